"""Dense cache: a row for each sequence, with keys and values in a slot for each position.

The alternative is the paged cache of `pages`. Layers of linear attention have `States` in both.
"""

import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.settings.model import Kind, ModelConfig
from gspo_jax.sharding import BATCH, P


def spec(x: Any) -> P:
  """Returns the PartitionSpec of a cache's array, but not of a table of pages."""
  return P(None, BATCH, "tensor", *[None] * (x.ndim - 3))


@flax.struct.dataclass
class Block:
  """Keys and values by position, of one block of layers with full attention.

  Slot s of a row holds position s. No lengths are stored: a query at position p reads slots 0..p,
  and decode steps overwrite the padding of a prefill before a query can read it.

  The last axis of keys is S, as in a query's scores; the last axis of values is H, as in a query's
  output. On CPU, bfloat16 keys and values are stored as bits in uint16: XLA would convert a
  whole bfloat16 array to float32 and back for each partial write.
  """

  k_lBKHS: jax.Array
  v_lBKSH: jax.Array
  scale_lBK2S: jax.Array | None = None  # Scales of int8 keys and values; None for other dtypes.


@flax.struct.dataclass
class States:
  """Recurrent states of one block of layers with linear attention, float32.

  `delta_rule` defines the letters. But the axis C has only C - 1 entries here, the earlier inputs
  that a convolution reads.
  """

  state_lBKRHJ: jax.Array
  q_lBKCH: jax.Array
  k_lBKCH: jax.Array
  v_lBKCRJ: jax.Array


@flax.struct.dataclass
class Cache:
  """Dense cache of all layers."""

  blocks: tuple[Block | States, ...]  # An entry for each block of the parameters.

  @property
  def positions(self) -> Block:
    """Returns the first block with keys and values."""
    return next(block for block in self.blocks if isinstance(block, Block))

  @property
  def dtype(self) -> Any:
    """Returns the dtype of keys and values, bfloat16 if stored as bits."""
    stored = self.positions.v_lBKSH.dtype
    return jnp.dtype(jnp.bfloat16) if stored == jnp.uint16 else stored

  def block(self, i: int) -> Block | States:
    """Returns the cache of block i of the parameters."""
    return self.blocks[i]

  def with_blocks(self, blocks: Sequence[Block | States]) -> "Cache":
    """Replaces all blocks."""
    return Cache(tuple(blocks))


def allocate(
  config: ModelConfig, batch: int, length: int, dtype: Any, layers: Sequence[int] | None = None
) -> Cache:
  """Allocates an empty cache for `batch` rows of up to `length` positions.

  layers: number of layers in each block of the parameters. None means as in `transformer.table`.
  """
  K, H = config.num_kv_heads, config.head_dim
  bits = jnp.dtype(dtype) == jnp.bfloat16 and sharding.platform() == "cpu"
  scales = jnp.dtype(dtype) == jnp.int8
  dtype = jnp.uint16 if bits else dtype
  return Cache(
    tuple(
      allocate_states(config, l, batch)
      if kind.linear
      else Block(
        zeros(dtype, l, batch, K, H, length),
        zeros(dtype, l, batch, K, length, H),
        zeros(jnp.float32, l, batch, K, 2, length) if scales else None,
      )
      for kind, l in blocks(config, layers)
    )
  )


def blocks(config: ModelConfig, layers: Sequence[int] | None) -> list[tuple[Kind, int]]:
  """Returns (kind, number of layers) of each block of the parameters.

  layers: number of layers in each block. None means as in `transformer.table`.
  """
  return [(kind, len(indices)) for kind, indices in config.stacks(layers)]


def allocate_states(config: ModelConfig, layers: int, batch: int) -> States:
  """Allocates states of zeros for one block of layers, and `batch` rows."""
  c = config.linear
  K, R, H, J, C = c.key_heads, c.value_heads // c.key_heads, c.key_dim, c.value_dim, c.kernel - 1
  shapes = (K, R, H, J), (K, C, H), (K, C, H), (K, C, R, J)
  return States(*(zeros(jnp.float32, layers, batch, *shape) for shape in shapes))


def zeros(dtype: Any, *shape: int) -> jax.Array:
  """Returns an array of zeros with the layout of a cache."""
  x = jnp.zeros(shape, dtype)
  return sharding.reshard(x, spec(x))


def write(
  block: Block, layer: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, position_BT: jax.Array
) -> tuple[Block, jax.Array, jax.Array]:
  """Writes one layer's new keys and values, one or several per row.

  If there are several per row, their positions are consecutive, and begin at the same position in
  all rows. For use inside `shard_map`.

  Returns:
    The block, the keys, and the values. If the cache is int8, the returned keys and values are
    rounded like the stored ones, so a prefill and later decode steps use the same numbers.
    Otherwise keys and values are returned unchanged.
  """
  write_to = functools.partial(_write, layer=layer, position_BT=position_BT)
  scale_lBK2S, dtype = block.scale_lBK2S, k_BTKH.dtype
  (k, *k_scale), (v, *v_scale) = (encode(x, block.v_lBKSH.dtype) for x in (k_BTKH, v_BTKH))
  if scale_lBK2S is not None:
    scale_lBK2S = write_to(scale_lBK2S, jnp.stack(k_scale + v_scale, axis=-1), 4)
    k_BTKH, v_BTKH = decode([k, *k_scale], dtype), decode([v, *v_scale], dtype)
  block = Block(write_to(block.k_lBKHS, k, 4), write_to(block.v_lBKSH, v, 3), scale_lBK2S)
  return block, k_BTKH, v_BTKH


def _write(
  stored: jax.Array, new_BTKX: jax.Array, axis: int, layer: jax.Array, position_BT: jax.Array
) -> jax.Array:
  """Writes new values to one array of a block.

  axis: axis of the array's slots, 3 or 4.
  """
  if new_BTKX.shape[1] == 1:
    row = jnp.arange(len(new_BTKX))[:, None]
    index = (layer, row, slice(None), position_BT)
    return stored.at[index if axis == 3 else (*index[:3], slice(None), position_BT)].set(new_BTKX)
  # For a scatter, XLA would transpose the whole cache, and transpose it back.
  start = [layer, *[jnp.zeros((), jnp.int32)] * 4]
  start[axis] = position_BT[0, 0]
  return jax.lax.dynamic_update_slice(stored, jnp.moveaxis(new_BTKX, 1, axis - 1)[None], start)


def read(block: Block, layer: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
  """Reads a layer's keys [B, K, H, S] and values [B, K, S, H]."""
  k_BKHS, v_BKSH = _decoded(block.k_lBKHS[layer]), _decoded(block.v_lBKSH[layer])
  if block.scale_lBK2S is not None:
    scale_BK2S = block.scale_lBK2S[layer]
    k_BKHS, v_BKSH = k_BKHS * scale_BK2S[:, :, :1], v_BKSH * scale_BK2S[:, :, 1, :, None]
  return k_BKHS.astype(dtype), v_BKSH.astype(dtype)


def encode(x: jax.Array, dtype: Any) -> list[jax.Array]:
  """Converts vectors [..., H] to the stored dtype of a cache.

  Returns [x], or for int8 [integers, scales], so that x is about integers · scale. Each vector has
  a float32 scale, max |x| / 127, so the scales have shape [...]. For H = 128, scales in bfloat16
  would make the cache 1.5 % smaller, but would change values by up to 0.4 %.
  """
  if dtype == jnp.uint16:
    return [jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), dtype)]
  if dtype != jnp.int8:
    return [x.astype(dtype)]
  x = x.astype(jnp.float32)
  scale = jnp.abs(x).max(-1) / 127
  return [jnp.round(x / jnp.where(scale > 0, scale, 1)[..., None]).astype(dtype), scale]


def decode(parts: Sequence[jax.Array], dtype: Any) -> jax.Array:
  """Undoes `encode`, up to rounding; returns [..., H] in `dtype`."""
  x, *scale = parts
  return (_decoded(x) * scale[0][..., None] if scale else _decoded(x)).astype(dtype)


def tile(dtype: Any) -> int:
  """Returns the number of positions in a hardware tile of a TPU, at least 16."""
  return max(16, 32 // jnp.dtype(dtype).itemsize)


def insert(cache: Any, rows: Any, index_r: jax.Array) -> Any:
  """Writes row j of `rows` to row `index_r[j]` of the cache.

  Rows with an index out of range are dropped. `rows` may have fewer slots than the cache; later
  slots are unchanged. Cache and rows may also be trees of `States`. For use inside `shard_map`.
  """

  def write_rows(x: jax.Array, new: jax.Array) -> jax.Array:
    return x.at[:, index_r, *map(slice, new.shape[2:])].set(new, mode="drop")

  return jax.tree.map(write_rows, cache, rows)


def copy_row(cache: Any, row: jax.Array, source: Any, source_row: jax.Array) -> Any:
  """Copies a row of `source` to the first slots of row `row` of the cache.

  `source` may have fewer slots than the cache; later slots are unchanged. Cache and source may also
  be trees of `States`. For use inside `shard_map`.
  """

  def copy(x, s):
    part = jax.lax.dynamic_slice_in_dim(s, source_row, 1, axis=1)
    return jax.lax.dynamic_update_slice(x, part, (0, row, *[0] * (x.ndim - 2)))

  return jax.tree.map(copy, cache, source)


def decoded(block: Block) -> Block:
  """Converts bits in uint16 to bfloat16; other dtypes are unchanged."""
  return jax.tree.map(_decoded, block)


def _decoded(x: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
