"""One process of benchmarks/gpu.py, which starts it: this package on one device.

Command:   python benchmarks/gpu_ours.py RESULT.json < SPEC.json
Tasks: `probe` says what the device is, `count` what a task needs (no device), `train` and `sample`
measure one.
"""

import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from scaling_points import ADAMW, init, make_step, random_batch, read_weights

from gspo_jax import sharding
from gspo_jax.learner import optimizer
from gspo_jax.learner.state import new_state
from gspo_jax.models import flops, transformer
from gspo_jax.models.hf import config as hf_config
from gspo_jax.sampling import LocalEngine, Workload, sample_rollout
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.model import PUBLISHED, REFERENCE, ModelConfig
from gspo_jax.settings.sampling import EngineConfig, SamplingConfig
from gspo_jax.system import accelerators

# "dots" keeps the products of a layer, 1.1 MB a token of the dense model, and computes the rest
# again, which is cheap. Logits of 8 sequences take 2.5 GB.
COMPUTE = dataclasses.replace(REFERENCE, dtype="bfloat16", remat="dots", logits_chunk=512)


def probe(_: dict[str, Any]) -> dict[str, Any]:
  device = jax.devices()[0]
  peak = accelerators.peak_flops(device.device_kind)
  kind, platform = device.device_kind, device.platform
  return dict(kind=kind, platform=platform, flops=peak, jax=jax.__version__)


def count(spec: dict[str, Any]) -> dict[str, Any]:
  """Returns the task's operations and bytes, and the model's config.json."""
  spec = spec["of"]
  config = model_of(spec)
  total, active = transformer.count(config)
  needed = dict(parameters=total, active=active, hf_config=hf_config.to_hf(config, "bfloat16"))
  if spec["task"] == "train":
    rows, length = spec["rows"], spec["length"]
    operations = flops.work(config, rows, length, length).training()
    return needed | dict(tokens=rows * length, operations=operations)
  rows = spec["prompts"] * spec["group"]
  positions = (
    spec["prompt"] + (spec["new"] - 1) / 2
  )  # positions of a row, on average over the steps
  cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * rows * positions
  return needed | dict(
    tokens=rows * spec["new"], bytes=2 * (read_weights(config, rows) + cache)
  )  # Per step.


def train(spec: dict[str, Any]) -> dict[str, Any]:
  config, rows = model_of(spec), spec["rows"]
  tx = optimizer.make(ADAMW, 1000)
  state = new_state(init(config, sharding.TRAIN), tx)
  batch = random_batch(config, rows, spec["length"], 1)
  batch = sharding.put_batch(batch, jax.sharding.get_mesh())
  compute = dataclasses.replace(COMPUTE, experts=spec["experts"])
  step = make_step(config, compute, tx, microbatches=rows // spec["at_once"])
  step = step.compile(state, batch)
  seconds = []
  for _ in range(spec["calls"] + 1):
    started = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    seconds.append(time.perf_counter() - started)
  return dict(seconds=statistics.median(seconds[1:]), peak_bytes=peak_bytes())


def sample(spec: dict[str, Any]) -> dict[str, Any]:
  config, rows = model_of(spec), spec["prompts"] * spec["group"]
  layout = transformer.shardings(config, sharding.ROLLOUT, jax.sharding.get_mesh())
  make = jax.jit(transformer.init, static_argnums=(0, 2), out_shardings=layout)
  params = make(config, jax.random.key(0), jnp.bfloat16)
  prompts = transformer.example_tokens(config, spec["prompts"], spec["prompt"]).tolist()
  slots = EngineConfig(slots=rows, steps=64, prefill_tokens=8192, cache_dtype="bfloat16")

  compute = dataclasses.replace(COMPUTE, experts=spec["experts"])
  engine = LocalEngine(config, slots, compute)
  engine.load(params, version=0)

  def call(new: int, seed: int) -> float:
    distribution = SamplingConfig(1.0, 0, 1.0, 0.0, new)
    workload = Workload(distribution, spec["prompt"], rows, spec["group"])
    started = time.perf_counter()
    sample_rollout(engine, workload, prompts, seed)
    seconds = time.perf_counter() - started
    if engine.usage.tokens != rows * new:
      raise ValueError(f"{engine.usage.tokens} tokens were sampled, not {rows * new}")
    return seconds

  calls = range(spec["calls"] + 1)
  whole, first = ([call(new, seed) for seed in calls][1:] for new in (spec["new"], 1))
  seconds = statistics.median(whole)
  step = (seconds - statistics.median(first)) / (spec["new"] - 1)
  return dict(seconds=seconds, step_seconds=max(step, 0.0), peak_bytes=peak_bytes())


def model_of(spec: dict[str, Any]) -> ModelConfig:
  return dataclasses.replace(PUBLISHED["Qwen3-1.7B-Base"], **spec["model"])


def peak_bytes() -> int | None:
  return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def main() -> None:
  spec = json.load(sys.stdin)
  mesh_config = MeshConfig(data=1, fsdp=1, expert=1, tensor=1)
  with jax.set_mesh(sharding.make_mesh(mesh_config, jax.devices()[:1])):
    record = dict(probe=probe, count=count, train=train, sample=sample)[spec["task"]](spec)
  Path(sys.argv[1]).write_text(json.dumps(record))


if __name__ == "__main__":
  main()
