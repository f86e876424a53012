"""Sections `reward` and `constraints`: verifiers, additions to rewards, and costs."""

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

VERIFIERS = {  # Imported if a configuration names them.
  "arithmetic": "gspo_jax.tasks.arithmetic",  # Embedded task of sums.
  "recurrence": "gspo_jax.tasks.recurrence",  # Embedded task of long responses.
  "math": "gspo_jax.verifiers.math_answer",  # SymPy in worker processes.
  "code": "gspo_jax.verifiers.programs.verifier",  # Tests in sandboxes.
  "string": "gspo_jax.verifiers.string_match",  # Normalised text.
}


# Largest absolute value of rewards: squares of differences are finite in float32.
LARGEST_REWARD = 1e15


TimeLimit = Annotated[float, Range(0.01, 86_400)]


@dataclasses.dataclass(frozen=True)
class RewardConfig:
  """The verifier or reward function, and additions to its reward. docs/rewards.md"""

  name: Annotated[str, Name((*VERIFIERS,))] = key("arithmetic", "verifier of responses")
  right_from: Annotated[float, Range(-LARGEST_REWARD, LARGEST_REWARD)] | None = key(
    None, "smallest reward of a right response; unset: 1, or above 0 with an environment"
  )
  workers: Workers = key(0, "verifying processes; math and code need at least 1")
  time_limit_s: TimeLimit = key(
    1.0, "time limit per answer, without queueing; code: CPU time per test"
  )
  memory_mb: Annotated[int, Range(64, 1_048_576)] = key(1024, "code: address space of a test")
  tolerance: Fraction = key(
    1e-6, "code: error of a decimal in an expected output, absolute or relative; 0: exact"
  )
  isolation: Literal[ISOLATIONS] = key(
    "auto", "sandbox of code; none: programs have the user's rights"
  )
  format: Literal["none", "think", "think_answer"] = key("none", "required tags of a response")
  format_weight: NonNegativeFloat = key(0.0, "reward for a response with these tags")
  overlong_weight: NonNegativeFloat = key(
    0.0, "penalty of responses of overlong_max tokens; DAPO: 1"
  )
  overlong_max: NonNegativeInt = key(0, "tokens with the full penalty; 0: sampling.max_new_tokens")
  overlong_buffer: NonNegativeInt = key(
    0, "tokens below overlong_max, over which the penalty grows from 0"
  )
  false_positive: Fraction = key(0.0, "noise: share of wrong responses rewarded as right")
  false_negative: Fraction = key(0.0, "noise: share of right responses rewarded as wrong")
  partial: Fraction = key(0.0, "recurrence: part of the reward given by the share of right lines")
  per_line: bool = key(
    False,
    "recurrence: True: a reward, and noise, for each line; right lines share `partial` of the "
    "reward, or all of it if partial is 0",
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
        self.overlong_weight and self.buffer_error,
        f"{{overlong_weight}} needs a buffer: {self.buffer_error}",
      ),
    ]
    ranges.refuse(self, "reward", wrong)

  @property
  def threshold(self) -> float:
    """Smallest reward of a right response. Conversations do not use this value."""
    return 1.0 if self.right_from is None else self.right_from

  @property
  def buffer_error(self) -> str:
    """Description of an invalid overlong buffer; "" if the buffer is valid."""
    if 0 < self.overlong_buffer <= (self.overlong_max or self.overlong_buffer):
      return ""
    return (
      f"reward.overlong_buffer={self.overlong_buffer} must lie between 1 and reward.overlong_max="
      f"{self.overlong_max or 'sampling.max_new_tokens'}"
    )


# Signals that need no verifier. "length" is the response's number of tokens. "overlong" is the
# response's position in the overlong buffer, from 0 to 1. Any other signal is 1 if the response is
# truncated, or has the required format, the text or the token; else 0.
RESPONSE_SIGNALS = ("length", "truncated", "overlong", "format", "text", "token")


SIGNALS = Name(("", *RESPONSE_SIGNALS, *VERIFIERS))


Number = Annotated[float, Range(-1e6, 1e6)]


@dataclasses.dataclass(frozen=True)
class RewardSignal:
  """A further reward; its metric is constraint/<name>/reward."""

  signal: Annotated[str, SIGNALS] = key("", "source of the number")
  text: str = key("", "signal=text: 1 for a response with this text")
  token: Annotated[int, Range(0, INT32)] = key(
    0, "signal=token: 1 for a response with this token id"
  )
  weight: Number = key(0.0, "weight of the number, standardised in its group; 0: unused")


@dataclasses.dataclass(frozen=True)
class CostSignal:
  """A cost with a limit for its mean; its metrics are constraint/<name>/..."""

  signal: Annotated[str, SIGNALS] = key("", "as constraints.rewards.NAME.signal")
  text: str = key("", "as constraints.rewards.NAME.text")
  token: Annotated[int, Range(0, INT32)] = key(0, "as constraints.rewards.NAME.token")
  bound: Literal["", "at_most", "at_least"] = key("", '"": unused')
  limit: Number = key(0.0, "bound of an iteration's mean, in the signal's units")
  initial: NonNegativeFloat = key(0.0, "initial multiplier")
  rate: NonNegativeFloat = key(
    0.2,
    "change of the multiplier in an iteration with a mean one standard deviation beyond the limit; "
    "0: fixed",
  )
  gain: NonNegativeFloat = key(
    2.0,
    "proportional term of the multiplier, per standard deviation beyond the limit, against "
    "overshooting; 0: dual ascent alone",
  )
  most: PositiveFloat = key(10.0, "largest multiplier")

  @property
  def sign(self) -> float:
    return -1.0 if self.bound == "at_least" else 1.0


@dataclasses.dataclass(frozen=True)
class ConstraintConfig:
  """Further rewards, and costs with limits, by names of the user. docs/objectives.md"""

  reward_weight: NonNegativeFloat = key(
    1.0, "weight of the reward of section reward, standardised in its group"
  )
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
        raise ValueError(
          f"{path}: the name becomes part of metrics, so it must be a letter and then letters, "
          "digits and underscores"
        )
      is_cost = isinstance(entry, CostSignal)
      switch = "bound" if is_cost else "weight"
      wrong = [
        (
          not entry.signal,
          f"{{{switch}}} needs {path}.signal, the source of its number: {SIGNALS}",
        ),
        (
          (entry.signal == "text") != bool(entry.text),
          "{text}, {signal}: signal='text' looks for the text, and no other signal does; set both "
          "or neither",
        ),
        (
          entry.signal != "token" and entry.token,
          "{token}, {signal}: set token to 0, or signal to token",
        ),
        (is_cost and entry.initial > entry.most, "{initial} must be at most {most}"),
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
        self.enabled and not (self.reward_weight or self.active_rewards),
        "{reward_weight}: all rewards have weight 0; set this weight, or that of a further reward",
      ),
    ]
    ranges.refuse(self, "constraints", wrong)

  def entries(self) -> list[tuple[str, str, RewardSignal | CostSignal]]:
    """Returns section, name and signal of all entries, unused ones too."""
    rewards = [("rewards", name, signal) for name, signal in self.rewards.items()]
    return rewards + [("costs", name, signal) for name, signal in self.costs.items()]

  @property
  def active_rewards(self) -> dict[str, RewardSignal]:
    return {name: x for name, x in sorted(self.rewards.items()) if _active(x)}

  @property
  def active_costs(self) -> dict[str, CostSignal]:
    return {name: x for name, x in sorted(self.costs.items()) if _active(x)}

  @property
  def signals(self) -> dict[str, RewardSignal | CostSignal]:
    """Active rewards and then active costs, by name."""
    return {**self.active_rewards, **self.active_costs}

  @property
  def names(self) -> str:
    """Lists the names of the signals, separated by commas."""
    return ", ".join(self.signals)

  @property
  def enabled(self) -> bool:
    """Whether there are further rewards or costs."""
    return bool(self.signals)

  @property
  def verifiers(self) -> list[str]:
    """Names of the signals' verifiers."""
    return sorted({x.signal for x in self.signals.values()} - {*RESPONSE_SIGNALS})


def needs_workers(verifier: str) -> bool:
  """Whether a verifier runs in worker processes."""
  return verifier not in ("", "arithmetic", "recurrence", "string", *RESPONSE_SIGNALS)


def _active(signal: RewardSignal | CostSignal) -> bool:
  return bool(signal.weight if isinstance(signal, RewardSignal) else signal.bound)


def verifier_config(reward: RewardConfig, name: str) -> RewardConfig:
  """Returns the section `reward` with another verifier. Additions to rewards and noise are off."""
  plain = dict(format_weight=0.0, overlong_weight=0.0, false_positive=0.0, false_negative=0.0)
  partial = reward.partial if name == reward.name else 0.0
  return dataclasses.replace(reward, name=name, partial=partial, per_line=False, **plain)
