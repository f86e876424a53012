"""What sampling beside the updates saves: seconds of an iteration, by lag, on two CPU devices.

`python -m benchmarks.lag` makes short runs of configs/tiny.py, with random weights and longer
responses, each in a process of its own: on one device, which samples and updates in turn, and on
two, of which one samples. Each device has one thread for its products, so that two devices have two
cores. Printed are medians over the iterations after the first ones, which compile: the sampler's
half (samples, scores), the trainer's half (log-probabilities, updates, publication), the seconds
that each waits for the other, and the iteration, also over the longer half. To be run on a machine
that does nothing else, of two cores at least.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.machine import environment

SETTINGS = """
  job=rl rl.prompts=16 rl.group_size=8 sampling.max_new_tokens=32 rl.dump_every=100000
  eval.every=100000 eval.problems=4 eval.greedy=False checkpoint.every=100000 alarms.ratio=0
  objective.volatility=False objective.old_logp=sampler
""".split()
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
ARMS = {  # devices, and what a run changes
  "one device": (1, []),
  "two, lag 0": (2, ["rollout_mesh.fsdp=1"]),
  "two, lag 1": (2, ["rollout_mesh.fsdp=1", "rl.lag=1"]),
  "two, lag 2": (2, ["rollout_mesh.fsdp=1", "rl.lag=2"]),
}
HALVES = dict(
  sampler=("sample", "score", "sampler/sample", "sampler/score", "sampler/load"),
  trainer=("logp", "update", "publish"),
  waits=("wait_for_sampler",),
  idle=("sampler/wait_for_learner",),
)


def rows(devices: int, changes: list[str], iterations: int) -> list[dict[str, float]]:
  """The rows of a run's iterations."""
  with tempfile.TemporaryDirectory() as workdir:
    flags = [f"--config.{x}" for x in (*SETTINGS, *changes, f"rl.iterations={iterations}")]
    module = [sys.executable, "-m", "gspo_jax.main", "--config=tiny", f"--workdir={workdir}"]
    xla = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}"
    variables = dict(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(devices), XLA_FLAGS=xla)
    subprocess.run(
      [*module, *flags], env=os.environ | variables, check=True, stderr=subprocess.DEVNULL
    )
    return [json.loads(line) for line in Path(workdir, "metrics.jsonl").read_text().splitlines()]


def halves(timings: list[Mapping[str, float]], skip: int) -> dict[str, float]:
  """Returns medians of seconds: each half, waits and whole iterations."""
  parts: dict[str, list[float]] = {}
  for before, row in itertools.pairwise(timings):
    # The last iterations of a run with a lag have nothing left to sample.
    if skip < row["step"] < len(timings) - 5:
      seconds = (row["total/tokens"] - before["total/tokens"]) / row["tokens_per_second"]
      values = {k: sum(row.get(f"time/{x}", 0.0) for x in names) for k, names in HALVES.items()}
      for name, value in (values | dict(iteration=seconds)).items():
        parts.setdefault(name, []).append(value)
  return {name: statistics.median(values) for name, values in parts.items()}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--iterations", type=int, default=40)
  parser.add_argument("--skip", type=int, default=8, help="number of first iterations to leave out")
  arguments = parser.parse_args()
  print(environment(["jax", "jaxlib"]), ONE_THREAD)
  columns = "sampler", "trainer", "waits", "idle", "iteration"
  print(f"{'seconds':<12}" + "".join(f"{name:>11}" for name in columns) + f"{'/ longer':>11}")
  for name, (devices, changes) in ARMS.items():
    result = halves(rows(devices, changes, arguments.iterations), arguments.skip)
    longer = max(result["sampler"], result["trainer"])
    numbers = "".join(f"{result[column]:>11.3f}" for column in columns)
    print(f"{name:<12}{numbers}{result['iteration'] / longer:>11.2f}", flush=True)


if __name__ == "__main__":
  main()
