"""Trees of a model's parameters: adapters, compute dtypes, and abstract arrays to compile with."""

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
  """Freezes the parameters and adds adapters, new or from `config.adapter`.

  New adapters do not change the model's outputs. If the rank is 0, parameters are unchanged.

  Args:
    params: plain parameters, on the trainer's mesh.
    dtype: compute dtype. Frozen parameters are cast as in `transformer.dtypes`.
    seed: seed of new adapters.

  Raises:
    FileNotFoundError, CheckpointError, ValueError: as in `peft.load`.
  """
  if not config.rank:
    return params
  declared = lora.table(transformer.table(model), config)
  layout = weights.shardings(declared, sharding.TRAIN, mesh)

  @functools.partial(jax.jit, out_shardings=layout)
  def adapt(params, key):
    # XLA computes only the adapters of `fresh`, since nothing reads the other weights.
    fresh = weights.init(declared, key, jnp.float32)
    return lora.adapt(as_read(params, model, dtype), fresh)

  params = adapt(params, jax.random.key(seed))
  if not config.adapter:
    return params
  from gspo_jax.models.hf import peft  # Needs safetensors.

  return peft.load(config.adapter, params, model, config)


def as_read(params: Any, model: ModelConfig, compute_dtype: Any) -> Any:
  """Merges adapters, and casts parameters to their compute dtypes.

  Meant for parameters that are never updated: the rounded copies take less memory.
  """
  read = transformer.dtypes(model, compute_dtype)
  # `astype` does not copy arrays that have the dtype already.
  return jax.tree.map(lambda x, dtype: x.astype(dtype), lora.dithered(params), read)


def abstract_params(
  model: ModelConfig,
  mesh: jax.sharding.Mesh,
  rules: sharding.Rules,
  compute_dtype: Any,
  adapters: LoraConfig = NO_ADAPTERS,
) -> Any:
  """Returns ShapeDtypeStructs of parameters in their compute dtypes.

  adapters: configuration of LoRA; rank 0 means plain parameters.
  """
  declared = lora.table(transformer.table(model), adapters)
  return abstract_table(declared, mesh, rules, compute_dtype)


def abstract_table(
  declared: Any, mesh: jax.sharding.Mesh, rules: sharding.Rules, compute_dtype: Any
) -> Any:
  """Returns ShapeDtypeStructs for a table of weights, with shardings."""

  def abstract_weight(weight: weights.Weight, layout: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(weight.shape, weight.read_as(compute_dtype), sharding=layout)

  return jax.tree.map(abstract_weight, declared, weights.shardings(declared, rules, mesh))


def abstract(tree: Any, mesh: jax.sharding.Mesh) -> Any:
  """Places the ShapeDtypeStructs of `jax.eval_shape` on the devices of a mesh."""

  def concrete(x):
    pspec = getattr(x.sharding, "spec", jax.P())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, pspec))

  return jax.tree.map(concrete, tree)
