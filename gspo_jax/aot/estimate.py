"""Computes lower bounds on a program's time, memory and HBM traffic, without compiling the program.

`update_bound` estimates time and memory of an update, so that a search can skip slow settings
without compiling them. `needed` estimates the HBM traffic that a program cannot avoid, and the
report compares it with the traffic of the compiled program. For each program, `needed` counts this
traffic of a device:

  train    Reads and writes the trained weights of policy and critic, their gradients and their
           optimizer state. Each micro-batch reads all weights twice, for the forward and the
           backward pass. Each micro-batch also writes and reads saved activations (`compute.remat`)
           and, unless only adapters are trained, the gradients of weights gathered over `fsdp`.
  score    Reads the weights in each micro-batch. `teacher` reads the teacher's weights instead.
  publish  Reads the trainer's weights and writes the sampler's.
  prefill  Reads the layers' weights. Writes the prompts' keys, values and states of linear
           attention.
  decode   Reads the weights of the layers and the head. Reads an expert's weights only if some
           token chooses the expert. The expected number of these experts is computed as if each
           token chose experts at random. Reads the filled part of the cache and writes one position
           per slot. Reads and writes each slot's states of linear attention.

Weights sharded over `fsdp` are read locally, written when gathered, and read again by the matrix
products. A pass looks up only a few rows of the embedding table, so the table counts only if it is
also the head.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax import sharding, teacher
from gspo_jax.aot import chips, links
from gspo_jax.aot.programs import Case, resolve_remat, sampler_params, state_of
from gspo_jax.models import lora, remat, transformer
from gspo_jax.models.experts import moe
from gspo_jax.models.params import abstract_params
from gspo_jax.models.weights import Params
from gspo_jax.sampling.requests import sizes
from gspo_jax.settings.model import ModelConfig
from gspo_jax.structs import TrainState
from gspo_jax.system.meshes import use_mesh


@dataclasses.dataclass(frozen=True)
class LowerBounds:
  """Lower bounds on memory and time of one chip."""

  memory: float  # Needed bytes of a chip's memory.
  seconds: dict[str, float]  # Seconds by resource: compute, hbm, interconnect, network.

  @property
  def bound_s(self) -> float:
    """Seconds of the slowest resource."""
    return max(self.seconds.values())

  def __str__(self) -> str:
    return f"{self.bound_s:.3g} s ({max(self.seconds, key=self.seconds.get)})"

  def times(self, factor: float) -> "LowerBounds":
    """Scales the seconds, e.g. by a number of updates."""
    return LowerBounds(self.memory, {name: factor * n for name, n in self.seconds.items()})


def update_bound(case: Case, mesh: jax.sharding.Mesh, topology: str) -> LowerBounds:
  """Returns lower bounds of a train step on the mesh.

  Memory includes the training state, gradients, saved activations, and the weights gathered by
  `compute.prefetch`. Seconds are for these resources:

    compute       The model's matrix products, including recomputed ones.
    hbm           An update reads and writes the state, and writes the gradients. Each micro-batch
                  reads the weights twice (experts and head twice per chunk), and writes and reads
                  the saved activations. If there are several micro-batches, each also reads and
                  writes the sum of gradients.
    interconnect  Forward pass and recomputation gather the weights over `fsdp`. Gradients of
                  weights are scattered, unless only adapters are trained. Tokens are sent over
                  `expert` and `tensor`. A transfer has the speed of its axis (`links`).
    network       An update sums the gradients over slices once.
  """
  case = resolve_remat(case, mesh)
  c, model = case.config, case.model
  chip, number = chips.mesh_chips(topology, mesh)
  per_chip = chip.devices
  state = state_of(case, mesh)
  gradients = device_bytes(trained_params(state))
  weights = weights_of(case, mesh)
  rows = -(-case.rows // sharding.batch_shards(mesh))  # Rows per device and micro-batch.
  tokens = rows * case.length
  saved = tokens * activation_bytes(case, mesh)
  times = case.microbatches

  layers, head = weights["dense"] + weights["experts"], weights["head"]
  chunk = min(c.compute.expert_chunk or tokens, tokens)
  slices = min(c.compute.logits_chunk or case.length, case.length)
  read = 2 * (weights["dense"] + weights["experts"] * -(-tokens // chunk))
  read += 2 * head * -(-case.length // slices)
  adding = 2 * gradients if times > 1 else 0.0
  traffic = 2 * device_bytes(state) + gradients + times * (read + 2 * saved + adding)

  torus = links.torus_of(topology, mesh)
  share = {axis: torus.share(links.along(mesh, axis)) for axis in mesh.axis_names}
  # A layer's weights are gathered in the forward pass, and again if the layer is recomputed. The
  # weights' gradients are scattered, unless only adapters are trained.
  transfers = 1 + (c.compute.remat != "none") + (c.lora.rank == 0)
  with use_mesh(mesh):
    prefetched = remat.prefetched(model, c.compute)
  # Weights gathered by compute.prefetch are kept, and not gathered again.
  saved_gather = prefetched * (c.compute.remat != "none")
  gathered = transfers * layers + 2 * weights["head"] - saved_gather
  sent = gathered * _received_fraction(mesh, "fsdp") / share["fsdp"]
  itemsize = jnp.dtype(c.compute.dtype).itemsize
  hidden = tokens * model.hidden_size * itemsize * model.num_layers
  if model.num_experts:
    sent += 5 * hidden * (mesh.shape["expert"] - 1) / share["expert"]
  sent += 4 * 2 * hidden * _received_fraction(mesh, "tensor") / share["tensor"]
  work = case.work(model, case.sequences).executed(c.compute.remat)
  moved, sent = traffic * per_chip, times * sent * per_chip
  slices = len(set(map(sharding.slice_of, mesh.devices.flat)))
  trained = jax.tree.leaves(trained_params(state))
  trained_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in trained)
  to_slices = 2 * trained_bytes * (slices - 1) / mesh.size * per_chip  # Once per update.
  memory = device_bytes(state) + gradients + saved + prefetched
  return LowerBounds(memory * per_chip, chips.seconds(chip, number, work, moved, sent, to_slices))


def activation_bytes(case: Case, mesh: jax.sharding.Mesh) -> float:
  """Bytes saved per token for the backward pass, on each device.

  The inputs of all layers are saved, and the activations that `compute.remat` keeps.
  """
  c, model = case.config, case.model
  itemsize = jnp.dtype(c.compute.dtype).itemsize
  # Without remat a layer saves even more than with "both", so this is still a lower bound.
  policy = c.compute.remat if c.compute.remat in remat.POLICIES else "both"
  with use_mesh(mesh):
    saved = remat.saved_bytes(model, policy, itemsize)
  return saved + model.hidden_size * model.num_layers * itemsize


def weights_of(case: Case, mesh: jax.sharding.Mesh) -> dict[str, float]:
  """Bytes per device of weights in compute dtype, after gathering over `fsdp`.

  Returns a dict with the keys "experts", "head" and "dense" (other weights, without the embedding).
  """
  c, model = case.config, case.model
  total = device_bytes(abstract_params(model, mesh, sharding.ROLLOUT, c.compute.dtype))
  itemsize = jnp.dtype(c.compute.dtype).itemsize
  tensor, expert = mesh.shape["tensor"], mesh.shape["expert"]
  layer = 3 * model.num_experts * model.hidden_size * model.moe_intermediate_size * itemsize
  layers = model.num_moe_layers
  experts = layers * layer / (expert * tensor)
  head = model.vocab_size * model.hidden_size * itemsize / tensor
  embedding = 0 if model.tie_word_embeddings else head
  return dict(experts=experts, head=head, dense=total - experts - head - embedding)


def trained_params(state: TrainState) -> Any:
  """Returns trained parameters: the policy's (or its adapters'), and the critic's or None."""
  return lora.split(state.params)[0], None if state.critic is None else state.critic.params


def device_bytes(tree: Any) -> float:
  """Returns bytes of the arrays' shards on one device."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )


def _received_fraction(mesh: jax.sharding.Mesh, axis: str) -> float:
  """Returns the fraction of a gathered array on other devices before gathering."""
  return 1 - 1 / mesh.shape[axis]


def needed(name: str, case: Case, mesh: jax.sharding.Mesh) -> float:
  """Returns a program's minimum HBM traffic in bytes per device.

  For "decode" it is the traffic of one step.
  """
  functions = dict(train=_train, score=_score, teacher=_teacher)
  functions |= dict(publish=_publish, prefill=_prefill, decode=_decode)
  return functions[name](case, mesh)


def _train(case: Case, mesh: jax.sharding.Mesh) -> float:
  params, state = _trainer_params(case, mesh), state_of(case, mesh)
  tokens = case.rows // sharding.batch_shards(mesh) * case.length
  saved = tokens * activation_bytes(case, mesh)
  scattered = mesh.shape["fsdp"] > 1 and not case.config.lora.rank
  gathered = _gathered(params, case.model, case, mesh) if scattered else 0.0
  each = case.config.models * 2 * (_pass(params, case.model, case, mesh) + gathered + saved)
  gradients = device_bytes(trained_params(state))
  critic = () if state.critic is None else state.critic.opt_state
  return 2 * device_bytes((state.opt_state, critic)) + 4 * gradients + case.microbatches * each


def _score(case: Case, mesh: jax.sharding.Mesh) -> float:
  return case.scored // case.rows * _pass(_trainer_params(case, mesh), case.model, case, mesh)


def _teacher(case: Case, mesh: jax.sharding.Mesh) -> float:
  taught = teacher.find_teacher(case.config)
  params = abstract_params(taught.model, mesh, sharding.TRAIN, case.config.compute.dtype)
  return case.scored // case.rows * _pass(params, taught.model, case, mesh)


def _publish(case: Case, mesh: jax.sharding.Mesh) -> float:
  return device_bytes(_trainer_params(case, mesh)) + device_bytes(sampler_params(case, mesh))


def _prefill(case: Case, mesh: jax.sharding.Mesh) -> float:
  size = sizes(case.workload, case.engine, sharding.batch_shards(mesh))
  prompts = size.at_once(size.prompt)
  cached = prompts * (size.prompt * position_bytes(case, mesh) + state_bytes(case, mesh))
  return device_bytes(sampler_params(case, mesh).blocks) + cached


def _decode(case: Case, mesh: jax.sharding.Mesh) -> float:
  params, model = sampler_params(case, mesh), case.model
  slots = _slots(case, mesh)
  head = params.embed if params.head is None else params.head
  weights = device_bytes((params.blocks, params.final_norm, head))
  if model.num_experts:
    layers = [block.ffn for block in params.blocks if hasattr(block.ffn, "router")]
    expert_weights = [(ffn.gate, ffn.up, ffn.down) for ffn in layers]
    experts = device_bytes(expert_weights)
    whole = sum(math.prod(w.shape) * w.dtype.itemsize for w in jax.tree.leaves(expert_weights))
    # Tokens of all devices that share a layer's experts.
    tokens = slots * whole / experts / mesh.shape["tensor"]
    # Probability that none of these tokens chooses an expert.
    idle = (1 - model.experts_per_token / model.num_experts) ** tokens
    weights -= experts * idle
  cached = slots * (position_bytes(case, mesh) + 2 * state_bytes(case, mesh))
  return weights + cached + filled_cache(case, mesh)


def filled_cache(case: Case, mesh: jax.sharding.Mesh) -> float:
  """Bytes of keys and values read by a decode step, per device.

  A layer with a sliding window reads the window alone.
  """
  model = case.model
  read = [
    min(case.filled, model.sliding_window) if model.is_local(layer) else case.filled
    for layer in range(model.num_layers)
    if not model.is_linear(layer)
  ]
  return _slots(case, mesh) * sum(read) / max(len(read), 1) * position_bytes(case, mesh)


def _slots(case: Case, mesh: jax.sharding.Mesh) -> float:
  """Slots of the sampler per device."""
  shards = sharding.batch_shards(mesh)
  return sizes(case.workload, case.engine, shards).slots / shards


def _pass(params: Params, model: ModelConfig, case: Case, mesh: jax.sharding.Mesh) -> float:
  """Bytes of weights moved by one pass over layers and head, per device."""
  read = device_bytes(params) - (device_bytes(params.embed) if params.head is not None else 0.0)
  return read + (2 * _gathered(params, model, case, mesh) if mesh.shape["fsdp"] > 1 else 0.0)


def _gathered(params: Params, model: ModelConfig, case: Case, mesh: jax.sharding.Mesh) -> float:
  """Bytes per device of the layers and the head after gathering over `fsdp`.

  Weights are gathered in the dtypes of the matrix products.
  """
  read = transformer.dtypes(model, case.config.compute.dtype)

  def gathered(x: jax.ShapeDtypeStruct, dtype: Any) -> float:
    parts = mesh.shape["fsdp"] if "fsdp" in x.sharding.spec else 1
    return math.prod(x.sharding.shard_shape(x.shape)) * parts * jnp.dtype(dtype).itemsize

  if params.head is not None:
    params, read = params.replace(embed=None), read.replace(embed=None)
  return sum(jax.tree.leaves(jax.tree.map(gathered, params, read)))


def sent_to_experts(case: Case, mesh: jax.sharding.Mesh, topology: str, slots: int) -> float:
  """Bytes sent by a device in a decode step: tokens to their experts, and sums back.

  Counted at the speed of both links of a torus axis. 0 if experts have so many tokens that their
  weights are gathered instead.
  """
  model, k = case.model, case.model.experts_per_token
  if not model.num_experts:
    return 0.0
  rules = sharding.rollout_rules(case.config.mesh, mesh, model.num_experts)
  axes = [axis for axis in sharding.each(rules["E"]) if mesh.shape[axis] > 1]
  devices = math.prod(mesh.shape[axis] for axis in axes)
  tokens = slots // sharding.batch_shards(mesh) * devices
  if tokens * k > moe.FEW * model.num_experts or not axes:
    return 0.0
  share = 1.0  # Several axes use all links.
  if len(axes) == 1:
    share = links.torus_of(topology, mesh).share(links.along(mesh, axes[0]))
  numbers = 2 * (model.hidden_size + k)  # A token with its gate weights and experts; its sum.
  layers = model.num_moe_layers
  itemsize = jnp.dtype(case.config.sampler_compute.dtype).itemsize
  return layers * tokens * numbers * itemsize * (1 - 1 / devices) / share


def position_bytes(case: Case, mesh: jax.sharding.Mesh) -> float:
  """Bytes of a position's keys and values over layers without linear attention, per device."""
  model, dtype = case.model, jnp.dtype(case.config.engine.cache_dtype)
  vector = model.head_dim * dtype.itemsize + 4 * (dtype == jnp.int8)  # int8 has float32 scales.
  layers = sum(not model.is_linear(layer) for layer in range(model.num_layers))
  return layers * 2 * model.num_kv_heads * vector / mesh.shape["tensor"]


def state_bytes(case: Case, mesh: jax.sharding.Mesh) -> float:
  """Bytes of one sequence's states in all layers of linear attention, per device."""
  model, c = case.model, case.model.linear
  states = c.value_heads * c.key_dim * c.value_dim
  # Inputs of the convolutions at one position.
  inputs = 2 * c.key_heads * c.key_dim + c.value_heads * c.value_dim
  layers = sum(model.is_linear(layer) for layer in range(model.num_layers))
  return 4 * layers * (states + (c.kernel - 1) * inputs) / mesh.shape["tensor"]


def _trainer_params(case: Case, mesh: jax.sharding.Mesh) -> Params:
  """Returns shapes and shardings of the trainer's weights, without adapters."""
  dtype = case.config.compute.dtype if case.config.lora.rank else jnp.float32
  return abstract_params(case.model, mesh, sharding.TRAIN, dtype)
