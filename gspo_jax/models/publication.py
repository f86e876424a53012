"""The trainer's weights for the sampler: another layout, and the types in which they are read."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from gspo_jax import sharding
from gspo_jax.sharding import P


def publisher(
  shardings: Any, dtypes: Any, merge: Callable[[Any], Any] = lambda params: params
) -> Callable[[Any], Any]:
  """A jitted copy of parameters from the training layout to `shardings`, each cast to its own of
  `dtypes`: those in which the trainer reads them, or sampler and trainer are two networks.

  Stacked layers that are split over "fsdp" are put together one by one: XLA would hold all of them
  a second time, in the order in which the parts arrive.

  `merge` makes the parameters that these are of those that are trained.
  """

  def cast(x: jax.Array, target: NamedSharding, dtype: Any) -> jax.Array:
    if x.ndim < 3 or "fsdp" not in sharding.spec_of(x) or sharding.axis_size("fsdp") == 1:
      return x.astype(dtype)
    return jax.lax.map(lambda layer: sharding.reshard(layer.astype(dtype), P(*target.spec[1:])), x)

  return jax.jit(
    lambda params: jax.tree.map(cast, merge(params), shardings, dtypes), out_shardings=shardings
  )


def publisher_to(
  shardings: Any, dtypes: Any, merge: Callable[[Any], Any] = lambda params: params
) -> Callable[[Any], Any]:
  """The same for `shardings` of other devices of this process; in place when it returns."""
  cast = jax.jit(lambda params: jax.tree.map(jnp.astype, merge(params), dtypes))
  return lambda params: jax.block_until_ready(jax.device_put(cast(params), shardings))
