"""Parts of a Transformer layer that families of models share: norms, attention, feed-forward."""

import math
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
from gspo_jax.models.weights import (
  Attention,
  Dense,
  ExtendedMoe,
  GatedAttention,
  InStack,
  Weight,
)
from gspo_jax.settings.model import ComputeConfig, Kind, ModelConfig
from gspo_jax.sharding import BATCH, P

Norm = Callable[[jax.Array, jax.Array, float], jax.Array]  # (x, scale, eps) -> like x


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """x / sqrt(mean x² + eps) · scale, with the mean in float32.

  The normalised x is rounded to x's dtype before it is scaled, as in most models of Hugging Face.
  """
  normalised, scale = _normalised(x, eps).astype(x.dtype), _last_axis(scale.astype(x.dtype), x)
  return with_each_token(jnp.multiply, normalised, scale)


def rms_norm_rounded_once(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """x / sqrt(mean x² + eps) · scale, computed in float32 and rounded once."""
  scale = _last_axis(scale.astype(x.dtype), x).astype(jnp.float32)
  return _with_vector(jnp.multiply, _normalised(x, eps), scale).astype(x.dtype)


def rms_norm_around_one(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """x / sqrt(mean x² + eps) · (1 + scale).

  The whole formula is computed in float32 and rounded once, as in Gemma.
  """

  def combine(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * (1 + scale)

  scale = _last_axis(scale.astype(jnp.float32), x)
  return _with_vector(combine, _normalised(x, eps), scale).astype(x.dtype)


def _normalised(x: jax.Array, eps: float) -> jax.Array:
  """x / sqrt(mean x² + eps) over the last axis, in float32."""
  x_float32 = x.astype(jnp.float32)
  return x_float32 * jax.lax.rsqrt(jnp.mean(x_float32 * x_float32, axis=-1, keepdims=True) + eps)


def _last_axis(scale: jax.Array, x: jax.Array) -> jax.Array:
  """Reshapes a vector to the rank of x: [X] -> [1, ..., 1, X]."""
  before = x.ndim - 1
  split = P(*[None] * before, *sharding.spec_of(scale))
  return sharding.reshape(scale, (1,) * before + scale.shape, split)


def with_each_token(combine: Callable, x: jax.Array, weight: jax.Array) -> jax.Array:
  """Computes combine(x, weight), a sum or product; sums the weight's gradient in float32.

  The weight is common to all tokens, so its gradient is a sum over all tokens. In bfloat16, the
  rounding errors of such a long sum would be large. The result is also computed in float32, and
  then rounded to x's dtype. The operation in x's dtype would have the same result.
  """
  x_float32 = _with_vector(combine, x.astype(jnp.float32), weight.astype(jnp.float32))
  return x_float32.astype(x.dtype)


def _with_vector(combine: Callable, x: jax.Array, weight: jax.Array) -> jax.Array:
  """Computes combine(x, weight) elementwise; all tokens of x share the weight.

  A weight with a separate gradient per replica (`learner.replicas`) is combined in `shard_map`.
  """
  if not sharding.is_per_replica(weight):
    return combine(x, weight)
  split = sharding.spec_of(x)
  return sharding.shard_map(combine, (split, sharding.spec_of(weight)), split)(x, weight)


def add(x_BTD: jax.Array, y_BTD: jax.Array, config: ModelConfig) -> jax.Array:
  """Adds a residual: x + m y for the output y of attention or feed-forward layer.

  m is `multipliers.residual`, 1 except in Granite.
  """
  m = config.multipliers.residual
  return x_BTD + (y_BTD if m == 1 else y_BTD * jnp.asarray(m, y_BTD.dtype))


def feed_forward(x_BTD: jax.Array, w: Dense, activation: Callable) -> jax.Array:
  """(activation(x gate) · (x up)) down, [B, T, D]."""
  split = P(BATCH, None, "tensor")
  a_BTF = project("BTD,DF->BTF", x_BTD, w.gate, split)
  u_BTF = project("BTD,DF->BTF", x_BTD, w.up, split)
  return project("BTF,FD->BTD", activation(a_BTF) * u_BTF, w.down, P(BATCH))


def shared_experts(x_BTD: jax.Array, w: ExtendedMoe) -> jax.Array:
  """Returns the output of the shared experts, times a sigmoid gate if there is one."""
  y_BTD = feed_forward(x_BTD, w.shared, jax.nn.silu)
  if w.shared_gate is None:
    return y_BTD
  return jax.nn.sigmoid(project("BTD,DO->BTO", x_BTD, w.shared_gate, P(BATCH))) * y_BTD


def gather(table: Any, block: Any, dtype: Any) -> Any:
  """Casts a layer's weights, and gathers them over D (FSDP).

  Matrices stay split over heads and F ("tensor"); the small `wide` weights become whole on every
  device. The backward pass sums the gradients and scatters them over D again. Experts' weights are
  only cast: `moe` gathers them. `InStack` and `Int8` weights are unchanged, since the sampler does
  not split D.

  Args:
    table: the layer's table of weights.
    block: the layer's weights, without the axis l.
    dtype: compute dtype.
  """

  def prepare(weight: Weight, w: Any) -> Any:
    if w is None or isinstance(w, InStack | Int8):
      return w
    w = w.astype(weight.read_as(dtype))
    if weight.is_expert:
      return w
    gathered = P() if weight.wide else sharding.spec(weight.letters[1:], sharding.ROLLOUT)
    # Gradients of norms, biases and routers are small: a plain reshard sums them in one step.
    split = weight.fan_in and "D" in weight.letters
    gathers = split and (not weight.wide or sharding.is_per_replica(w))
    return (sharding.gather if gathers else sharding.reshard)(w, gathered)

  return jax.tree.map(prepare, table, block)


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
  """Computes grouped-query attention with its projections.

  Returns [B, T, D], and the updated cache (None if there is no cache).

  Args:
    x_BTD: the layer's input, normalised.
    norm: norm of queries and keys, in models with `qk_norm`.
    kv: cache of the layer's block, from `cache.block(i)`. None if there is no cache.
    layer: index of the layer in its block, and in `kv`.
    kind: kind of the layer. Only `local` and `rotary` are read.
    positions_BT: positions for rotary embeddings, and the slots of the cache to write.
    segments_BT: segment numbers, 0 for padding; unused if queries attend to a cache.
    tree: layout of sequences that share prefixes. None for plain rows.
    from_start: whether the cache has no earlier tokens. If so, the cache is written and not read.
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
  if isinstance(w, GatedAttention):
    y_BTNH = y_BTNH * jax.nn.sigmoid(project("BTD,DNH->BTNH", x_BTD, w.q_gate, heads))
  y_BTD = project_heads(y_BTNH, w.o)
  if (o_bias := getattr(w, "o_bias", None)) is not None:
    y_BTD = with_each_token(jnp.add, y_BTD, o_bias[None, None])
  return y_BTD, kv


def project_heads(y_BTNH: jax.Array, o_NHD: jax.Array | Int8) -> jax.Array:
  """Projects outputs of all heads to [B, T, D].

  In linear attention, the outputs have the axes K, R, J in place of N, H.
  """
  # The axes of heads are merged for the product. Otherwise XLA may transpose the weight at every
  # step.
  B, T, *heads = y_BTNH.shape
  y_BTX = sharding.reshape(y_BTNH, (B, T, math.prod(heads)), P(BATCH, None, "tensor"))
  return project("BTX,XD->BTD", y_BTX, _merge_heads(o_NHD), P(BATCH))


def _merge_heads(o_NHD: jax.Array | Int8) -> jax.Array | Int8:
  """Merges the input axes of the output projection."""
  if is_int8(o_NHD):
    return o_NHD.replace(values=_merge_heads(o_NHD.values), inputs=(-2,))
  *heads, D = o_NHD.shape
  return sharding.reshape(o_NHD, (math.prod(heads), D), P("tensor"))


def norm_heads(norm: Norm, x_BTNH: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """Normalises queries or keys.

  If the scale is [H], each head is normalised separately. If it is [N, H], all heads of a token are
  normalised together.
  """
  if scale.ndim == 1:
    return norm(x_BTNH, scale, eps)
  B, T, N, H = x_BTNH.shape
  x_BTX = sharding.reshape(x_BTNH, (B, T, N * H), P(BATCH, None, "tensor"))
  scale_X = sharding.reshape(scale, (N * H,), P("tensor"))
  y_BTX = norm(x_BTX, scale_X, eps)
  return sharding.reshape(y_BTX, (B, T, N, H), P(BATCH, None, "tensor", None))


def scores_of(config: ModelConfig, local: bool) -> Scores:
  """Returns the options of the scores in global or in local (windowed) layers."""
  return Scores(
    scale=config.scores.scale or (config.query_pre_attn_scalar or config.head_dim) ** -0.5,
    window=config.sliding_window if local else 0,
    cap=config.attn_logit_softcapping,
    # Zeros mark a model with sinks; `_on_each_device` replaces them by the layer's weight.
    sink_N=np.zeros(config.num_heads, np.float32) if config.scores.sinks else None,
  )


def _on_each_device(compute: ComputeConfig, declared: Scores, kv, tree, from_start) -> Callable:
  """Returns a layer's attention as a function inside `shard_map`.

  The function takes queries, keys and values of the new tokens. If there is a cache, the function
  writes keys and values to it. If the cache has earlier tokens, queries attend to the cache, else
  to the new tokens.

  declared: options of the scores, without the layer's sinks.
  """

  def attend_and_write(q, k, v, sink_N, kv, layer, positions_BT, segments_BT, paths):
    scores = declared._replace(sink_N=sink_N)
    # The formulation depends on the length in which queries attend: that of a row, of a row of
    # `paths`, or of a trunk and one branch together.
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
    name = compute.attention
    return attention.attend_cache(q, k_BKHS, v_BKSH, positions_BT, scores, name), kv

  heads = P(BATCH, None, "tensor", None)
  # The table of pages has two dimensions, other arrays of a cache have more.
  kv_specs = jax.tree.map(lambda x: kv_cache.spec(x) if x.ndim > 2 else P(BATCH), kv)
  # Pallas kernels do not support the check of `sharding.shard_map`. They may run in any pass on
  # TPUs, and in passes with a cache on GPUs.
  kernels = dict(tpu=True, gpu=kv is not None).get(sharding.platform(), False)
  return sharding.shard_map(
    attend_and_write,
    in_specs=(heads, heads, heads, P("tensor"), kv_specs, P(), P(BATCH), P(BATCH), P(BATCH)),
    out_specs=(heads, kv_specs),
    check=not kernels and compute.attention != "splash",
  )
