"""Transformer language model: pure functions over a pytree of parameters.

One `forward` serves training, scoring, prefill and decoding. `config.family` names the model's
family, such as Qwen3 or Llama: a file of `families` declares its weights and its layer.
"""

import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import sharding
from gspo_jax.models import gated_delta, head, layers, lora, remat, weights
from gspo_jax.models.attention import attention
from gspo_jax.models.attention.attention import Paths, Tree
from gspo_jax.models.attention.cache import Cache
from gspo_jax.models.attention.pages import Pages
from gspo_jax.models.experts import moe
from gspo_jax.models.experts.moe import ExpertWeights, RouterStats
from gspo_jax.models.families.lookup import family
from gspo_jax.models.head import head_logits, token_logp  # noqa: F401, for callers of `forward`
from gspo_jax.models.weights import InStack, Params
from gspo_jax.settings.model import REFERENCE, ComputeConfig, Kind, ModelConfig
from gspo_jax.sharding import BATCH, P, Rules

UNROLLED = 8  # On CPU, models of at most this many layers are unrolled instead of scanned.


def table(config: ModelConfig) -> Params:
  """Declares every weight of the model once."""
  w = weights.weight_factory(config)
  block_table = family(config).block_table
  blocks = tuple(block_table(config, kind, number) for kind, number in config.runs())
  return Params(
    embed=w("VD", fan_in="D"),
    blocks=blocks,
    final_norm=family(config).final_norm(w),
    head=None if config.tie_word_embeddings else w("DV", fan_in="D"),
  )


def sampler_table(config: ModelConfig, weights_dtype: str = "") -> Params:
  """Declares the sampler's weights, for `engine.weights_dtype`.

  If it is "int8", the matrices of the layers are `Int8`. For any other value the table is the
  trainer's.
  """
  plain = table(config)
  return weights.in_eight_bits(plain) if weights_dtype == "int8" else plain


def check_attention(config: ModelConfig, compute: ComputeConfig, shared_prompts: bool) -> None:
  """Raises ValueError if the model or the devices do not support `compute.attention`.

  shared_prompts: whether responses share the forward pass of their prompt (`Tree`).
  """
  if compute.attention == "cudnn" and sharding.platform() not in ("gpu", "cuda"):
    raise ValueError(
      f"compute.attention='cudnn' is for NVIDIA GPUs, and the platform is "
      f"{sharding.platform()!r}: set it to auto"
    )
  name, dtype = compute.attention, compute.dtype
  for kind in {kind for kind, _ in config.runs() if not kind.linear}:
    scores = layers.scores_of(config, kind.local)
    attention.choose(name, 1, dtype, scores, shared_prompts, config.head_dim)


def shardings(config: ModelConfig, rules: Rules, mesh: jax.sharding.Mesh) -> Params:
  """Returns the NamedShardings of all parameters.

  Raises ValueError, naming the weight, if a mesh axis does not divide a dimension.
  """
  return weights.shardings(table(config), rules, mesh)


def dtypes(config: ModelConfig, compute_dtype: Any) -> Params:
  """Returns the dtype of each parameter in computations.

  Each forward pass casts the parameters. The trainer may store all of them in float32, and compute
  in bfloat16. A few parameters, such as the router, are used in float32 for any `compute_dtype`.
  """
  return weights.dtypes(table(config), compute_dtype)


def init(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
  """Initialises parameters. Jit it with `out_shardings=shardings(...)` to keep them sharded."""
  return weights.init(table(config), key, dtype)


def count(config: ModelConfig) -> tuple[int, int]:
  """Counts all parameters, and the parameters used for one token."""
  weights = jax.tree.leaves(table(config))
  total = sum(math.prod(w.shape) for w in weights)
  by_expert = sum(math.prod(w.shape) for w in weights if w.by_expert)
  unused = config.num_experts - config.experts_per_token
  return total, total - by_expert * unused // max(config.num_experts, 1)


def remat_of(config: ModelConfig, compute: ComputeConfig, tokens: int) -> str:
  """Returns the rematerialisation policy of a pass.

  tokens: tokens of the batch, on all devices.
  """
  parameters, mesh = 0, jax.sharding.get_abstract_mesh()
  if compute.remat == "auto" and not mesh.empty:
    layout = shardings(config, sharding.TRAIN, mesh)
    parts = jax.tree.map(lambda w, s: math.prod(s.shard_shape(w.shape)), table(config), layout)
    parameters = sum(jax.tree.leaves(parts))
  return remat.choose(config, compute, sharding.rows_per_device(tokens), parameters)


def decoding_params(params: Params) -> Params:
  """Unstacks the layers for decoding, except on TPU.

  A loop over stacked layers is slower on CPU and GPU: at every decode step it copies each layer's
  weights out of the stack. On GPU it also copies the layer's part of the cache.
  """
  return params if sharding.platform() == "tpu" else unstack(params)


def unstack(params: Params) -> Params:
  """Splits the parameters into blocks of one layer each."""
  depths = zip(params.blocks, params.depths)
  layers = [(block, i) for block, depth in depths for i in range(depth)]
  return params.replace(blocks=tuple(_layer_of(block, i) for block, i in layers))


@jax.jit
def _layer_of(block: Any, i: int) -> Any:
  """Slices layer `i` of a block. Blocks of equal shapes share one compiled program."""
  return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1), block)


@flax.struct.dataclass
class Output:
  """Result of `forward`."""

  hidden_BTD: jax.Array  # Hidden states after the final norm; the head's input.
  cache: Cache | Pages | None  # The updated cache. None if `forward` had no cache.
  routing_lBTk: jax.Array | None  # int32: chosen experts of MoE layers. None for dense models.
  stats: RouterStats | None  # Stacked over MoE layers. None for dense models.


def forward(
  params: Params,
  config: ModelConfig,
  tokens_BT: jax.Array,
  *,
  positions: jax.Array | None = None,
  segments: jax.Array | None = None,
  tree: Tree | Paths | None = None,
  cache: Cache | Pages | None = None,
  routing: jax.Array | None = None,
  compute: ComputeConfig = REFERENCE,
) -> Output:
  """Computes the final hidden states of all positions.

  Args:
    positions: int32 [B, T], for rotary embeddings and the cache's slots. None means 0..T-1
      and a cache without earlier tokens.
    segments: int32 [B, T]; tokens attend to their own segment; 0 is padding. None: one per row.
    tree: layout of sequences that share prefixes; needs `positions`. None for plain rows.
    cache: keys and values of earlier positions. If T > 1, the new positions are consecutive and
      begin at the same position in all rows. `Pages` require T = 1. None means no cache.
    routing: int32 [MoE layers, B, T, k], experts to replay; -1 keeps the router's choice.
    compute: dtypes and implementations.
  """
  B, T = tokens_BT.shape
  from_start = positions is None  # If so, the cache has no earlier tokens.
  if positions is None:
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
  segments = jnp.ones((B, T), jnp.int32) if segments is None else segments
  positions, segments, tokens_BT = (
    sharding.reshard(jnp.asarray(x), P(BATCH)) for x in (positions, segments, tokens_BT)
  )
  dtype = jnp.dtype(compute.dtype)
  x_BTD = _embed(params, config, tokens_BT, dtype)
  placement = dict(positions_BT=positions, segments_BT=segments, tree=tree, from_start=from_start)
  policy = remat_of(config, compute, B * T)

  caches, experts, stats, first, moe_layers = [], [], [], 0, 0
  for i, (block, depth) in enumerate(zip(params.blocks, params.depths)):
    replayed_experts = None
    if routing is not None and config.is_moe(first):
      replayed_experts = jnp.asarray(routing[moe_layers : moe_layers + depth])
      moe_layers += depth
    kv = None if cache is None else cache.block(i)
    x_BTD, kv, block_experts, block_stats = _apply_block(
      x_BTD, kv, block, replayed_experts, (first, depth), policy, config, compute, **placement
    )
    caches.append(kv)
    first += depth
    if block_experts is not None:
      experts.append(block_experts)
      stats.append(block_stats)

  final_norm = sharding.reshard(params.final_norm.astype(dtypes(config, dtype).final_norm), P())
  return Output(
    hidden_BTD=family(config).norm(x_BTD, final_norm, config.rms_norm_eps),
    cache=None if cache is None else cache.with_blocks(caches),
    routing_lBTk=jnp.concatenate(experts) if experts else None,
    stats=jax.tree.map(lambda *xs: jnp.concatenate(xs), *stats) if stats else None,
  )


def _embed(params: Params, config: ModelConfig, tokens_BT: jax.Array, dtype: Any) -> jax.Array:
  """Embeds tokens, and multiplies the vectors by the family's factor, such as Gemma's √D."""
  x_BTD = head.embed(params, tokens_BT, dtype)
  if (scale := family(config).embed_scale(config)) != 1:
    x_BTD = x_BTD * jnp.asarray(scale, dtype)
  return x_BTD


def _apply_block(
  x_BTD,
  kv,
  block,
  replayed_experts_lBTk,
  span: tuple[int, int],
  policy: str,
  config: ModelConfig,
  compute: ComputeConfig,
  **placement,
):
  """Applies a block: consecutive layers of one kind, with stacked weights.

  Returns hidden states, cache, and chosen experts and router statistics by layer.

  Args:
    kv: cache of the block's layers. None if there is no cache.
    replayed_experts_lBTk: replaces the router's choice. None means no replay.
    span: index of the block's first layer, and number of layers.
    policy: name of the rematerialisation policy. A pass with a cache has no gradient and ignores
      the policy.
    placement: positions, segments, `tree` and `from_start`, as in `layers.attend`.
  """
  (first, depth), block_table = span, family(config).block_table
  kind = config.kind(first)
  layer = functools.partial(_layer, config=config, compute=compute, kind=kind, **placement)
  if policy != "none" and kv is None:
    layer = jax.checkpoint(layer, policy=remat.POLICIES[policy], prevent_cse=False)
  if kv is not None:
    block, layer = _experts_in_stack(block_table(config, kind, 1), block, layer)
  # The scan carries the cache, and so updates it in place. As an input and an output of the scan
  # the cache would exist twice.
  carry, inputs = (x_BTD, kv), (np.arange(depth), block, replayed_experts_lBTk)
  if compute.prefetch and kv is None and depth > 1 and kind.moe:
    declared = block_table(config, kind, 1)
    stack, other_weights = _experts_of(config, kind, block), _without_experts(declared, block)
    layer, gathered, next_experts = _prefetch_experts(layer, stack, compute)
    carry, inputs = (
      (*carry, gathered),
      (np.arange(depth), other_weights, replayed_experts_lBTk, next_experts),
    )
  unroll = sharding.platform() == "cpu" and config.num_layers <= UNROLLED
  (x_BTD, kv, *_), (experts, stats) = _over_layers(
    lambda carry, inputs: layer(*carry, *inputs), carry, inputs, unroll
  )
  return x_BTD, kv, experts, stats


def _experts_in_stack(table, block, layer):
  """Excludes experts' weights from the inputs of the scan.

  Returns the block without these weights, and a wrapper of `layer` for such a block. The wrapper
  passes each weight of the experts to `layer` as an `InStack`, a reference into the block's stack.
  """

  def with_experts(x_BTD, kv, index, other_weights, replayed_experts_BTk):
    whole = jax.tree.map(
      lambda w, x, stack: InStack(stack, index) if w.is_expert else x, table, other_weights, block
    )
    return layer(x_BTD, kv, index, whole, replayed_experts_BTk)

  return _without_experts(table, block), with_experts


def _without_experts(table, block):
  return jax.tree.map(lambda w, x: None if w.is_expert else x, table, block)


def _experts_of(config: ModelConfig, kind: Kind, block) -> ExpertWeights:
  """Returns the experts' weights of a block, stacked over its layers."""
  weights, whole = jax.tree.flatten(family(config).block_table(config, kind, 1))
  pairs = zip(weights, whole.flatten_up_to(block), strict=True)
  experts = (x for w, x in pairs if w.is_expert)
  return ExpertWeights(*experts, activation=family(config).activation)


def _prefetch_experts(layer, stack: ExpertWeights, compute: ComputeConfig):
  """Overlaps each layer with the gathering of the next layer's experts.

  In the backward pass, each layer overlaps with scattering the gradients of the next layer's
  experts. The gathered weights of all layers are saved for the backward pass.

  Returns:
    layer: `layer` with the gathered weights of its experts in the carry of the scan.
    gathered: the gathered weights of layer 0, for the initial carry.
    next_experts: for each layer, the next layer's weights to gather. The last layer gathers the
      weights of layer 0 again, and does not use them.
  """

  def gather(w: ExpertWeights) -> moe.Gathered:
    w = lora.dithered(jax.lax.optimization_barrier(w))
    w = jax.tree.map(lambda x: x.astype(compute.dtype), w)
    return moe.gather(w, compute.experts)

  def prefetching(x_BTD, kv, gathered, index, block, replayed_experts_BTk, next_experts):
    prefetched = gather(next_experts)
    (x_BTD, kv), outputs = layer(x_BTD, kv, index, block, replayed_experts_BTk, gathered)
    return (x_BTD, kv, prefetched), outputs

  first = gather(jax.tree.map(lambda w: w[0], stack))
  return prefetching, first, jax.tree.map(lambda w: jnp.roll(w, -1, axis=0), stack)


def _over_layers(layer, carry, inputs, unroll):
  """Scans over layers, or calls a single layer directly.

  The direct call copies no weights.

  unroll: whether to unroll the whole scan. A loop stacks the residuals of all layers, which takes
    10 to 20 % of an update's time on CPU. JAX has no gradient of partly unrolled loops on a mesh.
  """
  if len(inputs[0]) > 1:
    return jax.lax.scan(layer, carry, inputs, unroll=unroll)
  carry, outputs = layer(carry, jax.tree.map(lambda x: x[0], inputs))
  return carry, jax.tree.map(lambda x: x[None], outputs)


def _layer(
  x_BTD,
  kv,
  index,
  block,
  replayed_experts_BTk,
  gathered: moe.Gathered | None = None,
  *,
  config: ModelConfig,
  compute,
  kind: Kind,
  **placement,
):
  """Computes one layer of the family.

  Returns (hidden states, cache), and (chosen experts, router statistics); the latter two are None
  in a dense layer.

  Args:
    kv: cache of the layer's block. None if there is no cache.
    index: index of the layer in its block.
    block: weights of this layer, without the axis of layers.
    gathered: prefetched weights of the experts. None if `block` has the experts' weights.
  """

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
  # Without the barrier, XLA casts the weights of all layers before the loop and keeps the copies.
  if kv is None:
    block = jax.lax.optimization_barrier(block)
  declared = family(config).block_table(config, kind, 1)
  block = layers.gather(declared, lora.dithered(block), x_BTD.dtype)
  x_BTD, kv, experts_BTk, stats = family(config).layer(x_BTD, block, config, attend, experts)
  return (x_BTD, kv), (experts_BTk, stats)


def logits(params: Params, config: ModelConfig, tokens_BT: jax.Array) -> jax.Array:
  """Computes float32 logits [B, T, V] of every position, causally."""
  hidden_BTD = forward(params, config, jnp.asarray(tokens_BT)).hidden_BTD
  return head_logits(params, config, hidden_BTD)


def example_tokens(config: ModelConfig, batch: int, length: int, seed: int = 0) -> np.ndarray:
  """Returns random token ids, for benchmarks and compile checks."""
  return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length), np.int32)
