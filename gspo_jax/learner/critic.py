"""The critic's part of an update: sections `critic` and `critic_optimizer` of a configuration.

V_t is the value of what stands before token t: the prompt and the tokens that precede it. So it is
read from the hidden state that predicts the token, and lies in [B, T] where the token's log-prob
does. learner/values.py has what comes before the updates.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gspo_jax import objectives as O
from gspo_jax.learner.layout import Rows, by_sequence, forward
from gspo_jax.learner.optimizer import Optimizer
from gspo_jax.models import critic as models
from gspo_jax.objectives.reductions import Max, Mean, Metrics
from gspo_jax.settings import ranges
from gspo_jax.settings.model import ComputeConfig, ModelConfig
from gspo_jax.settings.ranges import Fraction, NonNegativeFloat, NonNegativeInt
from gspo_jax.structs import CriticState, TrainBatch, TrainState

LOSS = "value/loss"  # the metric that is the critic's loss
GRAD_NORM = "value/grad_norm"


@dataclasses.dataclass(frozen=True)
class CriticConfig:
  # none: advantages are relative to a group | head: on the policy's trunk | model: with its own
  name: Literal["none", "head", "model"]
  init: Literal["policy", "random"]  # of a model of its own: the policy's weights before RL
  warmup_iterations: NonNegativeInt  # the first ones, in which only the critic learns
  discount: Fraction  # γ, per token
  trace: Fraction  # λ, per token
  clip: NonNegativeFloat  # how far a value may move from the old one in an iteration; 0: no bound
  normalize: bool  # advantages of an iteration to mean 0 and standard deviation 1, over tokens
  trunk_coef: NonNegativeFloat  # of a head: the factor of its loss for the trunk
  kl_coef: NonNegativeFloat  # of log π_old/π_ref, which is taken from each token's reward

  def __post_init__(self):
    ranges.check(self, "critic")

  def _not_read(self) -> dict[str, Any]:
    """Keys that have no effect with this name, and the values that they have then."""
    of_model, of_head = dict(init="policy"), dict(trunk_coef=0.1)
    of_any = dict(warmup_iterations=0, kl_coef=0, discount=1, trace=0.95, clip=0.2, normalize=True)
    return dict(none=of_model | of_head | of_any, model=of_head, head=of_model)[self.name]

  def check_with(
    self, objective: Any, rl: Any, data: Any, environment: Any, taught: bool = False
  ) -> None:
    """ValueError if the sections of these names do not go with a critic, or with having none;
    taught: advantages are a teacher's alone (distillation.py)."""
    what, skipped = f"critic.name={self.name!r}", data.query_set.extra_rounds
    if self.name == "none":
      of_group = objective.advantage_kind == "soft" and objective.soft_value is None
      if rl.group_size == 1 and not taught and (objective.relative or of_group):
        raise ValueError("rl.group_size=1: advantages are relative to a group; make it at least 2")
    for key, usual in self._not_read().items():
      if (value := getattr(self, key)) != usual:
        raise ValueError(f"critic.{key}={value!r} has no effect, since {what}; set it to {usual}")
    if self.name == "none":
      return
    if not objective.loss.by_token:
      raise ValueError(
        f"{what} gives each token an advantage, which objective.name={objective.name!r} does not "
        "take; set it to ppo_clip, gspo_token or segment"
      )
    if objective.advantage_kind != objective.loss.advantage:
      raise ValueError(
        f"objective.advantage={objective.advantage!r} has no effect, since {what} gives the "
        "advantages; leave it unset"
      )
    if skipped:
      raise ValueError(
        f"data.query_set.extra_rounds={skipped} leaves out groups of equal rewards, of which "
        f"{what} learns too; set it to 0"
      )
    if environment.discount != 1:
      raise ValueError(
        f"environment.discount={environment.discount} has no effect, since {what} discounts by "
        "token; set it to 1, and critic.discount"
      )
    if self.warmup_iterations >= rl.iterations:
      raise ValueError(
        f"critic.warmup_iterations={self.warmup_iterations} leaves none of rl.iterations="
        f"{rl.iterations} to the policy"
      )

  @property
  def warmup(self) -> int:
    """Iterations at the start in which the policy stays as it is."""
    return self.warmup_iterations if self.name != "none" else 0

  def numbers(self, updates: int) -> dict[str, float]:
    """What is an argument of compiled programs; `updates` of an iteration."""
    found = dict(discount=self.discount, trace=self.trace, warmup=float(self.warmup * updates))
    options = dict(clip=self.clip, trunk_coef=self.trunk_coef, kl_coef=self.kl_coef)
    return found | {key: value for key, value in options.items() if value}

  @property
  def structure(self) -> "CriticConfig":
    """The configuration with 1 for each of its numbers, but for those that are 0."""
    ones = {key: 1.0 for key in self.numbers(0) if key != "warmup"}
    return dataclasses.replace(self, **ones, warmup_iterations=0, init="random")


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
