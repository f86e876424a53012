"""Parameters of a model as whole trees: their shapes, the types that they are read in, adapters."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from gspo_jax import sharding
from gspo_jax.models import lora, transformer, weights
from gspo_jax.settings.model import ModelConfig


def with_adapters(
  params: Any, model: ModelConfig, rank: int, dtype: Any, mesh: jax.sharding.Mesh, seed: int
) -> Any:
  """The parameters, frozen and with new adapters of this rank; as they are if it is 0. The model is
  the same."""
  if not rank:
    return params
  declared = lora.table(transformer.table(model), rank)
  layout = weights.shardings(declared, sharding.TRAIN, mesh)

  @functools.partial(jax.jit, out_shardings=layout)
  def adapt(params, key):
    fresh = weights.init(declared, key, jnp.float32)  # what is not an adapter is never made
    return lora.adapt(as_read(params, model, dtype), fresh)

  return adapt(params, jax.random.key(seed))


def as_read(params: Any, model: ModelConfig, compute_dtype: Any) -> Any:
  """The parameters in the types in which passes of that compute type read them: what is needed of
  those that are never updated."""
  read = transformer.dtypes(model, compute_dtype)
  return jax.tree.map(lambda x, dtype: x.astype(dtype), params, read)  # what is so already stays


def abstract_params(
  model: ModelConfig,
  mesh: jax.sharding.Mesh,
  rules: sharding.Rules,
  compute_dtype: Any,
  rank: int = 0,
) -> Any:
  """Shapes, shardings and types of a model's parameters, as a pass of that compute type reads
  them; with adapters of a rank above 0."""
  declared = transformer.table(model)
  declared = lora.table(declared, rank) if rank else declared
  return abstract_table(declared, mesh, rules, compute_dtype)


def abstract_table(
  declared: Any, mesh: jax.sharding.Mesh, rules: sharding.Rules, compute_dtype: Any
) -> Any:
  """The same of a table of weights."""

  def of_weight(weight: weights.Weight, layout: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(weight.shape, weight.read_as(compute_dtype), sharding=layout)

  return jax.tree.map(of_weight, declared, weights.shardings(declared, rules, mesh))


def abstract(tree: Any, mesh: jax.sharding.Mesh) -> Any:
  """ShapeDtypeStructs on real devices: `jax.eval_shape` leaves them on an abstract mesh."""

  def concrete(x):
    pspec = getattr(x.sharding, "spec", jax.P())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, pspec))

  return jax.tree.map(concrete, tree)
