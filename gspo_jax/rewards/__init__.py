"""Rewards: responses and their prompts in, a number for each out. Nothing here imports jax.

A verifier is a module with `OUTCOMES`, the names of what it can find, and `open_verifier(config)`,
a context manager of a `Verify` function; VERIFIERS names those that come with the package.
"""

import collections
import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal, Protocol

import numpy as np

from gspo_jax import ranges
from gspo_jax.ranges import Fraction, Name, NonNegativeFloat, NonNegativeInt, Range, Workers
from gspo_jax.rewards import shaping
from gspo_jax.rewards.programs.process import ISOLATIONS

VERIFIERS = {  # imported when a config names them
  "arithmetic": "gspo_jax.tasks.arithmetic",  # the embedded task
  "math": "gspo_jax.rewards.math_answer",  # math-verify in worker processes
  "code": "gspo_jax.rewards.programs.verifier",  # tests in sandboxes
  "string": "gspo_jax.rewards.string_match",  # the normalised text
}
_USER = "gspo_jax.rewards.user_function"  # package.module:function


TimeLimit = Annotated[float, Range(0.01, 86_400)]


@dataclasses.dataclass(frozen=True)
class RewardConfig:
  """The verifier, and what is added to its reward. docs/rewards.md has more."""

  name: Annotated[str, Name((*VERIFIERS,))]  # or the user's own
  workers: Workers  # processes that verify; arithmetic and string need none
  time_limit_s: TimeLimit  # for one answer without queueing; code: CPU time for one test
  memory_mb: Annotated[int, Range(64, 1_048_576)]  # code: address space of one test
  isolation: Literal[ISOLATIONS]  # code; none: programs run with your rights
  format: Literal["none", "think", "think_answer"]  # tags that a response must have
  format_weight: NonNegativeFloat  # what keeping the format adds to the reward
  overlong_weight: NonNegativeFloat  # taken from a response of overlong_max tokens and more
  overlong_max: NonNegativeInt  # tokens; 0: sampling.max_new_tokens, by `config.derived`
  overlong_buffer: NonNegativeInt  # tokens before overlong_max over which the loss grows
  false_positive: Fraction  # share of other responses rewarded as if right
  false_negative: Fraction  # share of the right responses not rewarded
  noise_seed: ranges.Seed  # of those two

  def __post_init__(self):
    ranges.check(self, "reward")
    if self.workers == 0 and self.name not in ("arithmetic", "string"):
      raise ValueError(f"reward.workers=0: reward.name={self.name!r} needs at least 1")
    if self.format_weight and self.format == "none":
      raise ValueError("reward.format_weight needs reward.format=think or think_answer")
    if self.overlong_weight and not 0 < self.overlong_buffer <= (
      self.overlong_max or self.overlong_buffer
    ):
      raise ValueError(
        f"reward.overlong_weight={self.overlong_weight} needs a buffer:"
        f" reward.overlong_buffer={self.overlong_buffer} must lie between 1 and"
        f" reward.overlong_max={self.overlong_max or 'sampling.max_new_tokens'}"
      )


class Prompt(Protocol):
  """A prompt as far as rewards look at it (`structs.Prompt` is one)."""

  id: str
  question: str
  answer: str  # the gold answer, or tests for programs
  info: tuple[tuple[str, str], ...]  # further fields of the row in the data set


# One outcome per response and its prompt, each one of OUTCOMES; and the values between 0 and 1, or
# None for 1 where the outcome is "right" and 0 elsewhere.
Verify = Callable[[Sequence[str], Sequence[Prompt]], tuple[Sequence[str], Sequence[float] | None]]


@dataclasses.dataclass(frozen=True)
class Scores:
  """The rewards of B responses, and how the verifier came to them."""

  reward: np.ndarray  # float32 [B]: what is learned from
  outcomes: dict[str, int]  # of the verifier: how many were right, wrong, timeout, ...
  correct: np.ndarray  # float32 [B]: 1 where the verifier said right


class Scorer(Protocol):
  def __call__(
    self, responses: Sequence[str], prompts: Sequence[Prompt], lengths: Sequence[int] | None = None
  ) -> Scores:
    """Scores B responses to B prompts, which repeat where a prompt has several responses.

    `lengths` in tokens are for the overlong punishment; without them none is given, which is for
    evaluation, where `correct` counts and `reward` does not.
    """


@contextlib.contextmanager
def open_scorer(config: RewardConfig) -> Iterator[Scorer]:
  """The configured reward, its processes alive inside the `with` block.

  Raises:
    RuntimeError: if a verifier cannot be started, or programs cannot be confined.
  """
  verifier = importlib.import_module(VERIFIERS.get(config.name, _USER))
  with verifier.open_verifier(config) as verify:
    yield functools.partial(_score, config, verifier.OUTCOMES, verify)


def _score(
  config: RewardConfig,
  names: Sequence[str],
  verify: Verify,
  responses: Sequence[str],
  prompts: Sequence[Prompt],
  lengths: Sequence[int] | None = None,
) -> Scores:
  if len(responses) != len(prompts):
    raise ValueError(f"{len(responses)} responses and {len(prompts)} prompts")
  found, values = verify(responses, prompts)
  # An outcome that did not occur is 0 rather than missing.
  outcomes = dict.fromkeys(map(str, names), 0) | collections.Counter(map(str, found))
  correct = np.array([outcome == "right" for outcome in found], np.float32)
  reward = correct.copy() if values is None else np.array(values, np.float32)
  if config.false_positive or config.false_negative:
    noise = config.false_positive, config.false_negative, config.noise_seed
    flips = shaping.flipped(correct > 0, responses, [p.answer for p in prompts], *noise)
    reward = np.where(flips, 1 - correct, reward).astype(np.float32)
    outcomes["false_positive"] = int((flips & (correct == 0)).sum())
    outcomes["false_negative"] = int((flips & (correct == 1)).sum())
  if config.format_weight:
    kept = [shaping.keeps_format(response, config.format) for response in responses]
    outcomes["format_kept"] = sum(kept)
    reward += config.format_weight * np.array(kept, np.float32)
  if config.overlong_weight and lengths is not None:
    buffer = config.overlong_buffer
    reward += config.overlong_weight * shaping.overlong(lengths, config.overlong_max, buffer)
  return Scores(reward, outcomes, correct)
