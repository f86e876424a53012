"""The devices' part of advantages: after the passes of an iteration, before its updates.

The host's part, of rewards, is rollouts/advantages.py.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax import objectives as O
from gspo_jax.learner.critic import Critic
from gspo_jax.objectives.reductions import Mean, merge
from gspo_jax.settings.critic import CriticConfig, DistillationConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import TrainBatch

# From all mini-batches of an iteration to the same with advantages of tokens, and metrics.
Made = tuple[list[TrainBatch], dict[str, jax.Array]]
Part = Callable[[Sequence[TrainBatch]], Made]
EPSILON = 1e-6  # added to the standard deviation of advantages


def make(c: RunConfig, critic: Critic | None) -> Part:
  """The part of the configured estimator."""
  make_part = PARTS.get(c.estimator.name)
  return make_part(c, critic) if make_part else lambda batches: (list(batches), {})


def of_critic(config: CriticConfig, numbers: Mapping[str, float]) -> Part:
  """A jitted function of all mini-batches of an iteration, which need `reward_BT` and
  `old_value_BT`, and with a `kl_coef` `ref_logp_BT`. It returns them with `advantage_BT` and
  `return_BT`, and metrics.

  `value/explained_variance` compares the values with what came of them, Σ γ^k r_{t+k}. (The returns
  of GAE have the values in them, and would flatter.)
  """
  number = {key: float(numbers.get(key, 0.0)) for key in ("discount", "trace", "kl_coef")}

  def of_batch(
    batch: TrainBatch, number: Mapping[str, Any]
  ) -> tuple[TrainBatch, jax.Array, dict[str, Any]]:
    mask_BT, reward_BT, metrics = batch.mask_BT, batch.reward_BT, {}
    if config.kl_coef:
      tokens_BT = jnp.where(mask_BT > 0, batch.old_logp_BT - batch.ref_logp_BT, 0)
      reward_BT = reward_BT - number["kl_coef"] * tokens_BT
      responses = (mask_BT > 0).any(axis=1).sum(dtype=jnp.float32)
      metrics["reward/kl_penalty"] = Mean(number["kl_coef"] * tokens_BT.sum(), responses)
    gamma = number["discount"]
    advantage_BT, return_BT = O.gae(reward_BT, batch.old_value_BT, mask_BT, gamma, number["trace"])
    outcome_BT, _ = O.gae(reward_BT, jnp.zeros_like(reward_BT), mask_BT, gamma, 1.0)
    made = batch.replace(reward_BT=None, advantage_BT=advantage_BT, return_BT=return_BT)
    return made, outcome_BT, metrics

  @jax.jit
  def advantages(batches: Sequence[TrainBatch], number: Mapping[str, Any]) -> Any:
    batches, outcomes, metrics = zip(*(of_batch(batch, number) for batch in batches))
    masks = [batch.mask_BT for batch in batches]
    mean, far = _about_mean([batch.advantage_BT for batch in batches], masks)
    std = jnp.sqrt(_mean([x**2 for x in far], masks))
    row = O.compute(functools.reduce(merge, metrics))
    row |= {"advantage/mean": mean, "advantage/std": std}
    # About their means: squares of values and returns far from 0 would cancel.
    about = [_about_mean(x, masks)[1] for x in ([b.old_value_BT for b in batches], outcomes)]
    explained = map(O.explained_variance.sums, *about, masks)
    row["value/explained_variance"] = functools.reduce(merge, explained).compute()
    if config.normalize:
      scaled = [(b.advantage_BT - mean) / (std + EPSILON) * b.mask_BT for b in batches]
      batches = [b.replace(advantage_BT=x_BT) for b, x_BT in zip(batches, scaled)]
    return list(batches), row

  return lambda batches: advantages(list(batches), number)


def _about_mean(
  values: Sequence[jax.Array], masks: Sequence[jax.Array]
) -> tuple[jax.Array, list[jax.Array]]:
  """The mean over the tokens of all mini-batches, and by how much each [B, T] is above it."""
  mean = _mean(values, masks)
  return mean, [value_BT - mean for value_BT in values]


def _mean(values: Sequence[jax.Array], masks: Sequence[jax.Array]) -> jax.Array:
  sums = [
    Mean(jnp.where(mask_BT > 0, value_BT, 0).sum(), mask_BT.sum())
    for value_BT, mask_BT in zip(values, masks)
  ]
  return functools.reduce(merge, sums).compute()


def of_teacher(config: DistillationConfig) -> Part:
  """The student samples, the teacher scores the same tokens, and each token's advantage is how much
  likelier the teacher finds it than the student did, beside that of its rewards or instead of it.

  Â_t = w Â_reward + c Σ_{u≥t} γ^(u−t) (log π_teacher(y_u) − log π_old(y_u)), with c `coef`, γ
  `discount` and w `reward_weight` (`objectives.distillation_advantages`). The mini-batches need
  `old_logp_BT` and `teacher_logp_BT`, in whose place they have `advantage_BT` then.
  """
  return lambda batches: _distilled(list(batches), config.numbers())


@jax.jit
def _distilled(batches: list[TrainBatch], number: Mapping[str, Any]) -> Made:
  def advantages(batch: TrainBatch) -> TrainBatch:
    reward_BT = batch.advantage_BT
    if reward_BT is None:
      reward_BT = batch.advantage_B[:, None]
    gain_BT = number["coef"] * O.distillation_advantages(
      batch.old_logp_BT, batch.teacher_logp_BT, batch.mask_BT, number["discount"]
    )
    reward_BT = jnp.where(batch.mask_BT > 0, number["reward_weight"] * reward_BT, 0)
    return batch.replace(advantage_BT=reward_BT + gain_BT, teacher_logp_BT=None)

  divergences = [
    O.reverse_kl.sums(batch.old_logp_BT, batch.teacher_logp_BT, batch.mask_BT) for batch in batches
  ]
  metrics = {"distillation/reverse_kl": functools.reduce(merge, divergences)}
  return [advantages(batch) for batch in batches], O.compute(metrics)


PARTS: dict[str, Callable[[RunConfig, Critic | None], Part]] = dict(
  gae=lambda c, critic: of_critic(c.critic, critic.numbers),
  distillation=lambda c, _: of_teacher(c.distillation),
)
