"""Tile sizes of the kernels of megablox, and the bytes moved between HBM and vector memory.

Megablox is JAX's Pallas implementation of grouped matrix products for TPU. Its cost estimates are
too high: they assume that each step of a kernel fetches all its blocks, but Pallas fetches a block
only if the previous step had a different one. Estimates of time (`aot`) use these bytes instead.

Tile sizes are (tm, tk, tn): rows, inner width and outer width of the blocks in a step.
"""

import math
from collections.abc import Iterator

from gspo_jax.system.accelerators import Chip

# Memory that the compiler uses for the left factor, in addition to two buffers of a tile each. The
# unit is a tile. The largest measured value is 1.2.
COPY = 1.25
Tiles = tuple[int, int, int]


def product_tiles(
  rows: int,
  inner: int,
  outer: int,
  groups: int,
  size: int,
  out_size: int,
  memory: int = Chip.vector_memory,
) -> tuple[Tiles, int]:
  """Returns the best tile sizes of a grouped product, and the bytes moved.

  A product is [rows, inner] @ [inner, outer]; each group of rows has a separate matrix.

  Args:
    groups: number of groups.
    size, out_size: bytes per element of the factors, and of the result.
    memory: vector memory of a kernel in bytes.
  """

  def traffic(tm, tk, tn):
    # The outermost loop is over tiles of outer columns, the next over visits (see `_visits`), and
    # the innermost over tiles of the inner width. If one tile has the whole inner width, rows or a
    # matrix that successive visits share are fetched once.
    visits = _visits(rows, groups, tm)
    matrix_reads = groups if tk >= inner else visits
    column_tiles = -(-outer // tn)
    row_reads = rows if tk >= inner else visits * tm
    return (
      row_reads * inner * column_tiles + matrix_reads * inner * outer
    ) * size + rows * outer * out_size

  def footprint(tm, tk, tn):
    accumulator = 4 * (tk < inner)  # Bytes of float32, to sum over tiles of the inner width.
    return ((2 + COPY) * tm * tk + 2 * tk * tn) * size + tm * tn * (2 * out_size + accumulator)

  return _best(rows, inner, outer, groups, traffic, footprint, memory)


def outer_tiles(
  inner: int,
  rows: int,
  outer: int,
  groups: int,
  size: int,
  out_size: int,
  memory: int = Chip.vector_memory,
) -> tuple[Tiles, int]:
  """Returns the best tile sizes of sums of outer products, and the bytes moved.

  For each group, the kernel computes [inner, rows of the group] @ [rows of the group, outer]. Here,
  `inner` and `outer` are the sides of the result.

  out_size: bytes written per element of a sum, plus those read if the sum is added to a total.
  """

  def traffic(tm, tk, tn):
    rows_read = inner * -(-outer // tn) + outer * -(-inner // tk)
    return rows * rows_read * size + groups * inner * outer * out_size

  def footprint(tm, tk, tn):
    return ((2 + COPY) * tm * tk + 2 * tm * tn) * size + tk * tn * (2 * out_size + 4)

  return _best(rows, inner, outer, groups, traffic, footprint, memory)


def _best(rows, inner, outer, groups, traffic, footprint, memory) -> tuple[Tiles, int]:
  """Returns the candidate with the fewest moved bytes, and these bytes.

  A candidate has a footprint of at most `memory`. Its number of rows, tm, is the largest power of
  two that divides `rows`, up to 512 or up to 256. Widths tk and tn below 3 · 128 stall products, so
  they are tried only if no wider tile fits.
  """
  most = math.gcd(rows, 512)
  for least in (3, 1):
    tiles = [
      (tm, tk, tn)
      for tm in sorted({most, min(most, 256)})
      for tk in _parts(inner, least)
      for tn in _parts(outer, least)
      if footprint(tm, tk, tn) <= memory
    ]
    if tiles:
      break

  def cost(tm, tk, tn):
    return traffic(tm, tk, tn), _visits(rows, groups, tm) * tm, -tm * tk * tn

  best = min(tiles, key=lambda sizes: cost(*sizes))
  return best, traffic(*best)


def _visits(rows: int, groups: int, tm: int) -> int:
  """Returns the number of visits in the worst case.

  A tile of rows is visited once for each group with rows in the tile. In the worst case, all groups
  but the first begin in the middle of a tile.
  """
  return -(-rows // tm) + groups - 1


def _parts(width: int, least: int) -> Iterator[int]:
  """Yields tile widths for a width padded to a multiple of 128.

  Tile widths divide the padded width, and are multiples of 128, at least `least` · 128. A padded
  width below `least` · 128 is one tile.
  """
  units = -(-width // 128)
  return (128 * n for n in range(min(units, least), units + 1) if units % n == 0)
