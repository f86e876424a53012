"""Paged key/value cache: rows take pages from a pool as they grow.

A page has S consecutive positions. Memory is needed for positions in use, not for the longest
possible rows, and rows with a common prefix share its full pages. The alternative is the dense
cache of `cache`.

A table lists the pages of each row. A page in no table is free; free pages have no other record.
`free`, `insert`, `begin` and `attend` are for use inside `shard_map`: each device has a separate
pool, and numbers its pages from 0.
"""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.models.attention import attention
from gspo_jax.models.attention import cache as kv_cache
from gspo_jax.models.attention.blocks import Scores
from gspo_jax.models.attention.cache import Cache, States, decode, decoded, encode, tile
from gspo_jax.settings.model import ModelConfig
from gspo_jax.sharding import BATCH, P

NONE = -1  # No page.


@flax.struct.dataclass
class Block:
  """Keys and values by page, of one block of layers with full attention.

  Position s of a row is in the row's page s // S, at s % S.
  """

  kv_lpK2SH: jax.Array  # p pages of S positions; the axis of size 2 has key and value.
  scale_lpK2S: jax.Array | None = None  # Scales of int8 keys and values; None for other dtypes.
  table_Bn: jax.Array | None = None  # `Pages.table_Bn`; None in the blocks of `Pages`.

  @property
  def arrays(self) -> list[jax.Array]:
    """Returns keys and values, and for int8 also their scales."""
    return [self.kv_lpK2SH] if self.scale_lpK2S is None else [self.kv_lpK2SH, self.scale_lpK2S]


@flax.struct.dataclass
class Pages:
  """Paged cache of all layers."""

  blocks: tuple[Block | States, ...]  # An entry for each block of the parameters.
  table_Bn: jax.Array  # int32: page numbers of a row, in order of positions; NONE for no page.

  @property
  def _first(self) -> jax.Array:
    return next(block.kv_lpK2SH for block in self.blocks if isinstance(block, Block))

  @property
  def dtype(self) -> Any:
    return self._first.dtype

  @property
  def page(self) -> int:
    """Returns the number of positions of a page."""
    return self._first.shape[4]

  @property
  def pages(self) -> int:
    """Returns the number of pages."""
    return self._first.shape[1]

  @property
  def states(self) -> tuple[States, ...]:
    """Returns the blocks of linear attention."""
    return states_of(self.blocks)

  def with_states(self, states: Sequence[States]) -> "Pages":
    """Replaces the blocks of linear attention."""
    new = iter(states)
    blocks = (next(new) if isinstance(block, States) else block for block in self.blocks)
    return self.replace(blocks=tuple(blocks))

  def block(self, i: int) -> Block | States:
    """Returns the cache of block i of the parameters."""
    block = self.blocks[i]
    return block if isinstance(block, States) else block.replace(table_Bn=self.table_Bn)

  def with_blocks(self, blocks: Sequence[Block | States]) -> "Pages":
    """Replaces all blocks; the table is unchanged."""
    blocks = (b if isinstance(b, States) else b.replace(table_Bn=None) for b in blocks)
    return self.replace(blocks=tuple(blocks))


def states_of(blocks: Sequence[Any]) -> tuple[States, ...]:
  """Returns the blocks of linear attention."""
  return tuple(block for block in blocks if isinstance(block, States))


def allocate(
  config: ModelConfig,
  batch: int,
  length: int,
  pages: int,
  page: int,
  dtype: Any,
  layers: Sequence[int] | None = None,
) -> Pages:
  """Allocates free pages, and `batch` rows without pages.

  length: maximum number of positions of a row.
  pages: number of pages, over all devices.
  page: number of positions of a page.
  dtype: dtype of keys and values; int8 also allocates scales.
  layers: number of layers in each block of the parameters. None means as in `transformer.table`.
  """
  shape, H = (pages, config.num_kv_heads, 2, page), config.head_dim
  scales = jnp.dtype(dtype) == jnp.int8
  return Pages(
    tuple(
      kv_cache.allocate_states(config, count, batch)
      if kind.linear
      else Block(
        kv_cache.zeros(dtype, count, *shape, H),
        kv_cache.zeros(jnp.float32, count, *shape) if scales else None,
      )
      for kind, count in kv_cache.blocks(config, layers)
    ),
    no_pages(batch, -(-length // page)),
  )


def no_pages(rows: int, width: int) -> jax.Array:
  """Returns a table of rows without pages, with `width` entries per row."""
  return sharding.reshard(jnp.full((rows, width), NONE, jnp.int32), P(BATCH))


def free(cache: Pages, *tables: jax.Array) -> jax.Array:
  """Marks the pages in neither the cache's table nor `tables`, bool [p]."""
  used = jnp.concatenate([cache.table_Bn.reshape(-1), *(t.reshape(-1) for t in tables)])
  page_p = jnp.arange(cache.pages)
  return ~(used[:, None] == page_p[None]).any(0)


def insert(
  cache: Pages, rows: Cache, length_r: jax.Array, *tables: jax.Array
) -> tuple[Pages, jax.Array, jax.Array]:
  """Copies the first `length_r` positions of dense rows into free pages.

  Rows take pages in order. If a row does not fit, this row and all later rows take none.

  Args:
    rows: dense cache of r rows, such as prefilled prompts.
    length_r: number of positions to copy of each row.
    tables: further tables with pages in use.

  Returns:
    The cache, with its table and states unchanged; a table of the new pages, int32 [r, n]; whether
    there were enough pages for each row, bool [r].
  """
  free_p, S = free(cache, *tables), cache.page
  n = -(-rows.positions.v_lBKSH.shape[3] // S)
  count_r = -(-length_r // S)
  end_r = jnp.cumsum(count_r)
  fits_r = end_r <= free_p.sum()
  place_n, order_p = jnp.arange(n), jnp.argsort(~free_p, stable=True).astype(jnp.int32)
  index_rn = (end_r - count_r)[:, None] + place_n[None]
  page_rn = order_p[jnp.minimum(index_rn, len(order_p) - 1)]
  table_rn = jnp.where((place_n[None] < count_r[:, None]) & fits_r[:, None], page_rn, NONE)
  target_rn = jnp.where(table_rn == NONE, len(order_p), table_rn)  # Out of range: dropped.

  def write(pages, new_lrK2TY):
    l, r, K, _, T, *width = new_lrK2TY.shape
    padding = ((0, 0),) * 4 + ((0, n * S - T),) + ((0, 0),) * len(width)
    new_lrK2nSY = jnp.pad(new_lrK2TY, padding).reshape(l, r, K, 2, n, S, *width)
    return pages.at[:, target_rn].set(
      jnp.moveaxis(new_lrK2nSY, 4, 2).astype(pages.dtype), mode="drop"
    )

  def write_block(block: Block | States, new: kv_cache.Block | States) -> Block | States:
    if isinstance(block, States):
      return block
    new = decoded(new)
    kv = jnp.stack([jnp.swapaxes(new.k_lBKHS, 3, 4), new.v_lBKSH], axis=3)
    scale = block.scale_lpK2S
    scale = None if scale is None else write(scale, new.scale_lBK2S)
    return Block(write(block.kv_lpK2SH, kv), scale)

  return cache.replace(blocks=tuple(map(write_block, cache.blocks, rows.blocks))), table_rn, fits_r


def begin(cache: Pages, row: jax.Array, prefix_n: jax.Array, position: jax.Array, page: jax.Array):
  """Starts a row after a prefix, such as a prompt.

  The row shares the prefix's full pages. Its next tokens are written to the free page `page`. If
  the prefix's last page is partly filled, `page` begins as a copy of it. For example, a prefix of 6
  positions in pages 3 and 8 of 4 positions each, and `page` = 5, give the row the pages 3 and 5.
  Returns the cache, with its states unchanged.

  Args:
    row: index of the row.
    prefix_n: pages of the prefix.
    position: number of the prefix's positions in the cache, and position of the row's first input.
    page: number of a free page.
  """
  width = cache.table_Bn.shape[1]
  last = position // cache.page
  missing = max(0, width - len(prefix_n))
  prefix_n = jnp.pad(prefix_n[:width], (0, missing), constant_values=NONE)
  pages_n = jnp.where(jnp.arange(width) < last, prefix_n, NONE).at[last].set(page)
  source = jnp.where(prefix_n[last] == NONE, page, prefix_n[last])

  def copy(kv):
    part = jax.lax.dynamic_slice_in_dim(kv, source, 1, axis=1)
    return jax.lax.dynamic_update_slice_in_dim(kv, part, page, axis=1)

  blocks = (b if isinstance(b, States) else jax.tree.map(copy, b) for b in cache.blocks)
  return Pages(tuple(blocks), cache.table_Bn.at[row].set(pages_n))


def attend(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  cache: Block,
  layer: jax.Array,
  position_BT: jax.Array,
  scores: Scores,
  implementation: str,
) -> tuple[jax.Array, Block]:
  """Writes one key and value per row and attends; T is 1.

  Returns outputs [B, 1, N, H], and the cache. A row without a page for its position writes nothing,
  and its output is undefined.

  implementation: "kernel" is the Pallas kernel for TPU (interpreted elsewhere); "plain" attends to
    a dense copy of the rows' pages.

  Raises ValueError for more than one query per row.
  """
  if q_BTNH.shape[1] != 1:
    raise ValueError(
      f"the paged cache has {q_BTNH.shape[1]} queries per row, and attends with 1 only: prefill a "
      "dense cache, and insert its rows"
    )
  arrays, table_Bn = cache.arrays, cache.table_Bn
  p, K, _, S, H = cache.kv_lpK2SH.shape[1:]
  position_B, B = position_BT[:, 0], len(q_BTNH)
  page_B = jnp.take_along_axis(table_Bn, position_B[:, None] // S, axis=1)[:, 0]
  new = encode(jnp.stack([k_BTKH[:, 0], v_BTKH[:, 0]], axis=2), arrays[0].dtype)
  if implementation == "kernel":
    from gspo_jax.models.attention import paged  # Slow import.

    y_BNH, (kv, *scale) = paged.attend(
      q_BTNH[:, 0] * scores.scale,
      new,
      arrays,
      layer,
      jnp.maximum(table_Bn, 0),
      jnp.where(page_B == NONE, -1, position_B),
      scores,
      interpret=sharding.platform() != "tpu",
    )
    return y_BNH[:, None], Block(kv, *scale or [None], table_Bn)
  place = layer, jnp.where(page_B == NONE, p, page_B), slice(None), slice(None), position_B % S
  kv, *scale = (x.at[place].set(values, mode="drop") for x, values in zip(arrays, new))
  read = layer, jnp.maximum(table_Bn, 0)
  rows_BnK2SH = decode([kv[read], *(x[read] for x in scale)], q_BTNH.dtype)
  rows_K2BXH = jnp.moveaxis(rows_BnK2SH, (2, 3), (0, 1)).reshape(K, 2, B, -1, H)
  k_BKHX = jnp.moveaxis(rows_K2BXH[:, 0], (0, 3), (1, 2))
  v_BKXH = jnp.swapaxes(rows_K2BXH[:, 1], 0, 1)
  y_BTNH = attention.attend_cache(q_BTNH, k_BKHX, v_BKXH, position_BT, scores)
  return y_BTNH, Block(kv, *scale or [None], table_Bn)


def choose(cache: Block, implementation: str) -> str:
  """Returns the implementation of `attend` for a value of `ComputeConfig.attention`.

  "splash" means the kernel, and so does "auto" on TPU. The kernel needs S to be a multiple of a
  hardware tile, and H a multiple of its 128 lanes. Otherwise "plain" is used.
  """
  S, H = cache.kv_lpK2SH.shape[-2:]
  kernel = sharding.platform() == "tpu" if implementation == "auto" else implementation == "splash"
  return "kernel" if kernel and S % tile(cache.kv_lpK2SH.dtype) == 0 and H % 128 == 0 else "plain"
