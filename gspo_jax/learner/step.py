"""The update: gradient over micro-batches, Optax, metrics."""

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
from gspo_jax.learner.adaptive_clip import in_force
from gspo_jax.learner.critic import Critic
from gspo_jax.learner.metrics import (
  age_metrics,
  length_metrics,
  router_metrics,
  segment_metrics,
  version_metrics,
  volatility_metrics,
)
from gspo_jax.learner.objective import policy_loss
from gspo_jax.learner.optimizer import Optimizer, numbered
from gspo_jax.learner.passes import Learner, accumulate, log_probs, parts
from gspo_jax.models import lora
from gspo_jax.models.experts import moe
from gspo_jax.objectives.reductions import Last, Max, Mean, merge
from gspo_jax.settings.critic import CriticConfig
from gspo_jax.settings.objective import ObjectiveConfig
from gspo_jax.structs import TrainBatch, TrainState


class WithNumbers(NamedTuple):
  """A jitted function whose last argument is given: scalars, which a sweep varies. Whatever their
  values are, the program is the same."""

  function: Callable
  numbers: Mapping[str, Any]

  def __call__(self, *arguments: Any) -> Any:
    return self.function(*arguments, self.numbers)

  def compile(self, *arguments: Any) -> "WithNumbers":
    """The same, compiled for arguments like these and for no others."""
    return self._replace(function=self.function.lower(*arguments, self.numbers).compile())

  def trace(self, *arguments: Any) -> Any:
    return self.function.trace(*arguments, self.numbers)


def with_numbers(function: Callable, numbers: Mapping[str, Any]) -> WithNumbers:
  """`function` with these numbers. They are Python's: in arithmetic an array keeps its type."""
  return WithNumbers(function, jax.tree.map(float, numbers))


def make_rl_step(
  learner: Learner,
  objective: ObjectiveConfig,
  tx: optax.GradientTransformation | Optimizer,
  critic: Critic | None = None,
) -> WithNumbers:
  """The jitted update of the policy, and of a critic if there is one, on one mini-batch, (state,
  batch) -> (state, metrics); the state is donated. Numbers of the configuration (clip ranges, rates
  and so on) are arguments: configurations that differ in nothing else are one program."""
  tx = numbered(tx)
  numbers = dict(
    objective=objective.numbers(),
    optimizer=tx.numbers,
    load_balance_coef=learner.load_balance_coef,
  )
  learner, config, apply_to_critic = dataclasses.replace(learner, load_balance_coef=0.0), None, None
  if critic is not None:
    numbers |= dict(critic=critic.numbers, critic_optimizer=critic.tx.numbers)
    config, apply_to_critic = critic.config.structure, critic.tx.update
  step = _rl_step(learner, objective.structure, tx.update, config, apply_to_critic)
  return with_numbers(step, numbers)


@functools.lru_cache(maxsize=8)
def _rl_step(
  learner: Learner,
  objective: ObjectiveConfig,
  apply: Callable,
  critic_config: CriticConfig | None,
  apply_to_critic: Callable | None,
) -> Callable:
  def loss(params, critic, batch, all_numbers):
    numbers = all_numbers["objective"]
    logp_BT, entropy_BT, out, rows = log_probs(
      params, batch.inputs, learner, objective.replay, batch.old_experts_BTlk
    )
    batch, of_old = with_own_logp(objective, logp_BT, batch)
    longest = learner.response_tokens

    def of_policy(logp_BT):
      return policy_loss(objective, logp_BT, entropy_BT, batch, longest, numbers)

    total, metrics, clipped_BT = of_policy(logp_BT)
    if longest:
      metrics |= length_metrics(logp_BT, batch.old_logp_BT, batch.mask_BT, clipped_BT, longest)
    metrics |= age_metrics(logp_BT, batch, clipped_BT, learner.ages)
    if batch.unit_BT is not None:
      metrics |= segment_metrics(lambda x_BT: of_policy(x_BT)[0], logp_BT, batch, clipped_BT)
    mask_BT = batch.mask_BT  # older weights are another policy, whatever the sampler does
    if batch.current_BT is not None:
      mask_BT = mask_BT * batch.current_BT
    metrics |= O.mismatch.sums(logp_BT, batch.sampler_logp_BT, mask_BT) | of_old
    if objective.old_logp == "behaviour":
      metrics |= version_metrics(batch, mask_BT)
    metrics |= volatility_metrics(out, rows, objective.replay)
    empty_RT = (rows.segments_RT == 0).astype(jnp.float32)
    metrics |= {"padding": Mean(empty_RT.sum(), jnp.ones_like(empty_RT).sum())}
    if "clip_range" in numbers:
      metrics |= {"clip_range": Last(jnp.float32(numbers["clip_range"]))}
    if critic is not None:
      of_critic = all_numbers["critic"]
      value_BT = critics.values(critic_config, critic, out.hidden_BTD, rows, learner, of_critic)
      metrics |= critics.loss(critic_config, value_BT, batch, of_critic)
    return total, metrics, out.stats

  def share(batch, numbers):  # a denominator depends on masks alone
    nothing_BT = jnp.zeros_like(batch.sampler_logp_BT)
    total, *_ = policy_loss(
      objective, nothing_BT, nothing_BT, batch, learner.response_tokens, numbers["objective"]
    )
    return total.denominator / jnp.maximum(batch.mask_BT.sum(), 1)

  return _step(learner, loss, apply, apply_to_critic, share)


def with_own_logp(
  objective: ObjectiveConfig, logp_BT: jax.Array, batch: TrainBatch
) -> tuple[TrainBatch, dict[str, Any]]:
  """The batch whose old log-probabilities are, in a first mini-batch, those of this very pass: with
  `recompute` it is the same policy, and the ratio exactly 1.

  Another program that computes them, without a gradient, rounds otherwise. By how much is the
  metric `mismatch/recomputed`: |mean Δ| of a sequence, in the mean. It is in the ratios of all
  later mini-batches.
  """
  if objective.old_logp != "recompute" or batch.first_B is None:
    return batch, {}
  sums = O.mismatch.sums(logp_BT, batch.old_logp_BT, batch.mask_BT)
  own_BT = jnp.where(batch.first_B[:, None], jax.lax.stop_gradient(logp_BT), batch.old_logp_BT)
  metrics = {"mismatch/recomputed": sums["mismatch/sequence/abs/mean"]}
  return batch.replace(old_logp_BT=own_BT), metrics


def make_sft_step(learner: Learner, tx: optax.GradientTransformation | Optimizer) -> WithNumbers:
  """The jitted supervised update: mean over tokens of -log π(token); the state is donated."""
  tx = numbered(tx)
  numbers = dict(optimizer=tx.numbers, load_balance_coef=learner.load_balance_coef)
  learner = dataclasses.replace(learner, load_balance_coef=0.0)
  return with_numbers(_sft_step(learner, tx.update), numbers)


@functools.lru_cache(maxsize=8)
def _sft_step(learner: Learner, apply: Callable) -> Callable:
  def loss(params, _, batch, __):
    logp_BT, entropy_BT, out, _ = log_probs(params, batch.inputs, learner)
    tokens = batch.mask_BT.sum()
    total = Mean(-(logp_BT * batch.mask_BT).sum(), tokens)
    return total, {"entropy": Mean((entropy_BT * batch.mask_BT).sum(), tokens)}, out.stats

  return _step(learner, loss, apply)


def make_sft_loss(learner: Learner) -> Callable[[Any, TrainBatch], Mean]:
  """The jitted loss of `make_sft_step`, without its update."""

  def loss(params, batch):
    logp_BT = log_probs(params, batch.inputs, learner)[0]
    return Mean(-(logp_BT * batch.mask_BT).sum(), batch.mask_BT.sum())

  return programs.jit(loss, learner.compute)


def _step(
  learner: Learner,
  loss: Callable,
  apply: Callable,
  apply_to_critic: Callable | None = None,
  share: Callable | None = None,
) -> Callable:
  """Gradient of `loss(params, critic, batch, numbers) -> (Mean, metrics, router stats)` and one
  Optax update, by `Optimizer.update`; (state, batch, numbers) -> (state, metrics).

  Numerators are differentiated and summed over micro-batches, denominators are summed, and they
  are divided once: the number of micro-batches changes memory and nothing else. (The load-balance
  loss is the exception: it is a product of two means, taken per micro-batch.) A batch of nothing to
  train on changes nothing. The metric `updates_skipped` counts, since the start of the run, the
  updates that were left out.

  A critic learns in the same pass, from the metric `critic.LOSS`, with an optimizer of its own. Its
  numerators count `share(batch, numbers)` times, so that one division by the denominator of the
  policy's loss is right for both: that one over the critic's own, of a whole mini-batch.
  """

  def numerator(changed, frozen, batch, numbers, weight):
    trained, critic = changed
    total, metrics, stats = loss(lora.join(trained, frozen), critic, batch, numbers)
    metrics |= {"loss": total}
    value = total.numerator
    if critic is not None:
      value = value + weight * metrics[critics.LOSS].numerator
    if stats is not None:
      metrics |= router_metrics(stats, learner.model)
      balance = moe.load_balance(stats, learner.model)
      value = value + numbers["load_balance_coef"] * balance * total.denominator
    return value, metrics

  gradient = jax.grad(numerator, has_aux=True)

  def add(total, new):
    return jax.tree.map(jnp.add, total[0], new[0]), merge(total[1], new[1])

  def step(state: TrainState, batch: TrainBatch, numbers: Mapping[str, Any]):
    number, part = parts(batch, learner)
    trained, frozen = lora.split(state.params)
    if "objective" in numbers:
      numbers = numbers | dict(objective=in_force(numbers["objective"], state.clip_factor))
    critic, weight, changed = state.critic, None, (trained, None)
    if not jax.tree.leaves(frozen):  # adapters are small
      changed = replicas.apart(trained), None
    if critic is not None:
      trunk = replicas.apart(critic.params.trunk)
      weight, changed = share(batch, numbers), (changed[0], critic.params.replace(trunk=trunk))

    def of_part(i):
      return gradient(changed, frozen, part(i), numbers, weight)

    grads, metrics = accumulate(of_part, number, add, learner.microbatches)
    denominator = metrics["loss"].denominator
    trains = denominator > 0  # without a token, Adam would still follow its momentum
    grads = replicas.summed(grads)
    grads, critic_grads = jax.tree.map(lambda g: g / jnp.where(trains, denominator, 1), grads)
    updates, opt_state = apply(grads, state.opt_state, trained, numbers["optimizer"])
    params = lora.join(optax.apply_updates(trained, updates), frozen)
    grad_norm = optax.tree.norm(grads)
    sound = jnp.isfinite(grad_norm) & jnp.isfinite(metrics["loss"].numerator)
    if learner.on_nonfinite == "stop":
      sound &= state.skipped == 0
    new = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    if critic is not None:
      new, of_critic = critics.update(new, state, critic_grads, apply_to_critic, numbers)
      metrics |= of_critic
      sound &= jnp.isfinite(of_critic[critics.GRAD_NORM].value)
    state = jax.tree.map(lambda new, old: jnp.where(sound & trains, new, old), new, state)
    state = state.replace(skipped=state.skipped + ~sound)
    metrics |= {"grad_norm": Max(grad_norm), "updates_skipped": Last(state.skipped)}
    return state, metrics

  return programs.jit(step, learner.compute, donate_argnums=0)
