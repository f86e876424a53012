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
  """Critic of PPO, for objective.name=ppo_clip. docs/objectives.md"""

  name: Literal["none", "head", "model"] = key(
    "none",
    "head: on the policy's trunk | model: a separate model, initialised from the policy",
  )
  warmup_iterations: NonNegativeInt = key(0, "initial iterations with updates of the critic alone")
  discount: PositiveFraction = key(
    1.0, "γ, per token (turn_gae: per turn); 1: values do not depend on the length of a response"
  )
  trace: Fraction = key(0.95, "λ of GAE, per token (turn_gae: per turn); 1: Monte Carlo returns")
  bootstrap: bool = key(
    False, "True: returns of a truncated response include the value of its last state"
  )
  clip: NonNegativeFloat = key(0.2, "largest change of a value in an iteration; 0: no bound")
  normalize: bool = key(True, "standardise advantages over tokens")
  trunk_coef: NonNegativeFloat = key(
    0.1, "name=head: factor of the value loss's gradient into the policy's trunk; 0: no gradient"
  )
  kl_coef: NonNegativeFloat = key(
    0.0, "factor of log π_old/π_ref, subtracted from each token's reward"
  )

  def __post_init__(self):
    ranges.check(self, "critic")

  @property
  def warmup(self) -> int:
    """Number of initial iterations without updates of the policy."""
    return self.warmup_iterations if self.name != "none" else 0

  def hyperparameters(self, updates: int) -> dict[str, float]:
    """Returns arguments of compiled programs.

    `clip`, `trunk_coef` and `kl_coef` are excluded if they are 0: the programs omit their terms.

    Args:
      updates: number of updates per iteration.
    """
    values = dict(discount=self.discount, trace=self.trace, warmup=float(self.warmup * updates))
    options = dict(clip=self.clip, trunk_coef=self.trunk_coef, kl_coef=self.kl_coef)
    return values | {key: value for key, value in options.items() if value}

  @property
  def static(self) -> "CriticConfig":
    """The section with 1 for each of `hyperparameters`, and without warm-up.

    Compiled programs have it as a constant.
    """
    ones = {key: 1.0 for key in self.hyperparameters(0) if key != "warmup"}
    return dataclasses.replace(self, **ones, warmup_iterations=0)


@dataclasses.dataclass(frozen=True)
class DistillationConfig:
  """On-policy distillation, from a larger model. docs/objectives.md"""

  teacher: str = key(
    "", 'Hugging Face directory or repository | run or its checkpoint, as weights; "": none'
  )
  coef: PositiveFloat = key(1.0, "factor of log π_teacher/π_old in a token's advantage")
  discount: Fraction = key(0.0, "discount of later tokens' log-ratios in an advantage; 0: excluded")
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
    """Returns arguments of the compiled program."""
    names = ("coef", "discount", "reward_weight")
    return {name: getattr(self, name) for name in names}
