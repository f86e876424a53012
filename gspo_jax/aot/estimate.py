"""What programs need at least, by arithmetic: a bound that tells a search what not to compile
(`of_update`), and a yardstick for the bytes that a program moves through HBM (`needed`).

The yardstick is per device, and nothing is moved twice:

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
from gspo_jax.aot import chips, links
from gspo_jax.aot.programs import Case, resolved, sampler_params, state_of
from gspo_jax.models import flops, lora, remat, transformer
from gspo_jax.models.params import abstract_params
from gspo_jax.models.weights import Params
from gspo_jax.sampling.requests import sizes
from gspo_jax.settings.model import ModelConfig
from gspo_jax.structs import TrainState


@dataclasses.dataclass(frozen=True)
class Least:
  """Lower bounds per chip; `row` of the report has what the compiler says."""

  memory: float  # bytes
  seconds: dict[str, float]  # of each resource

  @property
  def bound_s(self) -> float:
    return max(self.seconds.values())

  def __str__(self) -> str:
    return f"{self.bound_s:.3g} s ({max(self.seconds, key=self.seconds.get)})"

  def times(self, factor: float) -> "Least":
    """The same of so many updates."""
    return Least(self.memory, {name: factor * n for name, n in self.seconds.items()})


def of_update(case: Case, mesh: jax.sharding.Mesh, topology: str) -> Least:
  """The least that a train step of the case needs on the mesh.

  Memory: state, gradients and what `compute.remat` keeps. Traffic: the state once, and in each
  micro-batch the layers' weights and kept activations, forward and backward. Links: weights
  gathered over `fsdp` for each pass, their gradients, and tokens over `expert` and `tensor`, each
  at the speed that the axis has (`links`). Network: the gradients, summed over slices.
  """
  case = resolved(case, mesh)
  c, model = case.config, case.model
  chip, number = chips.of_mesh(topology, mesh)
  per_chip = chip.devices
  state = state_of(case, mesh)
  gradients = held(changed(state))
  weights = weights_of(case, mesh)
  rows = -(-case.rows // sharding.batch_shards(mesh))  # of a device, in a micro-batch
  tokens = rows * case.length
  kept = tokens * kept_per_token(case, mesh)
  times = case.microbatches

  layers, head = weights["dense"] + weights["experts"], weights["head"]
  chunk = min(c.compute.expert_chunk or tokens, tokens)
  slices = min(c.compute.logits_chunk or case.length, case.length)
  read = 2 * (weights["dense"] + weights["experts"] * -(-tokens // chunk))
  read += 2 * head * -(-case.length // slices)
  adding = 2 * gradients if times > 1 else 0.0
  traffic = 2 * held(state) + gradients + times * (read + 2 * kept + adding)

  torus = links.torus_of(topology, mesh)
  share = {axis: torus.share(links.along(mesh, axis)) for axis in mesh.axis_names}
  passes = 1 + (c.compute.remat != "none") + (c.lora.rank == 0)  # the last: of gradients
  with jax.set_mesh(mesh):
    prefetched = remat.prefetched(model, c.compute)
  again = prefetched * (c.compute.remat != "none")  # is not gathered again
  gathered = passes * layers + 2 * weights["head"] - again
  sent = gathered * _others(mesh, "fsdp") / share["fsdp"]
  itemsize = jnp.dtype(c.compute.dtype).itemsize
  hidden = tokens * model.hidden_size * itemsize * model.num_layers
  if model.num_experts:
    sent += 5 * hidden * (mesh.shape["expert"] - 1) / share["expert"]
  sent += 4 * 2 * hidden * _others(mesh, "tensor") / share["tensor"]
  work = flops.work(model, case.sequences, case.length, case.length).executed(c.compute.remat)
  moved, sent = traffic * per_chip, times * sent * per_chip
  slices = len(set(map(sharding.slice_of, mesh.devices.flat)))
  trained = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(changed(state)))
  to_slices = 2 * trained * (slices - 1) / mesh.size * per_chip  # once for all micro-batches
  memory = held(state) + gradients + kept + prefetched
  return Least(memory * per_chip, chips.seconds(chip, number, work, moved, sent, to_slices))


def kept_per_token(case: Case, mesh: jax.sharding.Mesh) -> float:
  """Bytes on a device, over all layers, that the backward pass finds of each token: the layers'
  inputs, which no `compute.remat` drops, and what it names besides."""
  c, model = case.config, case.model
  itemsize = jnp.dtype(c.compute.dtype).itemsize
  policy = c.compute.remat if c.compute.remat in remat.POLICIES else "both"  # none: no less
  with jax.set_mesh(mesh):
    kept = remat.kept(model, policy, itemsize)
  return kept + model.hidden_size * model.num_layers * itemsize


def weights_of(case: Case, mesh: jax.sharding.Mesh) -> dict[str, float]:
  """Bytes of the weights that a device multiplies with, put together over `fsdp`, in the type that
  they are read in."""
  c, model = case.config, case.model
  total = held(abstract_params(model, mesh, sharding.ROLLOUT, c.compute.dtype))
  itemsize = jnp.dtype(c.compute.dtype).itemsize
  tensor, expert = mesh.shape["tensor"], mesh.shape["expert"]
  layer = 3 * model.num_experts * model.hidden_size * model.moe_intermediate_size * itemsize
  layers = sum(model.is_moe(layer) for layer in range(model.num_layers))
  experts = layers * layer / (expert * tensor)
  head = model.vocab_size * model.hidden_size * itemsize / tensor
  embedding = 0 if model.tie_word_embeddings else head
  return dict(experts=experts, head=head, dense=total - experts - head - embedding)


def changed(state: TrainState) -> Any:
  """Parameters that an update changes, and that have gradients: the critic's among them."""
  return lora.split(state.params)[0], None if state.critic is None else state.critic.params


def held(tree: Any) -> float:
  """Bytes of a device's part of arrays."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )


def _others(mesh: jax.sharding.Mesh, axis: str) -> float:
  """The share of a gathered array that comes from other devices of the axis."""
  return 1 - 1 / mesh.shape[axis]


def needed(name: str, case: Case, mesh: jax.sharding.Mesh) -> float:
  """Bytes per device of the program; of decode, in one step."""
  functions = dict(train=_train, score=_score, teacher=_teacher)
  functions |= dict(publish=_publish, prefill=_prefill, decode=_decode)
  return functions[name](case, mesh)


def _train(case: Case, mesh: jax.sharding.Mesh) -> float:
  params, state = _trained(case, mesh), state_of(case, mesh)
  tokens = case.rows // sharding.batch_shards(mesh) * case.length
  kept = tokens * kept_per_token(case, mesh)
  scattered = mesh.shape["fsdp"] > 1 and not case.config.lora.rank
  gathered = _gathered(params, case.model, case, mesh) if scattered else 0.0
  each = case.config.models * 2 * (_pass(params, case.model, case, mesh) + gathered + kept)
  gradients = held(changed(state))
  return 2 * held(state.opt_state) + 4 * gradients + case.microbatches * each


def _score(case: Case, mesh: jax.sharding.Mesh) -> float:
  return case.scored // case.rows * _pass(_trained(case, mesh), case.model, case, mesh)


def _teacher(case: Case, mesh: jax.sharding.Mesh) -> float:
  taught = teacher.find(case.config)
  params = teacher.abstract(taught, case.config, mesh)
  return case.scored // case.rows * _pass(params, taught.model, case, mesh)


def _publish(case: Case, mesh: jax.sharding.Mesh) -> float:
  return held(_trained(case, mesh)) + held(sampler_params(case, mesh))


def _prefill(case: Case, mesh: jax.sharding.Mesh) -> float:
  size = sizes(case.workload, case.engine, sharding.batch_shards(mesh))
  tokens = size.at_once(size.prompt) * size.prompt
  return held(sampler_params(case, mesh).blocks) + tokens * position_bytes(case, mesh)


def _decode(case: Case, mesh: jax.sharding.Mesh) -> float:
  params, model = sampler_params(case, mesh), case.model
  slots = _slots(case, mesh)
  head = params.embed if params.head is None else params.head
  weights = held((params.blocks, params.final_norm, head))
  if model.num_experts:
    layers = [block.ffn for block in params.blocks if hasattr(block.ffn, "router")]
    of_experts = [(ffn.gate, ffn.up, ffn.down) for ffn in layers]
    experts = held(of_experts)
    whole = sum(math.prod(w.shape) * w.dtype.itemsize for w in jax.tree.leaves(of_experts))
    tokens = slots * whole / experts / mesh.shape["tensor"]  # of all devices that share a layer's
    idle = (1 - model.experts_per_token / model.num_experts) ** tokens
    weights -= experts * idle
  return weights + slots * position_bytes(case, mesh) + filled_cache(case, mesh)


def filled_cache(case: Case, mesh: jax.sharding.Mesh) -> float:
  """Bytes per device of the filled part of the cache of all slots, which a decode step reads."""
  return _slots(case, mesh) * case.filled * position_bytes(case, mesh)


def _slots(case: Case, mesh: jax.sharding.Mesh) -> float:
  shards = sharding.batch_shards(mesh)
  return sizes(case.workload, case.engine, shards).slots / shards  # of a device


def _pass(params: Params, model: ModelConfig, case: Case, mesh: jax.sharding.Mesh) -> float:
  """Weights for one pass over the layers and the head."""
  read = held(params) - (held(params.embed) if params.head is not None else 0.0)
  return read + (2 * _gathered(params, model, case, mesh) if mesh.shape["fsdp"] > 1 else 0.0)


def _gathered(params: Params, model: ModelConfig, case: Case, mesh: jax.sharding.Mesh) -> float:
  """Bytes of the weights put together over `fsdp`, in the type that they are read in."""
  read = transformer.dtypes(model, case.config.compute.dtype)

  def gathered(x: jax.ShapeDtypeStruct, dtype: Any) -> float:
    parts = mesh.shape["fsdp"] if "fsdp" in x.sharding.spec else 1
    return math.prod(x.sharding.shard_shape(x.shape)) * parts * jnp.dtype(dtype).itemsize

  if params.head is not None:
    params, read = params.replace(embed=None), read.replace(embed=None)
  return sum(jax.tree.leaves(jax.tree.map(gathered, params, read)))


def position_bytes(case: Case, mesh: jax.sharding.Mesh) -> float:
  """Bytes of the keys and values of one position, all layers, on a device."""
  model, itemsize = case.model, jnp.dtype(case.config.engine.cache_dtype).itemsize
  each = 2 * model.num_kv_heads * model.head_dim * itemsize / mesh.shape["tensor"]
  return model.num_layers * each


def _trained(case: Case, mesh: jax.sharding.Mesh) -> Params:
  """The trainer's weights; those of adapters, which are small, are not among them."""
  dtype = case.config.compute.dtype if case.config.lora.rank else jnp.float32
  return abstract_params(case.model, mesh, sharding.TRAIN, dtype)
