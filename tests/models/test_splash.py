"""The Pallas attention kernel for TPU computes the blocks with a visible pair, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

from gspo_jax.models.attention import blocks, splash
from gspo_jax.models.attention.attention import Scores, attend_self

T = 2048
PACKED = np.repeat([1, 2, 3, 0], [300, 900, 500, 348])
GAPS = np.repeat([1, 0, 1, 2, 0], [200, 600, 300, 700, 248])  # A trunk ends with padding.
UNORDERED = np.random.default_rng(0).integers(0, 4, T // 256).repeat(256)
ROWS = dict(packed=PACKED, gaps=GAPS, unordered=UNORDERED)


def visible_blocks(segment_S, first, sizes, window=0):
  """Whether a block of queries and one of keys have a visible pair of tokens, not padding."""
  query, key = np.arange(first, T)[:, None], np.arange(T)[None]
  visible = (query >= key) & (query - key < (window or T))
  visible &= (segment_S[first:, None] == segment_S[None]) & (segment_S > 0)[None]
  (q_size, k_size), Q = sizes, T - first
  return visible.reshape(Q // q_size, q_size, T // k_size, k_size).any((1, 3))


def computed_blocks(mask, axis, number):
  """The blocks of keys (axis 1) or of queries (axis 0) that a kernel computes, [i, j]."""
  data, kind = np.asarray(mask.data_next[0]), np.asarray(mask.block_mask[0])
  computed = np.zeros(number, bool)
  for i, j in zip(*np.nonzero(kind)):
    computed[(i, data[i, j]) if axis else (data[i, j], j)] = True
  return computed


@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("first", [0, 512])
@pytest.mark.parametrize("row", ROWS)
def test_blocks_with_a_visible_pair_are_computed(row, first, window):
  segment_S = ROWS[row]
  kernel = splash.make(2, (T - first, T), 128, (512, 512), first, Scores(1.0, window), True)
  ids = SegmentIds(jnp.asarray(segment_S[first:]), jnp.asarray(segment_S))
  kernel = jax.jit(lambda ids: splash.skip(kernel, ids, first))(ids)
  sizes = kernel.kwargs["block_sizes"]
  for mask, axis, shape in (
    (kernel.fwd_mask_info, 1, (sizes.block_q, sizes.block_kv)),
    (kernel.dq_mask_info, 1, (sizes.block_q_dq, sizes.block_kv_dq)),
    (kernel.dkv_mask_info, 0, (sizes.block_q_dkv, sizes.block_kv_dkv)),
  ):
    needed = visible_blocks(segment_S, first, shape, window)
    computed = computed_blocks(mask, axis, needed.shape)
    assert not (needed & ~computed).any()
    assert computed.any(1).all()  # A query without a block would be 0 / 0.
    # The data of a line's blocks ascend, so each is loaded once.
    assert (np.diff(np.asarray(mask.data_next[0], int), axis=axis) >= 0).all()
    if row == "packed":  # Nothing else is computed, except blocks of padding.
      queries, keys = np.arange(first, T), segment_S[first:] == 0
      needed[queries[keys] // shape[0] - first // shape[0], queries[keys] // shape[1]] = True
      assert (computed == needed).all()


def test_a_row_skips_most_blocks():
  """A property of the arithmetic above: 16 segments in a row leave little to compute."""
  segment_S = np.arange(T) // 128 + 1
  ids = SegmentIds(jnp.asarray(segment_S), jnp.asarray(segment_S))
  kernel = splash.make(1, (T, T), 128, (128, 128), 0, Scores(1.0), True)
  before = int((kernel.dq_mask_info.block_mask > 0).sum())
  after = int((splash.skip(kernel, ids, 0).dq_mask_info.block_mask > 0).sum())
  assert (before, after) == (24, 16)


@pytest.mark.parametrize("row", ROWS)
def test_blockwise_visits_the_blocks_with_a_visible_pair(row):
  segment_S, size = ROWS[row], 128
  ids, order = jnp.asarray(segment_S)[None], jnp.arange(T, dtype=jnp.int32)[None]
  ranges = blocks.segment_ranges(ids, order, size)
  first, end = blocks._range(blocks.overlap(ranges, ranges), order.reshape(-1, 1, size), size)
  needed = visible_blocks(segment_S, 0, (size, size))
  for i, line in enumerate(needed):
    if line.any():
      assert first[i] <= np.flatnonzero(line)[0] and np.flatnonzero(line)[-1] < end[i]
    if row == "packed":
      assert end[i] - first[i] == max(line.sum(), 1)  # A block of padding visits itself.


@pytest.mark.parametrize("name", ["splash", "blockwise"])
def test_padding_between_rows_and_segments_is_finite(name, monkeypatch):
  """Values and gradients of long rows: full, packed, and empty."""
  monkeypatch.setattr(blocks, "SHORT", 0)
  length = 400
  ids = np.zeros((3, length), np.int32)
  ids[0], ids[1, :150], ids[1, 150:290] = 1, 1, 2
  keys = jax.random.split(jax.random.key(0), 3)
  q, k, v = (jax.random.normal(key, (3, length, 2, 16)) for key in keys)

  def total(implementation, q, k, v):
    y = attend_self(q, k, v, jnp.asarray(ids), implementation)
    return jnp.where(ids[:, :, None, None] > 0, jnp.sin(y), 0).sum()

  def gradients(implementation):
    return jax.jit(jax.grad(lambda *x: total(implementation, *x), (0, 1, 2)))(q, k, v)

  for actual, expected in zip(gradients(name), gradients("plain"), strict=True):
    np.testing.assert_allclose(actual, expected, atol=2e-5)
