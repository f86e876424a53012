"""One query per row against its pages of a cache, for TPU: a Pallas kernel.

JAX has two. `ragged_paged_attention` leaves one of the two cores of a v4 or v5p chip idle, reads
whole blocks of pages, has no cost estimate, and runs in neither of Pallas' interpreters (JAX 0.10),
so tests would need a TPU. `paged_attention` has no windows, and its layout of pages does not allow
writing a token in place.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gspo_jax.models.attention.blocks import NEGATIVE, Scores, softcap

ROWS = 16  # Maximum batch rows per grid step of one core.
LANES = 128  # Of a hardware tile.
TILE = 16  # Positions written back together: a hardware tile of the narrowest cache dtype.


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
  """Writes one new key and value per row and attends; [B, N, H] and cache.

  The cache is updated in place. A row's pages up to its position, or in its window, are read once.
  `TILE` positions of the last page are written back. Pages are prefetched, also the next row's.

  Args:
    q_BNH: queries, already scaled.
    layer: index of the layer in the cache.
    table_Bn: pages of each row.
    position_B: position of the new token; -1 writes nothing and returns an undefined result.
  """
  (B, N, H), (l, p, K, _, S, _) = q_BNH.shape, kv_lpK2SH.shape
  kv_LK2SH = kv_lpK2SH.reshape(l * p, K, 2, S, H)  # A slice would copy the layer.
  rows = next(r for r in range(min(ROWS, max(1, B // 2)), 0, -1) if B % r == 0)

  def block(*shape):
    return pl.BlockSpec((rows, *shape), lambda i, *_: (i, 0, 0, 0))

  pages, width = pl.BlockSpec(memory_space=pl.ANY), table_Bn.shape[1]
  q_BKnH, index_P = q_BNH.reshape(B, K, N // K, H), (layer * p + table_Bn).reshape(-1)
  sinks, sink_specs = _sinks(scores.sink_N, K)
  scores = scores._replace(sink_N=None)
  y_BKnH, kv_LK2SH = pl.pallas_call(
    functools.partial(_kernel, width=width, scores=scores),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(B // rows,),
      in_specs=[block(K, N // K, H), block(K, 2, H), pages, *sink_specs],
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
    cost_estimate=_cost(q_BNH, kv_lpK2SH, width, scores),
    interpret=interpret,
    name="local_paged_attention" if scores.window else "paged_attention",  # aot/programs.py
  )(position_B, index_P, q_BKnH, new_BK2H.astype(kv_LK2SH.dtype), kv_LK2SH, *sinks)
  return y_BKnH.reshape(B, N, H), kv_LK2SH.reshape(kv_lpK2SH.shape)


def _sinks(sink_N: jax.Array | None, K: int) -> tuple[list[jax.Array], list[pl.BlockSpec]]:
  """Returns the sinks as an input of whole tiles, and its layout; none without sinks."""
  if sink_N is None:
    return [], []
  shape = (K, sink_N.size // K, LANES)
  sink_KnX = jnp.broadcast_to(sink_N.reshape(*shape[:2], 1), shape)
  return [sink_KnX], [pl.BlockSpec(shape, lambda i, *_: (0, 0, 0))]


def _cost(q_BNH: jax.Array, kv_lpK2SH: jax.Array, width: int, scores: Scores) -> pl.CostEstimate:
  """Estimates the cost for full rows or windows.

  The number of positions is unknown while tracing.
  """
  (B, N, H), (_, _, K, _, S, _) = q_BNH.shape, kv_lpK2SH.shape
  pages = B * (min(width, (scores.window - 2) // S + 2) if scores.window else width)
  return pl.CostEstimate(
    flops=4 * pages * S * N * H,
    bytes_accessed=(pages * S + B * (TILE + 1)) * 2 * K * H * kv_lpK2SH.dtype.itemsize
    + 2 * q_BNH.size * q_BNH.dtype.itemsize,
    transcendentals=pages * S * N,
  )


def _kernel(position, table, q, new, _, *references, width, scores):
  """Attends from rows of a grid step; `buffer` has the current and the next page."""
  *sinks, y, kv, buffer, fetched, written = references
  rows, S = q.shape[0], buffer.shape[-2]
  row0 = pl.program_id(0) * rows

  def pages_of(row):
    last = jnp.maximum(position[row0 + row], 0)
    begin = jnp.maximum(last - scores.window + 1, 0) // S if scores.window else 0
    return begin, last // S

  def fetch(row, i, side):
    page = table[(row0 + row) * width + i]
    return pltpu.make_async_copy(kv.at[page], buffer.at[side], fetched.at[side])

  def attend_row(row, side):
    newest = position[row0 + row]
    begin, last = pages_of(row)
    K, n, H = (query := q[row]).shape

    def attend_page(i, carry):
      side, largest, total, sums = carry
      has_more = i < last
      following = jnp.where(has_more, row, row + 1)
      next_begin, _ = pages_of(jnp.minimum(row + 1, rows - 1))

      @pl.when(following < rows)
      def _():
        fetch(following, jnp.where(has_more, i + 1, next_begin), 1 - side).start()

      fetch(row, i, side).wait()
      tile = pl.multiple_of(jnp.maximum(newest, 0) % S // TILE * TILE, TILE)
      buffer_tile = buffer.at[side, :, :, pl.ds(tile, TILE), :]
      page = table[(row0 + row) * width + i]
      write = pltpu.make_async_copy(buffer_tile, kv.at[page, :, :, pl.ds(tile, TILE), :], written)
      writes = (i == last) & (newest >= 0)

      @pl.when(writes)
      def _():
        _insert(buffer, side, tile, new, row, newest)
        write.start()

      k_KSH, v_KSH = buffer[side, :, 0].astype(query.dtype), buffer[side, :, 1].astype(query.dtype)
      highest, old, weight, value = _attend_keys(query, k_KSH, v_KSH, i, newest, scores, largest)

      @pl.when(writes)
      def _():
        write.wait()  # The next fetch overwrites its source.

      return 1 - side, highest, old * total + weight.sum(-1, keepdims=True), old * sums + value

    zeros = jnp.zeros((K, n, 1), jnp.float32)
    start = (zeros + sinks[0][:, :, :1], zeros + 1) if sinks else (zeros + NEGATIVE, zeros)
    carry = (side, *start, jnp.zeros((K, n, H), jnp.float32))
    side, _, total, sums = jax.lax.fori_loop(begin, last + 1, attend_page, carry)
    y[row] = (sums / total).astype(y.dtype)
    return side

  fetch(0, pages_of(0)[0], 0).start()
  jax.lax.fori_loop(0, rows, attend_row, jnp.int32(0))


def _insert(buffer, side, tile, new, row, position):
  """Inserts a row's new key and value at `position`, in a tile of the buffer."""
  _, K, _, S, H = buffer.shape
  slot = jax.lax.broadcasted_iota(jnp.int32, (K, 2, TILE, H), 2) + tile
  old = buffer[side, :, :, pl.ds(tile, TILE), :]
  buffer[side, :, :, pl.ds(tile, TILE), :] = jnp.where(
    slot == position % S, new[row][:, :, None, :], old
  )


def _attend_keys(q_KnH, k_KSH, v_KSH, page, position, scores: Scores, largest):
  """Computes an online softmax's step for one page of a row.

  Returns the largest score so far, the factor for earlier sums, the page's unnormalised weights,
  and their sum of values.

  Args:
    page: index of the page in the row.
    largest: largest score of earlier pages.
  """
  score = jax.lax.dot_general(
    q_KnH, k_KSH, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32
  )
  slot = jax.lax.broadcasted_iota(jnp.int32, score.shape, 2) + page * k_KSH.shape[1]
  visible = slot <= position
  if scores.window:
    visible &= position - slot < scores.window
  score = jnp.where(visible, softcap(score, scores.cap), NEGATIVE)
  highest = jnp.maximum(largest, score.max(-1, keepdims=True))
  weight, old = jnp.exp(score - highest), jnp.exp(largest - highest)
  value = jax.lax.dot_general(
    weight.astype(v_KSH.dtype),
    v_KSH,
    (((2,), (1,)), ((0,), (0,))),
    preferred_element_type=jnp.float32,
  )
  return highest, old, weight, value
