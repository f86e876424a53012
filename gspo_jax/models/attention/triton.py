"""Pallas kernel for NVIDIA GPUs: attention of one query per row to a dense cache.

Tiles of positions beyond a row's query, or before its window, are not read. If there are too few
rows and heads to fill the GPU, several programs share the positions of a row, and their partial
results are merged (FlashDecoding).
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from gspo_jax import sharding
from gspo_jax.models.attention.blocks import NEGATIVE, Scores, softcap

TILE = 64  # Maximum positions of a tile, which a program reads at once.
LEAST = 16  # Minimum size of a tile in each dimension.
PROGRAMS = 512  # Number of programs that fills a GPU.


def supports(positions: int, width: int) -> bool:
  """Whether the kernel supports a number of cache positions and a width of heads.

  `positions` must be a multiple of `LEAST`. The width must be a power of two and at least `LEAST`.
  """
  return math.gcd(positions, TILE) >= LEAST and width >= LEAST and width.bit_count() == 1


def attend(
  q_BNH: jax.Array, k_BKHS: jax.Array, v_BKSH: jax.Array, position_B: jax.Array, scores: Scores
) -> jax.Array:
  """Returns attention, [B, N, H], of each row's query to its keys up to `position_B`."""
  (B, N, H), (K, S) = q_BNH.shape, v_BKSH.shape[1:3]
  n, tile = N // K, math.gcd(S, TILE)
  rows = max(LEAST, 1 << (n - 1).bit_length())
  parts = min(max(1, PROGRAMS // (B * K)), S // tile)
  part_tiles = -(-S // tile // parts)
  q_BKnH = (q_BNH * scores.scale).reshape(B, K, n, H)  # The axis n is padded to r rows of a tile.
  q_BKrH = jnp.pad(q_BKnH, ((0, 0), (0, 0), (0, rows - n), (0, 0)))

  def kernel(position_ref, q_ref, k_ref, v_ref, y_ref, lse_ref):
    row, head, part = (pl.program_id(i) for i in range(3))
    position, q = position_ref[row], q_ref[row, head]
    first, end = part * part_tiles, jnp.minimum((part + 1) * part_tiles, position // tile + 1)
    if scores.window:
      first = jnp.maximum(first, (position - scores.window + 1) // tile)

    def add(i, carry):
      highest, total, sums = carry  # Largest score, sum of weights, weighted sum of values.
      slots = pl.ds(i * tile, tile)
      k, v = (x.astype(q.dtype) for x in (k_ref[row, head, :, slots], v_ref[row, head, slots]))
      slot = i * tile + jnp.arange(tile)
      visible = slot <= position
      if scores.window:
        visible &= position - slot < scores.window
      score = jnp.where(visible[None], softcap(dot(q, k), scores.cap), NEGATIVE)
      peak = jnp.maximum(highest, score.max(1))
      weight, old = jnp.exp(score - peak[:, None]), jnp.exp(highest - peak)
      sums = old[:, None] * sums + dot(weight.astype(v.dtype), v)
      return peak, old * total + weight.sum(1), sums

    start = ((rows,), NEGATIVE), ((rows,), 0), ((rows, H), 0)
    start = tuple(jnp.full(shape, value, jnp.float32) for shape, value in start)
    highest, total, sums = jax.lax.fori_loop(first, end, add, start)
    total = jnp.maximum(total, 1e-30)  # A part may have no visible key.
    y_ref[row, head, part] = (sums / total[:, None]).astype(y_ref.dtype)
    lse_ref[row, head, part] = highest + jnp.log(total)

  result = q_BNH.dtype if parts == 1 else jnp.float32
  call = pl.pallas_call(
    kernel,
    out_shape=(
      jax.ShapeDtypeStruct((B, K, parts, rows, H), result),
      jax.ShapeDtypeStruct((B, K, parts, rows), jnp.float32),
    ),
    grid=(B, K, parts),
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
    interpret=sharding.platform() != "gpu",
    name="cache_attention",
  )
  with jax.named_scope(f"flops={4 * q_BNH.size * S}"):  # For full rows; `aot` reads this name.
    y_BKPrH, lse_BKPr = call(position_B, q_BKrH, k_BKHS, v_BKSH)
  share_BKPr1 = jax.nn.softmax(lse_BKPr, axis=2)[..., None]
  y_BKrH = y_BKPrH[:, :, 0] if parts == 1 else (y_BKPrH * share_BKPr1).sum(2)
  y_BKnH = y_BKrH[:, :, :n]
  if scores.sink_N is not None:
    y_BKnH = _with_sinks(y_BKnH, lse_BKPr[..., :n], scores.sink_N)
  return y_BKnH.reshape(B, N, H).astype(q_BNH.dtype)


def _with_sinks(y_BKnH: jax.Array, lse_BKPn: jax.Array, sink_N: jax.Array) -> jax.Array:
  """Adds each head's sink to the softmax's denominator.

  lse_BKPn: log-sum-exp of the scores, by part.
  """
  lse_BKn = jax.nn.logsumexp(lse_BKPn, axis=2)
  return y_BKnH * jax.nn.sigmoid(lse_BKn - sink_N.reshape(1, *lse_BKn.shape[1:]))[..., None]


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
  """Multiplies matrices into float32, without rounding float32 to TF32."""
  exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  return jnp.dot(x, y, preferred_element_type=jnp.float32, precision=exact)
