"""Bytes that a program has to move through HBM if nothing is moved twice: a yardstick for what it
moves, per device.

  train    state read and written; gradients written and read; in each micro-batch the weights for
           the forward and for the backward pass, what `compute.remat` keeps written and read, and
           where weights are gathered their gradients before they are scattered
  score    the weights, in each micro-batch; teacher: the same of its own
  publish  the trainer's weights read, the sampler's written
  prefill  the layers' weights; keys and values of the prompts written
  decode   the layers' weights, of experts those that a token is expected to choose if all are
           chosen equally often, and the head; the filled part of the cache read, one position
           of each slot written

Weights that are split over `fsdp` are read where they lie, written when they are gathered, and
read by the products. Embeddings are looked up: no table is read.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax import sharding, teacher
from gspo_jax.aot import estimate
from gspo_jax.aot.programs import Case, sampler_params, state_of
from gspo_jax.models import transformer
from gspo_jax.models.params import abstract_params
from gspo_jax.sampling.requests import sizes


def of(name: str, case: Case, mesh: jax.sharding.Mesh) -> float:
  """Bytes per device of the program; of decode, in one step."""
  functions = dict(train=_train, score=_score, teacher=_teacher)
  functions |= dict(publish=_publish, prefill=_prefill, decode=_decode)
  return functions[name](case, mesh)


def _train(case: Case, mesh: jax.sharding.Mesh) -> float:
  params, state = _trained(case, mesh), state_of(case, mesh)
  changed = estimate.held(estimate.changed(state))  # and its gradients
  tokens = case.rows // sharding.batch_shards(mesh) * case.length
  kept = tokens * estimate.kept_per_token(case, mesh)
  scattered = mesh.shape["fsdp"] > 1 and not case.config.rl.lora_rank
  gathered = _gathered(params, case, mesh) if scattered else 0.0
  each = case.config.models * 2 * (_pass(params, case, mesh) + gathered + kept)
  return 2 * estimate.held(state.opt_state) + 4 * changed + case.microbatches * each


def _score(case: Case, mesh: jax.sharding.Mesh) -> float:
  passes = case.microbatches if case.config.rl.packed else 1
  return passes * _pass(_trained(case, mesh), case, mesh)


def _teacher(case: Case, mesh: jax.sharding.Mesh) -> float:
  c, taught = case.config, teacher.find(case.config)
  passes = case.microbatches if c.rl.packed else 1
  taught_case = dataclasses.replace(case, config=dataclasses.replace(c, model=taught.model))
  return passes * _pass(teacher.abstract(taught, c, mesh), taught_case, mesh)


def _publish(case: Case, mesh: jax.sharding.Mesh) -> float:
  return estimate.held(_trained(case, mesh)) + estimate.held(sampler_params(case, mesh))


def _prefill(case: Case, mesh: jax.sharding.Mesh) -> float:
  params = sampler_params(case, mesh)
  size = sizes(case.workload, case.engine, sharding.batch_shards(mesh))
  tokens = size.at_once(size.prompt) * size.prompt
  return estimate.held(params.blocks) + tokens * position(case, mesh)


def _decode(case: Case, mesh: jax.sharding.Mesh) -> float:
  params, model = sampler_params(case, mesh), case.model
  slots = _slots(case, mesh)
  head = params.embed if params.head is None else params.head
  weights = estimate.held((params.blocks, params.final_norm, head))
  if model.num_experts:
    of_experts = [
      (f.gate, f.up, f.down) for f in (b.ffn for b in params.blocks) if hasattr(f, "router")
    ]
    experts = estimate.held(of_experts)
    whole = sum(math.prod(w.shape) * w.dtype.itemsize for w in jax.tree.leaves(of_experts))
    tokens = slots * whole / experts / mesh.shape["tensor"]  # of all devices that share a layer's
    idle = (1 - model.experts_per_token / model.num_experts) ** tokens
    weights -= experts * idle
  return weights + slots * position(case, mesh) + cache(case, mesh)


def cache(case: Case, mesh: jax.sharding.Mesh) -> float:
  """Bytes per device of the filled part of the cache of all slots, which a decode step reads."""
  return _slots(case, mesh) * case.filled * position(case, mesh)


def _slots(case: Case, mesh: jax.sharding.Mesh) -> float:
  shards = sharding.batch_shards(mesh)
  return sizes(case.workload, case.engine, shards).slots / shards  # of a device


def _pass(params: Any, case: Case, mesh: jax.sharding.Mesh) -> float:
  """Weights for one pass over the layers and the head."""
  tables = [params.embed] if params.head is not None else []
  read = estimate.held(params) - estimate.held(tables)
  return read + (2 * _gathered(params, case, mesh) if mesh.shape["fsdp"] > 1 else 0.0)


def _gathered(params: Any, case: Case, mesh: jax.sharding.Mesh) -> float:
  """Bytes of the weights put together over `fsdp`, in the type that they are read in."""
  read = transformer.dtypes(case.model, case.config.compute.dtype)

  def gathered(x: jax.ShapeDtypeStruct, dtype: Any) -> float:
    parts = mesh.shape["fsdp"] if "fsdp" in x.sharding.spec else 1
    return math.prod(x.sharding.shard_shape(x.shape)) * parts * jnp.dtype(dtype).itemsize

  if params.head is not None:
    params, read = params.replace(embed=None), read.replace(embed=None)
  return sum(jax.tree.leaves(jax.tree.map(gathered, params, read)))


def position(case: Case, mesh: jax.sharding.Mesh) -> float:
  """Bytes of the keys and values of one position, all layers, on a device."""
  model, itemsize = case.model, jnp.dtype(case.config.engine.cache_dtype).itemsize
  each = 2 * model.num_kv_heads * model.head_dim * itemsize / mesh.shape["tensor"]
  return model.num_layers * each


def _trained(case: Case, mesh: jax.sharding.Mesh) -> Any:
  """The trainer's weights; those of adapters, which are small, are not among them."""
  dtype = case.config.compute.dtype if case.config.rl.lora_rank else jnp.float32
  return abstract_params(case.model, mesh, sharding.TRAIN, dtype)
