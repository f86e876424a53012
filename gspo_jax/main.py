"""Command line: python -m gspo_jax.main --config=configs/tiny.py --workdir=DIR [--config.key=value]

--help has more. With `gspo_jax.aot` the only module that knows flags and ConfigDict. Running the
same command again on the same workdir continues where it stopped.
"""

import gc
import os
import re
import runpy
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from gspo_jax import command_line

if __name__ == "__main__":
  command_line.begin(sys.argv)  # the imports below take seconds

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from gspo_jax import config as configuration
from gspo_jax import ranges, sft, train
from gspo_jax.config import RunConfig
from gspo_jax.report import page
from gspo_jax.run import Run, check, open_run
from gspo_jax.runs import files, nonfinite, preemption, provenance
from gspo_jax.sampling import ServersGone

BAD_INPUT = 2  # exit code: the command line or a file that it names must be changed

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Configuration: its name, e.g. tiny, or the path of a file."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run; made if it is not there.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Check, print what a run would be, start nothing.")


def main(argv: list[str]) -> None:
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)  # Orbax tells of every file it touches
    failed_saves_are_told_once()
  if _DRY_RUN.value:
    return plan()
  compiled_programs_stay()
  garbage_is_rare()
  config, workdir = configured(), Path(_WORKDIR.value)
  try:
    with open_run(config, workdir) as run, preemption.watch(config.checkpoint.grace_s):
      for line in provenance.difference(in_file(filename()), _CONFIG.value.to_dict()):
        sys.stderr.write(f"config {line}\n")
      do(run)
      if jax.process_index() == 0:
        sys.stderr.write(f"report: {page.write_report(workdir)}\n")
  except (ValueError, OSError) as error:
    refuse(error)
  except nonfinite.NonFiniteError as error:
    logging.debug("", exc_info=True)
    end(f"gspo_jax: {error}")
  except (files.WriteError, ServersGone) as error:
    logging.debug("", exc_info=True)
    end(f"gspo_jax: {error}; the same command goes on from the last checkpoint")
  except preemption.Preempted:
    sys.stderr.write("gspo_jax: saved; the same command continues from here\n")
    sys.exit(preemption.EXIT_CODE)
  except KeyboardInterrupt:
    sys.exit("gspo_jax: interrupted; the same command continues from the last checkpoint")


def plan() -> None:
  """Prints what a run would be. Refuses what a run would refuse; writes nothing."""
  from gspo_jax import dry_run  # the compiler's part of the package is only needed here

  config = configured()
  try:
    lines = dry_run.lines(config, check(config, _WORKDIR.value and Path(_WORKDIR.value)))
  except (ValueError, OSError) as error:
    refuse(error)
  if jax.process_index() == 0:
    sys.stdout.write("\n".join([*lines, ""]))


def configured() -> RunConfig:
  """The configuration that the flags give."""
  try:
    return configuration.from_dict(_CONFIG.value.to_dict())
  except ValueError as error:
    refuse(error)


def refuse(error: Exception) -> NoReturn:
  """Ends the process with `BAD_INPUT` and one line; the traceback comes with --verbosity=1."""
  logging.debug("", exc_info=error)
  if isinstance(error, OSError) and error.filename:
    error = f"{error.filename}: {error.strerror}"
  lines = " ".join(line.strip() for line in str(error).splitlines())
  sys.stderr.write(f"gspo_jax: {lines}\n")
  sys.exit(BAD_INPUT)


def failed_saves_are_told_once() -> None:
  """Leaves out the tracebacks of a save's threads, whose error the main one raises too."""
  logging.get_absl_logger().addFilter(lambda r: not (r.exc_info and "orbax" in r.pathname))
  before = sys.unraisablehook  # of the files that TensorStore is still at when one has failed
  closed = "Event loop is closed"
  sys.unraisablehook = lambda what: None if str(what.exc_value) == closed else before(what)


def end(message: str) -> NoReturn:
  """Ends the process at once: Orbax's threads may still wait for something that will not come, and
  JAX for the other hosts."""
  sys.stderr.write(f"{message}\n")
  sys.stderr.flush()
  os._exit(1)


def compiled_programs_stay() -> None:
  """Keeps compiled programs from one run to the next, in ~/.cache/gspo_jax/compiled unless
  JAX_COMPILATION_CACHE_DIR says where; JAX_ENABLE_COMPILATION_CACHE=false turns it off."""
  if jax.config.jax_compilation_cache_dir is None:
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(home / "gspo_jax" / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # many small ones add up


def garbage_is_rare() -> None:
  """Looks for cyclic garbage less often. Tracing makes millions of objects that stay, and looking
  through them all again and again takes a tenth of a warm start."""
  gc.freeze()  # what has been imported stays
  gc.set_threshold(100_000, 20, 20)


def filename() -> str:
  """The configuration file, and after a colon its argument."""
  return config_flags.get_config_filename(flags.FLAGS["config"])


def in_file(name: str) -> dict[str, Any]:
  """The configuration without what the command line changes in it.

  Raises:
    ValueError: there is no such file, or an error in it; says where.
  """
  if problem := command_line.missing_file(name):
    raise ValueError(problem)
  path, _, argument = command_line.path_of(name).partition(":")
  try:
    get_config = runpy.run_path(path)["get_config"]
    return (get_config(argument) if argument else get_config()).to_dict()
  except ValueError as error:
    raise ValueError(f"--config={name}: {error}") from error
  except Exception as error:  # the file is a program of the user's
    lines = [
      f":{x.lineno}" for x in traceback.extract_tb(error.__traceback__) if x.filename == path
    ]
    what = f"{type(error).__name__}: {error}"
    raise ValueError(
      f"--config={name}: {path}{(lines or [''])[-1]}: {what}; its get_config() gives a ConfigDict"
    ) from error


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
  if job in ("rl", "offline"):
    train.train(run, run.initial_params)
  if job == "sft+rl":
    train.train(run, lambda: sft.params_after(run))


def parse(argv: list[str]) -> list[str]:
  """Flags; one line instead of a traceback for what is wrong with them."""
  argv = command_line.with_paths(argv)
  given = flags.FlagValues()
  flags.DEFINE_string("config", None, "", flag_values=given)
  try:
    given(argv, known_only=True)
    if given.config is not None:
      _check_keys(argv, in_file(given.config))
    rest = flags.FLAGS(argv)
    if rest[1:]:
      raise ValueError(f"{rest[1]!r} is no flag: write --name=value")
    known = f"{', '.join(command_line.installed())}, or the path of a file"
    needed = dict(config=known) | ({} if _DRY_RUN.value else dict(workdir="where the run goes"))
    for flag, what in needed.items():
      if not flags.FLAGS[flag].value:
        raise ValueError(f"--{flag} must be given: {what}")
    if _WORKDIR.value:
      _check_workdir(Path(_WORKDIR.value))
    return rest
  except (AttributeError, KeyError, OSError, TypeError, ValueError, flags.Error) as error:
    refuse(ValueError(_of_flag(error)))


def _check_workdir(workdir: Path) -> None:
  """ValueError if nothing can be written there; nothing is made yet."""
  above = next(path for path in (workdir, *workdir.absolute().parents) if os.path.lexists(path))
  if not above.is_dir():
    raise ValueError(f"--workdir={workdir}: {above} is no directory; give one, or a new name")
  if not os.access(above, os.W_OK | os.X_OK):
    raise ValueError(f"--workdir={workdir}: {above} is not writable; give another one")


def _check_keys(argv: list[str], values: dict[str, Any]) -> None:
  """ValueError for a flag `--config.KEY` if the configuration has no such key."""
  keys = [re.match(r"--?config\.([\w.]*)(=|$)", argument) for argument in argv]
  for key in [match[1] for match in keys if match]:
    found, path = values, ""
    for part in key.split("."):
      if not isinstance(found, Mapping):
        raise ValueError(f"--config.{key}: {path[:-1]} is no section")
      if part not in found:
        raise ValueError(configuration.unknown(path, part, found))
      found, path = found[part], f"{path}{part}."


def _of_flag(error: Exception) -> str:
  """What is wrong with a flag, and what a key of the configuration must be instead."""
  cause = error.__context__
  key = re.match(r"flag --config\.([\w.]+)=", str(error))
  if key and cause and (kind := configuration.kind_of(key[1])):
    return f"{str(error)[5:].removesuffix(f': {cause}')} must be {ranges.describe(kind)}"
  while isinstance(error, BaseException) and error.args:
    error = error.args[0]  # ml_collections wraps its hint in two exceptions
  return str(error)


if __name__ == "__main__":
  app.run(main, flags_parser=parse)
