"""Key/value cache, the dense form: one slot per position, one row per sequence. pages.py is the
other one, for TPUs and for longer windows than there is memory for."""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.models.sizes import ModelConfig
from gspo_jax.sharding import BATCH, P


def spec(x: Any) -> P:
  """PartitionSpec of an array of a cache, in either form."""
  return P(None, BATCH, "tensor", *[None] * (x.ndim - 3))


@flax.struct.dataclass
class Cache:
  """Slot s of a row holds the key and value of position s, so no lengths are kept: a query at
  position p reads slots 0..p, and whatever a padded prefill left further on is overwritten before
  it can be read. Layers are stacked as in the blocks of the parameters.

  One query reads both arrays along their last axis: keys lie across the slots, values along them.
  """

  k_lBKHS: tuple[jax.Array, ...]
  v_lBKSH: tuple[jax.Array, ...]

  @property
  def dtype(self) -> Any:
    return self.v_lBKSH[0].dtype

  def block(self, i: int) -> tuple[jax.Array, jax.Array]:
    """What the i-th block of layers reads and writes."""
    return self.k_lBKHS[i], self.v_lBKSH[i]

  def with_blocks(self, blocks: Sequence[tuple[jax.Array, jax.Array]]) -> "Cache":
    return Cache(*(tuple(side) for side in zip(*blocks)))


def allocate(
  config: ModelConfig, batch: int, length: int, dtype: Any, layers: Sequence[int] | None = None
) -> Cache:
  """An empty cache for `batch` rows of up to `length` positions.

  layers: how many each block of the parameters stacks; default: as `transformer.table` does.
  """
  layers = [count for _, count in config.runs()] if layers is None else layers
  K, H = config.num_kv_heads, config.head_dim

  def zeros(*shape: int) -> jax.Array:
    x = jnp.zeros(shape, dtype)
    return sharding.reshard(x, spec(x))

  return Cache(
    tuple(zeros(l, batch, K, H, length) for l in layers),
    tuple(zeros(l, batch, K, length, H) for l in layers),
  )


def write(
  block: tuple[jax.Array, jax.Array],
  layer: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  position_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Writes new keys and values of one layer: one of each row, or several that follow each other,
  from the same position in all rows. For use on each device's part.
  """
  k_lBKHS, v_lBKSH = block
  k_BTKH, v_BTKH = k_BTKH.astype(k_lBKHS.dtype), v_BTKH.astype(v_lBKSH.dtype)
  if k_BTKH.shape[1] == 1:
    row = jnp.arange(len(k_BTKH))[:, None]
    return (
      _set(k_lBKHS, (layer, row, slice(None), slice(None), position_BT), k_BTKH),
      _set(v_lBKSH, (layer, row, slice(None), position_BT), v_BTKH),
    )
  # One slice: XLA would bring the whole cache into another order, and back, for a scatter.
  zero, first = jnp.zeros((), jnp.int32), position_BT[0, 0]
  k_1BKHT, v_1BKTH = jnp.moveaxis(k_BTKH, 1, 3)[None], jnp.swapaxes(v_BTKH, 1, 2)[None]
  return (
    jax.lax.dynamic_update_slice(k_lBKHS, k_1BKHT, (layer, zero, zero, zero, first)),
    jax.lax.dynamic_update_slice(v_lBKSH, v_1BKTH, (layer, zero, zero, first, zero)),
  )


def _set(x: jax.Array, index: tuple, value: jax.Array, mode: str | None = None) -> jax.Array:
  """x.at[index].set(value), of the same type. bfloat16 as the integers of its bits: XLA on CPU
  would widen the whole cache to float32 for each scatter, and narrow it again."""
  if x.dtype != jnp.bfloat16:
    return x.at[index].set(value, mode=mode)
  x, value = (jax.lax.bitcast_convert_type(a, jnp.uint16) for a in (x, value))
  return jax.lax.bitcast_convert_type(x.at[index].set(value, mode=mode), jnp.bfloat16)


def insert(cache: Cache, rows: Cache, index_r: jax.Array) -> Cache:
  """Row j of `rows`, which may be shorter, to row index_j; one that is out of range is dropped.

  For use on each device's part.
  """

  def keys(x_lBKHS, new_lrKHT):
    where = (slice(None), index_r, slice(None), slice(None), slice(new_lrKHT.shape[-1]))
    return _set(x_lBKHS, where, new_lrKHT, mode="drop")

  def values(x_lBKSH, new_lrKTH):
    where = (slice(None), index_r, slice(None), slice(new_lrKTH.shape[-2]))
    return _set(x_lBKSH, where, new_lrKTH, mode="drop")

  return Cache(
    tuple(map(keys, cache.k_lBKHS, rows.k_lBKHS)), tuple(map(values, cache.v_lBKSH, rows.v_lBKSH))
  )


def copy_row(cache: Cache, row: jax.Array, source: Cache, source_row: jax.Array) -> Cache:
  """One row of `source`, which may be shorter, to the start of a row of `cache`, in place.

  For use on each device's part.
  """

  def one(x, s):
    part = jax.lax.dynamic_slice_in_dim(s, source_row, 1, axis=1)
    return jax.lax.dynamic_update_slice(x, part, (0, row, 0, 0, 0))

  return jax.tree.map(one, cache, source)
