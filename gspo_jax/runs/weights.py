"""The weights that a run begins with: random ones, published ones, or those of another run."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.models import lora, transformer
from gspo_jax.models.params import abstract_params
from gspo_jax.runs import provenance, start
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.system import hosts


def initial(config: RunConfig, mesh: jax.sharding.Mesh, workdir: Path | None = None) -> Any:
  """What the key `weights` names, in float32 and the layout of training, under the mesh. A run that
  goes on in its `workdir` has those that it began with, whatever has been added there since.

  Raises:
    ValueError: there are none, they are damaged, or of another model.
  """
  began_with = provenance.origin(workdir, dataclasses.asdict(config), "start")
  name = began_with.get("checkpoint", began_with.get("directory", config.weights))
  if origin := hosts.run_on_first_host(
    lambda: start.find(name)
  ):  # its run may be writing the next one
    return of_checkpoint(origin, config.model, mesh, jnp.float32)
  if name != "random":
    from gspo_jax.models import hf  # safetensors is only needed here

    return hf.load(name, mesh=mesh, rules=sharding.TRAIN)[0]
  shardings = transformer.shardings(config.model, sharding.TRAIN, mesh)
  init = jax.jit(lambda key: transformer.init(config.model, key), out_shardings=shardings)
  return init(jax.random.key(config.seed_of("init")))


def of_checkpoint(
  origin: start.Start, model: ModelConfig, mesh: jax.sharding.Mesh, dtype: Any, key: str = "weights"
) -> Any:
  """The parameters of a checkpoint in the layout of training, as a pass of compute type `dtype`
  reads them. Adapters are merged in float32 with frozen weights as they are stored, and the sum is
  rounded once. Raises ValueError as `start.restore` does, naming `key`."""
  plain, adapters = abstract_params(model, mesh, sharding.TRAIN, dtype), origin.adapters
  if not adapters.rank:
    return start.restore(origin, plain, key)

  @functools.partial(jax.jit, out_shardings=jax.tree.map(lambda x: x.sharding, plain))
  def merge(params: Any) -> Any:
    merged = lora.merged(params, jnp.float32)
    return jax.tree.map(lambda x, like: x.astype(like.dtype), merged, plain)

  return jax.block_until_ready(merge(with_adapters_of(origin, model, mesh, key)))


def with_adapters_of(
  origin: start.Start, model: ModelConfig, mesh: jax.sharding.Mesh, key: str
) -> Any:
  """The parameters of a checkpoint and its adapters, as they are stored. Raises as above."""
  stored = origin.config["compute"]["dtype"]
  like = abstract_params(model, mesh, sharding.TRAIN, stored, origin.adapters)
  return start.restore(origin, like, key)
