"""What checkpoints, metrics and the report together cost a run, in steps per second.

`python -m benchmarks.overhead` makes the iterations of configs/tiny.py with a checkpoint every 20
of them. Blocks of 20 with everything as it is take turns with blocks in which nothing is written,
each from half-way between two checkpoints to half-way between the next two, so that what is written
in the background counts where it belongs. Printed are the seconds of each, and the medians' ratio.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import jax

from configs import tiny
from gspo_jax import train
from gspo_jax.inputs import read_inputs
from gspo_jax.main import cache_compiled_programs
from gspo_jax.report import page
from gspo_jax.rollouts.collector import Collector
from gspo_jax.run import open_run
from gspo_jax.runs import metrics
from gspo_jax.runs.checkpoint import Checkpointer
from gspo_jax.settings.reading import from_dict

WRITING = (
  (Checkpointer, "save"),
  (metrics.Writer, "write"),
  (metrics.Writer, "dump_rollouts"),
  (page, "write_report"),
  (train, "records"),
)


def iterate(workdir: Path, iterations: int, every: int) -> dict[bool, list[float]]:
  """Returns seconds of blocks with everything written, and with nothing."""
  values = tiny.get_config()
  values.job, values.rl.iterations, values.checkpoint.every = "rl", iterations, every
  values.eval.every, values.eval.problems, values.eval.greedy = 10**6, 8, False
  config = from_dict(values.to_dict())
  starts: list[float] = []

  def writes():
    return (len(starts) + every // 2) // every % 2 == 0

  collect = Collector.collect

  def timed(*arguments):
    starts.append(time.perf_counter())
    return collect(*arguments)

  def sometimes(function):
    return lambda *args, **kwargs: function(*args, **kwargs) if writes() else None

  with contextlib.ExitStack() as stack:
    stack.enter_context(mock.patch.object(Collector, "collect", timed))
    for owner, name in WRITING:
      patched = mock.patch.object(owner, name, sometimes(getattr(owner, name)))
      stack.enter_context(patched)
    run = stack.enter_context(open_run(read_inputs(config, workdir)))
    train.train(run, run.initial_params)
  seconds_by_writing: dict[bool, list[float]] = {True: [], False: []}
  marks = starts[every // 2 - 1 :: every][1:]  # Earlier blocks compile.
  for number, (start, end) in enumerate(itertools.pairwise(marks)):
    seconds_by_writing[number % 2 == 0].append(end - start)
  return seconds_by_writing


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--every", type=int, default=20, help="iterations between checkpoints")
  parser.add_argument("--blocks", type=int, default=10)
  options = parser.parse_args()
  cache_compiled_programs()
  with tempfile.TemporaryDirectory() as folder:
    iterations = (options.blocks + 1) * options.every + options.every // 2 + 1
    results = iterate(Path(folder), iterations, options.every)
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
  for writes, seconds in results.items():
    label = "everything" if writes else "nothing"
    print(f"{label} written: {', '.join(f'{s:.2f}' for s in seconds)} s per {options.every}")
  with_, without = (statistics.median(results[writes]) for writes in (True, False))
  print(f"medians {with_:.2f} and {without:.2f} s: {100 * (with_ / without - 1):+.1f} %")
  rows = [json.loads(line) for line in lines]
  for name in ("time/save", "time/report", "checkpoint/seconds"):
    if seconds := [row[name] for row in rows if row.get(name, 0) > 1e-3]:
      print(f"{name}: {1000 * statistics.median(seconds):.0f} ms, median where there is any")
  print(f"{jax.devices()[0].device_kind}, {jax.device_count()} devices")


if __name__ == "__main__":
  main()
