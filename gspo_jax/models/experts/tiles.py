"""Tiles of megablox's kernels, and their bytes between HBM and vector memory.

The kernels' own estimates assume a fetch of every block at every step. Pallas fetches a block only
if it differs from the previous step's; `aot` uses the bytes returned here.
"""

import math
from collections.abc import Iterator

from gspo_jax.system.accelerators import Chip

COPY = 1.25  # Compiler's copies relative to the left factor's tile (1.2 at most observed).
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
  """Returns tiles of [rows, inner] @ [inner, outer] with the fewest bytes.

  Args:
    size, out_size: bytes of a number of the factors and of the result.
    memory: vector memory of a kernel in bytes.
  """

  def moved(tm, tk, tn):
    # Loops, outermost first: parts of the result's width, tiles of rows, parts of the inner width.
    # With one part of the last, a group's matrix stays for all its rows.
    visits = _visits(rows, groups, tm)
    again = groups if tk >= inner else visits
    across = -(-outer // tn)
    x = rows if tk >= inner else visits * tm
    return (x * inner * across + again * inner * outer) * size + rows * outer * out_size

  def footprint(tm, tk, tn):
    adds_up = 4 * (tk < inner)  # The sum over parts of the inner width, in float32.
    return ((2 + COPY) * tm * tk + 2 * tk * tn) * size + tm * tn * (2 * out_size + adds_up)

  return _best(rows, inner, outer, groups, moved, footprint, memory)


def outer_tiles(
  inner: int,
  rows: int,
  outer: int,
  groups: int,
  size: int,
  out_size: int,
  memory: int = Chip.vector_memory,
) -> tuple[Tiles, int]:
  """Returns tiles for outer products of each group's rows, [inner, outer].

  out_size: bytes written per number, plus those read if it is added to a total.
  """

  def moved(tm, tk, tn):
    rows_read = inner * -(-outer // tn) + outer * -(-inner // tk)
    return rows * rows_read * size + groups * inner * outer * out_size

  def footprint(tm, tk, tn):
    return ((2 + COPY) * tm * tk + 2 * tm * tn) * size + tk * tn * (2 * out_size + 4)

  return _best(rows, inner, outer, groups, moved, footprint, memory)


def _best(rows, inner, outer, groups, moved, footprint, memory) -> tuple[Tiles, int]:
  most = math.gcd(rows, 512)
  for least in (3, 1):  # Lanes of 128. Fewer than 3 stall products; some widths have no choice.
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
    return moved(tm, tk, tn), _visits(rows, groups, tm) * tm, -tm * tk * tn

  best = min(tiles, key=lambda sizes: cost(*sizes))
  return best, moved(*best)


def _visits(rows: int, groups: int, tm: int) -> int:
  """Counts multiplied tiles of rows: a tile of two groups counts twice."""
  return -(-rows // tm) + groups - 1


def _parts(width: int, least: int) -> Iterator[int]:
  """Returns tiles dividing a width evenly, of at least `least` lanes."""
  lanes = -(-width // 128)
  return (128 * n for n in range(min(lanes, least), lanes + 1) if lanes % n == 0)
