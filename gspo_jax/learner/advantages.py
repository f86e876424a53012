"""Estimators of advantages on the devices, after an iteration's passes and before its updates.

These estimators need arrays computed by the passes: a critic's values, or log-probs of a reference
policy or teacher. All other advantages are computed on the host, in rollouts/advantages.py.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax import objectives as O
from gspo_jax import sharding
from gspo_jax.learner.critic import Critic
from gspo_jax.objectives.advantages import ROUNDING
from gspo_jax.objectives.reductions import Mean, merge
from gspo_jax.settings.critic import CriticConfig, DistillationConfig
from gspo_jax.settings.losses import find_estimator
from gspo_jax.settings.objective import ObjectiveConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.sharding import P
from gspo_jax.structs import AdvantageInputs, TrainBatch

# The mini-batches of an iteration, with advantages filled in, and metrics by name.
Filled = tuple[list[TrainBatch], dict[str, jax.Array]]
# The part of an estimator that runs on the devices: a function of an iteration's mini-batches.
Part = Callable[[Sequence[TrainBatch]], Filled]
EPSILON = 1e-6  # Added to a standard deviation before dividing by it.


def make(c: RunConfig, critic: Critic | None) -> Part:
  """Builds the configured estimator, with metrics of the advantages.

  If the host has computed the advantages, only the metrics are computed.

  Args:
    critic: training settings of the critic. None if the estimator needs no critic.
  """
  make_part, by_token = PARTS.get(c.estimator.name), c.objective.loss.by_token
  part = make_part(c, critic) if make_part else lambda batches: (list(batches), {})

  def with_metrics(batches: Sequence[TrainBatch]) -> Filled:
    batches, row = part(batches)
    return batches, _advantage_metrics(batches, by_token) | row

  return with_metrics


def critic_advantages(config: CriticConfig, hyperparameters: Mapping[str, float]) -> Part:
  """Builds the GAE estimator of advantages and returns from a critic's values.

  The estimator fills `advantage_BT` and `return_BT`. It needs `reward_BT` and `old_value_BT`. If
  `kl_coef` is not 0, it needs `ref_logp_BT`, too. If `bootstrap` is True, it needs `last_value_B`
  and `cut_off_B`, too. If mini-batches have `turn_BT`, GAE is over turns instead of tokens.

  The metrics `advantage/...` are those before normalisation. The metric `value/explained_variance`
  compares the values with discounted sums of later rewards, Σ_k γ^k r_{t+k}. The returns of GAE
  would make the fit look too good, because they include the values.
  """
  names = ("discount", "trace", "kl_coef")
  coefficients = {key: float(hyperparameters.get(key, 0.0)) for key in names}

  def batch_advantages(
    batch: TrainBatch, coefficients: Mapping[str, Any]
  ) -> tuple[TrainBatch, jax.Array, dict[str, Any]]:
    mask_BT, inputs, metrics = batch.mask_BT, batch.advantage_inputs, {}
    reward_BT, old_value_BT = inputs.reward_BT, batch.critic_targets.old_value_BT
    if config.kl_coef:
      tokens_BT = jnp.where(mask_BT > 0, batch.old_logp_BT - batch.ref_logp_BT, 0)
      reward_BT = reward_BT - coefficients["kl_coef"] * tokens_BT
      responses = (mask_BT > 0).any(axis=1).sum(dtype=jnp.float32)
      metrics["reward/kl_penalty"] = Mean(coefficients["kl_coef"] * tokens_BT.sum(), responses)
    gamma, trace, estimate, last_B = coefficients["discount"], coefficients["trace"], O.gae, None
    if inputs.cut_off_B is not None:
      last_B = jnp.where(inputs.cut_off_B, inputs.last_value_B, 0)
    if inputs.turn_BT is not None:
      estimate = functools.partial(O.turn_gae, turn_BT=inputs.turn_BT)
    advantage_BT, return_BT = estimate(
      reward_BT, old_value_BT, mask_BT, discount=gamma, trace=trace, last_value_B=last_B
    )
    no_value_BT = jnp.zeros_like(reward_BT)
    outcome_BT, _ = estimate(reward_BT, no_value_BT, mask_BT, discount=gamma, trace=1.0)
    batch = batch.replace(advantage_inputs=AdvantageInputs())
    return batch.with_fields(advantage_BT=advantage_BT, return_BT=return_BT), outcome_BT, metrics

  @jax.jit
  def advantages(batches: Sequence[TrainBatch], coefficients: Mapping[str, Any]) -> Any:
    batches, outcomes, metrics = zip(*(batch_advantages(batch, coefficients) for batch in batches))
    masks = [batch.mask_BT for batch in batches]
    with_metrics = _moments([batch.advantage_BT for batch in batches], masks)
    row = O.compute(functools.reduce(merge, metrics)) | with_metrics
    # Values and sums are centred first, since squares of numbers far from 0 would lose digits.
    centred = [
      _centre(x, masks)[1] for x in ([b.critic_targets.old_value_BT for b in batches], outcomes)
    ]
    explained = map(O.explained_variance.sums, *centred, masks)
    row["value/explained_variance"] = functools.reduce(merge, explained).compute()
    if config.normalize:
      mean, std, *ends = (row[f"advantage/{name}"] for name in ("mean", "std", "min", "max"))
      alike = ends[1] - ends[0] <= ROUNDING * jnp.maximum(*map(abs, ends))
      scale = jnp.where(alike, 0, 1 / (std + EPSILON))  # Rounding is not scaled up.
      scaled = [(b.advantage_BT - mean) * scale * b.mask_BT for b in batches]
      batches = [b.replace(advantage_BT=x_BT) for b, x_BT in zip(batches, scaled)]
    return list(batches), row

  return lambda batches: advantages(list(batches), coefficients)


def reference_advantages(config: ObjectiveConfig, group_size: int) -> Part:
  """Builds the estimator of advantages from rewards less a KL penalty.

  A response's reward becomes r_i − β Σ_t log π_old/π_ref, with β = `reward_kl_coef`. From these
  rewards, the configured estimator of group rewards (`objectives/estimators.py`) computes the
  advantages. Responses without a trained token are excluded.

  The mini-batches must have `reward_BT`, `old_logp_BT` and `ref_logp_BT`. The estimator fills
  `advantage_B`.
  """
  estimate = find_estimator(config.advantage_kind).of_group

  @jax.jit
  def advantages(batches: Sequence[TrainBatch], coef: float) -> Filled:
    rewards, valid, penalties = [], [], []
    for batch in batches:
      mask_BT = batch.mask_BT > 0
      drift_BT = jnp.where(mask_BT, batch.old_logp_BT - batch.ref_logp_BT, 0)
      penalties.append(coef * drift_BT.sum(axis=1))
      reward_B = batch.advantage_inputs.reward_BT.sum(axis=1) - penalties[-1]
      rewards.append(_group_order(reward_B, batch))
      valid.append(_group_order(mask_BT.any(axis=1), batch))
    reward_PG, valid_PG = (jnp.concatenate(x).reshape(-1, group_size) for x in (rewards, valid))
    advantages = jnp.split(estimate(reward_PG, valid_PG=valid_PG).reshape(-1), len(batches))
    total = Mean(sum(x_B.sum() for x_B in penalties), valid_PG.sum(dtype=jnp.float32))
    batches = [
      b.replace(advantage_inputs=AdvantageInputs(), advantage_B=_row_order(x, b))
      for b, x in zip(batches, advantages)
    ]
    return batches, {"reward/kl_penalty": total.compute()}

  return lambda batches: advantages(list(batches), config.reward_kl_coef)


def _group_order(x_B: jax.Array, batch: TrainBatch) -> jax.Array:
  """Restores the order before `packing.plan`.

  The whole array is copied to every device.
  """
  order_B = batch.order_B
  x_B = sharding.reshard(x_B, P())
  return x_B if order_B is None else x_B[jnp.argsort(sharding.reshard(order_B, P()))]


def _row_order(x_B: jax.Array, batch: TrainBatch) -> jax.Array:
  """Restores the order of the batch's rows.

  The array is split over devices again.
  """
  if batch.order_B is not None:
    x_B = x_B[sharding.reshard(batch.order_B, P())]
  return sharding.reshard(x_B, sharding.BY_ROW)


@functools.partial(jax.jit, static_argnames="by_token")
def _advantage_metrics(batches: list[TrainBatch], by_token: bool) -> dict[str, jax.Array]:
  """Returns metrics of the advantages used by the loss.

  Advantages of tokens are used if the batch has them and the loss reads them (`by_token`).
  Otherwise advantages of responses are used.
  """
  if by_token and batches[0].advantage_BT is not None:
    return _moments([b.advantage_BT for b in batches], [b.mask_BT for b in batches])
  masks = [(b.mask_BT > 0).any(axis=1).astype(jnp.float32) for b in batches]
  return _moments([b.advantage_B for b in batches], masks)


def _moments(values: Sequence[jax.Array], masks: Sequence[jax.Array]) -> dict[str, jax.Array]:
  """Returns mean, standard deviation, minimum and maximum of the values where masks are 1.

  If all masks are 0, these metrics are 0.

  Args:
    values: array of each mini-batch.
    masks: mask of each array, 1 or 0.
  """
  mean, deviations = _centre(values, masks)
  std = jnp.sqrt(_mean([x**2 for x in deviations], masks))
  extremes = [
    (O.Min(jnp.where(mask > 0, x, jnp.inf).min()), O.Max(jnp.where(mask > 0, x, -jnp.inf).max()))
    for x, mask in zip(values, masks)
  ]
  least, largest = O.compute(functools.reduce(merge, extremes))
  row = dict(mean=mean, std=std, min=least, max=largest)
  return {f"advantage/{name}": value for name, value in row.items()}


def _centre(
  values: Sequence[jax.Array], masks: Sequence[jax.Array]
) -> tuple[jax.Array, list[jax.Array]]:
  """Returns the result of `_mean`, and the values minus this mean."""
  mean = _mean(values, masks)
  return mean, [value_BT - mean for value_BT in values]


def _mean(values: Sequence[jax.Array], masks: Sequence[jax.Array]) -> jax.Array:
  """Returns the mean over all mini-batches where masks are 1."""
  sums = [
    Mean(jnp.where(mask_BT > 0, value_BT, 0).sum(), mask_BT.sum())
    for value_BT, mask_BT in zip(values, masks)
  ]
  return functools.reduce(merge, sums).compute()


def teacher_advantages(config: DistillationConfig) -> Part:
  """Builds the estimator of advantages from a teacher's log-probs.

  The advantage of a token has two terms. One is the advantage from rewards. The other is a
  discounted sum of differences between the log-probs of teacher and student:

  Â_t = w Â_reward + c Σ_{u≥t} γ^(u−t) (log π_teacher(y_u) − log π_old(y_u)).

  The keys of section `distillation` are c = `coef`, γ = `discount` and w = `reward_weight`.
  `objectives.distillation_advantages` computes the sum. The mini-batches must have `old_logp_BT`
  and `teacher_logp_BT`. The estimator fills `advantage_BT`, and drops `teacher_logp_BT`.
  """
  return lambda batches: _distill(list(batches), config.hyperparameters())


@jax.jit
def _distill(batches: list[TrainBatch], hyperparameters: Mapping[str, Any]) -> Filled:
  """Computes the advantages of `teacher_advantages`, and the reverse KL divergence."""

  def advantages(batch: TrainBatch) -> TrainBatch:
    reward_BT = batch.advantage_BT
    if reward_BT is None:
      reward_BT = batch.advantage_B[:, None]
    gain_BT = hyperparameters["coef"] * O.distillation_advantages(
      batch.old_logp_BT,
      batch.advantage_inputs.teacher_logp_BT,
      batch.mask_BT,
      hyperparameters["discount"],
    )
    reward_BT = jnp.where(batch.mask_BT > 0, hyperparameters["reward_weight"] * reward_BT, 0)
    return batch.replace(advantage_BT=reward_BT + gain_BT, advantage_inputs=AdvantageInputs())

  divergences = [
    O.reverse_kl.sums(batch.old_logp_BT, batch.advantage_inputs.teacher_logp_BT, batch.mask_BT)
    for batch in batches
  ]
  metrics = {"distillation/reverse_kl": functools.reduce(merge, divergences)}
  return [advantages(batch) for batch in batches], O.compute(metrics)


# Estimators on the devices, by name. All other estimators run on the host.
PARTS: dict[str, Callable[[RunConfig, Critic | None], Part]] = dict(
  gae=lambda c, critic: critic_advantages(c.critic, critic.hyperparameters),
  turn_gae=lambda c, critic: critic_advantages(c.critic, critic.hyperparameters),
  kl_in_reward=lambda c, _: reference_advantages(c.objective, c.rl.group_size),
  distillation=lambda c, _: teacher_advantages(c.distillation),
)
