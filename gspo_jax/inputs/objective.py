"""Trial of a user's loss and estimator of advantages on small arrays, before a run."""

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import objectives as O
from gspo_jax.learner.objective import configured_loss
from gspo_jax.rollouts.advantages import advantages
from gspo_jax.settings.losses import find_loss
from gspo_jax.settings.objective import ObjectiveConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import ModelInputs, TrainBatch
from gspo_jax.system import user_code

_B, _T = 4, 6  # Responses and tokens of the trial.
_REMEDIES = {  # By words in the messages of JAX's errors.
  "TracerBoolConversion": "; a value of a compiled function cannot be a condition: use jnp.where",
  "TracerArrayConversion": "; use jax.numpy instead of numpy",
}


def check_objective(config: RunConfig) -> None:
  """Raises ValueError if the user's loss or estimator fails."""
  if not config.has_iterations:
    return
  if config.objective.name not in O.POLICY_LOSSES:
    _check_loss(config.objective, config.sampling.max_new_tokens)
  if config.objective.advantage_kind not in O.ESTIMATORS:
    _check_estimator(config.objective, config.rl.group_size, config.reward.right_from)


def _check_loss(config: ObjectiveConfig, max_length: int) -> None:
  label, batch = f"objective.name={config.name!r}", _batch()

  def numerator(logp_BT: jax.Array, hyperparameters: dict) -> tuple:
    entropy_BT = jnp.ones_like(logp_BT)
    sums = configured_loss(config, logp_BT, entropy_BT, batch, max_length, hyperparameters)
    return sums[0].numerator, sums

  logp_BT = batch.old_logp_BT + 0.1 * np.cos(np.arange(_B * _T, dtype=np.float32)).reshape(_B, _T)
  hyperparameters = jax.tree.map(float, config.hyperparameters())
  try:
    (_, sums), gradient_BT = jax.jit(jax.value_and_grad(numerator, has_aux=True))(
      logp_BT, hyperparameters
    )
  except Exception as error:  # User code may raise anything.
    advantage = f"advantage_BT [{_B}, {_T}]"
    if not find_loss(config.name).by_token:
      advantage = f"advantage_B [{_B}], since its third argument is not called advantage_BT"
    raise ValueError(
      f"{label} fails: {_describe(error, config.name)}; tried on log-probs and mask [{_B}, {_T}], "
      f"and on {advantage}"
    ) from error
  total, _, clipped_BT = sums
  fault = ""
  if clipped_BT.shape != (_B, _T):
    fault = f"returned clipped_BT of shape {list(clipped_BT.shape)}, expected [{_B}, {_T}]"
  elif not (np.isfinite(total.compute()) and np.isfinite(gradient_BT).all()):
    fault = "is not finite, or has no finite gradient"
  elif np.any(gradient_BT[batch.mask_BT == 0]):
    fault = "trains tokens outside mask_BT; multiply by the mask"
  elif not np.any(gradient_BT):
    fault = "does not depend on logp_BT"
  if fault:
    label += user_code.place(config.name)
    raise ValueError(f"{label} {fault} (tried on arrays [{_B}, {_T}])")


def _batch() -> TrainBatch:
  """Returns a batch with masked tokens and an empty row."""
  zeros_BT = np.zeros((_B, _T), np.int32)
  mask_BT = np.float32(np.arange(_T) < np.array([[6], [4], [2], [0]]))
  old_logp_BT = -1 - np.arange(_B * _T, dtype=np.float32).reshape(_B, _T) / _T
  return TrainBatch(
    ModelInputs(tokens_BT=zeros_BT, segments_BT=zeros_BT + 1),
    mask_BT=mask_BT,
    advantage_B=np.float32([1, -1, 0.5, 0]),
    old_logp_BT=old_logp_BT,
    sampler_logp_BT=old_logp_BT,
    ref_logp_BT=old_logp_BT - 0.1,
    own_logp_BT=old_logp_BT,
  )


def _check_estimator(config: ObjectiveConfig, group_size: int, right_from: float | None) -> None:
  label, shape = f"objective.advantage={config.advantage_kind!r}", (3, group_size)
  reward_PG = np.float32(np.arange(3 * group_size).reshape(shape) % 3 > 0)
  reward_PG[-1] = 1  # A group of equal rewards.
  valid_PG = np.ones(shape, bool)
  valid_PG[0, -1] = group_size == 1
  try:
    advantage_PG = advantages(config, reward_PG, valid_PG, right_from)
  except Exception as error:  # User code may raise anything.
    reason = _describe(error, config.advantage_kind)
    raise ValueError(f"{label} fails on rewards {list(shape)}: {reason}") from error
  fault = ""
  if not np.isfinite(advantage_PG[:-1]).all():
    fault = "is not finite"
  elif not np.isfinite(advantage_PG).all():
    fault = "is not finite for a group of equal rewards; do not divide by their deviation of 0"
  elif not np.any(advantage_PG):
    fault = "is 0 for rewards that differ"
  if fault:
    label += user_code.place(config.advantage_kind)
    raise ValueError(f"{label} {fault} (tried on rewards {list(shape)})")


def _describe(error: Exception, name: str) -> str:
  """Describes an error of the user's function, with its remedy."""
  text = user_code.describe_error(error, name)
  return text + next((remedy for word, remedy in _REMEDIES.items() if word in text), "")
