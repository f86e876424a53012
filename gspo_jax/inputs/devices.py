"""Devices of a run: meshes, and checks of engine and memory on them."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.evaluation.benchmarks import HeldOut
from gspo_jax.evaluation.evaluator import workload
from gspo_jax.models import transformer, weights
from gspo_jax.sampling import Workload, requests
from gspo_jax.settings import passes, ranges
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.system.meshes import mesh_devices


@dataclasses.dataclass(frozen=True)
class Meshes:
  """Devices of the trainer and of the sampler."""

  trainer: jax.sharding.Mesh
  sampler: jax.sharding.Mesh  # The trainer's mesh unless `rollout_mesh` is set.
  layout: Any  # Shardings of the sampler's parameters.
  dtypes: Any  # Dtypes of the sampler's parameters.

  @property
  def separate(self) -> bool:
    """Whether trainer and sampler have separate devices."""
    return self.sampler is not self.trainer


def make_meshes(config: RunConfig, devices: list[Any] | None = None) -> Meshes:
  """Builds the meshes, and the sampler's layout of parameters.

  Args:
    config: configuration of the run.
    devices: devices of the meshes; None for all devices of the run.

  Raises:
    ValueError: the mesh does not fit the devices, a weight does not divide over a mesh axis, or the
      model or the devices do not support `compute.attention`.
  """
  trainer, sampler = sharding.make_meshes(config.mesh, config.rollout_mesh, devices)
  rollout = sharding.rollout_rules(config.mesh, sampler, config.model.num_experts)
  transformer.check_attention(config.model, config.compute, shared_prompts=config.shares_prompts)
  transformer.check_attention(config.model, config.sampler_compute, shared_prompts=False)
  table = transformer.table(config.model)
  weights.shardings(table, sharding.TRAIN, trainer)  # Raises ValueError for an indivisible weight.
  table = transformer.sampler_table(config.model, config.engine.weights_dtype)
  layout = weights.shardings(table, rollout, sampler)
  dtypes = weights.dtypes(table, config.sampler_compute.dtype)
  return Meshes(trainer, sampler, layout, dtypes)


def check_devices(config: RunConfig, batch_shards: int) -> None:
  """Raises ValueError if `batch_shards` does not divide the rows of a micro-batch."""
  rows = {}
  if config.has_iterations:
    name = "rl.prompts × rl.group_size / (rl.minibatches × rl.microbatches)"
    rows[name] = config.rl.rows // (config.rl.minibatches * config.rl.microbatches)
  if "sft" in config.job:
    rows["sft.batch / sft.microbatches"] = config.sft.batch // config.sft.microbatches
  for name, count in rows.items():
    if count % batch_shards:
      devices = f"{batch_shards} devices of mesh.data × mesh.fsdp × mesh.expert"
      key = name.partition(" ")[0]
      product = ranges.look_up(config, key) * batch_shards
      multiple = product // math.gcd(product, count)
      if key == "rl.prompts":
        multiple = math.lcm(multiple, config.rl.minibatches)
      raise ValueError(
        f"{name} = {count} rows do not divide over the {devices}: set {key} to a multiple of "
        f"{multiple}"
      )


def check_engine(
  config: RunConfig, tok: Tokenizer, mesh: jax.sharding.Mesh, evaluations: Sequence[HeldOut]
) -> None:
  """Raises ValueError if the local engine cannot run a `Workload` of the job."""
  if config.engine.name == "local":
    for load in workloads(config, tok, evaluations):
      requests.sizes(load, config.engine, sharding.batch_shards(mesh))


def workloads(config: RunConfig, tok: Tokenizer, evaluations: Sequence[HeldOut]) -> list[Workload]:
  """Returns the engine's workloads for training and evaluations."""
  c, stops, loads = config, tuple(tok.stop_ids), []
  if c.samples:
    loads.append(requests.workload(c, stops, bool(c.environment.name), tok.vocab_size))
  for b in evaluations:
    fields = dict(
      prompt_length=c.data.max_prompt_tokens,
      stop_ids=stops,
      several_turns=bool(c.environment.name) and not b.config.reward,
    )
    loads.append(workload(c.eval, c.eval.temperature, len(b.problems), b.config.samples, **fields))
  return loads


def check_memory(
  config: RunConfig, mesh: jax.sharding.Mesh, teacher: ModelConfig | None = None
) -> None:
  """Raises ValueError if parameters, gradients and moments exceed the devices' memory."""
  count, _ = transformer.count(config.model)
  adapters = config.job in ("rl", "offline") and config.lora.rank
  trained = config.job != "eval" and not adapters
  # A trained parameter with its gradient and two moments takes 16 bytes in float32. A frozen
  # parameter of the policy takes 4 bytes (evaluation, adapters): weights are loaded in float32.
  needed = count * (16 if trained else 4)
  if config.has_iterations and config.critic.name == "model":
    needed += 16 * count
  if config.has_iterations:
    frozen = passes.frozen_models(config, teacher).values()
    itemsize = jnp.dtype(config.compute.dtype).itemsize
    needed += itemsize * sum(transformer.count(model)[0] for model in frozen)
  devices = mesh_devices(mesh)
  local = [device for device in devices if device.process_index == jax.process_index()]
  limits = [(device.memory_stats() or {}).get("bytes_limit") for device in local]
  if None in limits:  # CPU devices report no limit and share the host's memory.
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
  available = sum(limits) * len(devices) // len(local)
  if needed > available:
    raise ValueError(
      f"parameters, gradients and moments take {needed / 2**30:,.0f} GiB, more than the "
      f"{available / 2**30:,.0f} GiB of the devices (the policy has {count:,} parameters); make "
      "model.* smaller, or use more devices"
    )
