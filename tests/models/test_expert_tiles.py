"""Tiles of the expert kernels: they fit, and what they are said to move is what Pallas fetches."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.models.experts import groups, tiles
from gspo_jax.system import accelerators

GROUPS = [300, 0, 212, 1, 511, 1024]  # rows of each expert; 2,048 together
FLAGSHIP = dict(into=(2048, 1536), down=(768, 2048), back=(2048, 768))  # inner, outer


def visits(tm, empty):
  """Tiles of rows with their group, in the kernels' order."""
  for group, (end, rows) in enumerate(zip(np.cumsum(GROUPS), GROUPS)):
    first, last = (end - rows) // tm, -(-end // tm)
    yield from ((group, m) for m in range(first, max(last, first + 1)) if rows or empty)


def fetched(blocks, size):
  """Bytes of a sequence of blocks; repeated ones are not fetched again."""
  return size * sum(1 for _ in itertools.groupby(blocks))


@pytest.mark.parametrize("inner, outer", [*FLAGSHIP.values(), (8192, 4096)])
def test_a_product_moves_what_pallas_fetches_at_most(inner, outer):
  rows, filled = sum(GROUPS), sum(rows > 0 for rows in GROUPS)
  (tm, tk, tn), moved = tiles.product_tiles(rows, inner, outer, filled, 2, 2)
  assert rows % tm == inner % tk == outer % tn == 0
  steps = itertools.product(range(outer // tn), visits(tm, False), range(inner // tk))
  steps = [(n, group, m, k) for n, (group, m), k in steps]
  total = fetched([(m, k) for n, g, m, k in steps], tm * tk * 2)
  total += fetched([(g, k, n) for n, g, m, k in steps], tk * tn * 2)
  total += fetched([(m, n) for n, g, m, k in steps], tm * tn * 2)
  assert total <= moved
  if tk == inner:
    assert total > 0.95 * moved  # a tile that two groups share is the same one for both


@pytest.mark.parametrize("width", [1408, 1664, 2432])
def test_widths_with_few_divisors_have_tiles_too(width):
  """11, 13 and 19 lanes of 128: with whole widths alone nothing would fit into vector memory."""
  for size in (2, 4):
    (_, tk, tn), _ = tiles.outer_tiles(2048, 4096, width, 64, size, 4)
    assert 2048 % tk == width % tn == 0
    (_, tk, tn), _ = tiles.product_tiles(4096, width, 2048, 64, size, 4)
    assert width % tk == 2048 % tn == 0


@pytest.mark.parametrize("inner, outer", FLAGSHIP.values())
@pytest.mark.parametrize("size", [2, 4, 8])  # 8: a float32 total is read, and written
def test_an_outer_product_moves_what_pallas_fetches(inner, outer, size):
  rows = sum(GROUPS)
  (tm, tk, tn), moved = tiles.outer_tiles(inner, rows, outer, len(GROUPS), 2, size)
  assert rows % tm == inner % tk == outer % tn == 0
  steps = itertools.product(range(outer // tn), range(inner // tk), visits(tm, True))
  steps = [(n, k, group, m) for n, k, (group, m) in steps]
  total = fetched([(m, k) for n, k, g, m in steps], tm * tk * 2)
  total += fetched([(m, n) for n, k, g, m in steps], tm * tn * 2)
  total += fetched([(g, k, n) for n, k, g, m in steps], tk * tn * size)
  assert 0.95 * moved < total <= 1.01 * moved


def test_of_tiles_that_move_as_much_those_that_multiply_fewer_rows_are_taken():
  """A tile of rows of two groups is multiplied for each."""
  (tm, tk, tn), _ = tiles.product_tiles(4096, 768, 2048, 32, 2, 2)
  assert (tm, tk, tn) == (256, 768, 2048)
  (tm, _, _), _ = tiles.outer_tiles(2048, 4096, 768, 32, 2, 2)
  assert tm == 256


def test_a_kernel_with_more_memory_moves_less():
  sizes = 81920, 3072, 4096, 32, 2, 2  # Qwen3-235B-A22B, back through gate and up
  least = (81920 * (3072 + 4096) + 32 * 3072 * 4096) * 2
  moved = [tiles.product_tiles(*sizes, memory << 20)[1] for memory in (16, 32, 128)]
  assert moved[0] > moved[1] > moved[2] == least
  assert accelerators.vector_memory("TPU v6e") == 2 * accelerators.vector_memory("TPU v5p")


def test_a_total_in_bfloat16_is_the_one_in_float32_rounded_once():
  """The kernel adds up in float32, whatever type the result has."""
  keys = jax.random.split(jax.random.key(0), 2)
  x, y = (jax.random.normal(key, (512, 128), jnp.bfloat16) for key in keys)
  count = jnp.array([200, 0, 250])  # the other rows are nobody's
  narrow, wide = (
    groups._megablox_outer(x, y, count, jnp.dtype(dtype)) for dtype in ("bfloat16", "float32")
  )
  np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))
  total = groups._megablox_outer(x, y, count, jnp.dtype("float32"), wide)
  np.testing.assert_array_equal(total, 2 * wide)  # Includes 0 for the expert without rows.
  exact = np.float64(x[200:450]).T @ np.float64(y[200:450])
  np.testing.assert_allclose(wide[2], exact, rtol=1e-5, atol=1e-4)
