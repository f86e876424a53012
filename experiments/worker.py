"""Makes runs one after another in a process.

So a sweep compiles once. It reads a JSON object per line from standard input: `values`, the
configuration, `workdir`, and `measure`, "" or a function in the place of training. It writes a line
per run: `status`, `reason` and `seconds`. A run's output goes to log.txt in its workdir. SIGTERM
saves the current run and ends the process.
"""

import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

MAPS = Path("/proc/self/maps")


def main(cores: str) -> None:
  """Makes runs on these cores, e.g. "0,2", until standard input ends.

  Systems without a choice of cores, such as macOS, use all.
  """
  if hasattr(os, "sched_setaffinity"):  # Threads inherit it.
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # After Ctrl-C, the runner sends SIGTERM.
  answers = os.fdopen(os.dup(1), "w")
  threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
  for line in sys.stdin:
    job = json.loads(line)
    answer = make(job["values"], Path(job["workdir"]), job["measure"])
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
    if answer["status"] != "done":
      os._exit(0)  # Threads of Orbax may wait forever. The runner starts another process.
    tidy()


def make(values: dict[str, Any], workdir: Path, measure: str = "") -> dict[str, Any]:
  """Makes a run; returns its status, reason and seconds."""
  started = time.monotonic()
  workdir.mkdir(parents=True, exist_ok=True)
  with open(workdir / "log.txt", "a") as log:
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
  try:
    status, reason = execute(values, workdir, measure)
  except Exception as error:
    traceback.print_exc()
    status, reason = "failed", f"{type(error).__name__}: {error}"
  sys.stderr.flush()
  reason = " ".join(reason.split())[:300]
  return dict(status=status, reason=reason, seconds=round(time.monotonic() - started, 1))


def execute(values: dict[str, Any], workdir: Path, measure: str = "") -> tuple[str, str]:
  """Makes a run, by `measure` if given; returns status and reason."""
  from absl import logging

  from gspo_jax import main as command_line
  from gspo_jax.inputs import read_inputs
  from gspo_jax.run import open_run
  from gspo_jax.runs import nonfinite
  from gspo_jax.settings.reading import from_dict
  from gspo_jax.system import preemption

  logging.set_verbosity(logging.WARNING)
  command_line.cache_compiled_programs()
  # The workdir's name identifies the run. Only keys newer than the interrupted run may differ.
  config = from_dict(values | dict(resume="force"))
  try:
    with preemption.watch(config.checkpoint.grace_s), open_run(read_inputs(config, workdir)) as run:
      if measure:
        name, *arguments = measure.split()
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function)(run, *arguments)
      else:
        command_line.run_job(run)
  except nonfinite.NonFiniteError as error:
    return "nan", str(error)
  except preemption.Preempted:
    return "interrupted", "stopped; it has a checkpoint"
  return "done", ""


def tidy() -> None:
  """Frees the last run's memory.

  Compiled programs stay, unless they use too many of a process's 65,530 memory mappings.
  """
  gc.collect()
  if MAPS.exists() and len(MAPS.read_text().splitlines()) > 30_000:
    import jax

    jax.clear_caches()


def _end_with(parent: int) -> None:
  """Stops this process once its parent has ended."""
  while os.getppid() == parent:
    time.sleep(1)
  os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
  main(sys.argv[1])
