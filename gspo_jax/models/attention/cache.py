"""Dense key/value cache: one slot per position, one row per sequence.

`pages` has the paged cache.
"""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.settings.model import ModelConfig
from gspo_jax.sharding import BATCH, P


def spec(x: Any) -> P:
  """PartitionSpec of an array of a dense or paged cache."""
  return P(None, BATCH, "tensor", *[None] * (x.ndim - 3))


@flax.struct.dataclass
class Cache:
  """Keys and values by position: slot s of a row holds position s.

  No lengths are stored: a query at position p reads slots 0..p, and padding of a prefill is
  overwritten before it can be read. Layers are stacked as in the blocks of the parameters.

  Keys have the slots last, values the head's width: the axes of scores and outputs of one query. On
  CPU bfloat16 is stored as bits in uint16: otherwise XLA would convert a whole array to float32 and
  back for each partial write.
  """

  k_lBKHS: tuple[jax.Array, ...]
  v_lBKSH: tuple[jax.Array, ...]

  @property
  def dtype(self) -> Any:
    stored = self.v_lBKSH[0].dtype
    return jnp.dtype(jnp.bfloat16) if stored == jnp.uint16 else stored

  def block(self, i: int) -> tuple[jax.Array, jax.Array]:
    """Returns the keys and values of the i-th block of layers."""
    return self.k_lBKHS[i], self.v_lBKSH[i]

  def with_blocks(self, blocks: Sequence[tuple[jax.Array, jax.Array]]) -> "Cache":
    return Cache(*(tuple(side) for side in zip(*blocks)))


def allocate(
  config: ModelConfig, batch: int, length: int, dtype: Any, layers: Sequence[int] | None = None
) -> Cache:
  """Allocates an empty cache for `batch` rows of up to `length` positions.

  layers: number of layers in each block of the parameters. None means as in `transformer.table`.
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
  """Writes one layer's new keys and values, one or several per row.

  Several are consecutive, from the same position in all rows. For use inside `shard_map`.
  """
  k_lBKHS, v_lBKSH = block
  k_BTKH, v_BTKH = _encoded(k_BTKH, k_lBKHS.dtype), _encoded(v_BTKH, v_lBKSH.dtype)
  if k_BTKH.shape[1] == 1:
    row = jnp.arange(len(k_BTKH))[:, None]
    return (
      k_lBKHS.at[layer, row, :, :, position_BT].set(k_BTKH),
      v_lBKSH.at[layer, row, :, position_BT].set(v_BTKH),
    )
  # One slice: a scatter would make XLA transpose the whole cache, and back.
  zero, first = jnp.zeros((), jnp.int32), position_BT[0, 0]
  k_1BKHT, v_1BKTH = jnp.moveaxis(k_BTKH, 1, 3)[None], jnp.swapaxes(v_BTKH, 1, 2)[None]
  return (
    jax.lax.dynamic_update_slice(k_lBKHS, k_1BKHT, (layer, zero, zero, zero, first)),
    jax.lax.dynamic_update_slice(v_lBKSH, v_1BKTH, (layer, zero, zero, first, zero)),
  )


def read(
  block: tuple[jax.Array, jax.Array], layer: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
  """Returns keys [B, K, H, S] and values [B, K, S, H] of a layer."""
  k_BKHS, v_BKSH = (_decoded(x[layer]).astype(dtype) for x in block)
  return k_BKHS, v_BKSH


def insert(cache: Cache, rows: Cache, index_r: jax.Array) -> Cache:
  """Writes row j of `rows` to row index_j; drops indices out of range.

  `rows` may have fewer slots. For use inside `shard_map`.
  """
  T = rows.v_lBKSH[0].shape[3]
  keys, values = zip(cache.k_lBKHS, rows.k_lBKHS), zip(cache.v_lBKSH, rows.v_lBKSH)
  return Cache(
    tuple(x.at[:, index_r, :, :, :T].set(new, mode="drop") for x, new in keys),
    tuple(x.at[:, index_r, :, :T].set(new, mode="drop") for x, new in values),
  )


def copy_row(cache: Cache, row: jax.Array, source: Cache, source_row: jax.Array) -> Cache:
  """Copies a row of `source` to a row's start, in place.

  `source` may have fewer slots. For use inside `shard_map`.
  """

  def copy(x, s):
    part = jax.lax.dynamic_slice_in_dim(s, source_row, 1, axis=1)
    return jax.lax.dynamic_update_slice(x, part, (0, row, 0, 0, 0))

  return jax.tree.map(copy, cache, source)


def decoded(cache: Cache) -> Cache:
  """Returns the cache with bits in uint16 converted to bfloat16."""
  return jax.tree.map(_decoded, cache)


def _encoded(x: jax.Array, dtype: Any) -> jax.Array:
  """Converts an array to the stored dtype of a cache."""
  if dtype != jnp.uint16:
    return x.astype(dtype)
  return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), dtype)


def _decoded(x: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
