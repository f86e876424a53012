"""Command line: python -m gspo_jax.main --config=configs/tiny.py --workdir=DIR [--config.key=value]

--help has more. Only command lines (this one, aot) use flags and ConfigDict. The same command with
the same workdir continues an interrupted run.
"""

import contextlib
import dataclasses
import gc
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from gspo_jax.cli import before_jax

if __name__ == "__main__":
  before_jax.begin(sys.argv)  # The imports below take seconds.

import jax
from absl import app, flags, logging

from gspo_jax import sft, train
from gspo_jax.cli import flags as config_flag
from gspo_jax.cli.flags import (
  CONFIG,
  compiled_programs_stay,
  configured,
  filename,
  in_file,
  refuse,
)
from gspo_jax.evaluation import statistics
from gspo_jax.inputs import model_of_weights, read_inputs
from gspo_jax.report import page
from gspo_jax.run import Run, open_run, rehearse
from gspo_jax.runs import nonfinite, provenance
from gspo_jax.sampling import ServersGone
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.passes import anchor, sampler_types
from gspo_jax.settings.run import RunConfig
from gspo_jax.system import files, hosts, preemption
from gspo_jax.system.text import visible

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run; made if it is not there.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Check, print the size of the run, start nothing.")

_TOPOLOGY = flags.DEFINE_string(
  "topology", "", "With --dry_run: devices elsewhere, v5p:4x4x4 or h100:8, as for gspo_jax.aot."
)


def main(argv: list[str]) -> None:
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)  # Orbax logs every file.
    report_failed_saves_once()
  if _DRY_RUN.value:
    return plan()
  compiled_programs_stay()
  garbage_is_rare()
  config, workdir = configured(_model_of_weights), _workdir()
  try:
    inputs = read_inputs(config, workdir)  # The first write comes after all checks.
    with open_run(inputs) as run, agreed_stops(config.checkpoint.grace_s):
      for line in provenance.difference(in_file(filename()), CONFIG.value.to_dict()):
        sys.stderr.write(f"config {line}\n")
      if text := anchor(config):
        sys.stderr.write(f"config {text}\n")
      if types := sampler_types(dataclasses.asdict(config.engine), config.compute.dtype):
        sys.stderr.write(f"config samples with {types} (compute.dtype={config.compute.dtype})\n")
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
  except preemption.Preempted as stop:
    saved = f"saved {stop.saved}" if stop.saved else "ended"
    sys.stderr.write(f"gspo_jax: {saved}; the same command continues from here\n")
    sys.exit(stop.code)


def _model_of_weights(config: RunConfig) -> ModelConfig:
  if config.distributed and not _TOPOLOGY.value:
    hosts.join()
  return model_of_weights(config, _workdir())


def agreed_stops(grace_s: float) -> contextlib.AbstractContextManager[None]:
  """Makes several hosts stop together, at their next common check. A single host ends at once
  outside of phases."""
  if jax.process_count() == 1:
    return contextlib.nullcontext()
  return preemption.watch(grace_s)


def plan() -> None:
  """Prints a summary of the run. Refuses bad input as a run does; writes nothing."""
  from gspo_jax.aot import chips, plan  # The compiler's part is only needed here.

  config = configured(_model_of_weights)
  try:
    devices = chips.described(_TOPOLOGY.value) if _TOPOLOGY.value else None
    inputs = read_inputs(config, _workdir(), devices)
    lines = plan.lines(inputs, rehearse(inputs))
  except (ValueError, OSError) as error:
    refuse(error)
  if jax.process_index() == 0:
    sys.stdout.write("\n".join([*lines, ""]))


def report_failed_saves_once() -> None:
  """Hides tracebacks of a save's threads; the main thread raises their error."""
  logging.get_absl_logger().addFilter(lambda r: not (r.exc_info and "orbax" in r.pathname))
  before = sys.unraisablehook

  def report(unraisable: Any) -> None:
    # TensorStore may still be busy with files of the save.
    if str(unraisable.exc_value) != "Event loop is closed":
      before(unraisable)

  sys.unraisablehook = report


def end(message: str) -> NoReturn:
  """Ends the process at once. (Orbax's threads may wait forever, and JAX for the other hosts.)"""
  sys.stderr.write(f"{visible(message)}\n")
  sys.stderr.flush()
  os._exit(1)


def garbage_is_rare() -> None:
  """Collects cyclic garbage less often. Tracing makes millions of lasting objects, and repeated
  looks at them take a tenth of a warm start."""
  gc.freeze()  # Imported modules stay.
  gc.set_threshold(100_000, 20, 20)


def do(run: Run) -> None:
  """Runs the configured job."""
  job = run.config.job
  if job == "eval":
    params = train.start_policy(run, run.initial_params)
    key = run.evaluate.key(params)
    run.engine.load(params, version=0)
    del params  # The engine has its own.
    row, records = run.evaluate(run.engine, key, alone=True)
    run.writer.truncate("eval", -1)  # Rows of training stay.
    run.writer.dump_rollouts("eval", 0, records)
    run.writer.write(dict(phase="eval", step=0) | row)
    if hosts.is_first():
      sys.stderr.writelines(statistics.lines(run.evaluate.benchmarks, row))
  if job == "sft" or (job == "sft+rl" and not sft.finished(run)):
    sft.sft(run)
  if job in ("rl", "offline"):
    train.train(run, run.initial_params)
  if job == "sft+rl":
    train.train(run, lambda: sft.params_after(run))
  run.evaluate.remove_log()


def parse(argv: list[str]) -> list[str]:
  """Parses flags; prints one line instead of a traceback for wrong ones."""
  return config_flag.parse(argv, _check_flags)


def _check_flags() -> None:
  if not (_WORKDIR.value or _DRY_RUN.value):
    raise ValueError("--workdir must be given: the directory of the run")
  if _TOPOLOGY.value and not _DRY_RUN.value:
    raise ValueError("--topology is for --dry_run: a run has the devices of its machine")
  if _WORKDIR.value:
    _check_workdir()


def _workdir() -> Path | None:
  return Path(_WORKDIR.value).expanduser() if _WORKDIR.value else None


def _check_workdir() -> None:
  """Raises ValueError if nothing can be written there; makes nothing yet."""
  if "://" in _WORKDIR.value:
    raise ValueError(
      f"--workdir={_WORKDIR.value}: it is a local directory; for checkpoints, and a copy of it, in "
      f"a bucket set --config.checkpoint.directory={_WORKDIR.value}"
    )
  if _WORKDIR.value.startswith("--"):
    raise ValueError(f"--workdir={_WORKDIR.value}: that is a flag; name the directory of the run")
  try:
    workdir = _workdir()
  except RuntimeError as error:  # An unknown ~user.
    raise ValueError(f"--workdir={_WORKDIR.value}: {error} Write the whole path") from error
  files.check_writable(f"--workdir={workdir}", workdir)


if __name__ == "__main__":
  app.run(main, flags_parser=parse)
