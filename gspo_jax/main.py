"""Command line: python -m gspo_jax.main --config=configs/tiny.py --workdir=DIR [--config.key=value]

The only module that knows flags and ConfigDict. Running the same command again on the same workdir
continues where it stopped.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from gspo_jax import config as configuration
from gspo_jax import sft, train
from gspo_jax.report import page
from gspo_jax.run import Run, open_run
from gspo_jax.runs import nonfinite, preemption, provenance

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, e.g. configs/tiny.py.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run; made if it is not there.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)  # Orbax tells of every file it touches
  compiled_programs_stay()
  values = _CONFIG.value.to_dict()
  try:
    config = configuration.from_dict(values)
    workdir = Path(_WORKDIR.value)
    for line in provenance.difference(as_in_the_file(), values):
      sys.stderr.write(f"config {line}\n")
    with open_run(config, workdir) as run, preemption.watch(config.checkpoint.grace_s):
      do(run)
      if jax.process_index() == 0:
        sys.stderr.write(f"report: {page.write_report(workdir)}\n")
  except (ValueError, nonfinite.NonFiniteError) as error:
    logging.debug("", exc_info=True)  # the traceback, with --verbosity=1
    sys.exit(f"gspo_jax: {error}")
  except preemption.Preempted:
    sys.stderr.write("gspo_jax: saved; the same command continues from here\n")
    sys.exit(preemption.EXIT_CODE)
  except KeyboardInterrupt:
    sys.exit("gspo_jax: interrupted; the same command continues from the last checkpoint")


def compiled_programs_stay() -> None:
  """Keeps compiled programs from one run to the next, in ~/.cache/gspo_jax/compiled unless
  JAX_COMPILATION_CACHE_DIR says where; JAX_ENABLE_COMPILATION_CACHE=false turns it off."""
  if jax.config.jax_compilation_cache_dir is None:
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(home / "gspo_jax" / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # many small ones add up


def as_in_the_file() -> dict[str, Any]:
  """The configuration without what the command line changes in it."""
  path, _, argument = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
  get_config = runpy.run_path(path)["get_config"]
  return (get_config(argument) if argument else get_config()).to_dict()


def do(run: Run) -> None:
  """The configured job."""
  job = run.config.job
  if job == "eval":
    params = run.initial_params()
    key = run.evaluate.key(params)
    run.engine.load(params, version=0)
    del params  # the engine has its own
    row, records = run.evaluate(run.engine, key)
    run.writer.truncate({})  # the same command again ends with the same single row
    run.writer.dump_rollouts("eval", 0, records)
    run.writer.write(dict(phase="eval", step=0) | row)
  if job == "sft" or (job == "sft+rl" and not sft.finished(run)):
    sft.sft(run)
  if job == "rl":
    train.train(run, run.initial_params)
  if job == "sft+rl":
    train.train(run, lambda: sft.params_after(run))


def parse(argv: list[str]) -> list[str]:
  """Flags, with one line instead of a traceback for a config key that is not there."""
  try:
    return app.parse_flags_with_usage(argv)
  except (AttributeError, TypeError, ValueError) as error:
    reason = error
    while isinstance(reason, BaseException) and reason.args:
      reason = reason.args[0]  # ml_collections wraps its hint in two exceptions
    sys.exit(f"gspo_jax: --config: {reason}")


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "workdir"])
  app.run(main, flags_parser=parse)
