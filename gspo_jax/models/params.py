"""Parameters of a model as whole trees: their shapes, the types that they are read in, adapters."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from gspo_jax import sharding
from gspo_jax.models import lora, transformer, weights
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.training import LoraConfig

NO_ADAPTERS = LoraConfig()


def with_adapters(
  params: Any,
  model: ModelConfig,
  config: LoraConfig,
  dtype: Any,
  mesh: jax.sharding.Mesh,
  seed: int,
) -> Any:
  """The parameters, frozen and with adapters; as they are if the rank is 0. With new ones the model
  is the same; those of `config.adapter` are read.

  Raises:
    FileNotFoundError, CheckpointError: as `peft.check`.
  """
  if not config.rank:
    return params
  declared = lora.table(transformer.table(model), config)
  layout = weights.shardings(declared, sharding.TRAIN, mesh)

  @functools.partial(jax.jit, out_shardings=layout)
  def adapt(params, key):
    fresh = weights.init(declared, key, jnp.float32)  # what is not an adapter is never made
    return lora.adapt(as_read(params, model, dtype), fresh)

  params = adapt(params, jax.random.key(seed))
  if not config.adapter:
    return params
  from gspo_jax.models.hf import peft  # safetensors is only needed here

  return peft.load(config.adapter, params, model, config)


def as_read(params: Any, model: ModelConfig, compute_dtype: Any) -> Any:
  """The parameters in the types in which passes of that compute type read them: what is needed of
  those that are never updated. Adapters are merged."""
  read = transformer.dtypes(model, compute_dtype)
  # What is so already stays.
  return jax.tree.map(lambda x, dtype: x.astype(dtype), lora.dithered(params), read)


def abstract_params(
  model: ModelConfig,
  mesh: jax.sharding.Mesh,
  rules: sharding.Rules,
  compute_dtype: Any,
  adapters: LoraConfig = NO_ADAPTERS,
) -> Any:
  """Shapes, shardings and types of a model's parameters, as a pass of that compute type reads
  them; with adapters if there are any."""
  declared = lora.table(transformer.table(model), adapters)
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
