"""Publication of the trainer's weights to the sampler: layout and dtypes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from gspo_jax import sharding
from gspo_jax.models import lora, transformer, weights
from gspo_jax.models.int8 import is_int8, quantise
from gspo_jax.settings.model import ModelConfig
from gspo_jax.sharding import P


def publisher(
  shardings: Any, dtypes: Any, merge: Callable[[Any], Any] = lambda params: params
) -> Callable[[Any], Any]:
  """Returns a jitted copy of parameters to `shardings`, in `dtypes`.

  With the dtypes of the trainer's reads, sampler and trainer are the same network. Stacked layers
  split over "fsdp" are gathered one by one: XLA would otherwise store all of them twice, the second
  time in order of arrival. `merge` merges adapters into the parameters.
  """

  def cast(x: jax.Array, target: Any, dtype: Any) -> Any:
    if x.ndim < 3 or "fsdp" not in sharding.spec_of(x) or sharding.axis_size("fsdp") == 1:
      return _convert(x, dtype)

    def move(x: jax.Array, target: NamedSharding) -> jax.Array:
      return sharding.reshard(x, P(*target.spec[1:]))

    return jax.lax.map(lambda layer: jax.tree.map(move, _convert(layer, dtype), target), x)

  return jax.jit(
    lambda params: jax.tree.map(cast, merge(params), shardings, dtypes), out_shardings=shardings
  )


def publisher_to(
  shardings: Any, dtypes: Any, merge: Callable[[Any], Any] = lambda params: params
) -> Callable[[Any], Any]:
  """Returns a copy to other devices of this process, complete on return."""
  cast = jax.jit(lambda params: jax.tree.map(_convert, merge(params), dtypes))
  return lambda params: jax.block_until_ready(jax.device_put(cast(params), shardings))


def _convert(x: jax.Array, dtype: Any) -> Any:
  """Casts an array, or rounds a matrix to eight bits."""
  return quantise(x, dtype.inputs) if is_int8(dtype) else x.astype(dtype)


@functools.partial(jax.jit, static_argnames="model")
def in_eight_bits(params: Any, model: ModelConfig) -> Any:
  """Rounds the layers' matrices to eight bits, if they are not."""

  def narrow(x: Any, dtype: Any) -> Any:
    return quantise(x, dtype.inputs) if is_int8(dtype) and not is_int8(x) else x

  dtypes = weights.dtypes(transformer.sampler_table(model, "int8"), jnp.float32)
  return jax.tree.map(narrow, params, dtypes, is_leaf=is_int8)


def _unchanged(params: Any) -> Any:
  return params


@dataclasses.dataclass(frozen=True)
class Publishers:
  """Functions from the trainer's parameters to the sampler's parameters."""

  load: Callable[[Any], Any] = _unchanged  # Applied in `Engine.load`, on the trainer's mesh.
  copy: Callable[[Any], Any] = _unchanged  # Copies to the sampler's separate mesh.


def make_publishers(shardings: Any, dtypes: Any, separate: bool) -> Publishers:
  """Makes the publishers of a run; adapters are merged.

  Args:
    shardings: layout of the sampler's parameters.
    dtypes: dtypes of the sampler's parameters.
    separate: whether the sampler has a separate mesh.
  """
  if separate:
    return Publishers(copy=publisher_to(shardings, dtypes, lora.dithered))
  return Publishers(load=publisher(shardings, dtypes, lora.dithered))
