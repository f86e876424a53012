"""Transformer language model: pure functions over a pytree of parameters.

One `forward` serves training, scoring, prefill and decoding. `config.family` names the model's
family, such as Qwen3 or Llama: a file of `families` declares its weights and its layer.
"""

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import sharding
from gspo_jax.models import head, layer_scan, layers, remat, weights
from gspo_jax.models.attention import attention
from gspo_jax.models.attention.attention import Paths, Tree
from gspo_jax.models.attention.cache import Cache
from gspo_jax.models.attention.pages import Pages
from gspo_jax.models.experts.moe import RouterStats
from gspo_jax.models.families.lookup import family
from gspo_jax.models.head import head_logits, token_logp  # noqa: F401, for callers of `forward`
from gspo_jax.models.weights import Params
from gspo_jax.settings.model import REFERENCE, ComputeConfig, ModelConfig
from gspo_jax.sharding import BATCH, P, Rules


def table(config: ModelConfig) -> Params:
  """Declares every weight of the model once."""
  w = weights.weight_factory(config)
  block_table = family(config).block_table
  blocks = tuple(block_table(config, kind, len(layers)) for kind, layers in config.stacks())
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
  for kind in {stack.kind for stack in config.stacks() if not stack.kind.linear}:
    scores = layers.scores_of(config, kind.local)
    attention.choose(name, 1, dtype, scores, shared_prompts, config.head_dim)


def shardings(config: ModelConfig, rules: Rules, mesh: jax.sharding.Mesh) -> Params:
  """Returns the NamedShardings of all parameters.

  Raises ValueError, naming the weight, if a mesh axis does not divide a dimension.
  """
  return weights.shardings(table(config), rules, mesh)


def dtypes(config: ModelConfig, compute_dtype: Any) -> Params:
  """Returns the dtype of each parameter in computations.

  Each forward pass casts the parameters, so the trainer may store all parameters in float32 and
  compute in bfloat16. A few, such as the router, are used in float32 for any `compute_dtype`.
  """
  return weights.dtypes(table(config), compute_dtype)


def init(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
  """Initialises parameters. To shard them, jit this with `out_shardings=shardings(...)`."""
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


def decoding_params(params: Params, config: ModelConfig) -> Params:
  """Unstacks the layers for decoding, except on TPU.

  A loop over stacked layers is slower on CPU and GPU: at every decode step it copies each layer's
  weights out of the stack. On GPU it also copies the layer's part of the cache.
  """
  return params if sharding.platform() == "tpu" else unstack(params, config)


def unstack(params: Params, config: ModelConfig) -> Params:
  """Splits the parameters into blocks of one layer each, in the layers' order."""
  blocks = {}
  for block, stack in zip(params.blocks, config.stacks(params.depths), strict=True):
    blocks |= {layer: _layer_of(block, i) for i, layer in enumerate(stack.layers)}
  return params.replace(blocks=tuple(blocks[layer] for layer in sorted(blocks)))


@jax.jit
def _layer_of(block: Any, i: int) -> Any:
  """Slices layer `i` of a block. Blocks of equal shapes share one compiled program."""
  return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1), block)


@flax.struct.dataclass
class Output:
  """Result of `forward`."""

  hidden_BTD: jax.Array  # Hidden states after the final norm; the head's input.
  cache: Cache | Pages | None  # The updated cache. None if `forward` had no cache.
  # int32: chosen experts of MoE layers, -1 on padding. None for dense models.
  routing_lBTk: jax.Array | None
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
    positions: int32 [B, T], for rotary embeddings and the cache's slots. None means 0..T-1. If so,
      a cache must have no earlier tokens.
    segments: int32 [B, T], segment numbers; 0 is padding. Tokens attend to their own segment. None
      means that each row is one segment.
    tree: layout of sequences that share prefixes; needs `positions`. None for plain rows.
    cache: keys and values, or recurrent states, of earlier positions. If T > 1, the new positions
      are consecutive and begin at the same position in all rows. `Pages` require T = 1. None means
      no cache.
    routing: int32 [MoE layers, B, T, k], experts to replay; -1 keeps the router's choice. None
      means no replay.
    compute: dtype and implementations.

  Raises:
    ValueError: the parameters are split over a mesh, and no mesh is set.
  """
  if sharding.without_mesh() and any(jax.typeof(params.embed).sharding.spec.partitions):
    raise ValueError("the parameters are split over a mesh: call this under jax.set_mesh(mesh)")
  B, T = tokens_BT.shape
  from_start = positions is None  # If so, the cache has no earlier tokens.
  if positions is None:
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
  segments = jnp.ones((B, T), jnp.int32) if segments is None else segments
  positions, segments, tokens_BT = (
    sharding.reshard(jnp.asarray(x), P(BATCH)) for x in (positions, segments, tokens_BT)
  )
  dtype = jnp.dtype(compute.dtype)
  x_BTD = head.embed(params, tokens_BT, dtype)
  if (scale := family(config).embed_scale(config)) != 1:  # Such as Gemma's √D.
    x_BTD = x_BTD * jnp.asarray(scale, dtype)
  placement = dict(positions_BT=positions, segments_BT=segments, tree=tree, from_start=from_start)
  x_BTD, caches, (experts_lBTk, stats) = _apply_layers(
    x_BTD, params, config, cache, routing, compute, **placement
  )
  final_norm = sharding.reshard(params.final_norm.astype(dtypes(config, dtype).final_norm), P())
  return Output(
    hidden_BTD=family(config).norm(x_BTD, final_norm, config.rms_norm_eps),
    cache=None if cache is None else cache.with_blocks(caches),
    routing_lBTk=experts_lBTk,
    stats=stats,
  )


def _apply_layers(
  x_BTD: jax.Array,
  params: Params,
  config: ModelConfig,
  cache: Cache | Pages | None,
  routing: jax.Array | None,
  compute: ComputeConfig,
  **placement,
) -> tuple[jax.Array, list, tuple]:
  """Applies all layers; returns hidden states, caches, and (chosen experts, router statistics).

  The arguments are those of `forward` and `layer_scan.apply`.
  """
  B, T, _ = x_BTD.shape
  policy = remat_of(config, compute, B * T)
  caches, routed, moe_layers = [], [], 0
  for scan in config.scans(params.depths):
    first, end = len(caches), len(caches) + len(scan.stacks)
    kvs = [None if cache is None else cache.block(i) for i in range(first, end)]
    count = sum(len(stack.layers) for stack in scan.stacks if stack.kind.moe)
    replayed_experts = None
    if routing is not None and count:
      replayed_experts = jnp.asarray(routing[moe_layers : moe_layers + count])
    blocks, moe_layers = params.blocks[first:end], moe_layers + count
    x_BTD, kvs, outputs = layer_scan.apply(
      x_BTD, kvs, blocks, replayed_experts, scan, policy, config, compute, **placement
    )
    caches += kvs
    routed += [outputs] if count else []
  if not routed:
    return x_BTD, caches, (None, None)
  return x_BTD, caches, jax.tree.map(lambda *xs: jnp.concatenate(xs), *routed)


def logits(params: Params, config: ModelConfig, tokens_BT: jax.Array) -> jax.Array:
  """Computes float32 logits [B, T, V] of every position, causally."""
  hidden_BTD = forward(params, config, jnp.asarray(tokens_BT)).hidden_BTD
  return head_logits(params, config, hidden_BTD)


def example_tokens(config: ModelConfig, batch: int, length: int, seed: int = 0) -> np.ndarray:
  """Returns random token ids, for benchmarks and compile checks."""
  return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length), np.int32)
