"""The training state: made at the start of a phase, described for restoring one."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from gspo_jax import sharding
from gspo_jax.models import transformer
from gspo_jax.models.sizes import ModelConfig
from gspo_jax.structs import TrainState


def new_state(params: Any, tx: optax.GradientTransformation) -> TrainState:
  """A training state at step 0; the optimizer's moments are laid out as the parameters."""
  zero = jnp.zeros((), jnp.int32)
  return TrainState(zero, params, jax.jit(tx.init)(params), skipped=jnp.zeros_like(zero))


def abstract_params(
  model: ModelConfig, mesh: jax.sharding.Mesh, rules: sharding.Rules, compute_dtype: Any
) -> Any:
  """Shapes, shardings and types of a model's parameters, as a pass of that compute type reads
  them."""
  layout, read = transformer.shardings(model, rules, mesh), transformer.dtypes(model, compute_dtype)
  one = lambda w, s, dtype: jax.ShapeDtypeStruct(w.shape, dtype, sharding=s)  # noqa: E731
  return jax.tree.map(one, transformer.table(model), layout, read)


def abstract_state(
  model: ModelConfig, mesh: jax.sharding.Mesh, tx: optax.GradientTransformation
) -> TrainState:
  """Shapes and shardings of a training state, for restoring one without making one first."""
  params = abstract_params(model, mesh, sharding.TRAIN, jnp.float32)
  return abstract(jax.eval_shape(lambda p: new_state(p, tx), params), mesh)


def abstract(tree: Any, mesh: jax.sharding.Mesh) -> Any:
  """ShapeDtypeStructs on real devices: `jax.eval_shape` leaves them on an abstract mesh."""

  def one(x):
    pspec = getattr(x.sharding, "spec", jax.P())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, pspec))

  return jax.tree.map(one, tree)
