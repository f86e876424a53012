"""One point of benchmarks/scaling.py: an update, or sampling, at one size.

Command:   python benchmarks/scaling_points.py < POINTS.json > RESULTS.json
scaling.py starts it so where points need several devices, which XLA simulates; otherwise it calls
`measure`.
"""

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from machine import busy_seconds

from gspo_jax import sharding
from gspo_jax.learner import optimizer, passes
from gspo_jax.learner import step as train_step
from gspo_jax.learner.state import new_state
from gspo_jax.models import flops, transformer
from gspo_jax.sampling import LocalEngine, Workload, sample_rollout
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.model import REFERENCE, ComputeConfig, ModelConfig
from gspo_jax.settings.objective import ObjectiveConfig
from gspo_jax.settings.sampling import EngineConfig, SamplingConfig
from gspo_jax.settings.sizes import tiny_moe
from gspo_jax.settings.training import OptimizerConfig
from gspo_jax.structs import ModelInputs, TrainBatch

# The models of benchmarks/iteration.py: 4 layers; MoE: 2 experts per token of width 128.
DENSE = dict(vocab_size=512, hidden_size=256, num_heads=8, intermediate_size=1024)
DENSE |= dict(num_experts=0, experts_per_token=0, moe_intermediate_size=0)
DENSE |= dict(max_position_embeddings=8192)
MOE = DENSE | dict(num_experts=16, experts_per_token=2, moe_intermediate_size=128)
COMPUTE = dataclasses.replace(REFERENCE, logits_chunk=128)
WHOLE = dataclasses.replace(REFERENCE, attention="plain")  # all scores and all logits at once

OBJECTIVE = ObjectiveConfig(
  name="gspo",
  advantage="std",
  old_logp="sampler",
  load_balance_coef=0.0,
  replay="none",
  volatility=False,
)
ADAMW = OptimizerConfig(
  learning_rate=1e-5,
  schedule="constant",
  warmup_steps=0,
  final_fraction=1.0,
  b1=0.9,
  b2=0.95,
  weight_decay=0.0,
  clip_norm=1.0,
)


@dataclasses.dataclass(frozen=True)
class Point:
  series: str
  x: int  # the size that the series varies
  line: str  # Line of table and plot: the model and its job.
  changes: dict[str, Any]  # Changes of `tiny_moe`, like DENSE and MOE.
  trains: bool  # one update; else: sampling
  prompts: int
  group: int
  prompt: int  # tokens
  new: int  # tokens of each response
  devices: int = 1
  whole: bool = False  # also compile the update that holds all scores and logits, for its memory
  seconds: float = 3.0  # Total time of calls.

  @property
  def config(self) -> ModelConfig:
    return dataclasses.replace(tiny_moe(512), **self.changes)

  @property
  def rows(self) -> int:
    return self.prompts * self.group

  @property
  def length(self) -> int:
    return self.prompt + self.new


def measure(point: Point) -> list[dict[str, Any]]:
  """Measures a row, or three for sampling: whole, prefill and decoding.

  Simulated devices have one row: some of them decode while others prefill.

  seconds, tokens; operations and bytes: how many are needed, without padding and recomputation;
  memory: bytes, temporary ones of the update, or the key/value cache; foreign: share of the machine
  that others took.
  """
  experts = point.devices if point.changes["num_experts"] else 1
  sizes = MeshConfig(data=1, fsdp=point.devices // experts, expert=experts, tensor=1)
  with jax.set_mesh(sharding.make_mesh(sizes, jax.devices()[: point.devices])):
    return update(point) if point.trains else sampling(point)


def update(point: Point) -> list[dict[str, Any]]:
  config, mesh = point.config, jax.sharding.get_mesh()
  tx = optimizer.make(ADAMW, 1000)
  state = new_state(init(config, sharding.TRAIN), tx)
  batch = random_batch(config, point.rows, point.length, point.prompt)
  batch = sharding.put_batch(batch, mesh)
  step = make_step(config, COMPUTE, tx).compile(state, batch)

  def call() -> float:
    nonlocal state
    started = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    return time.perf_counter() - started

  seconds, foreign = repeat(call, point.seconds)
  total, _ = transformer.count(config)
  measured = dict(
    line=point.line,
    seconds=statistics.median(seconds),
    tokens=point.rows * point.length,
    operations=flops.work(config, point.rows, point.length, point.length).training(),
    # Weights twice, gradients written and read, and weights and two moments read and written.
    bytes=4 * total * (2 + 2 + 6),
    memory=step.function.memory_analysis().temp_size_in_bytes,
    foreign=foreign,
  )
  if point.whole:
    compiled = make_step(config, WHOLE, tx).compile(state, batch).function
    measured["whole"] = compiled.memory_analysis().temp_size_in_bytes
  return [measured]


def sampling(point: Point) -> list[dict[str, Any]]:
  config, rows = point.config, point.rows
  params = init(config, sharding.ROLLOUT)
  prompts = transformer.example_tokens(config, point.prompts, point.prompt).tolist()
  slots = EngineConfig(slots=rows, steps=16, prefill_tokens=4096, cache_dtype="float32")
  engine, usages = LocalEngine(config, slots), []
  engine.load(params, version=0)
  distribution = SamplingConfig(1.0, 0, 1.0, 0.0, point.new)
  workload = Workload(distribution, point.prompt, rows, point.group)

  def call() -> float:
    started = time.perf_counter()
    sample_rollout(engine, workload, prompts, seed=len(usages))
    usages.append(engine.usage)
    return time.perf_counter() - started

  seconds, foreign = repeat(call, point.seconds)
  usages = usages[1:]  # without the call that compiled
  if {usage.tokens for usage in usages} != {rows * point.new}:
    raise ValueError(f"{rows} responses of {point.new} tokens, but {usages[0].tokens} were sampled")
  prefill = flops.work(config, point.prompts, point.prompt - 1, point.prompt - 1)
  prefill = prefill.forward() - prefill.head  # nothing is predicted there
  decode = flops.work(config, rows, point.new, point.length - 1).forward()
  written, read = cache_bytes(config, point)
  weights = 4 * read_weights(config, rows)
  parts = dict(
    prefill=(point.prompts * point.prompt, prefill, weights + written),
    decode=(rows * point.new, decode, point.new * weights + read),
  )
  parts = dict(sample=(rows * point.new, *np.add(parts["prefill"], parts["decode"])[1:])) | parts
  times = dict(
    sample=seconds,
    prefill=[usage.prefill_seconds for usage in usages],
    decode=[usage.decode_seconds for usage in usages],
  )
  return [
    dict(
      line=point.line.replace("sample", name),
      seconds=statistics.median(times[name]),
      tokens=tokens,
      operations=float(operations),
      bytes=float(needed),
      memory=usages[0].cache_bytes,
      foreign=foreign,
    )
    for name, (tokens, operations, needed) in parts.items()
    if name == "sample" or point.series != "devices"
  ]


def init(config: ModelConfig, rules: sharding.Rules) -> transformer.Params:
  layout = transformer.shardings(config, rules, jax.sharding.get_mesh())
  make = jax.jit(transformer.init, static_argnums=0, out_shardings=layout)
  return make(config, jax.random.key(0))


def make_step(config: ModelConfig, compute: ComputeConfig, tx, microbatches: int = 1) -> Callable:
  learner = passes.Learner(config, compute, 1.0, microbatches, load_balance_coef=0.0)
  return train_step.make_rl_step(learner, OBJECTIVE, tx)


def random_batch(config: ModelConfig, rows: int, length: int, prompt: int) -> TrainBatch:
  """Makes random sequences of one length; the loss skips `prompt` tokens."""
  mask = np.zeros((rows, length), np.float32)
  mask[:, prompt:] = 1
  logp = -np.log(config.vocab_size, dtype=np.float32) * mask
  tokens = transformer.example_tokens(config, rows, length)
  return TrainBatch(
    ModelInputs(tokens, np.ones((rows, length), np.int32)),
    mask_BT=mask,
    advantage_B=np.random.default_rng(0).normal(size=rows).astype(np.float32),
    old_logp_BT=logp,
    sampler_logp_BT=logp,
  )


def read_weights(config: ModelConfig, tokens: int) -> float:
  """Returns the number of parameters read for `tokens` tokens at once.

  Chosen experts count, if all are equally likely; the embedding is looked up and does not.
  """
  total, _ = transformer.count(config)
  expert_layers = sum(config.is_moe(layer) for layer in range(config.num_layers))
  experts = expert_layers * 3 * config.hidden_size * config.moe_intermediate_size
  embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
  rest = total - embedding - experts * config.num_experts
  return rest + experts * reached_experts(config, tokens)


def reached_experts(config: ModelConfig, tokens: int) -> float:
  """Returns the expected number of chosen experts in a layer."""
  if not config.num_experts:
    return 0.0
  left_out = 1 - config.experts_per_token / config.num_experts
  return config.num_experts * (1 - left_out**tokens)


def cache_bytes(config: ModelConfig, point: Point) -> tuple[float, float]:
  """Returns bytes of float32 keys and values written by prefill and read by decoding.

  Each token reads the positions up to its own.
  """
  position = 4 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
  positions = point.new * point.prompt + point.new * (point.new - 1) / 2
  return position * point.prompts * point.prompt, position * point.rows * positions


def repeat(call: Callable[[], float], budget: float) -> tuple[list[float], float]:
  """Returns seconds of at least three warm calls, and other processor time."""
  call()
  busy, started, seconds = foreign_seconds(), time.perf_counter(), []
  while len(seconds) < 3 or (time.perf_counter() - started < budget and len(seconds) < 50):
    seconds.append(call())
  foreign = max(foreign_seconds() - busy, 0.0) / (time.perf_counter() - started)
  return seconds, foreign / os.cpu_count()


def foreign_seconds() -> float:
  times = os.times()
  return busy_seconds() - times[0] - times[1]


def main() -> None:
  points = [Point(**fields) for fields in json.load(sys.stdin)]
  json.dump([measure(point) for point in points], sys.stdout)


if __name__ == "__main__":
  main()
