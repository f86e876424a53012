"""Command line: python -m gspo_jax.main --config=configs/tiny.py --workdir=DIR [--config.key=value]

--help lists all flags. The same command with the same workdir continues an interrupted run. Apart
from the configuration files, only this module, `cli` and `aot` use flags and ConfigDict.
"""

import contextlib
import dataclasses
import gc
import logging as std_logging
import os
import sys
from collections.abc import Iterator
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
  cache_compiled_programs,
  filename,
  read_config,
  read_config_file,
  refuse,
)
from gspo_jax.evaluation import statistics
from gspo_jax.inputs import model_of_weights, read_inputs
from gspo_jax.run import Run, open_run, rehearse
from gspo_jax.runs import checkpoint, mirror, nonfinite, paths, provenance
from gspo_jax.sampling import ServersGone
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.passes import describe_old_policy, sampler_types
from gspo_jax.settings.run import RunConfig
from gspo_jax.system import files, hosts, preemption
from gspo_jax.system.text import visible

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run; created if missing.")
_DRY_RUN = flags.DEFINE_bool(
  "dry_run", False, "Check the configuration, print the run's size, train nothing."
)

_TOPOLOGY = flags.DEFINE_string(
  "topology", "", "With --dry_run: devices to plan for, such as v5p:4x4x4 or h100:8."
)


def main(argv: list[str]) -> None:
  """Runs the configured job, or prints its plan with --dry_run."""
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)  # Orbax logs every file.
    std_logging.addLevelName(std_logging.WARNING, "warning")
    logging.get_absl_handler().setFormatter(std_logging.Formatter("%(levelname)s: %(message)s"))
    hide_save_tracebacks()
  if _DRY_RUN.value:
    return plan()
  cache_compiled_programs()
  collect_garbage_rarely()
  config, workdir = read_config(_model_of_weights, _check_paths), _workdir()
  try:
    inputs = read_inputs(config, workdir)  # Writes no files.
    with (
      open_run(inputs) as run,
      stop_together(config.checkpoint.grace_s),
      evaluation_copied(run),
    ):
      for line in provenance.difference(read_config_file(filename()), CONFIG.value.to_dict()):
        sys.stderr.write(f"config {line}\n")
      if text := describe_old_policy(config):
        sys.stderr.write(f"config {text}\n")
      types = sampler_types(dataclasses.asdict(config.engine), config.compute.dtype)
      if types and (config.samples or config.job == "eval"):
        sys.stderr.write(f"config samples with {types} (compute.dtype={config.compute.dtype})\n")
      run_job(run)
      if jax.process_index() == 0:
        sys.stderr.writelines(result_lines(run))
        if path := run.report.write():
          sys.stderr.write(f"report: {path}\n")
  except (ValueError, OSError) as error:
    refuse(error)
  except nonfinite.NonFiniteError as error:
    logging.debug("", exc_info=True)
    end_process(f"gspo_jax: {error}")
  except (files.WriteError, ServersGone) as error:
    logging.debug("", exc_info=True)
    end_process(f"gspo_jax: {error}; the same command resumes from the last checkpoint")
  except preemption.Preempted as stop:
    saved = f"saved {stop.saved}" if stop.saved else "ended"
    sys.stderr.write(f"gspo_jax: {saved}; the same command continues from here\n")
    sys.exit(stop.code)


def _model_of_weights(config: RunConfig) -> ModelConfig:
  if config.distributed and not _TOPOLOGY.value:
    hosts.join()
  return model_of_weights(config, _workdir())


def _check_paths(config: RunConfig) -> None:
  paths.check_paths(config, _workdir())


def stop_together(grace_s: float) -> contextlib.AbstractContextManager[None]:
  """Makes all hosts stop at the same `preemption.check` after a signal.

  Without `distributed`, a signal outside of a phase ends the process at once.
  """
  if jax.distributed.is_initialized():  # JAX takes SIGTERM, even of a single process.
    return preemption.watch(grace_s)
  return contextlib.nullcontext()


def evaluation_copied(run: Run) -> contextlib.AbstractContextManager[None]:
  """Copies the results of job=eval to `checkpoint.directory` at the end."""
  if run.config.job == "eval":
    return mirror.copied_at_end(run.workdir, run.config.checkpoint.directory)
  return contextlib.nullcontext()


def plan() -> None:
  """Checks the inputs as a run does, and prints a summary. Writes nothing to the workdir."""
  from gspo_jax.aot import chips, plan  # Only a dry run needs these modules.

  config = read_config(_model_of_weights, _check_paths)
  try:
    devices = chips.described(_TOPOLOGY.value) if _TOPOLOGY.value else None
    inputs = read_inputs(config, _workdir(), devices)
    lines = plan.lines(inputs, rehearse(inputs), _TOPOLOGY.value)
  except (ValueError, OSError) as error:
    refuse(error)
  if jax.process_index() == 0:
    sys.stdout.write("\n".join([*lines, ""]))


def hide_save_tracebacks() -> None:
  """Hides tracebacks of saving threads. The main thread raises the same errors."""
  logging.get_absl_logger().addFilter(lambda r: not (r.exc_info and "orbax" in r.pathname))
  before = sys.unraisablehook

  def report(unraisable: Any) -> None:
    # This error occurs if TensorStore is still busy with files of the save.
    if str(unraisable.exc_value) != "Event loop is closed":
      before(unraisable)

  sys.unraisablehook = report


def end_process(message: str) -> NoReturn:
  """Prints a message, and ends the process at once.

  A normal exit might never end, since Orbax waits for its threads, and JAX for other hosts.
  """
  sys.stderr.write(f"{visible(message)}\n")
  sys.stderr.flush()
  os._exit(1)


def collect_garbage_rarely() -> None:
  """Collects cyclic garbage less often.

  Tracing creates millions of lasting objects, and every collection scans all of these again. If all
  programs are in the compilation cache, these scans take a tenth of the time of a start.
  """
  gc.freeze()  # Objects of imported modules are never scanned.
  gc.set_threshold(100_000, 20, 20)


def run_job(run: Run) -> None:
  """Runs the configured job."""
  job = run.config.job
  if job == "eval":
    evaluate(run)
  if job == "sft" or (job == "sft+rl" and not sft.finished(run)):
    sft.sft(run)
  if job in ("rl", "offline"):
    train.train(run, run.initial_params)
  if job == "sft+rl":
    train.train(run, lambda: sft.params_after(run))
  run.evaluate.remove_log()


def evaluate(run: Run) -> None:
  """Evaluates the initial weights. Repeats a finished evaluation only if `resume` is "force"."""
  finished = hosts.run_on_first_host(lambda: bool(run.writer.rows("eval")))
  if finished and run.config.resume == "same":
    if hosts.is_first():
      sys.stderr.write("eval  finished before this start\n")
    return
  run.writer.truncate("eval", -1)  # Drops the rows of an earlier job=eval in this workdir.
  params = train.start_policy(run, run.initial_params)
  key = run.evaluate.key(params)
  run.engine.load(params, version=0)
  del params  # The engine has a copy.
  row, records = run.evaluate(run.engine, key, alone=True)
  run.writer.dump_rollouts("eval", 0, records)
  run.writer.write(dict(phase="eval", step=0) | row)


def result_lines(run: Run) -> Iterator[str]:
  """Yields lines about the last evaluation and the newest checkpoint, if there are any."""
  c, phase = run.config, run.config.job if run.config.job in ("sft", "eval") else "rl"
  rows = run.writer.rows(phase)
  evaluated = [row for row in rows if any(key.startswith("eval/") for key in row)]
  if evaluated:
    yield from statistics.accuracy_lines(run.evaluate.benchmarks, evaluated[-1])
  directory = c.checkpoint.phase_directory(run.workdir, phase)
  if phase != "eval" and (steps := checkpoint.finished(directory)):
    yield f"checkpoint: {directory / str(steps[-1])}\n"


def parse(argv: list[str]) -> list[str]:
  """Parses flags; an error is one line instead of a traceback."""
  return config_flag.parse(argv, _check_flags)


def _check_flags() -> None:
  if not (_WORKDIR.value or _DRY_RUN.value):
    raise ValueError("--workdir must be given: the directory of the run")
  if _TOPOLOGY.value and not _DRY_RUN.value:
    raise ValueError("--topology needs --dry_run, since a run uses the devices of its machine")
  if _WORKDIR.value:
    _check_workdir()


def _workdir() -> Path | None:
  return Path(_WORKDIR.value).expanduser() if _WORKDIR.value else None


def _check_workdir() -> None:
  """Raises ValueError if the workdir cannot be written."""
  if "://" in _WORKDIR.value:
    raise ValueError(
      f"--workdir={_WORKDIR.value}: a workdir is a local directory; for checkpoints, and a copy of "
      f"the workdir, in a bucket set --config.checkpoint.directory={_WORKDIR.value}"
    )
  if _WORKDIR.value.startswith("--"):
    raise ValueError(f"--workdir={_WORKDIR.value}: that is a flag; name the directory of the run")
  try:
    workdir = _workdir()
  except RuntimeError as error:  # An unknown ~user.
    raise ValueError(f"--workdir={_WORKDIR.value}: {error} Write an absolute path") from error
  files.check_writable(f"--workdir={workdir}", workdir)


if __name__ == "__main__":
  app.run(main, flags_parser=parse)
