"""The critic's part of an update: sections `critic` and `critic_optimizer` of a configuration.

V_t is the value of what stands before token t: the prompt and the tokens that precede it. So it is
read from the hidden state that predicts the token, and lies in [B, T] where the token's log-prob
does. learner/values.py has what comes before the updates.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gspo_jax import objectives as O
from gspo_jax.learner import optimizer
from gspo_jax.learner.layout import Rows, by_sequence, forward
from gspo_jax.learner.optimizer import Optimizer
from gspo_jax.models import critic as models
from gspo_jax.objectives.reductions import Max, Mean, Metrics
from gspo_jax.settings.critic import CriticConfig
from gspo_jax.settings.model import ComputeConfig, ModelConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import CriticState, TrainBatch, TrainState

LOSS = "value/loss"  # the metric that is the critic's loss
GRAD_NORM = "value/grad_norm"


class Critic(NamedTuple):
  """How a critic is trained; None in its place: there is none."""

  config: CriticConfig
  tx: Optimizer
  numbers: Mapping[str, float]  # of the configuration


def values(
  config: CriticConfig,
  critic: models.Critic,
  hidden_RTD: jax.Array,
  rows: Rows,
  model: ModelConfig,
  compute: ComputeConfig,
  numbers: Mapping[str, Any],
) -> jax.Array:
  """V_t, float32 [B, T]; 0 at position 0, before which there is nothing.

  Args:
    hidden_RTD: of the policy, which a critic with a trunk of its own does not look at.
  """
  if critic.trunk is not None:
    hidden_RTD = forward(critic.trunk, rows, model, compute).hidden_BTD
  else:
    constant_RTD = jax.lax.stop_gradient(hidden_RTD)
    if config.trunk_coef:  # the same values, and so much of their gradient
      hidden_RTD = constant_RTD + numbers["trunk_coef"] * (hidden_RTD - constant_RTD)
    else:
      hidden_RTD = constant_RTD
  of_next_BT = by_sequence(models.values(critic, hidden_RTD), rows)
  return jnp.pad(of_next_BT[:, :-1], ((0, 0), (1, 0)))


def loss(
  config: CriticConfig, value_BT: jax.Array, batch: TrainBatch, numbers: Mapping[str, Any]
) -> Metrics:
  """Metrics of an update, among them its loss, undivided: a mean over tokens."""
  clip = numbers["clip"] if config.clip else None
  arguments = batch.old_value_BT, batch.return_BT, batch.mask_BT
  total, metrics = O.value_loss.sums(value_BT, *arguments, clip=clip)
  if clip is None:
    del metrics["clip_fraction/value"]
  return metrics | {LOSS: total}


def share(policy: Mean, mask_BT: jax.Array) -> jax.Array:
  """What the critic's numerator is multiplied with, so that it may be divided by the denominator
  of the policy's loss: theirs over its own, of a whole mini-batch."""
  return policy.denominator / jnp.maximum(mask_BT.sum(), 1)


def update(
  new: TrainState,
  old: TrainState,
  grads: models.Critic,
  apply: Callable,
  numbers: Mapping[str, Any],
) -> tuple[TrainState, Metrics]:
  """The new state with the critic's own update, and metrics of it. Over the first updates, as many
  as the critic is warmed up for, the policy and its optimizer are those of the old state."""
  params, moments = old.critic.params, old.critic.opt_state
  updates, moments = apply(grads, moments, params, numbers["critic_optimizer"])
  critic = CriticState(optax.apply_updates(params, updates), moments)
  waits = old.step < numbers["critic"]["warmup"]
  either = lambda new, old: jax.tree.map(lambda x, y: jnp.where(waits, y, x), new, old)  # noqa: E731
  policy = either((new.params, new.opt_state), (old.params, old.opt_state))
  new = new.replace(params=policy[0], opt_state=policy[1], critic=critic)
  return new, {GRAD_NORM: Max(optax.tree.norm(grads))}


def optimizers(c: RunConfig) -> tuple[Optimizer, Critic | None]:
  """Of the updates of RL: the policy's optimizer, and the critic with its own."""
  updates, warmup = c.rl.iterations * c.rl.updates, c.critic.warmup * c.rl.updates
  policy = optimizer.make(c.rl_optimizer, updates - warmup)
  if c.critic.name == "none":
    return policy, None
  tx = optimizer.make(c.critic_optimizer, updates)
  return policy, Critic(c.critic, tx, c.critic.numbers(c.rl.updates))
