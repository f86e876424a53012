"""Pallas kernel for TPU: attention of one query per row to the row's pages of a cache.

JAX has two such kernels, which do not suffice. `ragged_paged_attention` leaves one of the two cores
of a v4 or v5p chip idle, reads whole blocks of pages, has no cost estimate, and runs in neither of
Pallas' interpreters (JAX 0.10), so tests would need a TPU. `paged_attention` has no windows, and
its layout of pages does not allow writing a token in place.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gspo_jax.models.attention.blocks import NEGATIVE, Scores, softcap
from gspo_jax.models.attention.cache import tile

ROWS = 16  # Maximum batch rows per grid step.
LANES = 128  # Lanes of a hardware tile.


def attend(
  q_BNH: jax.Array,
  new: Sequence[jax.Array],
  stored: Sequence[jax.Array],
  layer: jax.Array,
  table_Bn: jax.Array,
  position_B: jax.Array,
  scores: Scores,
  interpret: bool,
) -> tuple[jax.Array, list[jax.Array]]:
  """Writes one new key and value per row, and attends.

  Returns outputs [B, N, H], and the cache, updated in place. The pages up to a row's position are
  copied to the vector memory once. In layers with a window, only the pages in the window are
  copied. While a page is read, the next page of the grid step is copied. Of the last page, only
  the hardware tile with the new position is written back; for int8, the page's scales are written
  back, too. Keys and values in int8 are not multiplied by their scales. Instead, the scales
  multiply scores and attention weights.

  Args:
    q_BNH: queries, already multiplied by `scores.scale`.
    new: keys and values [B, K, 2, H], key first; for int8, also their scales [B, K, 2].
    stored: pages [l, p, K, 2, S, H] of S positions; for int8, also scales [l, p, K, 2, S].
    layer: index of the layer in `stored`.
    table_Bn: page numbers of each row, in order of positions.
    position_B: position of the new token; -1 writes nothing and returns an undefined result.
    interpret: whether to run in Pallas' interpreter, without a TPU.
  """
  (B, N, H), (l, p, K, *_) = q_BNH.shape, stored[0].shape
  # The axes l and p are merged, since slicing the pages of one layer would copy them.
  pages = [x.reshape(l * p, *x.shape[2:]) for x in stored]
  q_BKnH, width = q_BNH.reshape(B, K, N // K, H), table_Bn.shape[1]
  sinks, sink_specs = _sinks(scores.sink_N, K)
  scores = scores._replace(sink_N=None)
  y_BKnH, pages = pl.pallas_call(
    functools.partial(_kernel, width=width, scores=scores),
    grid_spec=_grid_spec(q_BKnH, pages, sink_specs),
    out_shape=[
      jax.ShapeDtypeStruct(q_BKnH.shape, q_BNH.dtype),
      [pltpu.HBM(x.shape, x.dtype) for x in pages],
    ],
    input_output_aliases={3 + len(pages) + i: 1 + i for i in range(len(pages))},
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    cost_estimate=_cost(q_BNH, stored, width, scores),
    interpret=interpret,
    # `aot.programs` finds costs by this name, and scales them from full rows to the mean length.
    name="local_paged_attention" if scores.window else "paged_attention",
  )(
    position_B,
    (layer * p + table_Bn).reshape(-1),
    q_BKnH,
    # A hardware tile of int8 has 32 rows, so a new key and value stay int32 until their insertion.
    [new[0].astype(jnp.int32 if new[1:] else pages[0].dtype), *(x[..., None] for x in new[1:])],
    pages,
    sinks,
  )
  return y_BKnH.reshape(B, N, H), [x.reshape(s.shape) for x, s in zip(pages, stored)]


def _sinks(sink_N: jax.Array | None, K: int) -> tuple[list[jax.Array], list[pl.BlockSpec]]:
  """Returns the sinks as an input of the kernel, and its block.

  Each sink is repeated over a tile's lanes. Both lists are empty if there are no sinks.
  """
  if sink_N is None:
    return [], []
  shape = (K, sink_N.size // K, LANES)
  sink_KnX = jnp.broadcast_to(sink_N.reshape(*shape[:2], 1), shape)
  return [sink_KnX], [pl.BlockSpec(shape, lambda i, *_: (0, 0, 0))]


def _grid_spec(
  q_BKnH: jax.Array, pages: Sequence[jax.Array], sink_specs: Sequence[pl.BlockSpec]
) -> pltpu.PrefetchScalarGridSpec:
  """Declares the grid.

  A step has a block of rows. Pages and their scales stay in HBM.
  """
  B, K, n, H = q_BKnH.shape
  rows = next(r for r in range(min(ROWS, max(1, B // 2)), 0, -1) if B % r == 0)

  def block(*shape):
    return pl.BlockSpec((rows, *shape), lambda i, *_: (i, 0, 0, 0))

  in_place = [pl.BlockSpec(memory_space=pltpu.HBM)] * len(pages)
  return pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=2,
    grid=(B // rows,),
    in_specs=[block(K, n, H), [block(K, 2, H), block(K, 2, 1)][: len(pages)], in_place, sink_specs],
    out_specs=[block(K, n, H), in_place],
    scratch_shapes=[
      [pltpu.VMEM((2, *x.shape[1:]), x.dtype) for x in pages],
      pltpu.SemaphoreType.DMA((len(pages), 2)),
      pltpu.SemaphoreType.DMA((len(pages),)),
    ],
  )


def _cost(
  q_BNH: jax.Array, stored: Sequence[jax.Array], width: int, scores: Scores
) -> pl.CostEstimate:
  """Estimates the cost for rows of maximum length, or for whole windows.

  The estimate is an upper bound, since the rows' positions are unknown while tracing.
  """
  (B, N, H), (_, _, K, _, S, _), dtype = q_BNH.shape, stored[0].shape, stored[0].dtype
  pages = B * (min(width, (scores.window - 2) // S + 2) if scores.window else width)
  positions = pages * S + B * (tile(dtype) + 1)
  scales = sum((pages + B) * 2 * K * S * x.dtype.itemsize for x in stored[1:])
  return pl.CostEstimate(
    flops=4 * pages * S * N * H,
    bytes_accessed=positions * 2 * K * H * dtype.itemsize
    + scales
    + 2 * q_BNH.size * q_BNH.dtype.itemsize,
    transcendentals=pages * S * N,
  )


def _kernel(
  position, table, q, new, _, sinks, y, stored, buffers, fetched, written, *, width, scores
):
  """Attends from the rows of a grid step; `fetched` and `written` are semaphores of copies."""
  (rows, K, n, H), S = q.shape, buffers[0].shape[-2]
  row0 = pl.program_id(0) * rows

  def pages_of(row):  # First and last page to read, counted in the row.
    last = jnp.maximum(position[row0 + row], 0)
    begin = jnp.maximum(last - scores.window + 1, 0) // S if scores.window else 0
    return begin, last // S

  def fetch(row, i, side, method):  # Successive pages alternate between a buffer's two sides.
    page = table[(row0 + row) * width + i]
    for n, (source, target) in enumerate(zip(stored, buffers)):
      copy = pltpu.make_async_copy(source.at[page], target.at[side], fetched.at[n, side])
      getattr(copy, method)()

  def attend_row(row, side):
    newest = position[row0 + row]
    begin, last = pages_of(row)

    def attend_page(i, carry):
      side, largest, total, sums = carry  # Largest score, sum of weights, weighted sum of values.
      has_more = i < last
      next_row = jnp.where(has_more, row, row + 1)  # Row of the next page.
      next_begin, _ = pages_of(jnp.minimum(row + 1, rows - 1))

      @pl.when(next_row < rows)
      def _():
        fetch(next_row, jnp.where(has_more, i + 1, next_begin), 1 - side, "start")

      fetch(row, i, side, "wait")
      slot, writes = jnp.maximum(newest, 0) % S, (i == last) & (newest >= 0)
      copies = _write_back(stored, buffers, written, table[(row0 + row) * width + i], side, slot)

      @pl.when(writes)
      def _():
        _insert(buffers, side, [x[row] for x in new], slot)
        for copy in copies:
          copy.start()

      highest, old, weight, value = _attend_page(q[row], buffers, side, i, newest, scores, largest)

      @pl.when(writes)
      def _():
        for copy in copies:
          copy.wait()  # The next fetch overwrites the copy's source.

      return 1 - side, highest, old * total + weight.sum(-1, keepdims=True), old * sums + value

    zeros = jnp.zeros((K, n, 1), jnp.float32)  # A sink is a first score of weight 1, with no value.
    start = (zeros + sinks[0][:, :, :1], zeros + 1) if sinks else (zeros + NEGATIVE, zeros)
    carry = (side, *start, jnp.zeros((K, n, H), jnp.float32))
    side, _, total, sums = jax.lax.fori_loop(begin, last + 1, attend_page, carry)
    y[row] = (sums / total).astype(y.dtype)
    return side

  fetch(0, pages_of(0)[0], 0, "start")
  jax.lax.fori_loop(0, rows, attend_row, jnp.int32(0))


def _tile_of(buffer, slot):
  """Returns the first slot of a slot's hardware tile, and the tile as a slice."""
  size = tile(buffer.dtype)
  first = pl.multiple_of(slot // size * size, size)
  return first, pl.ds(first, size)


def _write_back(stored, buffers, written, page, side, slot):
  """Declares copies of a slot's tile, and of the page's scales, to the cache."""
  _, tile_slots = _tile_of(buffers[0], slot)
  index = slice(None), slice(None), tile_slots, slice(None)
  pairs = [(buffers[0].at[side, *index], stored[0].at[page, *index])]
  pairs += [(x.at[side], target.at[page]) for x, target in zip(buffers[1:], stored[1:])]
  return [pltpu.make_async_copy(*pair, written.at[n]) for n, pair in enumerate(pairs)]


def _insert(buffers, side, new, slot):
  """Inserts a new key, value and scales in a slot of the page."""
  (buffer, *scale_buffer), (new_K2H, *new_scale_K21) = buffers, new
  first, tile_slots = _tile_of(buffer, slot)
  old_K2xH = buffer[side, :, :, tile_slots, :]
  is_new = jax.lax.broadcasted_iota(jnp.int32, old_K2xH.shape, 2) + first == slot
  tile_K2xH = jnp.where(is_new, new_K2H[:, :, None, :], old_K2xH.astype(new_K2H.dtype))
  buffer[side, :, :, tile_slots, :] = tile_K2xH.astype(buffer.dtype)
  for x, scale_K21 in zip(scale_buffer, new_scale_K21):
    old_K2S = x[side]
    is_new = jax.lax.broadcasted_iota(jnp.int32, old_K2S.shape, 2) == slot
    x[side] = jnp.where(is_new, scale_K21, old_K2S)


def _attend_page(q_KnH, buffers, side, page, position, scores: Scores, largest):
  """Computes the step of an online softmax for one page of a row.

  Returns the largest score m up to this page, the factor that corrects the sums over earlier pages,
  the page's unnormalised weights exp(score - m), and the sum of values with these weights.

  Args:
    buffers: keys and values of the page at `side`; for int8, also their scales.
    page: index of the page in the row.
    position: position of the query.
    largest: largest score of earlier pages.
  """
  k_KSH, v_KSH = (buffers[0][side, :, n].astype(q_KnH.dtype) for n in range(2))
  scales = [x[side, :, pl.ds(n, 1), :] for x in buffers[1:] for n in range(2)]
  score = jax.lax.dot_general(
    q_KnH, k_KSH, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32
  )
  if scales:
    score *= scales[0]
  slot = jax.lax.broadcasted_iota(jnp.int32, score.shape, 2) + page * k_KSH.shape[1]
  visible = slot <= position
  if scores.window:
    visible &= position - slot < scores.window
  score = jnp.where(visible, softcap(score, scores.cap), NEGATIVE)
  highest = jnp.maximum(largest, score.max(-1, keepdims=True))
  weight, old = jnp.exp(score - highest), jnp.exp(largest - highest)
  value = jax.lax.dot_general(
    (weight * scales[1] if scales else weight).astype(v_KSH.dtype),
    v_KSH,
    (((2,), (1,)), ((0,), (0,))),
    preferred_element_type=jnp.float32,
  )
  return highest, old, weight, value
