"""Tiles of megablox's kernels, and their bytes between HBM and vector memory.

The kernels' own estimates assume a fetch of every block at every step. Pallas fetches a block only
if it differs from the previous step's; `aot` uses the bytes returned here.
"""

import math
from collections.abc import Iterator

from gspo_jax.system.accelerators import Chip

COPY = 1.25  # Compiler's copies of the left factor's tile, in tiles (at most 1.2 observed).
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
  """Returns tiles of [rows, inner] @ [inner, outer] with the fewest bytes, and their bytes.

  Args:
    size, out_size: bytes of a number of the factors and of the result.
    memory: vector memory of a kernel in bytes.
  """

  def traffic(tm, tk, tn):
    # Loops, outermost first: parts of the result's width, tiles of rows, parts of the inner width.
    # With a single part of the inner width, a group's matrix is read once for all its rows.
    visits = _visits(rows, groups, tm)
    matrix_reads = groups if tk >= inner else visits
    column_tiles = -(-outer // tn)
    x = rows if tk >= inner else visits * tm
    return (
      x * inner * column_tiles + matrix_reads * inner * outer
    ) * size + rows * outer * out_size

  def footprint(tm, tk, tn):
    accumulator = 4 * (tk < inner)  # The sum over parts of the inner width, in float32.
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
  """Returns tiles for outer products of each group's rows, [inner, outer], and bytes.

  out_size: bytes written per number; with a total to add to, plus bytes read.
  """

  def traffic(tm, tk, tn):
    rows_read = inner * -(-outer // tn) + outer * -(-inner // tk)
    return rows * rows_read * size + groups * inner * outer * out_size

  def footprint(tm, tk, tn):
    return ((2 + COPY) * tm * tk + 2 * tm * tn) * size + tk * tn * (2 * out_size + 4)

  return _best(rows, inner, outer, groups, traffic, footprint, memory)


def _best(rows, inner, outer, groups, traffic, footprint, memory) -> tuple[Tiles, int]:
  most = math.gcd(rows, 512)
  for least in (3, 1):  # Units of 128. With fewer than 3, products stall: the second choice.
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
  """Counts products of row tiles: a tile of two groups counts twice."""
  return -(-rows // tm) + groups - 1


def _parts(width: int, least: int) -> Iterator[int]:
  """Returns tile widths: divisors of `width`, at least `least` units of 128."""
  units = -(-width // 128)
  return (128 * n for n in range(min(units, least), units + 1) if units % n == 0)
