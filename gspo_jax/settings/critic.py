"""Sections `critic` and `distillation`."""

import dataclasses
from typing import Literal

from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import (
  Fraction,
  NonNegativeFloat,
  NonNegativeInt,
  PositiveFloat,
  PositiveFraction,
  key,
)


@ranges.section("critic")
class CriticConfig:
  """Critic, for the losses ppo_clip, gspo_token and segment. docs/objectives.md"""

  name: Literal["none", "head", "model"] = key(
    "none",
    "none: no critic | head: a value head on the policy's hidden states | model: a separate "
    "model, initialised from the policy",
  )
  warmup_iterations: NonNegativeInt = key(
    0, "number of iterations at the start that update the critic alone"
  )
  discount: PositiveFraction = key(
    1.0, "γ of GAE, per token (per turn if objective.advantage=turn_gae); 1: no discount"
  )
  trace: Fraction = key(
    0.95,
    "λ of GAE, per token (per turn if objective.advantage=turn_gae); 1: Monte Carlo returns",
  )
  bootstrap: bool = key(
    False, "True: the state after a truncated response has the critic's value | False: it has 0"
  )
  clip: NonNegativeFloat = key(
    0.2, "clip range of the value loss, around the values before the updates; 0: no clipping"
  )
  normalize: bool = key(
    True,
    "True: shift and scale the advantages of an iteration's tokens to mean 0 and standard "
    "deviation 1",
  )
  trunk_coef: NonNegativeFloat = key(
    0.1,
    "factor of the value loss's gradient in the policy's layers, if critic.name=head; 0: the value "
    "loss trains the head alone",
  )
  kl_coef: NonNegativeFloat = key(
    0.0, "factor β of a KL penalty: β log π_old/π_ref is subtracted from each token's reward"
  )

  @property
  def warmup(self) -> int:
    """Number of initial iterations without updates of the policy."""
    return self.warmup_iterations if self.name != "none" else 0

  def hyperparameters(self, updates: int) -> dict[str, float]:
    """Returns numeric arguments of compiled programs.

    Each of `clip`, `trunk_coef` and `kl_coef` is excluded if it is 0. The programs then omit its
    term.

    Args:
      updates: number of updates per iteration.
    """
    values = dict(discount=self.discount, trace=self.trace, warmup=float(self.warmup * updates))
    options = dict(clip=self.clip, trunk_coef=self.trunk_coef, kl_coef=self.kl_coef)
    return values | {key: value for key, value in options.items() if value}

  @property
  def static(self) -> "CriticConfig":
    """The section with each of `hyperparameters` set to 1, and without warm-up.

    It is a constant of compiled programs. So changed hyperparameters need no new compilation.
    """
    ones = {key: 1.0 for key in self.hyperparameters(0) if key != "warmup"}
    return dataclasses.replace(self, **ones, warmup_iterations=0)


@ranges.section("distillation")
class DistillationConfig:
  """On-policy distillation from a teacher. docs/objectives.md"""

  teacher: str = key(
    "",
    "weights of the teacher, named as in key weights: Hugging Face directory or repository | run "
    'or its checkpoint | "": no teacher',
  )
  coef: PositiveFloat = key(1.0, "factor of log π_teacher/π_old in a token's advantage")
  discount: Fraction = key(
    0.0,
    "factor γ per token. The log-ratio of the n-th later token counts γ^n in an advantage. With "
    "0, only the token's own log-ratio counts.",
  )
  reward_weight: NonNegativeFloat = key(
    1.0, "weight of the advantage from rewards; 0: advantages are from the teacher alone"
  )

  @property
  def enabled(self) -> bool:
    return bool(self.teacher)

  @property
  def alone(self) -> bool:
    """Whether advantages come from the teacher alone, and not from rewards."""
    return self.enabled and self.reward_weight == 0

  def hyperparameters(self) -> dict[str, float]:
    """Returns numeric arguments of the compiled program."""
    names = ("coef", "discount", "reward_weight")
    return {name: getattr(self, name) for name in names}
