"""The weights that a run begins with: random ones, published ones, or those of another run."""

import dataclasses
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
  name = began_with.get("checkpoint", config.weights)
  if origin := hosts.of_first(lambda: start.find(name)):  # its run may be writing the next one
    return of_checkpoint(origin, config.model, mesh, jnp.float32)
  if config.weights != "random":
    from gspo_jax.models import hf  # safetensors is only needed here

    return hf.load(config.weights, mesh=mesh, rules=sharding.TRAIN)[0]
  shardings = transformer.shardings(config.model, sharding.TRAIN, mesh)
  init = jax.jit(lambda key: transformer.init(config.model, key), out_shardings=shardings)
  return init(jax.random.key(config.seed_of("init")))


def of_checkpoint(
  origin: start.Start, model: ModelConfig, mesh: jax.sharding.Mesh, dtype: Any, key: str = "weights"
) -> Any:
  """The parameters of a checkpoint in the layout of training, as a pass of compute type `dtype`
  reads them; adapters are merged. Raises ValueError as `start.restore` does, naming `key`."""
  like = abstract_params(model, mesh, sharding.TRAIN, dtype, origin.lora_rank)
  params = start.restore(origin, like, key)
  if not origin.lora_rank:
    return params
  plain = abstract_params(model, mesh, sharding.TRAIN, dtype)
  plain = jax.tree.map(lambda x: x.sharding, plain)
  return jax.block_until_ready(jax.jit(lora.merged, out_shardings=plain)(params))
