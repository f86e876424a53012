"""What checkpoints, metrics and the report together cost a run, in steps per second.

`python benchmarks/overhead.py` makes the iterations of configs/tiny.py, a checkpoint every 20 of
them, in turn with everything as it is and with nothing written at all, and prints the seconds of 20
iterations in both cases, their ratio, and where the difference goes.
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
from gspo_jax import config as configuration
from gspo_jax import metrics, train
from gspo_jax.checkpoint import Checkpointer
from gspo_jax.context import open_context
from gspo_jax.main import compiled_programs_stay


def iterate(workdir: Path, iterations: int, every: int, writes: bool) -> list[float]:
  """Seconds of each `every` iterations after the first `every`, which compile."""
  values = tiny.get_config()
  values.job, values.rl.iterations, values.checkpoint.every = "rl", iterations, every
  values.eval.every, values.eval.problems, values.eval.greedy = 10**6, 8, False
  config = configuration.from_dict(values.to_dict())
  begun = []
  groups = train.Sampling.groups

  def timed(*arguments):
    begun.append(time.perf_counter())
    return groups(*arguments)

  with contextlib.ExitStack() as stack:
    stack.enter_context(mock.patch.object(train.Sampling, "groups", timed))
    if not writes:
      for owner, name in (
        (Checkpointer, "save"),
        (metrics.Writer, "write"),
        (metrics.Writer, "dump_rollouts"),
        (train.rollout_viewer, "write_report"),
        (train, "rollout_records"),
      ):
        stack.enter_context(mock.patch.object(owner, name, lambda *_, **__: None))
    context = stack.enter_context(open_context(config, workdir))
    train.run(context, context.initial_params)
  marks = begun[every::every]
  return [b - a for a, b in itertools.pairwise(marks)]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--every", type=int, default=20, help="iterations between checkpoints")
  parser.add_argument("--iterations", type=int, default=81, help="of each run")
  parser.add_argument("--rounds", type=int, default=2)
  options = parser.parse_args()
  compiled_programs_stay()
  found: dict[bool, list[float]] = {True: [], False: []}
  stages: dict[str, float] = {}
  for round_ in range(options.rounds):
    for writes in (True, False) if round_ % 2 == 0 else (False, True):
      with tempfile.TemporaryDirectory() as folder:
        seconds = iterate(Path(folder), options.iterations, options.every, writes)
        found[writes] += seconds
        if writes:
          rows = [json.loads(x) for x in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
          for name in ("time/save", "time/report", "checkpoint/seconds"):
            stages[name] = statistics.median(row[name] for row in rows if name in row)
      what = "everything" if writes else "nothing"
      print(f"{what} written: {', '.join(f'{s:.2f}' for s in seconds)} s per {options.every}")
  with_, without = (statistics.median(found[writes]) for writes in (True, False))
  print(f"medians {with_:.2f} and {without:.2f} s: {100 * (with_ / without - 1):+.1f} %")
  for name, seconds in stages.items():
    print(f"{name}: {1000 * seconds:.0f} ms per checkpoint, median")
  print(f"{jax.devices()[0].device_kind}, {jax.device_count()} devices")


if __name__ == "__main__":
  main()
