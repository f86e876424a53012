"""The training state: made at the start of a phase, described for restoring one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from gspo_jax import sharding
from gspo_jax.learner import adaptive_clip
from gspo_jax.learner.critic import Critic
from gspo_jax.models import critic as critics
from gspo_jax.models import lora, transformer, weights
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.objective import FIXED, AdaptiveClipConfig
from gspo_jax.structs import CriticState, StateWithCritic, TrainState


def new_state(
  params: Any,
  tx: optax.GradientTransformation,
  adaptive: AdaptiveClipConfig = FIXED,
) -> TrainState:
  """A training state at step 0; the optimizer's moments are laid out as the parameters that it
  changes."""
  zero = jnp.zeros((), jnp.int32)
  moments = jax.jit(tx.init)(lora.split(params)[0])
  state = TrainState(zero, params, moments, skipped=jnp.zeros_like(zero))
  return adaptive_clip.begin(state, adaptive)


def with_critic(
  state: TrainState, params: critics.Critic, tx: optax.GradientTransformation
) -> TrainState:
  """The state with a critic and the moments of its optimizer."""
  return StateWithCritic(**vars(state), critic=CriticState(params, jax.jit(tx.init)(params)))


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
    return lora.adapt(params, declared, fresh, dtype)

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
  one = lambda w, s: jax.ShapeDtypeStruct(w.shape, w.read_as(compute_dtype), sharding=s)  # noqa: E731
  return jax.tree.map(one, declared, weights.shardings(declared, rules, mesh))


def abstract_state(
  model: ModelConfig,
  mesh: jax.sharding.Mesh,
  tx: optax.GradientTransformation,
  rank: int = 0,
  frozen_dtype: Any = jnp.float32,
  adaptive: AdaptiveClipConfig = FIXED,
  critic: Critic | None = None,
) -> TrainState:
  """Shapes and shardings of a training state, for restoring one without making one first. With
  adapters, the parameters are as passes of compute type `frozen_dtype` read them."""
  params = abstract_params(model, mesh, sharding.TRAIN, frozen_dtype if rank else jnp.float32, rank)
  state = jax.eval_shape(lambda p: new_state(p, tx, adaptive), params)
  if critic is not None:
    params = abstract_critic(critic, model, mesh)
    state = jax.eval_shape(lambda s, p: with_critic(s, p, critic.tx), state, params)
  return abstract(state, mesh)


def abstract_critic(critic: Critic, model: ModelConfig, mesh: jax.sharding.Mesh) -> critics.Critic:
  """Shapes and shardings of a critic's parameters, in float32."""
  declared = critics.table(model, critic.config.name == "model")
  one = lambda w, s: jax.ShapeDtypeStruct(w.shape, jnp.float32, sharding=s)  # noqa: E731
  return jax.tree.map(one, declared, weights.shardings(declared, sharding.TRAIN, mesh))


def abstract(tree: Any, mesh: jax.sharding.Mesh) -> Any:
  """ShapeDtypeStructs on real devices: `jax.eval_shape` leaves them on an abstract mesh."""

  def one(x):
    pspec = getattr(x.sharding, "spec", jax.P())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, pspec))

  return jax.tree.map(one, tree)
