"""Scorers: what a verifier says of responses, and what is added to it.

A verifier is a module with `OUTCOMES`, the names of what it can find, `UNKNOWN`, those of them
that say nothing of the response ("crash" alone where it is left out), and `open_verifier`, a
context manager of a `Verify` function, whose parameters are keys of the section `reward`.
VERIFIERS names those that come with the package. A verifier may have `check_answer(text)`, which
raises ValueError for a gold answer that it could not read, and `right_lines(response, answer)`, the
verdicts on single lines (lines.py); and the function may have `notes`, metrics that hold for the
whole run.
"""

import collections
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from gspo_jax.rewards import lines, shaping
from gspo_jax.settings.rewards import VERIFIERS, RewardConfig
from gspo_jax.verifiers import pool, thought

_USER = "gspo_jax.rewards.user_function"  # package.module:function


class Prompt(Protocol):
  """A prompt as far as rewards look at it (`structs.Prompt` is one)."""

  id: str
  question: str
  answer: str  # the gold answer, or tests for programs
  info: tuple[tuple[str, str], ...]  # further fields of the row in the data set
  # thinks: bool, which may be left out; True: it ends with <think>, the response begins within one


# From responses, their prompts, and whether each ended by itself: one outcome per response, of
# OUTCOMES; and the values between 0 and 1, or None for 1 where the outcome is "right" and 0
# elsewhere. An outcome that is unknown may be a `pool.Failure`, which has a reason.
Verify = Callable[
  [Sequence[str], Sequence[Prompt], Sequence[bool]], tuple[Sequence[str], Sequence[float] | None]
]


@dataclasses.dataclass(frozen=True)
class Scores:
  """The rewards of B responses, and how the verifier came to them."""

  reward: np.ndarray  # float32 [B]: what is learned from; 0 where nothing is known
  outcomes: Mapping[str, int]  # Counts of right, wrong, timeout, ... by the verifier.
  correct: np.ndarray  # float32 [B]: 1 where the verifier said right
  # Responses without a verdict, by their index in the batch: outcome and reason. They are neither
  # right nor wrong.
  unknown: Mapping[int, str] = dataclasses.field(default_factory=dict)
  # With `per_line`: float32 [U] for each response, of the lines of its text; `reward` is their sum.
  lines: Sequence[np.ndarray] | None = None
  # float32 [B]: the verifier's own values, before noise and additions; None: those of `correct`.
  values: np.ndarray | None = None

  @property
  def known(self) -> np.ndarray:
    """bool [B]: there is a verdict."""
    return np.array([i not in self.unknown for i in range(len(self.reward))], bool)


class Scorer(Protocol):
  notes: Mapping[str, float]  # metrics that hold for the whole run: what confines programs

  def __call__(
    self,
    responses: Sequence[str],
    prompts: Sequence[Prompt],
    lengths: Sequence[int] | None = None,
    finished: Sequence[bool] | None = None,
  ) -> Scores:
    """Scores B responses to B prompts; prompts with several responses repeat.

    Whatever the responses hold, and whatever becomes of the verifier, nothing is raised: there is
    no verdict then on those that it failed on.

    Args:
      lengths: in tokens, for the overlong punishment; without them none is given, which is for
        evaluation, where `correct` counts and `reward` does not.
      finished: False where a response was cut off; None: all ended by themselves.
    """


def check_importable(name: str, key: str = "reward.name") -> None:
  """Raises ValueError, naming `key`, for a user's verifier in a missing module."""
  if name in VERIFIERS:
    return
  module = name.partition(":")[0]
  sys.path.append(os.getcwd())  # Workers look there too.
  try:
    spec = importlib.util.find_spec(module)
  except Exception as error:  # a package above it is imported, and is the user's
    raise ValueError(f"{key}={name!r}: {type(error).__name__}: {error}") from error
  if spec is None:
    raise ValueError(f"{key}={name!r}: there is no module {module} here or on PYTHONPATH")


def check_lines(config: RewardConfig) -> None:
  """Raises ValueError for `per_line` with a verifier of whole responses."""
  if config.per_line:
    lines.judge(_verifier(config.name), config.name)


def answer_check(name: str) -> Callable[[str], None] | None:
  """Returns the check of gold answers of a verifier, by its name. None if it has none."""
  return getattr(_verifier(name), "check_answer", None) if name else None


def _verifier(name: str) -> types.ModuleType:
  return importlib.import_module(VERIFIERS.get(name, _USER))


@contextlib.contextmanager
def open_scorer(config: RewardConfig) -> Iterator[Scorer]:
  """The configured reward, its processes alive inside the `with` block.

  Raises:
    RuntimeError: if a verifier cannot be started.
    ValueError: if programs cannot be confined, or for `per_line` where no lines are judged.
  """
  verifier = _verifier(config.name)
  unknown = getattr(verifier, "UNKNOWN", ("crash",))
  right_lines = lines.judge(verifier, config.name) if config.per_line else None
  keys = inspect.signature(verifier.open_verifier).parameters
  with verifier.open_verifier(**{key: getattr(config, key) for key in keys}) as verify:
    scorer = functools.partial(_score, config, verifier.OUTCOMES, unknown, verify, right_lines)
    scorer.notes = getattr(verify, "notes", {})
    yield scorer


@contextlib.contextmanager
def open_scorers(sections: Mapping[str, RewardConfig], key: str) -> Iterator[dict[str, Scorer]]:
  """Several of them, by the names of verifiers. ValueError, which names `key`, for one that cannot
  be started."""
  with contextlib.ExitStack() as stack:
    scorers = {}
    for name, section in sections.items():
      try:
        scorers[name] = stack.enter_context(open_scorer(section))
      except RuntimeError as error:  # The last line of a traceback says it.
        raise ValueError(f"{key}={name!r}: {str(error).strip().splitlines()[-1]}") from error
    yield scorers


def _score(
  config: RewardConfig,
  names: Sequence[str],
  unknown_names: Sequence[str],
  verify: Verify,
  right_lines: lines.RightLines | None,
  responses: Sequence[str],
  prompts: Sequence[Prompt],
  lengths: Sequence[int] | None = None,
  finished: Sequence[bool] | None = None,
) -> Scores:
  if len(responses) != len(prompts):
    raise ValueError(f"{len(responses)} responses and {len(prompts)} prompts")
  finished = [True] * len(responses) if finished is None else finished
  thinks = [getattr(prompt, "thinks", False) for prompt in prompts]
  texts = map(thought.with_opening, responses, thinks)
  verdicts = _verdicts(verify, list(zip(texts, prompts, finished, strict=True)))
  unknown = {
    i: ": ".join(filter(None, [str(outcome), getattr(outcome, "reason", "")]))
    for i, (outcome, _) in enumerate(verdicts)
    if outcome in unknown_names or outcome == "crash"
  }
  # An outcome that did not occur is 0 rather than missing.
  counts = collections.Counter(str(outcome) for outcome, _ in verdicts)
  outcomes = dict.fromkeys(map(str, names), 0) | counts
  correct = np.array([outcome == "right" for outcome, _ in verdicts], np.float32)
  reward = np.array([value for _, value in verdicts], np.float32)
  scores = Scores(reward, outcomes, correct, unknown, values=reward)
  answers = [prompt.answer for prompt in prompts]
  added = np.zeros(len(responses), np.float32)
  if config.format_weight:
    formatted = [shaping.keeps_format(response, config.format) for response in responses]
    outcomes["format_kept"] = sum(formatted)
    added += config.format_weight * np.array(formatted, np.float32)
  if config.overlong_weight and lengths is not None:
    buffer = config.overlong_buffer
    added += config.overlong_weight * shaping.overlong(lengths, config.overlong_max, buffer)
  by_line = None
  if right_lines is not None:
    exact = dataclasses.replace(config, false_positive=0.0, false_negative=0.0)
    by_line, misjudged = lines.rewards(config, right_lines, responses, answers, correct)
    without_noise, _ = lines.rewards(exact, right_lines, responses, answers, correct)
    outcomes |= misjudged
    reward = _sums(by_line)
    scores = dataclasses.replace(scores, values=_sums(without_noise))
    for reward_U, addition, scored in zip(by_line, added, scores.known):
      reward_U[-1] += addition
      reward_U *= scored
  elif config.false_positive or config.false_negative:
    wrong, right = config.false_positive, config.false_negative
    flips = shaping.flipped(correct > 0, responses, answers, wrong, right, config.noise_seed)
    flips &= scores.known
    reward = np.where(flips, 1 - correct, reward).astype(np.float32)
    outcomes["false_positive"] = int((flips & (correct == 0)).sum())
    outcomes["false_negative"] = int((flips & (correct == 1)).sum())
  reward = np.where(scores.known, reward + added, 0).astype(np.float32)
  return dataclasses.replace(scores, reward=reward, lines=by_line)


def _sums(rewards_BU: Sequence[np.ndarray]) -> np.ndarray:
  """float32 [B], added up in float64."""
  return np.array([reward_U.sum(dtype=np.float64) for reward_U in rewards_BU], np.float32)


def _verdicts(verify: Verify, batch: list[tuple[str, Prompt, bool]]) -> list[tuple[str, float]]:
  """Outcome and value of each response. Where the verifier raises, halves of the batch are tried,
  and so on: what it cannot do is left without a verdict, and that alone."""
  if not batch:
    return []
  try:
    outcomes, values = verify(*map(list, zip(*batch)))
    values = [float(outcome == "right") for outcome in outcomes] if values is None else values
    return [pair for pair, _ in zip(zip(outcomes, values, strict=True), batch, strict=True)]
  except Exception as error:  # Any kind: the response may have been made for it.
    if len(batch) == 1:
      return [(pool.Failure("crash", f"{type(error).__name__}: {error}"), 0.0)]
  middle = len(batch) // 2
  return _verdicts(verify, batch[:middle]) + _verdicts(verify, batch[middle:])


class NoVerdictError(ValueError):
  """The verifier failed on all responses of a batch: there is nothing to learn from it."""


def require_verdicts(reasons: Sequence[str], total: int, place: str) -> None:
  """Raises `NoVerdictError` if no response has a verdict."""
  if total and len(reasons) == total:
    (reason, times), *_ = collections.Counter(reasons).most_common(1)
    raise NoVerdictError(
      f"the verifier came to no verdict on any of {total} responses ({times} times: {reason}). "
      f"They are in {place}; correct reward.name, the gold answers or the machine"
    )
