"""Publication: copies of the trainer's weights, in the sampler's layout and dtypes."""

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


def publisher(shardings: Any, dtypes: Any) -> Callable[[Any], Any]:
  """Returns a jitted function: parameters -> copies in `shardings` and `dtypes`.

  Adapters are merged. If a matrix has adapters or is split over "fsdp", its stacked layers are
  published one by one. For all layers at once, XLA would store their sums in float32, or the
  gathered layers twice.

  Args:
    shardings: layout of the sampler's parameters.
    dtypes: dtypes of the sampler's parameters; for matrices in eight bits, an `Int8` of dtypes.
      Trainer and sampler are the same network only if `dtypes` are the trainer's compute dtypes.
  """

  def publish(x: Any, target: Any, dtype: Any) -> Any:
    if not lora.is_adapted(x) and not _is_gathered(x):
      return _convert(x, dtype)

    def move(x: jax.Array, target: NamedSharding) -> jax.Array:
      return sharding.reshard(x, P(*target.spec[1:]))

    return jax.lax.map(lambda layer: jax.tree.map(move, _convert(layer, dtype), target), x)

  return jax.jit(
    lambda params: _map_weights(publish, params, shardings, dtypes), out_shardings=shardings
  )


def _is_gathered(x: jax.Array) -> bool:
  """Whether x has matrices of stacked layers, split over "fsdp"."""
  return x.ndim > 2 and "fsdp" in sharding.spec_of(x) and sharding.axis_size("fsdp") > 1


def publisher_to(shardings: Any, dtypes: Any) -> Callable[[Any], Any]:
  """Returns a function: parameters -> copies on other devices of this process.

  The arguments are those of `publisher`. The copies are complete when the returned function
  returns.
  """
  convert = jax.jit(lambda params: _map_weights(_convert, params, dtypes))
  return lambda params: jax.block_until_ready(jax.device_put(convert(params), shardings))


def _map_weights(function: Callable, params: Any, *trees: Any) -> Any:
  """Maps over weights; a weight with its adapter is one leaf."""
  return jax.tree.map(function, params, *trees, is_leaf=lora.is_adapted)


def _convert(x: jax.Array | lora.Adapted, dtype: Any) -> Any:
  """Merges an adapter, and casts or quantises the result."""
  x = lora.dithered(x)
  return quantise(x, dtype.inputs) if is_int8(dtype) else x.astype(dtype)


@functools.partial(jax.jit, static_argnames="model")
def in_eight_bits(params: Any, model: ModelConfig) -> Any:
  """Rounds the layers' matrices to eight bits, unless they are `Int8` already."""

  def narrow(x: Any, dtype: Any) -> Any:
    return quantise(x, dtype.inputs) if is_int8(dtype) and not is_int8(x) else x

  dtypes = weights.dtypes(transformer.sampler_table(model, "int8"), jnp.float32)
  params = _map_weights(lora.dithered, params)  # Merges adapters.
  return jax.tree.map(narrow, params, dtypes, is_leaf=is_int8)


def _unchanged(params: Any) -> Any:
  return params


@dataclasses.dataclass(frozen=True)
class Publishers:
  """Two functions from the trainer's parameters to the sampler's. By default they copy nothing."""

  load: Callable[[Any], Any] = _unchanged  # Applied in `Engine.load`, on the trainer's mesh.
  copy: Callable[[Any], Any] = _unchanged  # Copies to the sampler's separate mesh, before `load`.


def make_publishers(shardings: Any, dtypes: Any, separate: bool) -> Publishers:
  """Builds the publishers of a run.

  Args:
    shardings: layout of the sampler's parameters.
    dtypes: dtypes of the sampler's parameters.
    separate: whether the sampler has a separate mesh.
  """
  if separate:
    return Publishers(copy=publisher_to(shardings, dtypes))
  return Publishers(load=publisher(shardings, dtypes))
