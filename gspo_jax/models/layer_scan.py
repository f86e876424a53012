"""Scans over stacked layers. `ModelConfig.scans` splits a model's layers into scans.

A stack is a set of layers of one kind, with stacked weights. A step of a scan applies some layers
of each stack, in an inner scan over these layers. In Qwen3-Next, a step applies three layers of
linear attention, then one layer of full attention.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import sharding
from gspo_jax.models import gated_delta, layers, lora, remat
from gspo_jax.models.experts import moe
from gspo_jax.models.experts.moe import ExpertWeights
from gspo_jax.models.families.lookup import family
from gspo_jax.models.weights import InStack
from gspo_jax.settings.model import ComputeConfig, Kind, ModelConfig, Scan
from gspo_jax.sharding import P

UNROLLED = 8  # On CPU, models of at most this many layers are unrolled instead of scanned.


def apply(
  x_BTD: jax.Array,
  kvs: Sequence[Any],
  blocks: Sequence[Any],
  replayed_experts_lBTk: jax.Array | None,
  scan: Scan,
  policy: str,
  config: ModelConfig,
  compute: ComputeConfig,
  **placement,
) -> tuple[jax.Array, Sequence[Any], Any]:
  """Applies the layers of a scan.

  Returns hidden states, the updated caches, and a pair (chosen experts, router statistics), stacked
  over MoE layers. The pair is None if the scan has no MoE layers.

  Args:
    kvs: cache of each stack, None if there is no cache.
    blocks: weights of each stack.
    replayed_experts_lBTk: experts that replace the router's choice. None means no replay.
    policy: name of the rematerialisation policy; ignored if there is a cache.
    placement: positions, segments, `tree` and `from_start`, as in `layers.attend`.
  """
  cached, weights, layers, gathered = kvs[0] is not None, list(blocks), [], None
  tables = [family(config).block_table(config, stack.kind, 1) for stack in scan.stacks]
  for i, stack in enumerate(scan.stacks):
    layer = functools.partial(_layer, config=config, compute=compute, kind=stack.kind, **placement)
    if policy != "none" and not cached:
      layer = jax.checkpoint(layer, policy=remat.POLICIES[policy], prevent_cse=False)
    if cached:
      weights[i], layer = None, _from_stack(tables[i], blocks[i], layer)
    layers.append(layer)
  prefetches = compute.prefetch and not cached and remat.prefetches(scan)
  if prefetches:
    layers, weights, gathered = _prefetch_experts(layers, blocks, tables, scan, config, compute)
  unroll = sharding.platform() == "cpu" and config.num_layers <= UNROLLED

  def step(carry, inputs):
    (x_BTD, [*kvs], gathered), routed = carry, []
    for i, stack in enumerate(scan.stacks):
      carry = x_BTD, kvs[i], gathered
      if len(stack.layers) == scan.steps:
        carry, outputs = layers[i](carry, inputs[i])
        outputs = jax.tree.map(lambda x: x[None], outputs)
      else:
        carry, outputs = _over_layers(layers[i], carry, inputs[i], unroll or cached or prefetches)
      x_BTD, kvs[i], gathered = carry
      routed += [outputs] if stack.kind.moe else []
    routed = jax.tree.map(lambda *xs: jnp.concatenate(xs), *routed) if routed else None
    return (x_BTD, tuple(kvs), gathered), routed

  # A scan updates carried caches in place. As inputs and outputs, caches would exist twice.
  carry = x_BTD, tuple(kvs), gathered
  indices = [np.arange(len(stack.layers), dtype=np.int32) for stack in scan.stacks]
  inputs = [*zip(indices, weights, _split_experts(replayed_experts_lBTk, scan), strict=True)]
  for i, stack in enumerate(scan.stacks):
    if len(stack.layers) > scan.steps:
      inputs[i] = _by_step(inputs[i], scan.steps)
  (x_BTD, kvs, _), routed = _over_layers(step, carry, inputs, unroll)
  return x_BTD, kvs, _merge_steps(routed)


def _split_experts(experts_lBTk: jax.Array | None, scan: Scan) -> list[jax.Array | None]:
  """Splits the experts to replay by stack. A dense stack, or a stack without replay, has None."""
  if experts_lBTk is None:
    return [None] * len(scan.stacks)
  parts, first, by_step = [], 0, _by_step(experts_lBTk, scan.steps)
  for stack in scan.stacks:
    end = first + len(stack.layers) // scan.steps * stack.kind.moe
    part = _merge_steps(by_step[:, first:end])
    parts, first = [*parts, part if stack.kind.moe else None], end
  return parts


def _by_step(layers: Any, steps: int) -> Any:
  """Splits the axis of layers: [l, ...] to [steps, layers of a step, ...]."""
  return jax.tree.map(lambda x: _reshape(x, 1, (steps, len(x) // steps)), layers)


def _merge_steps(layers: Any) -> Any:
  """Merges the axes of `_by_step`."""
  return jax.tree.map(lambda x: _reshape(x, 2, (x.shape[0] * x.shape[1],)), layers)


def _reshape(x: Any, axes: int, sizes: tuple[int, ...]) -> Any:
  """Reshapes the first `axes` axes to `sizes`. No mesh axis may split them."""
  shape = *sizes, *x.shape[axes:]
  if isinstance(x, np.ndarray) or sharding.without_mesh():
    return x.reshape(shape)
  spec = jax.typeof(x).sharding.spec
  parts = *[None] * len(sizes), *spec.partitions[axes:]
  # The sharding is explicit, since JAX derives none for arrays that differ between replicas.
  out = P(*parts, unreduced=spec.unreduced, reduced=spec.reduced)
  return jax.lax.reshape(x, shape, out_sharding=out)


def _from_stack(table, block, layer):
  """Wraps `layer` to read its weights from their stack, at the layer's index.

  Experts' weights are passed as an `InStack`, a reference into the stack.
  """

  def from_stack(carry, inputs):
    index, _, replayed_experts_BTk = inputs

    def read(w, stack):
      if w.is_expert:
        return InStack(stack, index)
      return jax.tree.map(lambda x: _read(x, index, len(w.inputs)), stack)

    return layer(carry, (index, jax.tree.map(read, table, block), replayed_experts_BTk))

  return from_stack


def _read(stack, index, inputs):
  """Slices a weight's stack.

  `layers.project_heads` merges several input axes. If it merged those of a slice, XLA on TPU would
  copy the slice at every step. So the axes are merged before the slice, and split again after it.

  inputs: number of the weight's input axes.
  """
  shape = stack.shape[1:]
  merges = inputs > 1 and len(shape) > inputs  # Not a scale of int8, which has no input axes.
  if merges:
    stack = sharding.reshape(stack, (len(stack), -1, shape[-1]), P(None, "tensor"))
  w = jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)
  return sharding.reshape(w, shape, P("tensor")) if merges else w


def _experts_of(config: ModelConfig, kind: Kind, block) -> ExpertWeights:
  """Returns the experts' weights of a block, stacked over its layers."""
  weights, whole = jax.tree.flatten(family(config).block_table(config, kind, 1))
  pairs = zip(weights, whole.flatten_up_to(block), strict=True)
  experts = (x for w, x in pairs if w.is_expert)
  return ExpertWeights(*experts, activation=family(config).activation)


def _prefetch_experts(
  layers: Sequence[Any],
  blocks: Sequence[Any],
  tables: Sequence[Any],
  scan: Scan,
  config: ModelConfig,
  compute: ComputeConfig,
) -> tuple[list, list, moe.Gathered]:
  """Overlaps each layer with the gathering of the next layer's experts.

  In the backward pass, each layer overlaps with scattering the gradients of the next layer's
  experts. The gathered weights of all layers are saved for the backward pass.

  Returns:
    layers: functions that apply a layer, and return the next layer's gathered experts in the carry.
    inputs: a pair for each stack: the weights without experts, and the experts' weights that each
      layer gathers for the next layer. The last layer of the scan gathers the experts of the first
      layer again, and does not use them.
    gathered: the gathered experts of the scan's first layer, for the initial carry.
  """

  def gather(w: ExpertWeights) -> moe.Gathered:
    w = lora.dithered(jax.lax.optimization_barrier(w))
    w = jax.tree.map(lambda x: x.astype(compute.dtype), w)
    return moe.gather(w, compute.experts)

  def prefetching(layer):
    def run(carry, inputs):
      index, (block, next_experts), replayed_experts_BTk = inputs
      prefetched = gather(next_experts)
      (x_BTD, kv, _), outputs = layer(carry, (index, block, replayed_experts_BTk))
      return (x_BTD, kv, prefetched), outputs

    return run

  def shift(experts: ExpertWeights, next_stack: ExpertWeights) -> ExpertWeights:
    """Returns the experts of each layer's next layer.

    After a step's last layer of the stack, this is the step's first layer of `next_stack`.
    """
    pair = _by_step((experts, next_stack), scan.steps)
    shifted = jax.tree.map(lambda x, y: jnp.concatenate([x[:, 1:], y[:, :1]], axis=1), *pair)
    return _merge_steps(shifted)

  stacks = [_experts_of(config, stack.kind, block) for stack, block in zip(scan.stacks, blocks)]
  first = jax.tree.map(lambda w: jnp.roll(w, -(len(w) // scan.steps), axis=0), stacks[0])
  experts = map(shift, stacks, [*stacks[1:], first])
  others = [
    jax.tree.map(lambda w, x: None if w.is_expert else x, table, block)
    for table, block in zip(tables, blocks)
  ]
  inputs = list(zip(others, experts))
  return list(map(prefetching, layers)), inputs, gather(jax.tree.map(lambda w: w[0], stacks[0]))


def _over_layers(layer, carry, inputs, unroll):
  """Scans over layers or steps. A single layer or step is called directly, to copy no weights.

  unroll: whether to unroll the whole scan. Otherwise the loop stacks the residuals of all layers,
    which takes 10 to 20 % of an update's time on CPU. Loops are not unrolled in part, since JAX has
    no gradient of such loops on a mesh.
  """
  if len(jax.tree.leaves(inputs)[0]) > 1:
    return jax.lax.scan(layer, carry, inputs, unroll=unroll)
  carry, outputs = layer(carry, jax.tree.map(lambda x: x[0], inputs))
  return carry, jax.tree.map(lambda x: x[None], outputs)


def _layer(
  carry,
  inputs,
  *,
  config: ModelConfig,
  compute,
  kind: Kind,
  **placement,
):
  """Computes one layer of the family.

  Returns the carry, with None in place of the prefetched weights, and (chosen experts, router
  statistics). Chosen experts and router statistics are None in a dense layer.

  Args:
    carry: hidden states; cache of the layer's stack, None if there is no cache; prefetched weights
      of the experts, None if the layer's weights include them.
    inputs: index of the layer in its stack; weights of the layer, without the axis of layers;
      experts to replay, None if there are none.
  """
  (x_BTD, kv, gathered), (index, block, replayed_experts_BTk) = carry, inputs

  def experts(y_BTD, w):
    valid_BT = placement["segments_BT"] > 0
    names = "choice_bias", "router_bias", "gate_bias", "up_bias", "down_bias"
    choice_bias, router_bias, *biases, down_bias = (getattr(w, name, None) for name in names)
    gate_BTk, experts_BTk, stats = moe.route(
      y_BTD, w.router, config, valid_BT, replayed_experts_BTk, choice_bias, router_bias
    )
    activation = family(config).activation
    expert_w = gathered or ExpertWeights(w.gate, w.up, w.down, *biases, activation)
    chunk = compute.expert_chunk
    y_BTD = moe.experts(y_BTD, gate_BTk, experts_BTk, expert_w, compute.experts, chunk)
    if down_bias is not None:
      y_BTD = y_BTD + moe.output_biases(gate_BTk, experts_BTk, down_bias).astype(y_BTD.dtype)
    return y_BTD, experts_BTk, stats

  module = gated_delta if kind.linear else layers
  attend = functools.partial(
    module.attend, kv=kv, layer=index, config=config, compute=compute, kind=kind, **placement
  )
  # Without this barrier, XLA casts the weights of all layers before the loop, and keeps the copies.
  if kv is None:
    block = jax.lax.optimization_barrier(block)
  declared = family(config).block_table(config, kind, 1)
  block = layers.gather(declared, lora.dithered(block), x_BTD.dtype)
  x_BTD, kv, experts_BTk, stats = family(config).layer(x_BTD, block, config, attend, experts)
  return (x_BTD, kv, None), (experts_BTk, stats)
