"""Tiles of megablox's kernels, and the bytes that they move between HBM and vector memory.

The kernels' own estimates take every block as fetched at every step. Pallas fetches a block when it
is another one than in the step before; `aot` counts what is returned here.
"""

import math
from collections.abc import Iterator

from gspo_jax.system.accelerators import Chip

COPY = 1.25  # of the left factor's tile: what the compiler holds besides (1.2 at most was seen)
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
  """Tiles of [rows, inner] times each group's [inner, outer] that move the fewest bytes, and those.

  Args:
    size, out_size: bytes of a number of the factors and of the result.
    memory: bytes that a kernel may hold.
  """

  def moved(tm, tk, tn):
    # One after the other: parts of the result's width, tiles of rows, parts of the inner width. If
    # the last is one part, a group's matrix stays for all its rows.
    visits = _visits(rows, groups, tm)
    again = groups if tk >= inner else visits
    across = -(-outer // tn)
    x = rows if tk >= inner else visits * tm
    return (x * inner * across + again * inner * outer) * size + rows * outer * out_size

  def held(tm, tk, tn):
    adds_up = 4 * (tk < inner)  # the sum over parts of the inner width, in float32
    return ((2 + COPY) * tm * tk + 2 * tk * tn) * size + tm * tn * (2 * out_size + adds_up)

  return _best(rows, inner, outer, groups, moved, held, memory)


def outer_tiles(
  inner: int,
  rows: int,
  outer: int,
  groups: int,
  size: int,
  out_size: int,
  memory: int = Chip.vector_memory,
) -> tuple[Tiles, int]:
  """The same for the outer products of each group's rows, [inner, outer].

  out_size: bytes that are written of a number, and read where it is added to a total.
  """

  def moved(tm, tk, tn):
    rows_read = inner * -(-outer // tn) + outer * -(-inner // tk)
    return rows * rows_read * size + groups * inner * outer * out_size

  def held(tm, tk, tn):
    return ((2 + COPY) * tm * tk + 2 * tm * tn) * size + tk * tn * (2 * out_size + 4)

  return _best(rows, inner, outer, groups, moved, held, memory)


def _best(rows, inner, outer, groups, moved, held, memory) -> tuple[Tiles, int]:
  most = math.gcd(rows, 512)
  for least in (3, 1):  # lanes; of fewer the products wait, which a width of 11 lanes has to
    tiles = [
      (tm, tk, tn)
      for tm in sorted({most, min(most, 256)})
      for tk in _parts(inner, least)
      for tn in _parts(outer, least)
      if held(tm, tk, tn) <= memory
    ]
    if tiles:
      break

  def cost(tm, tk, tn):
    return moved(tm, tk, tn), _visits(rows, groups, tm) * tm, -tm * tk * tn

  best = min(tiles, key=lambda each: cost(*each))
  return best, moved(*best)


def _visits(rows: int, groups: int, tm: int) -> int:
  """Tiles of rows that are multiplied: one that two groups share is, for each of them."""
  return -(-rows // tm) + groups - 1


def _parts(width: int, least: int) -> Iterator[int]:
  """Tiles that divide a width evenly, of `least` lanes or more."""
  lanes = -(-width // 128)
  return (128 * n for n in range(min(lanes, least), lanes + 1) if lanes % n == 0)
