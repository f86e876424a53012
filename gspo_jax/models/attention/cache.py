"""Key/value cache, the dense form: one slot per position, one row per sequence. pages.py is the
other one, for TPUs and for longer windows than there is memory for."""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.settings.model import ModelConfig
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
  On CPU bfloat16 is held as its bits, in uint16: XLA would widen a whole array to float32, and
  narrow it again, for each write into a part of it.
  """

  k_lBKHS: tuple[jax.Array, ...]
  v_lBKSH: tuple[jax.Array, ...]

  @property
  def dtype(self) -> Any:
    held = self.v_lBKSH[0].dtype
    return jnp.dtype(jnp.bfloat16) if held == jnp.uint16 else held

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
  bits = jnp.dtype(dtype) == jnp.bfloat16 and sharding.platform() == "cpu"

  def zeros(*shape: int) -> jax.Array:
    x = jnp.zeros(shape, jnp.uint16 if bits else dtype)
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
  k_BTKH, v_BTKH = _encoded(k_BTKH, k_lBKHS.dtype), _encoded(v_BTKH, v_lBKSH.dtype)
  if k_BTKH.shape[1] == 1:
    row = jnp.arange(len(k_BTKH))[:, None]
    return (
      k_lBKHS.at[layer, row, :, :, position_BT].set(k_BTKH),
      v_lBKSH.at[layer, row, :, position_BT].set(v_BTKH),
    )
  # One slice: XLA would bring the whole cache into another order, and back, for a scatter.
  zero, first = jnp.zeros((), jnp.int32), position_BT[0, 0]
  k_1BKHT, v_1BKTH = jnp.moveaxis(k_BTKH, 1, 3)[None], jnp.swapaxes(v_BTKH, 1, 2)[None]
  return (
    jax.lax.dynamic_update_slice(k_lBKHS, k_1BKHT, (layer, zero, zero, zero, first)),
    jax.lax.dynamic_update_slice(v_lBKSH, v_1BKTH, (layer, zero, zero, first, zero)),
  )


def read(
  block: tuple[jax.Array, jax.Array], layer: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
  """Keys [B, K, H, S] and values [B, K, S, H] of one layer."""
  k_BKHS, v_BKSH = (_decoded(x[layer]).astype(dtype) for x in block)
  return k_BKHS, v_BKSH


def insert(cache: Cache, rows: Cache, index_r: jax.Array) -> Cache:
  """Row j of `rows`, which may be shorter, to row index_j; one that is out of range is dropped.

  For use on each device's part.
  """
  T = rows.v_lBKSH[0].shape[3]
  keys, values = zip(cache.k_lBKHS, rows.k_lBKHS), zip(cache.v_lBKSH, rows.v_lBKSH)
  return Cache(
    tuple(x.at[:, index_r, :, :, :T].set(new, mode="drop") for x, new in keys),
    tuple(x.at[:, index_r, :, :T].set(new, mode="drop") for x, new in values),
  )


def copy_row(cache: Cache, row: jax.Array, source: Cache, source_row: jax.Array) -> Cache:
  """One row of `source`, which may be shorter, to the start of a row of `cache`, in place.

  For use on each device's part.
  """

  def copy(x, s):
    part = jax.lax.dynamic_slice_in_dim(s, source_row, 1, axis=1)
    return jax.lax.dynamic_update_slice(x, part, (0, row, 0, 0, 0))

  return jax.tree.map(copy, cache, source)


def decoded(cache: Cache) -> Cache:
  """The same with arrays of its type."""
  return jax.tree.map(_decoded, cache)


def _encoded(x: jax.Array, dtype: Any) -> jax.Array:
  """Numbers as an array of a cache, of this type, holds them."""
  if dtype != jnp.uint16:
    return x.astype(dtype)
  return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), dtype)


def _decoded(x: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
