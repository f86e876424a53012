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
    "none", "head: on the policy's trunk | model: with a trunk of its own"
  )
  init: Literal["policy", "random"] = key(
    "policy", "of a model of its own: policy: its weights before RL"
  )
  warmup_iterations: NonNegativeInt = key(0, "at the start, in which only the critic learns")
  discount: PositiveFraction = key(
    1.0, "γ, per token (turn_gae: per turn); 1: a right response is worth the same at any length"
  )
  trace: Fraction = key(
    0.95, "λ of GAE, per token (turn_gae: per turn); 1: rewards alone, for long responses"
  )
  bootstrap: bool = key(
    False, "True: what follows a response that was cut off is worth the value of its last state"
  )
  clip: NonNegativeFloat = key(0.2, "how far a value may move in an iteration; 0: no bound")
  normalize: bool = key(True, "advantages to mean 0 and standard deviation 1, over tokens")
  trunk_coef: NonNegativeFloat = key(0.1, "of a head: factor of its loss for the trunk; 0: none")
  kl_coef: NonNegativeFloat = key(0.0, "of log π_old/π_ref, taken from each token's reward")

  def __post_init__(self):
    ranges.check(self, "critic")

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


@dataclasses.dataclass(frozen=True)
class DistillationConfig:
  """On-policy distillation, from a larger model. docs/objectives.md"""

  teacher: str = key(
    "", 'Hugging Face directory or repository | run or its checkpoint, as weights; "": none'
  )
  coef: PositiveFloat = key(1.0, "of log π_teacher/π_old in the advantage of a token")
  discount: Fraction = key(0.0, "of what later tokens add; 0: nothing")
  reward_weight: NonNegativeFloat = key(1.0, "of the advantage by rewards; 0: the teacher's")

  def __post_init__(self):
    ranges.check(self, "distillation")

  @property
  def on(self) -> bool:
    return bool(self.teacher)

  @property
  def alone(self) -> bool:
    """Whether nothing is learned from rewards."""
    return self.on and self.reward_weight == 0

  def numbers(self) -> dict[str, float]:
    """What is an argument of the compiled program."""
    names = ("coef", "discount", "reward_weight")
    return {name: getattr(self, name) for name in names}


OFF = DistillationConfig()
