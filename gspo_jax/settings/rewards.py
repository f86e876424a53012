"""Sections `reward` and `constraints`: verifiers, what is added to their rewards, and costs."""

import dataclasses
import re
from typing import Annotated, Literal

from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import (
  INT32,
  Fraction,
  Name,
  NonNegativeFloat,
  NonNegativeInt,
  PositiveFloat,
  Range,
  Workers,
  key,
)
from gspo_jax.verifiers.programs import ISOLATIONS

VERIFIERS = {  # imported when a config names them
  "arithmetic": "gspo_jax.tasks.arithmetic",  # the embedded task of sums
  "recurrence": "gspo_jax.tasks.recurrence",  # the embedded task of long responses
  "math": "gspo_jax.verifiers.math_answer",  # SymPy in worker processes
  "code": "gspo_jax.verifiers.programs.verifier",  # tests in sandboxes
  "string": "gspo_jax.verifiers.string_match",  # the normalised text
}


TimeLimit = Annotated[float, Range(0.01, 86_400)]


@dataclasses.dataclass(frozen=True)
class RewardConfig:
  """The verifier, 1 for a right response and 0 for any other, and what is added to its reward.
  docs/rewards.md"""

  name: Annotated[str, Name((*VERIFIERS,))] = key("arithmetic", "verifier of responses")
  workers: Workers = key(0, "processes that verify at the same time; math and code need some")
  time_limit_s: TimeLimit = key(1.0, "per answer, without queueing; code: CPU time per test")
  memory_mb: Annotated[int, Range(64, 1_048_576)] = key(1024, "code: address space of a test")
  isolation: Literal[ISOLATIONS] = key("auto", "code; none: programs have your rights")
  format: Literal["none", "think", "think_answer"] = key("none", "tags that a response must have")
  format_weight: NonNegativeFloat = key(0.0, "added to the reward of a response that has them")
  overlong_weight: NonNegativeFloat = key(
    0.0, "taken from responses of overlong_max tokens; DAPO: 1"
  )
  overlong_max: NonNegativeInt = key(0, "tokens; 0: sampling.max_new_tokens")
  overlong_buffer: NonNegativeInt = key(
    0, "tokens below overlong_max over which the loss grows from 0"
  )
  false_positive: Fraction = key(0.0, "noise: share of other responses rewarded as if right")
  false_negative: Fraction = key(0.0, "share of the right responses that are not rewarded")
  noise_seed: ranges.Seed = key(0, "the same seed misjudges the same responses")
  partial: Fraction = key(0.0, "recurrence: of the value, what the share of right lines decides")
  per_line: bool = key(
    False,
    "True: each line has a reward where it ends, what partial (0 is 1 then) gives for it, and is "
    "misjudged by itself; of verifiers that judge lines: recurrence",
  )

  def __post_init__(self):
    ranges.check(self, "reward")
    wrong = [
      (needs_workers(self.name) and not self.workers, "{workers}: {name} needs at least 1"),
      (self.partial and self.name != "recurrence", "{partial} needs reward.name=recurrence"),
      (
        self.format_weight and self.format == "none",
        "{format_weight} needs reward.format=think or think_answer",
      ),
      (
        self.overlong_weight and self.wrong_buffer,
        f"{{overlong_weight}} needs a buffer: {self.wrong_buffer}",
      ),
    ]
    ranges.refuse(self, "reward", wrong)

  @property
  def wrong_buffer(self) -> str:
    """Says why the overlong buffer is none, "" if it is one."""
    if 0 < self.overlong_buffer <= (self.overlong_max or self.overlong_buffer):
      return ""
    return (
      f"reward.overlong_buffer={self.overlong_buffer} must lie between 1 and reward.overlong_max="
      f"{self.overlong_max or 'sampling.max_new_tokens'}"
    )


# What a response shows by itself: tokens that were sampled; 1 if it was cut off; from 0 to 1 how
# far it is into the overlong buffer; 1 if it keeps the format, holds the text, or the token.
SHOWN = ("length", "truncated", "overlong", "format", "text", "token")


SIGNALS = Name(("", *SHOWN, *VERIFIERS))


Number = Annotated[float, Range(-1e6, 1e6)]


@dataclasses.dataclass(frozen=True)
class RewardSignal:
  """A further reward; its metric is constraint/<name>/reward."""

  signal: Annotated[str, SIGNALS] = key("", "where its number comes from")
  text: str = key("", "of signal=text: 1 for a response that has it")
  token: Annotated[int, Range(0, INT32)] = key(
    0, "of signal=token: 1 for a response that has the token of this id"
  )
  weight: Number = key(0.0, "of its value, standardised in its group; 0: it is left out")


@dataclasses.dataclass(frozen=True)
class CostSignal:
  """A cost with a limit for its mean; its metrics are constraint/<name>/..."""

  signal: Annotated[str, SIGNALS] = key("", "as of a further reward")
  text: str = key("", "the same")
  token: Annotated[int, Range(0, INT32)] = key(0, "the same")
  bound: Literal["", "at_most", "at_least"] = key("", '"": it is left out')
  limit: Number = key(0.0, "of the mean over an iteration's responses, in the signal's units")
  initial: NonNegativeFloat = key(0.0, "multiplier of the first iteration")
  rate: NonNegativeFloat = key(
    0.2, "of the multiplier, per iteration and standard deviation off the limit; 0: it stays"
  )
  gain: NonNegativeFloat = key(
    2.0, "added to it per standard deviation, against overshooting; 0: dual ascent alone"
  )
  most: PositiveFloat = key(10.0, "of the multiplier")

  @property
  def sign(self) -> float:
    return -1.0 if self.bound == "at_least" else 1.0


@dataclasses.dataclass(frozen=True)
class ConstraintConfig:
  """Further rewards, and costs that are held at limits, by names of your own. docs/objectives.md"""

  reward_weight: NonNegativeFloat = key(1.0, "of the standardised reward of the section reward")
  rewards: dict[str, RewardSignal] = key(dict(extra=RewardSignal()), "further rewards, by name")
  costs: dict[str, CostSignal] = key(
    dict(
      length=CostSignal("length"),
      truncated=CostSignal("truncated"),
      text=CostSignal("text"),
      other=CostSignal(),
    ),
    "costs, by name",
  )

  def __post_init__(self):
    for kind, name, entry in self.entries():
      path = f"constraints.{kind}.{name}"
      ranges.check(entry, path)
      if not re.fullmatch(r"[A-Za-z]\w*", name):
        raise ValueError(f"{path}: a name is letters, digits and underscores, as in metrics")
      of_cost = isinstance(entry, CostSignal)
      switch = "bound" if of_cost else "weight"
      wrong = [
        (
          not entry.signal,
          f"{{{switch}}} needs {path}.signal, where its number comes from: {SIGNALS}",
        ),
        (
          (entry.signal == "text") != bool(entry.text),
          "{text}, {signal}: a text is what signal='text' looks for, and it needs one; set both or "
          "neither",
        ),
        (
          entry.signal != "token" and entry.token,
          "{token}, {signal}: set it to 0, or signal to token",
        ),
        (of_cost and entry.initial > entry.most, "{initial} is above {most}"),
      ]
      ranges.refuse(entry, path, wrong if _active(entry) else [])
    twice = min({*self.active_rewards} & {*self.active_costs}, default="")
    wrong = [
      (
        twice,
        f"constraints.rewards.{twice} and constraints.costs.{twice} would have the same metrics: "
        "rename one of them",
      ),
      (
        self.on and not (self.reward_weight or self.active_rewards),
        "{reward_weight}: no reward is left; set it, or a weight",
      ),
    ]
    ranges.refuse(self, "constraints", wrong)

  def entries(self) -> list[tuple[str, str, RewardSignal | CostSignal]]:
    """Section, name and entry of all that there are, those left out included."""
    found = [("rewards", name, one) for name, one in self.rewards.items()]
    return found + [("costs", name, one) for name, one in self.costs.items()]

  @property
  def active_rewards(self) -> dict[str, RewardSignal]:
    return {name: one for name, one in sorted(self.rewards.items()) if _active(one)}

  @property
  def active_costs(self) -> dict[str, CostSignal]:
    return {name: one for name, one in sorted(self.costs.items()) if _active(one)}

  @property
  def signals(self) -> dict[str, RewardSignal | CostSignal]:
    """Rewards, and then costs, by name."""
    return {**self.active_rewards, **self.active_costs}

  @property
  def names(self) -> str:
    """Lists the names of the signals, separated by commas."""
    return ", ".join(self.signals)

  @property
  def on(self) -> bool:
    """Whether advantages are anything but those of the reward."""
    return bool(self.signals)

  @property
  def verifiers(self) -> list[str]:
    """Names of the verifiers that signals come from."""
    return sorted({one.signal for one in self.signals.values()} - {*SHOWN})


def needs_workers(verifier: str) -> bool:
  """Whether a verifier runs in processes of its own."""
  return verifier not in ("", "arithmetic", "recurrence", "string", *SHOWN)


def _active(one: RewardSignal | CostSignal) -> bool:
  return bool(one.weight if isinstance(one, RewardSignal) else one.bound)


def verifier_config(reward: RewardConfig, name: str) -> RewardConfig:
  """The section `reward` for another verifier, whose value comes without additions and noise."""
  plain = dict(format_weight=0.0, overlong_weight=0.0, false_positive=0.0, false_negative=0.0)
  partial = reward.partial if name == reward.name else 0.0
  return dataclasses.replace(reward, name=name, partial=partial, per_line=False, **plain)
