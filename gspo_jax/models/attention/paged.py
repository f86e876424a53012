"""One query per row against its pages of a cache, for TPU: a Pallas kernel.

JAX ships two. `ragged_paged_attention` leaves one of the two cores of a v4 or v5p chip idle, reads
whole blocks of pages, does not say how many bytes, and cannot be checked without a TPU: neither of
Pallas' interpreters takes it (JAX 0.10). `paged_attention` has no windows, and its order of pages
is not one in which a token can be written in place.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gspo_jax.models.attention.blocks import NEGATIVE, Scores, softcap

ROWS = 16  # rows of the batch that one core goes through without a pause, at most
TILE = 16  # positions that are written back together: a tile of the narrowest type of cache


def attend(
  q_BNH: jax.Array,
  new_BK2H: jax.Array,
  kv_lpK2SH: jax.Array,
  layer: jax.Array,
  table_Bn: jax.Array,
  position_B: jax.Array,
  scores: Scores,
  interpret: bool,
) -> tuple[jax.Array, jax.Array]:
  """Writes one new key and value per row and attends from there; [B, N, H] and the cache, in place.

  A row's pages up to its position are read once, in a window those that it touches; of the last
  one `TILE` positions are written back. Pages are fetched ahead, across rows.

  Args:
    q_BNH: multiplied with the scale already.
    layer: whose pages they are.
    table_Bn: pages of each row.
    position_B: of the new token; -1: nothing is written, and the result means nothing.
  """
  (B, N, H), (l, p, K, _, S, _) = q_BNH.shape, kv_lpK2SH.shape
  kv_LK2SH = kv_lpK2SH.reshape(l * p, K, 2, S, H)  # a slice of a layer would be a copy of it
  rows = next(r for r in range(min(ROWS, max(1, B // 2)), 0, -1) if B % r == 0)

  def block(*shape):
    return pl.BlockSpec((rows, *shape), lambda i, *_: (i, 0, 0, 0))

  pages = pl.BlockSpec(memory_space=pl.ANY)
  q_BKnH = q_BNH.reshape(B, K, N // K, H)
  # Of rows that are full, or have a full window: how many positions there are, nobody knows here.
  width = table_Bn.shape[1]
  read = B * (min(width, (scores.window - 2) // S + 2) if scores.window else width)
  y_BKnH, kv_LK2SH = pl.pallas_call(
    functools.partial(_kernel, width=width, scores=scores),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(B // rows,),
      in_specs=[block(K, N // K, H), block(K, 2, H), pages],
      out_specs=[block(K, N // K, H), pages],
      scratch_shapes=[
        pltpu.VMEM((2, K, 2, S, H), kv_LK2SH.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA(()),
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct(q_BKnH.shape, q_BNH.dtype),
      jax.ShapeDtypeStruct(kv_LK2SH.shape, kv_LK2SH.dtype),
    ],
    input_output_aliases={4: 1},
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    cost_estimate=pl.CostEstimate(
      flops=4 * read * S * N * H,
      bytes_accessed=(read * S + B * (TILE + 1)) * 2 * K * H * kv_lpK2SH.dtype.itemsize
      + 2 * q_BNH.size * q_BNH.dtype.itemsize,
      transcendentals=read * S * N,
    ),
    interpret=interpret,
    name="local_paged_attention" if scores.window else "paged_attention",  # aot/programs.py
  )(
    position_B,
    (layer * p + table_Bn).reshape(-1),
    q_BKnH,
    new_BK2H.astype(kv_LK2SH.dtype),
    kv_LK2SH,
  )
  return y_BKnH.reshape(B, N, H), kv_LK2SH.reshape(kv_lpK2SH.shape)


def _kernel(position, table, q, new, _, y, kv, held, fetched, written, *, width, scores):
  """Rows of one grid step. `held` has two pages: one that is looked at, and the next one."""
  rows, S = q.shape[0], held.shape[-2]
  row0 = pl.program_id(0) * rows

  def pages_of(row):
    at = jnp.maximum(position[row0 + row], 0)
    begin = jnp.maximum(at - scores.window + 1, 0) // S if scores.window else 0
    return begin, at // S

  def fetch(row, i, side):
    page = table[(row0 + row) * width + i]
    return pltpu.make_async_copy(kv.at[page], held.at[side], fetched.at[side])

  def one_row(row, side):
    at = position[row0 + row]
    begin, last = pages_of(row)
    query = q[row]
    K, n, H = query.shape

    def one_page(i, carry):
      side, largest, total, sums = carry
      goes_on = i < last
      following = jnp.where(goes_on, row, row + 1)
      begin_of_next, _ = pages_of(jnp.minimum(row + 1, rows - 1))

      @pl.when(following < rows)
      def _():
        fetch(following, jnp.where(goes_on, i + 1, begin_of_next), 1 - side).start()

      fetch(row, i, side).wait()
      tile = pl.multiple_of(jnp.maximum(at, 0) % S // TILE * TILE, TILE)
      held_tile = held.at[side, :, :, pl.ds(tile, TILE), :]
      page = table[(row0 + row) * width + i]
      write = pltpu.make_async_copy(held_tile, kv.at[page, :, :, pl.ds(tile, TILE), :], written)
      writes = (i == last) & (at >= 0)

      @pl.when(writes)
      def _():
        place = jax.lax.broadcasted_iota(jnp.int32, (K, 2, TILE, H), 2) + tile
        old = held[side, :, :, pl.ds(tile, TILE), :]
        held[side, :, :, pl.ds(tile, TILE), :] = jnp.where(
          place == at % S, new[row][:, :, None, :], old
        )
        write.start()

      k_KSH, v_KSH = held[side, :, 0].astype(query.dtype), held[side, :, 1].astype(query.dtype)
      score = jax.lax.dot_general(
        query, k_KSH, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32
      )
      slot = jax.lax.broadcasted_iota(jnp.int32, score.shape, 2) + i * S
      visible = slot <= at
      if scores.window:
        visible &= at - slot < scores.window
      score = jnp.where(visible, softcap(score, scores.cap), NEGATIVE)
      now = jnp.maximum(largest, score.max(-1, keepdims=True))
      weight, old = jnp.exp(score - now), jnp.exp(largest - now)
      value = jax.lax.dot_general(
        weight.astype(v_KSH.dtype),
        v_KSH,
        (((2,), (1,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
      )

      @pl.when(writes)
      def _():
        write.wait()  # before the place that it is read from is fetched into

      return 1 - side, now, old * total + weight.sum(-1, keepdims=True), old * sums + value

    nothing = jnp.zeros((K, n, 1), jnp.float32)
    carry = (side, nothing + NEGATIVE, nothing, jnp.zeros((K, n, H), jnp.float32))
    side, _, total, sums = jax.lax.fori_loop(begin, last + 1, one_page, carry)
    y[row] = (sums / total).astype(y.dtype)
    return side

  fetch(0, pages_of(0)[0], 0).start()
  jax.lax.fori_loop(0, rows, one_row, jnp.int32(0))
