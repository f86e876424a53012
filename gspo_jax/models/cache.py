"""Key/value cache: one slot per position, one row per sequence."""

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.models.sizes import ModelConfig
from gspo_jax.sharding import BATCH, P

SPEC = P(None, BATCH, None, "tensor", None)  # of every cache array, l B S K H


@flax.struct.dataclass
class Cache:
  """Slot s of a row holds the key and value of position s, so no lengths are kept: a query at
  position p reads slots 0..p, and whatever a padded prefill left further on is overwritten before
  it can be read. Layers are stacked in runs of one kind, as the parameters are."""

  k_lBSKH: tuple[jax.Array, ...]
  v_lBSKH: tuple[jax.Array, ...]

  @property
  def length(self) -> int:
    return self.k_lBSKH[0].shape[2]


def allocate(config: ModelConfig, batch: int, length: int, dtype) -> Cache:
  """An empty cache for `batch` rows of up to `length` positions."""

  def zeros() -> tuple[jax.Array, ...]:
    row = (batch, length, config.num_kv_heads, config.head_dim)
    return tuple(
      sharding.reshard(jnp.zeros((layers, *row), dtype), SPEC) for _, layers in config.runs()
    )

  return Cache(zeros(), zeros())


def repeat(cache: Cache, times: int) -> Cache:
  """Each row `times` times in a row: a prompt's cache handed to the responses of its group."""

  def one(x_lBSKH: jax.Array) -> jax.Array:
    l, B, S, K, H = x_lBSKH.shape
    grouped = jnp.broadcast_to(x_lBSKH[:, :, None], (l, B, times, S, K, H))
    return grouped.reshape(l, B * times, S, K, H)

  return jax.tree.map(one, cache)
