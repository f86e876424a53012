"""Parts of a Transformer layer shared by the families of models."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import sharding
from gspo_jax.models.attention import attention, pages, positions
from gspo_jax.models.attention import cache as kv_cache
from gspo_jax.models.attention.attention import Paths, Scores, Tree
from gspo_jax.models.int8 import Int8, is_int8, project
from gspo_jax.models.weights import Attention, Dense, InStack, Weight
from gspo_jax.settings.model import ComputeConfig, Kind, ModelConfig
from gspo_jax.sharding import BATCH, P

Norm = Callable[[jax.Array, jax.Array, float], jax.Array]  # (x, scale, eps) -> like x


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """x / sqrt(mean x² + eps) · scale, with statistics in float32."""
  normalised, scale = _normalised(x, eps).astype(x.dtype), _last_axis(scale.astype(x.dtype), x)
  return with_each_token(jnp.multiply, normalised, scale)


def rms_norm_around_one(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """x / sqrt(mean x² + eps) · (1 + scale), all in float32."""

  def combine(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * (1 + scale)

  scale = _last_axis(scale.astype(jnp.float32), x)
  return _with_vector(combine, _normalised(x, eps), scale).astype(x.dtype)


def _normalised(x: jax.Array, eps: float) -> jax.Array:
  x_float32 = x.astype(jnp.float32)
  return x_float32 * jax.lax.rsqrt(jnp.mean(x_float32 * x_float32, axis=-1, keepdims=True) + eps)


def _last_axis(scale: jax.Array, x: jax.Array) -> jax.Array:
  return scale.reshape((1,) * (x.ndim - 1) + (-1,))


def with_each_token(combine: Callable, x: jax.Array, weight: jax.Array) -> jax.Array:
  """Combines activations with a weight common to all tokens: sum or product.

  The result is the same in float32, rounded to the common dtype, as in that dtype. But the weight's
  gradient, a sum over all tokens, then adds up in float32 and not in bfloat16.
  """
  x_float32 = _with_vector(combine, x.astype(jnp.float32), weight.astype(jnp.float32))
  return x_float32.astype(x.dtype)


def _with_vector(combine: Callable, x: jax.Array, weight: jax.Array) -> jax.Array:
  """combine(x, weight), elementwise, for activations and a vector common to all rows."""
  if not sharding.is_per_replica(weight):
    return combine(x, weight)
  split = sharding.spec_of(x)
  return sharding.shard_map(combine, (split, sharding.spec_of(weight)), split)(x, weight)


def add(x_BTD: jax.Array, y_BTD: jax.Array, config: ModelConfig) -> jax.Array:
  """x + m y, for the residual multiplier m."""
  m = config.multipliers.residual
  return x_BTD + (y_BTD if m == 1 else y_BTD * jnp.asarray(m, y_BTD.dtype))


def feed_forward(x_BTD: jax.Array, w: Dense, activation: Callable) -> jax.Array:
  """(activation(x gate) · (x up)) down."""
  split = P(BATCH, None, "tensor")
  a_BTF = project("BTD,DF->BTF", x_BTD, w.gate, split)
  u_BTF = project("BTD,DF->BTF", x_BTD, w.up, split)
  return project("BTF,FD->BTD", activation(a_BTF) * u_BTF, w.down, P(BATCH))


def gather(table: Any, block: Any, dtype: Any) -> Any:
  """Casts and gathers a layer's weights over D before use (FSDP).

  They stay split over heads and F. The backward pass reduces and scatters their gradients. Weights
  used in float32 are small, and replicated. Experts' weights, if in the block, are gathered later,
  at their products. The sampler's matrices in eight bits are whole over D.
  """

  def read(weight: Weight, w: Any) -> Any:
    if w is None or isinstance(w, InStack | Int8):
      return w
    w = w.astype(weight.read_as(dtype))
    if weight.is_expert:
      return w
    gathered = P() if weight.wide else sharding.spec(weight.letters[1:], sharding.ROLLOUT)
    # Norms and biases are only resharded, as are routers: their small gradients are summed at once.
    gathers = weight.fan_in and (not weight.wide or sharding.is_per_replica(w))
    return (sharding.gather if gathers else sharding.reshard)(w, gathered)

  return jax.tree.map(read, table, block)


def attend(
  x_BTD: jax.Array,
  w: Attention,
  norm: Norm,
  kv: Any,
  layer: Any,
  *,
  config: ModelConfig,
  compute: ComputeConfig,
  kind: Kind,
  positions_BT: jax.Array,
  segments_BT: jax.Array,
  tree: Tree | Paths | None,
  from_start: bool,
) -> tuple[jax.Array, Any]:
  """Grouped-query attention with projections; [B, T, D] and the new cache.

  Args:
    kv: cache of the layer's block, from `cache.block(i)`. None without a cache.
    layer: index of the layer in the block, and in `kv`.
    kind: whether the layer is local, has experts, and has rotary positions.
    from_start: whether the cache has no earlier tokens.
  """
  heads = P(BATCH, None, "tensor", None)
  q = project("BTD,DNH->BTNH", x_BTD, w.q, heads)
  k = project("BTD,DKH->BTKH", x_BTD, w.k, heads)
  v = project("BTD,DKH->BTKH", x_BTD, w.v, heads)
  if w.q_bias is not None:
    biases = (w.q_bias, w.k_bias, w.v_bias)
    q, k, v = (with_each_token(jnp.add, x, b[None, None]) for x, b in zip((q, k, v), biases))
  if w.q_norm is not None:
    q = norm_heads(norm, q, w.q_norm, config.rms_norm_eps)
    k = norm_heads(norm, k, w.k_norm, config.rms_norm_eps)
  if bound := config.scores.clip_qkv:
    q, k, v = (jnp.clip(x, -bound, bound) for x in (q, k, v))
  if kind.rotary:
    rotation = positions.rotation_of(config, kind.local)
    q, k = (positions.rotate(x, positions_BT, rotation) for x in (q, k))
  q = positions.scale_queries(q, positions_BT, config.rope)
  tree, paths = (None, tree) if isinstance(tree, Paths) else (tree, None)
  run = _on_each_device(compute, scores_of(config, kind.local), kv, tree, from_start)
  sink_N = getattr(w, "sink", None)
  sink_N = None if sink_N is None else sink_N.astype(jnp.float32)
  y_BTNH, kv = run(q, k, v, sink_N, kv, layer, positions_BT, segments_BT, paths)
  # Heads as one axis: otherwise XLA may transpose the weight at every step.
  B, T, N, H = y_BTNH.shape
  y_BTX = sharding.reshape(y_BTNH, (B, T, N * H), P(BATCH, None, "tensor"))
  o_XD = _merge_heads(w.o)
  y_BTD = project("BTX,XD->BTD", y_BTX, o_XD, P(BATCH))
  if (o_bias := getattr(w, "o_bias", None)) is not None:
    y_BTD = with_each_token(jnp.add, y_BTD, o_bias[None, None])
  return y_BTD, kv


def _merge_heads(o_NHD: jax.Array | Int8) -> jax.Array | Int8:
  """Merges the input axes of the output projection."""
  if is_int8(o_NHD):
    return o_NHD.replace(values=_merge_heads(o_NHD.values), inputs=(-2,))
  N, H, D = o_NHD.shape
  return sharding.reshape(o_NHD, (N * H, D), P("tensor"))


def norm_heads(norm: Norm, x_BTNH: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """Normalises each head, or with a scale [N, H] all heads together."""
  if scale.ndim == 1:
    return norm(x_BTNH, scale, eps)
  B, T, N, H = x_BTNH.shape
  x_BTX = sharding.reshape(x_BTNH, (B, T, N * H), P(BATCH, None, "tensor"))
  scale_X = sharding.reshape(scale, (N * H,), P("tensor"))
  y_BTX = norm(x_BTX, scale_X, eps)
  return sharding.reshape(y_BTX, (B, T, N, H), P(BATCH, None, "tensor", None))


def scores_of(config: ModelConfig, local: bool) -> Scores:
  """Returns the options of a global or a local layer's scores."""
  return Scores(
    scale=config.scores.scale or (config.query_pre_attn_scalar or config.head_dim) ** -0.5,
    window=config.sliding_window if local else 0,
    cap=config.attn_logit_softcapping,
    # A place for the layer's weight.
    sink_N=np.zeros(config.num_heads, np.float32) if config.scores.sinks else None,
  )


def _on_each_device(compute: ComputeConfig, declared: Scores, kv, tree, from_start) -> Callable:
  """Returns attention per device, a function of new queries, keys and values.

  With a cache, new keys and values are written first. Prefilling from position 0 does not read it.
  """

  def attend_and_write(q, k, v, sink_N, kv, layer, positions_BT, segments_BT, paths):
    scores = declared._replace(sink_N=sink_N)
    length = q.shape[1] if paths is None else paths.read_RF.shape[1]
    if tree is not None:
      length += tree.trunk - tree.trunk // tree.branches
    if isinstance(kv, pages.Block):
      name = pages.choose(kv, compute.attention)
      return pages.attend(q, k, v, kv, layer, positions_BT, scores, name)
    gaps, width = tree is not None, q.shape[3]
    name = attention.choose(compute.attention, length, q.dtype, scores, gaps, width)
    if paths is not None:
      return attention.attend_paths(q, k, v, paths, name, scores), kv
    if kv is not None:
      kv, k, v = kv_cache.write(kv, layer, k, v, positions_BT)
    if tree is not None:
      return attention.attend_tree(q, k, v, segments_BT, tree, name, scores, positions_BT), kv
    if kv is None or from_start:
      return attention.attend_self(q, k, v, segments_BT, name, scores), kv
    k_BKHS, v_BKSH = kv_cache.read(kv, layer, q.dtype)
    form = compute.attention
    return attention.attend_cache(q, k_BKHS, v_BKSH, positions_BT, scores, form), kv

  heads = P(BATCH, None, "tensor", None)
  # A table of pages has two dimensions.
  kv_specs = jax.tree.map(lambda x: kv_cache.spec(x) if x.ndim > 2 else P(BATCH), kv)
  # Pallas kernels do not support the check.
  kernels = dict(tpu=True, gpu=kv is not None).get(sharding.platform(), False)
  return sharding.shard_map(
    attend_and_write,
    in_specs=(heads, heads, heads, P("tensor"), kv_specs, P(), P(BATCH), P(BATCH), P(BATCH)),
    out_specs=(heads, kv_specs),
    check=not kernels and compute.attention != "splash",
  )
