"""Updates of the parameters on one mini-batch, in RL and SFT.

An update sums gradients and metrics over micro-batches, and then applies the optimizer once.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gspo_jax import objectives as O
from gspo_jax.learner import critic as critics
from gspo_jax.learner import programs, replicas
from gspo_jax.learner.adaptive_clip import scale_ranges
from gspo_jax.learner.critic import Critic
from gspo_jax.learner.metrics import (
  age_metrics,
  length_metrics,
  router_metrics,
  segment_metrics,
  version_metrics,
  volatility_metrics,
)
from gspo_jax.learner.objective import configured_loss
from gspo_jax.learner.optimizer import Optimizer, as_optimizer
from gspo_jax.learner.passes import Learner, accumulate, log_probs, parts, shift_right
from gspo_jax.models import lora
from gspo_jax.models.experts import moe
from gspo_jax.objectives.reductions import Last, Max, Mean, Metrics, merge
from gspo_jax.settings.critic import CriticConfig
from gspo_jax.settings.objective import ObjectiveConfig
from gspo_jax.structs import TrainBatch, TrainState


class WithHyperparameters(NamedTuple):
  """A jitted function with hyperparameters as its last argument.

  Hyperparameters are traced scalars, so new values do not require another compilation.
  """

  function: Callable
  hyperparameters: Mapping[str, Any]

  def __call__(self, *arguments: Any) -> Any:
    return self.function(*arguments, self.hyperparameters)

  def compile(self, *arguments: Any) -> "WithHyperparameters":
    """Compiles the function for the shapes of these arguments only."""
    lowered = self.function.lower(*arguments, self.hyperparameters)
    return self._replace(function=lowered.compile())

  def trace(self, *arguments: Any) -> Any:
    """Traces the function with these arguments, as `jax.jit(...).trace` does."""
    return self.function.trace(*arguments, self.hyperparameters)


def with_hyperparameters(
  function: Callable, hyperparameters: Mapping[str, Any]
) -> WithHyperparameters:
  """Binds hyperparameters to a jitted function, as Python floats.

  Python floats are weakly typed: a product with a bfloat16 array is bfloat16.
  """
  return WithHyperparameters(function, jax.tree.map(float, hyperparameters))


def make_rl_step(
  learner: Learner,
  objective: ObjectiveConfig,
  tx: optax.GradientTransformation | Optimizer,
  critic: Critic | None = None,
) -> WithHyperparameters:
  """Builds the jitted update on one mini-batch, (state, batch) -> (state, metrics).

  The buffers of the old state are donated. Hyperparameters, such as clip ranges and learning rates,
  are arguments of the program. So configurations that differ in hyperparameters alone share one
  program.

  Args:
    tx: optimizer of the policy.
    critic: training settings of the critic, which is updated together with the policy. None means
      no critic.
  """
  tx = as_optimizer(tx)
  hyperparameters = dict(
    objective=objective.hyperparameters(),
    optimizer=tx.hyperparameters,
    load_balance_coef=learner.load_balance_coef,
  )
  # Learners that differ in `load_balance_coef` alone share a program, since it is an argument.
  learner, config, apply_to_critic = dataclasses.replace(learner, load_balance_coef=0.0), None, None
  if critic is not None:
    hyperparameters |= dict(critic=critic.hyperparameters)
    hyperparameters |= dict(critic_optimizer=critic.tx.hyperparameters)
    config, apply_to_critic = critic.config.static, critic.tx.update
  step = _rl_step(learner, objective.static, tx.update, config, apply_to_critic)
  return with_hyperparameters(step, hyperparameters)


@functools.lru_cache(maxsize=8)
def _rl_step(
  learner: Learner,
  objective: ObjectiveConfig,
  apply: Callable,
  critic_config: CriticConfig | None,
  apply_to_critic: Callable | None,
) -> Callable:
  """Builds the jitted function of `make_rl_step`, once for equal arguments."""

  def numerator(trained, i, *, frozen, part, hyperparameters, critic_weight):
    (policy, critic), batch = trained, part(i)
    logp_BT, entropy_BT, out, rows = log_probs(
      lora.join(policy, frozen), batch.inputs, learner, objective.replay, batch.old_experts_BTlk
    )
    batch, metrics = with_own_logp(objective, logp_BT, batch)
    total, loss_metrics, clipped_BT = configured_loss(
      objective,
      logp_BT,
      entropy_BT,
      batch,
      learner.response_tokens,
      hyperparameters["objective"],
    )
    metrics |= loss_metrics | age_metrics(logp_BT, batch, clipped_BT, learner.ages)
    if longest := learner.response_tokens:
      metrics |= length_metrics(logp_BT, batch.old_logp_BT, batch.mask_BT, clipped_BT, longest)
    metrics |= _mismatch_metrics(objective, logp_BT, batch)
    empty_RT = (rows.segments_RT == 0).astype(jnp.float32)
    padding = Mean(empty_RT.sum(), jnp.ones_like(empty_RT).sum())
    metrics |= volatility_metrics(out, rows, objective.replay) | {"padding": padding}
    if batch.unit_BT is not None:
      loss = functools.partial(
        _loss_at, objective, entropy_BT, batch, learner, hyperparameters["objective"]
      )
      metrics |= segment_metrics(loss, logp_BT, batch, clipped_BT)
    if "clip_range" in hyperparameters["objective"]:
      metrics |= {"clip_range": Last(jnp.float32(hyperparameters["objective"]["clip_range"]))}
    value = total.numerator
    if critic is not None:
      values = functools.partial(critics.values_after, critic_config, critic, out.hidden_BTD, rows)
      value_BT = shift_right(values(learner, hyperparameters["critic"]), rows)
      metrics |= critics.loss(critic_config, value_BT, batch, hyperparameters["critic"])
      value = value + critic_weight * metrics[critics.LOSS].numerator
    return _with_balance(learner, value, total, metrics, out.stats, hyperparameters)

  def relative_weight(batch, hyperparameters):
    # The loss's denominator does not depend on log-probs, so log-probs of 0 suffice.
    zeros_BT = jnp.zeros_like(batch.sampler_logp_BT)
    total = _loss_at(objective, zeros_BT, batch, learner, hyperparameters["objective"], zeros_BT)
    return total.denominator / jnp.maximum(batch.mask_BT.sum(), 1)

  return _step(learner, numerator, apply, apply_to_critic, relative_weight)


def _loss_at(
  objective: ObjectiveConfig,
  entropy_BT: jax.Array,
  batch: TrainBatch,
  learner: Learner,
  hyperparameters: Mapping[str, Any],
  logp_BT: jax.Array,
) -> Mean:
  """Returns the configured loss at `logp_BT`, not yet divided."""
  longest = learner.response_tokens
  return configured_loss(objective, logp_BT, entropy_BT, batch, longest, hyperparameters)[0]


def _mismatch_metrics(objective: ObjectiveConfig, logp_BT: jax.Array, batch: TrainBatch) -> Metrics:
  """Compares the log-probs of trainer and sampler.

  Tokens sampled by older weights are excluded, since their log-probs differ even if the sampler is
  exact. If `objective.old_logp=behaviour`, `version_metrics` reports these tokens separately.
  """
  mask_BT, current_BT = batch.mask_BT, batch.metric_inputs.current_BT
  if current_BT is not None:
    mask_BT = mask_BT * current_BT
  metrics = O.mismatch.sums(logp_BT, batch.sampler_logp_BT, mask_BT)
  return metrics | (version_metrics(batch, mask_BT) if objective.old_logp == "behaviour" else {})


def with_own_logp(
  objective: ObjectiveConfig, logp_BT: jax.Array, batch: TrainBatch
) -> tuple[TrainBatch, dict[str, Any]]:
  """Replaces the first mini-batch's old log-probs by `logp_BT`.

  On the first mini-batch of an iteration, the weights are those of the old policy. If
  `objective.old_logp=recompute`, a separate program computed the old log-probs from the same
  weights, so these log-probs differ from `logp_BT` by rounding errors Δ. After the replacement, the
  importance ratio is exactly 1. All later mini-batches keep the recomputed log-probs, so their
  ratios include rounding errors. If `objective.old_logp` is not "recompute", or `first_B` is None,
  the batch is unchanged.

  The metric `mismatch/recomputed` is the mean over sequences of |mean over tokens of Δ|.
  `summarize` reports its value on the first mini-batch.
  """
  if objective.old_logp != "recompute" or batch.first_B is None:
    return batch, {}
  sums = O.mismatch.sums(logp_BT, batch.old_logp_BT, batch.mask_BT)
  own_BT = jnp.where(batch.first_B[:, None], jax.lax.stop_gradient(logp_BT), batch.old_logp_BT)
  metrics = {"mismatch/recomputed": sums["mismatch/sequence/abs/mean"]}
  return batch.replace(old_logp_BT=own_BT), metrics


def make_sft_step(
  learner: Learner, tx: optax.GradientTransformation | Optimizer
) -> WithHyperparameters:
  """Builds the jitted update of supervised fine-tuning, (state, batch) -> (state, metrics).

  The loss is the mean of -log π(token) over trained tokens, plus the load-balance loss of a model
  with experts. The buffers of the old state are donated.
  """
  tx = as_optimizer(tx)
  hyperparameters = dict(optimizer=tx.hyperparameters, load_balance_coef=learner.load_balance_coef)
  learner = dataclasses.replace(learner, load_balance_coef=0.0)
  return with_hyperparameters(_sft_step(learner, tx.update), hyperparameters)


@functools.lru_cache(maxsize=8)
def _sft_step(learner: Learner, apply: Callable) -> Callable:
  """Builds the jitted function of `make_sft_step`, once for equal arguments."""

  def numerator(trained, i, *, frozen, part, hyperparameters, critic_weight):
    (policy, _), batch = trained, part(i)
    logp_BT, entropy_BT, out, _ = log_probs(lora.join(policy, frozen), batch.inputs, learner)
    tokens = batch.mask_BT.sum()
    total = Mean(-(logp_BT * batch.mask_BT).sum(), tokens)
    metrics = {"entropy": Mean((entropy_BT * batch.mask_BT).sum(), tokens)}
    return _with_balance(learner, total.numerator, total, metrics, out.stats, hyperparameters)

  return _step(learner, numerator, apply)


def make_sft_loss(learner: Learner) -> Callable[[Any, TrainBatch], Mean]:
  """Builds the jitted loss of `make_sft_step`, (params, batch) -> undivided loss.

  The load-balance loss is excluded.
  """

  def loss(params, batch):
    logp_BT = log_probs(params, batch.inputs, learner)[0]
    return Mean(-(logp_BT * batch.mask_BT).sum(), batch.mask_BT.sum())

  return programs.jit(loss, learner.compute)


def _with_balance(
  learner: Learner,
  value: jax.Array,
  total: Mean,
  metrics: Metrics,
  stats: moe.RouterStats | None,
  hyperparameters: Mapping[str, Any],
) -> tuple[jax.Array, Metrics]:
  """Adds the load-balance loss to `value`; returns the sum and metrics.

  Args:
    value: numerator of the policy's loss. If there is a critic, the weighted numerator of its loss
      is included.
    total: undivided policy loss, which becomes the metric "loss". `_step` divides the gradient of
      the sum by the denominator of `total`. So the load-balance loss is first multiplied by this
      denominator.
    stats: statistics of the routers. None for a model without experts; `value` is then unchanged.
  """
  metrics |= {"loss": total}
  if stats is not None:
    metrics |= router_metrics(stats, learner.model)
    balance = moe.load_balance(stats, learner.model)
    value = value + hyperparameters["load_balance_coef"] * balance * total.denominator
  return value, metrics


def _step(
  learner: Learner,
  numerator: Callable,
  apply: Callable,
  apply_to_critic: Callable | None = None,
  relative_weight: Callable | None = None,
) -> Callable:
  """Builds the jitted function (state, batch, hyperparameters) -> (state, metrics).

  Gradients of numerators are summed over micro-batches, and denominators are summed separately. The
  first sum is divided by the second. So the update does not depend on the number of micro-batches.
  An exception is the load-balance loss, a product of two means over a micro-batch.

  If the gradient is 0, the state is unchanged, since Adam would otherwise apply its momentum.
  `updates_skipped` counts non-finite updates. If `on_nonfinite=stop`, it also counts later ones.

  Args:
    numerator: function of (parameters, i, **constants) -> (numerator of micro-batch i, metrics).
    apply, apply_to_critic: `Optimizer.update` of policy and critic. None means no critic.
    relative_weight: function of (batch, hyperparameters) -> the denominator of the policy's loss,
      divided by that of the critic's loss. The critic's numerator is multiplied by this ratio.
  """
  gradient = jax.grad(numerator, has_aux=True)

  def add(total, new):
    return jax.tree.map(jnp.add, total[0], new[0]), merge(total[1], new[1])

  def step(state: TrainState, batch: TrainBatch, hyperparameters: Mapping[str, Any]):
    number, part = parts(batch, learner)
    if "objective" in hyperparameters:
      objective = scale_ranges(hyperparameters["objective"], state.clip_factor)
      hyperparameters = hyperparameters | dict(objective=objective)
    policy, frozen = lora.split(state.params)
    constants = dict(frozen=frozen, part=part, hyperparameters=hyperparameters, critic_weight=None)
    if state.critic is not None:
      constants |= dict(critic_weight=relative_weight(batch, hyperparameters))
    differentiated = functools.partial(gradient, _on_replicas(state, policy, frozen), **constants)
    grads, metrics = accumulate(differentiated, number, add, learner.microbatches)
    denominator = metrics["loss"].denominator
    nonempty = denominator > 0
    grads = replicas.summed(grads)
    grads, critic_grads = jax.tree.map(lambda g: g / jnp.where(nonempty, denominator, 1), grads)
    updates, opt_state = apply(grads, state.opt_state, policy, hyperparameters["optimizer"])
    params = lora.join(optax.apply_updates(policy, updates), frozen)
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(metrics["loss"].numerator)
    if learner.on_nonfinite == "stop":
      finite &= state.skipped == 0
    nonzero = grad_norm != 0
    new = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    if state.critic is not None:
      new, row = critics.update(new, state, critic_grads, apply_to_critic, hyperparameters, nonzero)
      metrics, critic_norm = metrics | row, row[critics.GRAD_NORM].value
      finite, nonzero = finite & jnp.isfinite(critic_norm), nonzero | (critic_norm != 0)
    applied = finite & nonempty & nonzero
    state = jax.tree.map(lambda new, old: jnp.where(applied, new, old), new, state)
    state = state.replace(skipped=state.skipped + ~finite)
    return state, metrics | dict(grad_norm=Max(grad_norm), updates_skipped=Last(state.skipped))

  return programs.jit(step, learner.compute, donate_argnums=0)


def _on_replicas(state: TrainState, policy: Any, frozen: Any) -> tuple[Any, Any]:
  """Keeps gradients of policy and critic separate on each replica (replicas.py).

  These gradients are summed over replicas once per update. JAX sums the gradient of the critic's
  head, which is small, in every micro-batch. It also sums those of merged adapters, which are as
  large as the matrices: no rule of JAX multiplies two marked arrays.
  """
  if not jax.tree.leaves(frozen):
    policy = replicas.apart(policy)
  if state.critic is None:
    return policy, None
  critic = state.critic.params
  return policy, critic.replace(trunk=replicas.apart(critic.trunk))
