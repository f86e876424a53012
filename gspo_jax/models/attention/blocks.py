"""Attention in blocks of queries and keys: an online softmax without a [T, S] array.

Axes: i blocks of queries, R queries of a block, C keys of a block, n = N / K query heads of each
key head.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gspo_jax import sharding
from gspo_jax.settings.mesh import AXES

NEGATIVE = -1e30  # Score of an invisible key; -inf would give NaN for a query without any key.
BLOCK = 512  # Approximate number of queries, and of keys, in a block; on CPU often less.
SHORT = 2048  # `splash` skips no blocks in rows of up to this many keys, since it has few.
PADDING = 2**30  # Segments of padding begin here, in ranges of segments.
RESIDUAL = "attention"  # Name of attention's outputs in rematerialisation policies.


class Scores(NamedTuple):
  """Options of the scores cap · tanh(q kᵀ · scale / cap), the logits of attention's softmax."""

  scale: float  # Usually H^(-1/2).
  window: int = 0  # Number of last positions a query sees, its own included. 0 means all.
  cap: float = 0.0  # Soft bound on a score. 0 means no bound, so scores are q kᵀ · scale.
  sink_N: Any = None  # Sink, a further logit in each head's softmax, float32. None means no sinks.


_einsum_float32 = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def softcap(x: jax.Array, cap: float) -> jax.Array:
  """cap · tanh(x / cap), or x if cap is 0."""
  return cap * jnp.tanh(x / cap) if cap else x


def attend_blockwise(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  order_BT: jax.Array,
  segments: tuple[jax.Array, jax.Array],
  scores: Scores,
  positions: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
  """Attends from query t to keys s <= order_t of its segment, [B, T, N, H].

  In forward and backward pass, only the scores of one block of queries and one block of keys are in
  memory. Blocks before the first and after the last visible key are skipped, and so are blocks of
  other segments. The two passes are algorithms 1 and 4 of FlashAttention, arXiv:2205.14135.

  Args:
    order_BT: int32, index on S of the last key each query may see.
    segments: segment numbers of queries [B, T] and of keys [B, S].
    positions: positions of queries [B, T] and of keys [B, S], to measure `scores.window`. May be
      None if there is no window. If there is a window, padding (segment 0) may lie between the keys
      of a segment, but no other segment may.
  """
  B, T, N, H = q_BTNH.shape
  S, K = k_BSKH.shape[1:3]
  block = block_size(B * N)
  R, C = _even(T, block), _even(S, block)
  # Padded queries see no keys, and padded keys match no query's segment.
  segment_BT, segment_BS = segments
  key = Keys(pad(segment_BS, C, -2))
  order_BS = jnp.arange(key.segment.shape[1], dtype=jnp.int32)[None]
  seen_Bij = overlap(
    segment_ranges(pad(segment_BT, R, -1), pad(order_BT, R, -1), R),
    segment_ranges(key.segment, order_BS, C),
  )
  last_iBR = _blocks(order_BT, R, -1)
  query = Queries(last_iBR, _blocks(segment_BT, R, -1), *_range(seen_Bij, last_iBR, C))
  if scores.window:
    padding_BS = jnp.cumsum(segment_BS == 0, axis=1, dtype=jnp.int32)
    padding_BT = jnp.take_along_axis(padding_BS, order_BT, axis=1)
    first_BT = jnp.maximum(order_BT - (scores.window - 1) - padding_BT, 0)
    first_i = _blocks(first_BT, R, S).min((1, 2)) // C
    query = query._replace(
      first=jnp.maximum(query.first, first_i), position=_blocks(positions[0], R)
    )
    key = key._replace(position=pad(positions[1], C))
  q = _blocks(q_BTNH * scores.scale, R).reshape(-1, B, R, K, N // K, H)
  sink_Kn, scores = scores.sink_N, scores._replace(sink_N=None)
  if sink_Kn is not None:
    sink_Kn = sharding.vary(sink_Kn.reshape(K, N // K), AXES)
  y_iBRKnH = _flash(q, pad(k_BSKH, C), pad(v_BSKH, C), sink_Kn, query, key, C, scores)
  return jnp.moveaxis(y_iBRKnH, 0, 1).reshape(B, -1, N, H)[:, :T].astype(q_BTNH.dtype)


class Queries(NamedTuple):
  """Data of the queries: arrays [i, B, R] of all blocks, or [B, R] of one block."""

  last: jax.Array  # Index of the last key that the query may see; -1 for padding.
  segment: jax.Array
  first: jax.Array  # First block of keys that the queries may see; [i], or [] of one block.
  end: jax.Array  # Number of the last such block, plus one; [i] or [].
  position: jax.Array | None = None  # None if there is no window.


class Keys(NamedTuple):
  """Data of the keys: arrays [B, S] of all keys, or [B, C] of one block."""

  segment: jax.Array
  position: jax.Array | None = None  # None if there is no window.


def block_size(rows: int) -> int:
  """Returns a block size, a power of two.

  On CPU, the size is at least 64 and at most `BLOCK`. Within these bounds, the scores of a block,
  rows · size² numbers, fit in a core's cache of about a megabyte. Attention with blocks of 512
  would take twice as long. On other platforms, the size is `BLOCK`.

  rows: number of rows times heads, B·N.
  """
  if sharding.platform() != "cpu":
    return BLOCK
  largest_size = math.isqrt(max(2**18 // rows, 64**2))
  return min(BLOCK, 1 << (largest_size.bit_length() - 1))


def _even(length: int, block: int) -> int:
  """Returns a block size near `block`, for little padding of `length`."""
  parts = round(length / block)
  return length if parts <= 1 else -(-length // parts // 8) * 8


def gather(x_RX: jax.Array, index_RY: jax.Array) -> jax.Array:
  """Gathers positions of rows by their index in the flattened rows; 0 beyond the end."""
  return x_RX.reshape(-1, *x_RX.shape[2:]).at[index_RY].get(mode="fill", fill_value=0)


def pad(x_BT: jax.Array, size: int, value: int = 0) -> jax.Array:
  """Pads axis 1 to a multiple of `size`."""
  width = [(0, 0), (0, -x_BT.shape[1] % size)] + [(0, 0)] * (x_BT.ndim - 2)
  return jnp.pad(x_BT, width, constant_values=value)


def _blocks(x_BT: jax.Array, size: int, value: int = 0) -> jax.Array:
  """Splits axis 1 into padded blocks, [B, T, ...] -> [i, B, size, ...]."""
  x = pad(x_BT, size, value)
  return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _slice(j, C, arrays):
  """Slices block j of the keys' arrays, [B, C, ...]."""
  return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, j * C, C, axis=1), arrays)


def _scores(q_BRKnH, k_BCKH, query: Queries, key: Keys, j, scores: Scores):
  """Returns masked and unmasked scores for key block j, [B, K, n, R, C]."""
  score = _einsum_float32("BRKnH,BCKH->BKnRC", q_BRKnH, k_BCKH)
  score, C = softcap(score, scores.cap), k_BCKH.shape[1]
  visible = query.last[:, :, None] >= (j * C + jnp.arange(C))[None, None]
  visible &= query.segment[:, :, None] == key.segment[:, None, :]
  if scores.window:
    visible &= query.position[:, :, None] - key.position[:, None, :] < scores.window
  return jnp.where(visible[:, None, None], score, NEGATIVE), score


def segment_ranges(
  segment_BX: jax.Array, position_BX: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the lowest and the highest segment of each block, [B, X / size].

  Each position of padding (segments below 1) counts as a segment of its own.
  """
  segment_BX = jnp.where(segment_BX > 0, segment_BX, PADDING + position_BX)
  segment_BjC = segment_BX.reshape(len(segment_BX), -1, size)
  return segment_BjC.min(-1), segment_BjC.max(-1)


def overlap(query: tuple[jax.Array, jax.Array], key: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Whether ranges of segments overlap, [B, i, j].

  Blocks with a common segment overlap. If the segments of a row ascend, hardly any others do.
  """
  (low_Bi, high_Bi), (low_Bj, high_Bj) = query, key
  return (low_Bi[:, :, None] <= high_Bj[:, None]) & (high_Bi[:, :, None] >= low_Bj[:, None])


def _range(seen_Bij: jax.Array, last_iBR: jax.Array, C: int) -> tuple[jax.Array, jax.Array]:
  """Returns first and end, [i], of the key blocks visible to blocks of queries.

  seen_Bij: whether a block of queries and one of keys may have a segment in common.
  last_iBR: index of the last key that a query may see.
  """
  number_1j = jnp.arange(seen_Bij.shape[2], dtype=jnp.int32)[None]
  seen_ij = seen_Bij.any(0) & (number_1j <= last_iBR.max((1, 2))[:, None] // C)
  first_i = jnp.where(seen_ij, number_1j, number_1j.size).min(1)
  return first_i, jnp.where(seen_ij, number_1j + 1, 0).max(1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _flash(q, k, v, sink_Kn, query, key, C, scores):
  """Computes attention; see `_flash_forward`."""
  return _flash_forward(q, k, v, sink_Kn, query, key, C, scores)[0]


def _flash_forward(q, k, v, sink_Kn, query, key, C, scores):
  """Returns the output, shaped like q, and residuals.

  q: scaled queries [i, B, R, K, n, H].
  k, v: keys and values [B, S, K, H].
  """
  _, B, R, K, n, H = q.shape

  def query_block(block):
    q_BRKnH, query = block

    def body(j, carry):
      largest, total, sum_BKnRH = carry  # Largest score, sum of weights, weighted sum of values.
      k_BCKH, v_BCKH, key_BC = _slice(j, C, (k, v, key))
      score, _ = _scores(q_BRKnH, k_BCKH, query, key_BC, j, scores)
      new = jnp.maximum(largest, score.max(-1))
      weight = jnp.exp(score - new[..., None])
      scale = jnp.exp(largest - new)
      part = _einsum_float32("BKnRC,BCKH->BKnRH", weight.astype(v.dtype), v_BCKH)
      total = total * scale + weight.sum(-1)
      return new, total, sum_BKnRH * scale[..., None] + part

    zeros = jnp.zeros((B, K, n, R), jnp.float32)
    start = jnp.full_like(zeros, NEGATIVE), zeros, jnp.zeros((B, K, n, R, H), jnp.float32)
    if sink_Kn is not None:
      start = zeros + sink_Kn[None, :, :, None], zeros + 1, start[2]
    start = sharding.vary(start, AXES)
    largest, total, sum_BKnRH = jax.lax.fori_loop(query.first, query.end, body, start)
    total = jnp.maximum(total, 1e-30)
    y = jnp.moveaxis(sum_BKnRH / total[..., None], 3, 1)
    return y, largest + jnp.log(total)

  y, lse = jax.lax.map(query_block, (q, query))
  y, lse = (checkpoint_name(x, RESIDUAL) for x in (y.astype(q.dtype), lse))
  return y, (q, k, v, sink_Kn, query, key, y, lse)


def _flash_backward(C, scores, residuals, dy):
  """Returns gradients; recomputes weights by block, from the log-sum-exp of scores."""
  q, k, v, sink_Kn, query, key, y, lse = residuals

  def query_block(carry, block):
    q_BRKnH, query, y_BRKnH, lse_BKnR, dy_BRKnH = block
    delta_BRKn = jnp.sum(dy_BRKnH.astype(jnp.float32) * y_BRKnH, axis=-1)
    delta_BKnR = jnp.moveaxis(delta_BRKn, 1, 3)
    dsink_Kn = None
    if sink_Kn is not None:
      weight_BKnR = jnp.exp(sink_Kn[None, :, :, None] - lse_BKnR)
      dsink_Kn = -jnp.sum(weight_BKnR * delta_BKnR, axis=(0, 3))

    def body(j, carry):
      dq, dk, dv = carry
      k_BCKH, v_BCKH, key_BC = _slice(j, C, (k, v, key))
      score, unmasked = _scores(q_BRKnH, k_BCKH, query, key_BC, j, scores)
      weight = jnp.exp(score - lse_BKnR[..., None])
      dweight = _einsum_float32("BRKnH,BCKH->BKnRC", dy_BRKnH, v_BCKH)
      dscore = weight * (dweight - delta_BKnR[..., None])
      if scores.cap:
        dscore = dscore * (1 - (unmasked / scores.cap) ** 2)  # tanh' = 1 - tanh²
      dscore = dscore.astype(q.dtype)
      dq = dq + _einsum_float32("BKnRC,BCKH->BRKnH", dscore, k_BCKH)
      dk_BCKH = _einsum_float32("BKnRC,BRKnH->BCKH", dscore, q_BRKnH)
      dv_BCKH = _einsum_float32("BKnRC,BRKnH->BCKH", weight.astype(q.dtype), dy_BRKnH)
      old = _slice(j, C, (dk, dv))
      dk, dv = (
        jax.lax.dynamic_update_slice_in_dim(total, before + part, j * C, axis=1)
        for total, before, part in zip((dk, dv), old, (dk_BCKH, dv_BCKH))
      )
      return dq, dk, dv

    dq = sharding.vary(jnp.zeros(q_BRKnH.shape, jnp.float32), AXES)
    dq, dk, dv = jax.lax.fori_loop(query.first, query.end, body, (dq, *carry))
    return (dk, dv), (dq.astype(q.dtype), dsink_Kn)

  zeros = sharding.vary(tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v)), AXES)
  (dk, dv), (dq, dsink_iKn) = jax.lax.scan(query_block, zeros, (q, query, y, lse, dy))
  dsink_Kn = None if dsink_iKn is None else dsink_iKn.sum(0)
  return dq, dk.astype(k.dtype), dv.astype(v.dtype), dsink_Kn, None, None


_flash.defvjp(_flash_forward, _flash_backward)
