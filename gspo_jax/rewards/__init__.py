"""Verifiers: responses and gold answers in, rewards out. Nothing here imports jax."""

import collections
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal, Protocol

import numpy as np

from gspo_jax import ranges
from gspo_jax.ranges import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, Range
from gspo_jax.rewards import shaping
from gspo_jax.rewards.programs.process import ISOLATIONS

VERIFIERS = {  # their outcomes: each is counted, and the count is 0 rather than missing
  "arithmetic": "right wrong",  # the embedded task
  "math": "right wrong unparsable timeout crash",  # math-verify in worker processes
  "code": "right wrong unparsable error timeout memory crash",  # tests in sandboxes
  "string": "right wrong unparsable",  # the normalised text
}
_USER = "right wrong timeout crash"  # package.module:function
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True)
class RewardConfig:
  """The verifier, and what is added to its reward. docs/rewards.md has more."""

  name: str  # one of VERIFIERS | the user's own package.module:function
  workers: NonNegativeInt  # processes that verify; arithmetic and string need none
  time_limit_s: PositiveFloat  # for one answer without queueing; code: CPU time for one test
  memory_mb: Annotated[int, Range(64, why="Python needs them")]  # code: address space of one test
  isolation: Literal[ISOLATIONS]  # code; none: programs run with your rights
  format: Literal["none", "think", "think_answer"]  # tags that a response must have
  format_weight: NonNegativeFloat  # what keeping the format adds to the reward
  overlong_weight: NonNegativeFloat  # taken from a response of overlong_max tokens and more
  overlong_max: NonNegativeInt  # tokens; 0: sampling.max_new_tokens, by `config.derived`
  overlong_buffer: NonNegativeInt  # tokens before overlong_max over which the loss grows
  false_positive: Fraction  # share of other responses rewarded as if right
  false_negative: Fraction  # share of the right responses not rewarded
  noise_seed: NonNegativeInt  # of those two

  def __post_init__(self):
    ranges.check(self, "reward")
    if self.name not in VERIFIERS and not _DOTTED.fullmatch(self.name):
      names = ", ".join(VERIFIERS)
      raise ValueError(
        f"reward.name={self.name!r} is not one of {names}, nor package.module:function"
      )
    if self.workers == 0 and self.name not in ("arithmetic", "string"):
      raise ValueError(f"reward.workers=0: reward.name={self.name!r} needs at least 1")
    if self.format_weight and self.format == "none":
      raise ValueError("reward.format_weight needs reward.format=think or think_answer")
    if self.overlong_weight and not 0 < self.overlong_buffer <= (
      self.overlong_max or self.overlong_buffer
    ):
      raise ValueError(
        f"reward.overlong_buffer={self.overlong_buffer} must lie between 1 and "
        f"reward.overlong_max={self.overlong_max}"
      )


@dataclasses.dataclass(frozen=True)
class Scores:
  reward: np.ndarray  # float32 [B]: what is learned from
  outcomes: dict[str, int]  # of the verifier: how many were right, wrong, timeout, ...
  correct: np.ndarray | None = None  # float32 [B]: 1 where the verifier said right; None: reward

  def __post_init__(self):
    if self.correct is None:
      object.__setattr__(self, "correct", self.reward)


class Scorer(Protocol):
  def __call__(
    self,
    responses: Sequence[str],
    answers: Sequence[str],
    lengths: Sequence[int] | None = None,
  ) -> Scores:
    """Scores responses against gold answers, or against tests for programs.

    `lengths` in tokens are for the overlong punishment; without them none is given, which is for
    evaluation, where `correct` counts and `reward` does not.
    """


# Outcomes, and values between 0 and 1.
_Verify = Callable[[Sequence[str], Sequence[str]], tuple[list[str], Sequence[float]]]


@contextlib.contextmanager
def open_scorer(config: RewardConfig) -> Iterator[Scorer]:
  """The configured reward, its processes alive inside the `with` block.

  Raises:
    RuntimeError: if a verifier cannot be started, or programs cannot be confined.
  """
  with contextlib.ExitStack() as stack:
    yield _scorer(config, _open_verifier(config, stack))


def _open_verifier(config: RewardConfig, stack: contextlib.ExitStack) -> _Verify:
  limits = config.workers, config.time_limit_s
  if config.name == "arithmetic":
    from gspo_jax.tasks import arithmetic

    return _binary(lambda r, a: ["right" if x else "wrong" for x in map(arithmetic.verify, r, a)])
  if config.name == "string":
    from gspo_jax.rewards import string_match

    return _binary(lambda r, a: list(map(string_match.verify, r, a)))
  if config.name == "math":
    from gspo_jax.rewards.math_answer import MathVerifier

    return _binary(stack.enter_context(MathVerifier(*limits)).score)
  if config.name == "code":
    from gspo_jax.rewards.programs.verifier import CodeVerifier, Limits

    tests = Limits.of(config.time_limit_s, config.memory_mb)
    verifier = CodeVerifier(config.workers, tests, config.isolation)
    return _binary(stack.enter_context(verifier).score)
  from gspo_jax.rewards.user_function import UserVerifier

  return stack.enter_context(UserVerifier(config.name, *limits)).score


def _binary(outcomes: Callable[[Sequence[str], Sequence[str]], list[str]]) -> _Verify:
  """A verifier without partial credit."""

  def verify(responses, answers):
    found = [str(outcome) for outcome in outcomes(responses, answers)]
    return found, [outcome == "right" for outcome in found]

  return verify


def _scorer(config: RewardConfig, verify: _Verify) -> Scorer:
  names = VERIFIERS.get(config.name, _USER).split()

  def score(responses, answers, lengths=None):
    found, values = verify(responses, answers)
    outcomes = dict.fromkeys(names, 0) | collections.Counter(found)
    correct = np.array([outcome == "right" for outcome in found], np.float32)
    reward = np.array(values, np.float32)
    if config.false_positive or config.false_negative:
      noise = config.false_positive, config.false_negative, config.noise_seed
      flips = shaping.flipped(correct > 0, responses, answers, *noise)
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

  return score
