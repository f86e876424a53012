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


@dataclasses.dataclass(frozen=True)
class CriticConfig:
  """PPO, with objective.name=ppo_clip. docs/objectives.md"""

  name: Literal["none", "head", "model"] = key(
    "none", "head: on the policy's trunk | model: a separate trunk, at first the policy's"
  )
  warmup_iterations: NonNegativeInt = key(0, "first iterations, with updates of the critic alone")
  discount: PositiveFraction = key(
    1.0, "γ, per token (turn_gae: per turn); 1: a right response has the same value at any length"
  )
  trace: Fraction = key(
    0.95, "λ of GAE, per token (turn_gae: per turn); 1: Monte Carlo returns, for long responses"
  )
  bootstrap: bool = key(
    False, "True: a truncated response is continued by the value of its last state"
  )
  clip: NonNegativeFloat = key(0.2, "largest change of a value in an iteration; 0: no bound")
  normalize: bool = key(True, "standardise advantages over tokens")
  trunk_coef: NonNegativeFloat = key(0.1, "factor of a head's gradients for the trunk; 0: none")
  kl_coef: NonNegativeFloat = key(0.0, "factor of log π_old/π_ref in each token's reward")

  def __post_init__(self):
    ranges.check(self, "critic")

  @property
  def warmup(self) -> int:
    """Iterations of warm-up, without updates of the policy."""
    return self.warmup_iterations if self.name != "none" else 0

  def hyperparameters(self, updates: int) -> dict[str, float]:
    """Arguments of compiled programs, for `updates` updates in an iteration."""
    values = dict(discount=self.discount, trace=self.trace, warmup=float(self.warmup * updates))
    options = dict(clip=self.clip, trunk_coef=self.trunk_coef, kl_coef=self.kl_coef)
    return values | {key: value for key, value in options.items() if value}

  @property
  def static(self) -> "CriticConfig":
    """Static part of compiled programs: each hyperparameter other than 0 is 1."""
    ones = {key: 1.0 for key in self.hyperparameters(0) if key != "warmup"}
    return dataclasses.replace(self, **ones, warmup_iterations=0)


@dataclasses.dataclass(frozen=True)
class DistillationConfig:
  """On-policy distillation, from a larger model. docs/objectives.md"""

  teacher: str = key(
    "", 'Hugging Face directory or repository | run or its checkpoint, as weights; "": none'
  )
  coef: PositiveFloat = key(1.0, "factor of log π_teacher/π_old in a token's advantage")
  discount: Fraction = key(0.0, "weight of later tokens' ratios; 0: none")
  reward_weight: NonNegativeFloat = key(
    1.0, "weight of the advantage from rewards; 0: the teacher alone"
  )

  def __post_init__(self):
    ranges.check(self, "distillation")

  @property
  def enabled(self) -> bool:
    return bool(self.teacher)

  @property
  def alone(self) -> bool:
    """Whether the teacher alone gives advantages, without rewards."""
    return self.enabled and self.reward_weight == 0

  def hyperparameters(self) -> dict[str, float]:
    """Arguments of the compiled program."""
    names = ("coef", "discount", "reward_weight")
    return {name: getattr(self, name) for name in names}


OFF = DistillationConfig()
