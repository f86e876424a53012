"""The training state: new at the start of a phase, or abstract for restoring a checkpoint.

An abstract state has shapes, dtypes and shardings instead of arrays.
"""

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

# Keys of each phase that change the names or shapes of arrays in its training state. An entry that
# ends with a dot means all keys of that section.
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

  The optimizer's moments are split over devices like their parameters.

  Args:
    params: initial parameters, with adapters if the run trains them.
    tx: optimizer.
    adaptive: section `objective.adaptive_clip`.
  """
  zero = jnp.zeros((), jnp.int32)
  moments = jax.jit(tx.init)(lora.split(params)[0])
  state = TrainState(zero, params, moments, skipped=jnp.zeros_like(zero))
  return adaptive_clip.begin(state, adaptive)


def with_critic(
  state: TrainState, params: head.Critic, tx: optax.GradientTransformation
) -> TrainState:
  """Returns the state with a critic and its optimizer's moments."""
  return StateWithCritic(**vars(state), critic=CriticState(params, jax.jit(tx.init)(params)))


def params_of(state: TrainState) -> dict[str, Any]:
  """Returns the trained parameters by their names in `Pass.reads`."""
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
  """Returns the abstract training state, for restoring a checkpoint.

  Args:
    model: section `model`.
    mesh: the trainer's mesh.
    tx: optimizer of the policy.
    adapters: section `lora`. By default there are no adapters.
    frozen_dtype: dtype of frozen parameters, if there are adapters. Weights declared as `wide`
      (models/weights.py) stay float32. If there are no adapters, all parameters are float32.
    adaptive: section `objective.adaptive_clip`.
    critic: training settings of the critic. None means no critic.
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
  """Raises ValueError if the newest checkpoint does not fit the configuration.

  A checkpoint does not fit if the names or shapes of its arrays differ from those of the configured
  training state. The message names the changed keys. If no key in `changed` affects these arrays,
  there is no check. Only the phase from which the run resumes is checked: RL, or SFT if RL has no
  checkpoint.

  Args:
    config: current configuration.
    workdir: directory of the run.
    changed: lines `key: old -> new`, from `provenance.changes`.
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
          f"checkpoint {path} has another training state than the configuration, because these "
          f"keys changed: {'; '.join(suspects)}. Restore their values, or use another --workdir"
        )
    if steps:  # The run resumes in this phase.
      return
