"""What an update needs at least, by arithmetic: it tells a search what not to compile."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.aot import chips, links
from gspo_jax.aot.programs import Case, resolved, state_of
from gspo_jax.models import flops, lora, remat
from gspo_jax.models.params import abstract_params
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
  at the speed that the axis has (`links`).
  """
  case = resolved(case, mesh)
  c, model = case.config, case.model
  chip, number = chips.parse(topology)
  per_chip = mesh.size / number
  state = state_of(case, mesh)
  gradients = held(changed(state))
  weights = weights_of(case, mesh)
  rows = -(-case.rows // sharding.batch_shards(mesh))  # of a device, in a micro-batch
  tokens = rows * case.length
  kept = tokens * kept_per_token(case, mesh)
  times = case.microbatches

  layers = weights["dense"] + weights["experts"]
  chunk = min(c.compute.expert_chunk or tokens, tokens)
  slices = min(c.compute.logits_chunk or case.length, case.length)
  read = 2 * (weights["dense"] + weights["experts"] * -(-tokens // chunk))
  read += 2 * weights["head"] * -(-case.length // slices)
  adding = 2 * gradients if times > 1 else 0.0
  traffic = 2 * held(state) + gradients + times * (read + 2 * kept + adding)

  torus = links.torus_of(topology, mesh)
  share = {axis: torus.share(links.along(mesh, axis)) for axis in mesh.axis_names}
  passes = 1 + (c.compute.remat != "none") + (c.rl.lora_rank == 0)  # the last: of gradients
  sent = (passes * layers + 2 * weights["head"]) * _others(mesh, "fsdp") / share["fsdp"]
  itemsize = jnp.dtype(c.compute.dtype).itemsize
  hidden = tokens * model.hidden_size * itemsize * model.num_layers
  if model.num_experts:
    sent += 5 * hidden * (mesh.shape["expert"] - 1) / share["expert"]
  sent += 4 * 2 * hidden * _others(mesh, "tensor") / share["tensor"]
  work = flops.work(model, case.sequences, case.length, case.length).executed(c.compute.remat)
  moved, sent = traffic * per_chip, times * sent * per_chip
  memory = held(state) + gradients + kept
  return Least(memory * per_chip, chips.seconds(chip, number, work, moved, sent))


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
