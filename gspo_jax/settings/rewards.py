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

VERIFIERS = {  # Modules, imported if a configuration names them.
  "arithmetic": "gspo_jax.tasks.arithmetic",  # Embedded task of sums.
  "recurrence": "gspo_jax.tasks.recurrence",  # Embedded task of long responses.
  "math": "gspo_jax.verifiers.math_answer",  # SymPy in worker processes.
  "code": "gspo_jax.verifiers.programs.verifier",  # Tests in sandboxes.
  "string": "gspo_jax.verifiers.string_match",  # Normalised text.
}


# Largest absolute value of a reward, so that squares of differences are finite in float32.
LARGEST_REWARD = 1e15


TimeLimit = Annotated[float, Range(0.01, 86_400)]


@ranges.section("reward")
class RewardConfig:
  """The verifier or reward function, and additions to its reward. docs/rewards.md"""

  name: Annotated[str, Name((*VERIFIERS,))] = key(
    "arithmetic", "verifier of responses, or your own reward function"
  )
  right_from: Annotated[float, Range(-LARGEST_REWARD, LARGEST_REWARD)] | None = key(
    None,
    "smallest reward of a right response, before noise and additions. If it is unset, a response "
    "is right from a reward of 1 on. A conversation is then right if its environment's metric "
    "`correct` is at least 1. If the environment has no such metric, a conversation is right if "
    "its rewards sum to more than 0.",
  )
  workers: Workers = key(
    0, "number of processes of the verifiers math and code, and of your own functions; 0: one"
  )
  time_limit_s: TimeLimit = key(
    1.0,
    "time limit of one answer in seconds, without waiting in the queue. If reward.name=code: limit "
    "of a test's CPU time, rounded up to whole seconds.",
  )
  memory_mb: Annotated[int, Range(64, 1_048_576)] = key(
    1024, "largest address space of a program under test, in MiB (reward.name=code)"
  )
  tolerance: Fraction = key(
    1e-6,
    "largest error, absolute or relative, of a decimal in a program's output (reward.name=code); "
    "0: exact",
  )
  isolation: Literal[ISOLATIONS] = key(
    "auto",
    "sandbox of programs (reward.name=code). namespaces: Linux namespaces | auto: the same as "
    "namespaces | none: programs have the rights of the user",
  )
  format: Literal["none", "think", "think_answer"] = key("none", "tags that a response should have")
  format_weight: NonNegativeFloat = key(0.0, "reward for a response with the tags of reward.format")
  overlong_weight: NonNegativeFloat = key(
    0.0, "penalty of a response with overlong_max or more tokens. DAPO has 1."
  )
  overlong_max: NonNegativeInt = key(
    0, "number of tokens from which the penalty is full; 0: sampling.max_new_tokens"
  )
  overlong_buffer: NonNegativeInt = key(
    0, "number of tokens below overlong_max over which the penalty grows from 0 to overlong_weight"
  )
  false_positive: Fraction = key(
    0.0,
    "artificial noise: share of wrong responses that are rewarded as right. If per_line is set, "
    "this is a share of wrong lines.",
  )
  false_negative: Fraction = key(
    0.0,
    "artificial noise: share of right responses that are rewarded as wrong. If per_line is set, "
    "this is a share of right lines.",
  )
  partial: Fraction = key(
    0.0,
    "weight p in the reward p · (share of right lines) + (1 - p) · (1 if the last line is right, "
    "else 0), if reward.name=recurrence",
  )
  per_line: bool = key(
    False,
    "True: each line of a response has its own reward and its own noise "
    "(reward.name=recurrence). Let p be reward.partial, or 1 if that key is 0. If n lines are "
    "expected, a right line has the reward p / n. The last line of a right response has 1 - p "
    "more.",
  )

  def __post_init__(self):
    wrong = [
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


# Signals that need no verifier. "length" is the number of a response's tokens. "overlong" is 0
# before the overlong buffer, and rises to 1 over the buffer's tokens. "truncated" is 1 for a
# truncated response. "format", "text" and "token" are 1 for a response that contains the tags, the
# text or the token.
RESPONSE_SIGNALS = ("length", "truncated", "overlong", "format", "text", "token")


SIGNALS = Name(("", *RESPONSE_SIGNALS, *VERIFIERS))


Number = Annotated[float, Range(-1e6, 1e6)]


@dataclasses.dataclass(frozen=True)
class RewardSignal:
  """A reward in addition to section `reward`. Its metric is constraint/<name>/reward."""

  signal: Annotated[str, SIGNALS] = key(
    "", "source of a number for each response: a property such as length, or a verifier"
  )
  text: str = key(
    "", "text to look for, if signal=text. The number is 1 for a response that contains it, else 0."
  )
  token: Annotated[int, Range(0, INT32)] = key(
    0,
    "token id to look for, if signal=token. The number is 1 for a response that contains it, "
    "else 0.",
  )
  weight: Number = key(
    0.0, "weight of the number, after standardisation within each group; 0: the signal is unused"
  )


@dataclasses.dataclass(frozen=True)
class CostSignal:
  """A cost whose mean has a limit. Its metrics are constraint/<name>/..."""

  signal: Annotated[str, SIGNALS] = key("", "as constraints.rewards.NAME.signal")
  text: str = key("", "as constraints.rewards.NAME.text")
  token: Annotated[int, Range(0, INT32)] = key(0, "as constraints.rewards.NAME.token")
  bound: Literal["", "at_most", "at_least"] = key(
    "",
    'at_most: the limit is an upper bound | at_least: the limit is a lower bound | "": the cost '
    "is unused",
  )
  limit: Number = key(
    0.0, "bound of the mean over an iteration's responses, in the unit of the signal"
  )
  initial: NonNegativeFloat = key(0.0, "multiplier in the first iteration")
  rate: NonNegativeFloat = key(
    0.2,
    "largest change of the multiplier's integral term in an iteration. The change is this large if "
    "the mean is one standard deviation (within groups) or more from the limit, and proportionally "
    "smaller otherwise. 0: the term is fixed.",
  )
  gain: NonNegativeFloat = key(
    2.0,
    "largest proportional term of the multiplier. The term is this large if the mean violates the "
    "limit by one standard deviation or more, and proportionally smaller otherwise. The term "
    "prevents overshooting. 0: no such term.",
  )
  most: PositiveFloat = key(10.0, "largest multiplier")

  @property
  def sign(self) -> float:
    return -1.0 if self.bound == "at_least" else 1.0


@dataclasses.dataclass(frozen=True)
class ConstraintConfig:
  """Further rewards, and costs with limits. You choose their names. docs/objectives.md"""

  reward_weight: NonNegativeFloat = key(
    1.0, "weight of the reward of section reward, after standardisation within each group"
  )
  rewards: dict[str, RewardSignal] = key(
    dict(extra=RewardSignal()), "sections of further rewards, by name"
  )
  costs: dict[str, CostSignal] = key(
    dict(
      length=CostSignal("length"),
      truncated=CostSignal("truncated"),
      text=CostSignal("text"),
      other=CostSignal(),
    ),
    "sections of costs, by name",
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
          "{text}, {signal}: signal='text' needs a text, and other signals have none; set both or "
          "neither",
        ),
        (
          entry.signal != "token" and entry.token,
          "{token} has no effect, since {signal}; set token to 0, or signal to token",
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
        "{reward_weight}: all rewards have weight 0; change this weight, or a further reward's",
      ),
    ]
    ranges.refuse(self, "constraints", wrong)

  def entries(self) -> list[tuple[str, str, RewardSignal | CostSignal]]:
    """Returns section, name and signal of every entry, used or not."""
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


def _active(signal: RewardSignal | CostSignal) -> bool:
  return bool(signal.weight if isinstance(signal, RewardSignal) else signal.bound)


def verifier_config(reward: RewardConfig, name: str) -> RewardConfig:
  """Returns the section `reward` for a signal's verifier.

  The result has no noise, and no rewards for format, length or lines. Its `partial` is 0, unless
  `name` is `reward.name`.
  """
  plain = dict(format_weight=0.0, overlong_weight=0.0, false_positive=0.0, false_negative=0.0)
  partial = reward.partial if name == reward.name else 0.0
  return dataclasses.replace(reward, name=name, partial=partial, per_line=False, **plain)
