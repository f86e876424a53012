"""Section `critic`: PPO."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from gspo_jax import objectives as O
from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat

if TYPE_CHECKING:
  from gspo_jax.settings.run import RunConfig


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


@dataclasses.dataclass(frozen=True)
class DistillationConfig:
  teacher: str  # "": none | Hugging Face directory | run or its checkpoint (runs/start.py)
  coef: PositiveFloat  # of log π_teacher/π_old in the advantage of a token
  discount: Fraction  # of that of later tokens; 0: each token answers for itself alone
  reward_weight: NonNegativeFloat  # of the advantage that rewards give; 0: the teacher's alone

  def __post_init__(self):
    ranges.check(self, "distillation")

  @property
  def on(self) -> bool:
    return bool(self.teacher)

  @property
  def alone(self) -> bool:
    """Whether nothing is learned from rewards."""
    return self.on and self.reward_weight == 0

  def check_with(self, c: "RunConfig") -> None:
    """ValueError if the other sections of a `config.RunConfig` do not go with this one."""
    if not self.on:
      for key, value in dict(coef=1.0, discount=0.0, reward_weight=1.0).items():
        if (given := getattr(self, key)) != value:
          raise ValueError(
            f"distillation.{key}={given} has no effect without a teacher; set distillation.teacher,"
            f" or this to {value:g}"
          )
      return
    if not c.has_iterations:
      return
    what, rounds = f"distillation.teacher={self.teacher!r}", c.data.query_set.extra_rounds
    takes = [name for name, loss in O.POLICY_LOSSES.items() if loss.by_token]
    wrong = {
      f"{what} gives each token an advantage, which objective.name={c.objective.name!r} does not "
      f"take; set it to one of {', '.join(takes)}": not c.objective.loss.by_token,
      f"{what}, critic.name={c.critic.name!r}: both give each token its advantage; set critic.name "
      "to none": c.critic.name != "none",
      f"{what}: the student learns from its own responses, and job='offline' has others; set job "
      "to rl": c.job == "offline",
      "distillation.reward_weight=0 leaves constraints and costs without effect; set it above 0, "
      "or leave out constraints, environment.token_cost and environment.call_cost": self.alone
      and (c.constraints.on or c.environment.costs),
      f"data.query_set.extra_rounds={rounds} leaves out groups of equal rewards, of which "
      f"{what} teaches too; set it to 0": rounds > 0,
    }
    for message, found in wrong.items():
      if found:
        raise ValueError(message)

  def numbers(self) -> dict[str, float]:
    """What is an argument of the compiled program."""
    names = ("coef", "discount", "reward_weight")
    return {name: getattr(self, name) for name in names}


OFF = DistillationConfig("", coef=1.0, discount=0.0, reward_weight=1.0)
