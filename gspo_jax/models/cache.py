"""Key/value cache: one slot per position, one row per sequence."""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.models.sizes import ModelConfig
from gspo_jax.sharding import BATCH, P

SPEC = P(None, BATCH, "tensor", None, None)  # of every cache array


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


def allocate(
  config: ModelConfig, batch: int, length: int, dtype: Any, layers: Sequence[int] | None = None
) -> Cache:
  """An empty cache for `batch` rows of up to `length` positions.

  layers: how many each block of the parameters stacks; default: as `transformer.table` does.
  """
  layers = [count for _, count in config.runs()] if layers is None else layers
  K, H = config.num_kv_heads, config.head_dim

  def zeros(*shape: int) -> jax.Array:
    return sharding.reshard(jnp.zeros(shape, dtype), SPEC)

  return Cache(
    tuple(zeros(l, batch, K, H, length) for l in layers),
    tuple(zeros(l, batch, K, length, H) for l in layers),
  )


def size(config: ModelConfig, batch: int, length: int, dtype: Any) -> int:
  """Bytes of such a cache, over all devices."""
  each = config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize
  return 2 * config.num_layers * batch * length * each


def insert(cache: Cache, rows: Cache, index_r: jax.Array) -> Cache:
  """Row j of `rows`, which may be shorter, to row index_j; one that is out of range is dropped.

  For use on each device's part.
  """

  def keys(x_lBKHS, new_lrKHT):
    return x_lBKHS.at[:, index_r, :, :, : new_lrKHT.shape[-1]].set(new_lrKHT, mode="drop")

  def values(x_lBKSH, new_lrKTH):
    return x_lBKSH.at[:, index_r, :, : new_lrKTH.shape[-2]].set(new_lrKTH, mode="drop")

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
