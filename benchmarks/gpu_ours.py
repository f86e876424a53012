"""One process of benchmarks/gpu.py, which starts it: this package on one device.

Command:   python benchmarks/gpu_ours.py RESULT.json < SPEC.json
Tasks: `probe` says what the device is, `count` what a task needs (no device), `compare` whether
results are right, `check` what a task's programs take once compiled; `train` and `sample` measure.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import gpu_compare
import gpu_programs
import jax
import jax.numpy as jnp
from gpu_programs import engine_of, mesh_of, model_of, workload_of
from scaling_points import ADAMW, init, random_batch

from gspo_jax import sharding
from gspo_jax.learner import optimizer
from gspo_jax.learner.state import new_state
from gspo_jax.models import transformer
from gspo_jax.models.hf import config as hf_config
from gspo_jax.sampling import LocalEngine, sample_rollout
from gspo_jax.system import accelerators


def probe(_: dict[str, Any]) -> dict[str, Any]:
  device = jax.devices()[0]
  kind, chip = device.device_kind, accelerators.find(device.device_kind)
  return dict(
    kind=kind,
    platform=device.platform,
    flops=accelerators.peak_flops(kind),
    bandwidth=chip and chip.hbm_speed,
    jax=jax.__version__,
  )


def compare(_: dict[str, Any]) -> list[dict[str, Any]]:
  """Compares results with plain sums in float32."""
  rows = []
  for row in gpu_compare.rows(mesh_of("")):
    rows.append(row)
    mark = "" if row["right"] else "  WRONG"
    print(f"{row['name']:<34}{row['dtype']:<10}{row['error']:.1e} of {row['limit']:.1e}{mark}")
    sys.stdout.flush()
  return rows


def check(spec: dict[str, Any]) -> list[dict[str, Any]]:
  return gpu_programs.check(spec["of"])


def count(spec: dict[str, Any]) -> dict[str, Any]:
  """Returns the task's operations and bytes, and the model's config.json."""
  spec = spec["of"]
  config = model_of(spec)
  total, active = transformer.count(config)
  needed = dict(parameters=total, active=active, hf_config=hf_config.to_hf(config, "bfloat16"))
  if spec["task"] == "train":
    tokens = spec["rows"] * spec["length"]
    return needed | dict(tokens=tokens, operations=gpu_programs.operations(spec))
  tokens = spec["prompts"] * spec["group"] * spec["new"]
  return needed | dict(
    tokens=tokens, bytes=gpu_programs.step_bytes(spec, gpu_programs.mean_positions(spec))
  )


def train(spec: dict[str, Any]) -> dict[str, Any]:
  spec, step = gpu_programs.fit(spec)
  config = model_of(spec)
  state = new_state(init(config, sharding.TRAIN), optimizer.make(ADAMW, 1000))
  batch = random_batch(config, spec["rows"], spec["length"], 1)
  batch = sharding.put_batch(batch, jax.sharding.get_mesh())
  seconds = []
  for _ in range(spec["calls"] + 1):
    started = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    seconds.append(time.perf_counter() - started)
  sizes = dict(model=spec["model"], at_once=spec["at_once"])
  return dict(seconds=statistics.median(seconds[1:]), peak_bytes=peak_bytes(), sizes=sizes)


def sample(spec: dict[str, Any]) -> dict[str, Any]:
  config, rows = model_of(spec), spec["prompts"] * spec["group"]
  layout = transformer.shardings(config, sharding.ROLLOUT, jax.sharding.get_mesh())
  make = jax.jit(transformer.init, static_argnums=(0, 2), out_shardings=layout)
  prompts = transformer.example_tokens(config, spec["prompts"], spec["prompt"]).tolist()
  engine = LocalEngine(config, engine_of(spec), gpu_programs.compute_of(spec))
  engine.load(make(config, jax.random.key(0), jnp.bfloat16), version=0)

  def call(new: int, seed: int) -> float:
    started = time.perf_counter()
    sample_rollout(engine, workload_of(spec, new), prompts, seed)
    seconds = time.perf_counter() - started
    if engine.usage.tokens != rows * new:
      raise ValueError(f"{engine.usage.tokens} tokens were sampled, not {rows * new}")
    return seconds

  calls = range(spec["calls"] + 1)
  whole, first = ([call(new, seed) for seed in calls][1:] for new in (spec["new"], 1))
  seconds = statistics.median(whole)
  step = (seconds - statistics.median(first)) / (spec["new"] - 1)
  return dict(seconds=seconds, step_seconds=max(step, 0.0), peak_bytes=peak_bytes())


def peak_bytes() -> int | None:
  return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


TASKS = dict(probe=probe, compare=compare, check=check, count=count, train=train, sample=sample)


def main() -> None:
  spec = json.load(sys.stdin)
  task = TASKS[spec["task"]]
  if task is compare:  # Its attention and experts run without a mesh.
    record = compare(spec)
  else:
    try:
      mesh = mesh_of(spec.get("target", ""))
    except ValueError as error:  # An unknown card, or no compiler for it.
      raise SystemExit(str(error)) from None
    with jax.set_mesh(mesh):
      try:
        record = task(spec)
      except MemoryError as error:
        raise SystemExit(str(error)) from None
  Path(sys.argv[1]).write_text(json.dumps(record))


if __name__ == "__main__":
  main()
