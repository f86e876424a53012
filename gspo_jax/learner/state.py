"""The training state: built at the start of a phase, or described for restoring a checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from etils import epath

from gspo_jax import sharding
from gspo_jax.learner import adaptive_clip
from gspo_jax.learner.critic import Critic, optimizers
from gspo_jax.models import head, lora, transformer
from gspo_jax.models.params import NO_ADAPTERS, abstract, abstract_table
from gspo_jax.runs import checkpoint
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.objective import FIXED, AdaptiveClipConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.settings.training import LoraConfig
from gspo_jax.structs import CriticState, StateWithCritic, TrainState
from gspo_jax.system.meshes import use_mesh

# Keys, or sections with a dot, that decide which arrays a training state has.
_STATE_KEYS = dict(
  rl=(
    *("model.", "lora.rank", "lora.matrices", "rl_optimizer.clip_norm", "critic.name"),
    *("critic_optimizer.clip_norm", "objective.adaptive_clip."),
  ),
  sft=("model.", "sft_optimizer.clip_norm"),
)


def new_state(
  params: Any,
  tx: optax.GradientTransformation,
  adaptive: AdaptiveClipConfig = FIXED,
) -> TrainState:
  """Builds a training state at step 0.

  The optimizer's moments have the layout of their parameters.
  """
  zero = jnp.zeros((), jnp.int32)
  moments = jax.jit(tx.init)(lora.split(params)[0])
  state = TrainState(zero, params, moments, skipped=jnp.zeros_like(zero))
  return adaptive_clip.begin(state, adaptive)


def with_critic(
  state: TrainState, params: head.Critic, tx: optax.GradientTransformation
) -> TrainState:
  """Adds a critic and the moments of its optimizer."""
  return StateWithCritic(**vars(state), critic=CriticState(params, jax.jit(tx.init)(params)))


def params_of(state: TrainState) -> dict[str, Any]:
  """Returns the trained parameters, by their names in passes."""
  policy = dict(policy=state.params)
  return policy if state.critic is None else policy | dict(critic=state.critic.params)


def abstract_state(
  model: ModelConfig,
  mesh: jax.sharding.Mesh,
  tx: optax.GradientTransformation,
  adapters: LoraConfig = NO_ADAPTERS,
  frozen_dtype: Any = jnp.float32,
  adaptive: AdaptiveClipConfig = FIXED,
  critic: Critic | None = None,
) -> TrainState:
  """Returns shapes and shardings of a training state, for restoring a checkpoint.

  With adapters, the parameters have dtype `frozen_dtype`, as used in forward passes.
  """
  table, dtype = transformer.table(model), frozen_dtype if adapters.rank else jnp.float32
  params = abstract_table(lora.table(table, adapters), mesh, sharding.TRAIN, dtype)
  state = jax.eval_shape(lambda p: new_state(p, tx, adaptive), params)
  if critic is not None:
    declared = head.critic_table(model, table if critic.config.name == "model" else None)
    params = abstract_table(declared, mesh, sharding.TRAIN, jnp.float32)
    state = jax.eval_shape(lambda s, p: with_critic(s, p, critic.tx), state, params)
  return abstract(state, mesh)


def state_of_phase(c: RunConfig, phase: str, mesh: jax.sharding.Mesh) -> TrainState:
  """Returns the abstract training state of phase "sft" or "rl"."""
  tx, critic = optimizers(c, phase)
  with use_mesh(mesh):
    if phase == "sft":
      return abstract_state(c.model, mesh, tx)
    adaptive = c.objective.adaptive_clip
    return abstract_state(c.model, mesh, tx, c.lora, c.compute.dtype, adaptive, critic)


def check_state(
  config: RunConfig,
  workdir: Path | epath.Path,
  changed: Sequence[str],
  mesh: jax.sharding.Mesh,
) -> None:
  """Raises ValueError, naming keys, if the newest checkpoint has another training state.

  Args:
    config: current configuration.
    workdir: directory of the run.
    changed: changed keys, from `provenance.changes`.
    mesh: the trainer's mesh.
  """
  has_phase = dict(rl=config.has_iterations, sft="sft" in config.job)
  for phase, keys in _STATE_KEYS.items():
    directory = config.checkpoint.phase_directory(workdir, phase)
    steps = checkpoint.finished(directory) if has_phase[phase] else []
    suspects = [line for line in changed if line.startswith(keys)]
    if steps and suspects:
      path = directory / str(steps[-1])
      expected = checkpoint.shapes(state_of_phase(config, phase, mesh))
      if checkpoint.stored_shapes(path) != expected:
        raise ValueError(
          f"checkpoint {path} has another training state than the configuration "
          f"({'; '.join(suspects)}): put this back, or use another --workdir"
        )
    if steps:  # The run resumes in this phase.
      return
