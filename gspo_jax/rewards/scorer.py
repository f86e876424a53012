"""Scorers turn the verdicts of a verifier into rewards.

If configured, a scorer flips some verdicts (noise), rewards the format, and penalises overlong
responses (shaping.py).

A verifier is a module. `settings.rewards.VERIFIERS` lists the verifiers of this package. The module
`user_function` is the verifier that calls a user's function. Members of a verifier:

- `OUTCOMES`: names of all outcomes of a response, such as "right", "wrong" and "timeout".
- `UNKNOWN`, optional: outcomes that mean that there is no verdict. "crash" always means this.
- `open_verifier`: context manager that yields a `Verify` function (see below). The parameters of
  this context manager are keys of section `reward`. The `Verify` function may have an attribute
  `notes`, a dict of constant metrics of the run.
- `check_answer(text)`, optional: raises ValueError for an unreadable gold answer.
- `word(text)`, optional: returns the gold answer in normalised form if it is a word, else None. If
  the most frequent gold answer is a word, such as "unknown", a run prints a warning, since the
  data may have this word where an answer is missing.
- `right_lines(response, answer)`, optional: returns verdicts on single lines (lines.py).
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from gspo_jax.rewards import lines, shaping
from gspo_jax.settings.rewards import LARGEST_REWARD, VERIFIERS, RewardConfig
from gspo_jax.system import user_code
from gspo_jax.verifiers import pool, thought

_USER = "gspo_jax.rewards.user_function"  # Verifier of names `package.module:function`.


class Prompt(Protocol):
  """Fields of a prompt used in rewards; `structs.Prompt` has them."""

  id: str
  question: str
  answer: str  # Gold answer, or tests for programs.
  info: tuple[tuple[str, str], ...]  # Other fields of the data row.
  # An optional attribute `thinks`, a bool: whether the prompt ends with <think>.


# Function of B responses, their prompts, and B bools, which are False for truncated responses. The
# function returns B outcomes, and either B values or None. None means that a response's value is 1
# if the outcome is "right", and 0 otherwise. A response with a verdict is right if the outcome is
# "right", or if its returned value is at least `reward.right_from` (1 if this key is unset). An
# outcome without a verdict may be a `pool.Failure`, which has a reason.
Verify = Callable[
  [Sequence[str], Sequence[Prompt], Sequence[bool]], tuple[Sequence[str], Sequence[float] | None]
]


@dataclasses.dataclass(frozen=True)
class Scores:
  """Rewards of B responses, with the verifier's outcomes."""

  reward: np.ndarray  # Reward for training, float32 [B]; 0 without a verdict.
  # Counts of responses by outcome (right, wrong, timeout, ...). If noise is configured, the dict
  # has counts of flipped verdicts, too. If the format is rewarded, the dict has the count of
  # responses in this format.
  outcomes: Mapping[str, int]
  # 1 for responses that are right before noise and additions, 0 for other responses, float32 [B].
  correct: np.ndarray
  # Outcome and reason of each response without a verdict, by index in the batch. A response without
  # a verdict is neither right nor wrong.
  unknown: Mapping[int, str] = dataclasses.field(default_factory=dict)
  # Rewards of each response's lines, float32 [U]; their sum is `reward`. None unless
  # `reward.per_line` is set.
  lines: Sequence[np.ndarray] | None = None
  # Value of each response before noise and additions, float32 [B]: the verifier's value, or the
  # sum of `line_values` if `reward.per_line` is set. None means that they equal `correct`.
  values: np.ndarray | None = None
  line_values: Sequence[np.ndarray] | None = None  # `lines` before noise and additions.

  @property
  def known(self) -> np.ndarray:
    """Whether each response has a verdict, bool [B]."""
    return np.array([i not in self.unknown for i in range(len(self.reward))], bool)


class Scorer(Protocol):
  """Scores batches of responses."""

  notes: Mapping[str, float]  # Constant metrics of the run, such as the kind of sandbox.

  def __call__(
    self,
    responses: Sequence[str],
    prompts: Sequence[Prompt],
    lengths: Sequence[int] | None = None,
    finished: Sequence[bool] | None = None,
  ) -> Scores:
    """Scores B responses.

    If the verifier fails on a response, that response has no verdict, and no exception is raised.

    Args:
      responses: texts of the responses; `pool.Failure` for a response that could not be sampled.
      prompts: prompt of each response.
      lengths: number of tokens of each response, for the overlong penalty. None means no penalty.
      finished: False for truncated responses. None means that no response was truncated.
    """


def try_out(scorer: Scorer, key: str, name: str, prompt: Prompt) -> list[str]:
  """Scores a prompt's gold answer and an empty response.

  Args:
    scorer: the scorer.
    key: configuration key of the verifier, for the message.
    name: its name.
    prompt: the prompt.

  Returns:
    The rewards of the gold answer and of the empty response as text, or the reason for no verdict.

  Raises:
    ValueError: neither response has a verdict.
  """
  scores = scorer([prompt.answer, ""], [prompt] * 2)
  if len(scores.unknown) == 2:
    remedy = "a function takes the response and a dict of its row's fields, and returns a number"
    gold, empty = scores.unknown[0], scores.unknown[1]
    errors = f"and on an empty one ({gold})"
    if gold != empty:
      errors = f"({gold}), and on an empty one ({empty})"
    raise ValueError(
      f"{key}={name!r} fails on problem {prompt.id}: on its gold answer as a response {errors}"
      + ("" if name in VERIFIERS else f"; {remedy}")
    )
  texts = {i: f"no verdict ({reason})" for i, reason in scores.unknown.items()}
  return [texts.get(i, f"{x:g}") for i, x in enumerate(scores.reward)]


def check_importable(name: str, key: str = "reward.name") -> None:
  """Raises ValueError if a user's module cannot be found.

  Args:
    name: name of a verifier, or `package.module:function`.
    key: key of the configuration, for the message.
  """
  if name in VERIFIERS:
    return
  module = name.partition(":")[0]
  sys.path.append(os.getcwd())  # Worker processes search the working directory, too.
  try:
    if importlib.util.find_spec(module) is None:
      raise ModuleNotFoundError(f"No module named {module!r}", name=module)
  except Exception as error:  # `find_spec` imports parent packages; user code may raise anything.
    raise user_code.import_error(error, module, f"{key}={name!r}") from error


def check_lines(config: RewardConfig) -> None:
  """Raises ValueError if the verifier does not support `reward.per_line`."""
  if config.per_line:
    lines.line_verifier(_verifier(config.name), config.name)


def answer_check(name: str) -> Callable[[str], None] | None:
  """Returns a verifier's `check_answer`. Returns None for "", and without this function."""
  return getattr(_verifier(name), "check_answer", None) if name else None


def frequent_word(name: str, answers: Iterable[str]) -> str | None:
  """Describes the most frequent gold answer, if it is a word.

  Args:
    name: name of the verifier; "" for none.
    answers: gold answers.

  Returns:
    The word and its share of all gold answers, for example "unknown: 40%". None if the most
    frequent answer is not a word, or if there is no verifier with a function `word`.
  """
  word = getattr(_verifier(name), "word", None) if name else None
  if word is None:
    return None
  counts = collections.Counter((word(answer), answer) for answer in answers)
  words, others = collections.Counter(), [0]
  for (text, _), count in counts.items():
    if text is None:
      others.append(count)
    else:
      words[text] += count
  ((text, count),) = words.most_common(1) or [("", 0)]
  return f"{text}: {count / counts.total():.0%}" if count > max(others) else None


def _verifier(name: str) -> types.ModuleType:
  """Imports the module of a verifier."""
  return importlib.import_module(VERIFIERS.get(name, _USER))


@contextlib.contextmanager
def open_scorer(config: RewardConfig) -> Iterator[Scorer]:
  """Opens the configured scorer. The processes of the verifier end with the `with` block.

  Raises:
    RuntimeError: the verifier cannot be started.
    ValueError: no sandbox is available for programs, or the verifier does not support `per_line`.
  """
  verifier = _verifier(config.name)
  unknown = getattr(verifier, "UNKNOWN", ("crash",))
  right_lines = lines.line_verifier(verifier, config.name) if config.per_line else None
  keys = inspect.signature(verifier.open_verifier).parameters
  config = dataclasses.replace(config, workers=max(1, config.workers))
  with verifier.open_verifier(**{key: getattr(config, key) for key in keys}) as verify:
    scorer = functools.partial(_score, config, verifier.OUTCOMES, unknown, verify, right_lines)
    scorer.notes = getattr(verify, "notes", {})
    yield scorer


@contextlib.contextmanager
def open_scorers(sections: Mapping[str, RewardConfig], key: str) -> Iterator[dict[str, Scorer]]:
  """Opens a scorer for each verifier, by name.

  Args:
    sections: section `reward` of each verifier, by the verifier's name.
    key: key of the configuration that names the verifiers, for messages.

  Raises:
    ValueError: a verifier cannot be started, or `open_scorer` raises ValueError.
  """
  with contextlib.ExitStack() as stack:
    scorers = {}
    for name, section in sections.items():
      try:
        scorers[name] = stack.enter_context(open_scorer(section))
      except RuntimeError as error:  # The last line of the worker's traceback has the reason.
        reason = str(error).strip().splitlines()[-1].removeprefix("ValueError: ")
        raise ValueError(f"{key}={name!r}: {reason}") from error
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
  """Scores responses. The last four parameters are those of `Scorer`."""
  if len(responses) != len(prompts):
    raise ValueError(f"{len(responses)} responses and {len(prompts)} prompts")
  finished = [True] * len(responses) if finished is None else finished
  thinks = [getattr(prompt, "thinks", False) for prompt in prompts]
  texts = map(thought.with_opening, responses, thinks)
  batch = list(zip(texts, prompts, finished, strict=True))
  failed = [isinstance(response, pool.Failure) for response in responses]
  sampled = iter(_verdicts(verify, [x for x, fails in zip(batch, failed) if not fails]))
  verdicts = [(x, None) if fails else next(sampled) for x, fails in zip(responses, failed)]
  answers = [prompt.answer for prompt in prompts]
  if right_lines is not None:
    verdicts_BU = lines.line_verdicts(right_lines, responses, answers)
    pairs = zip(verdicts_BU, verdicts)
    verdicts = [(x, None) if isinstance(x, pool.Failure) else verdict for x, verdict in pairs]
  unknown = {
    i: ": ".join(filter(None, [str(outcome), getattr(outcome, "reason", "")]))
    for i, (outcome, _) in enumerate(verdicts)
    if outcome in unknown_names or outcome == "crash"
  }
  exact = np.array([outcome == "right" for outcome, _ in verdicts], np.float32)
  pairs = zip(exact, (value for _, value in verdicts))
  values = np.array([right if value is None else value for right, value in pairs], np.float32)
  graded = right_lines is not None or any(value is not None for _, value in verdicts)
  by_line, line_values, flips = None, None, {}
  if right_lines is not None:
    plain = dataclasses.replace(config, false_positive=0.0, false_negative=0.0)
    by_line, flips = lines.rewards(config, verdicts_BU, responses, answers, exact)
    line_values, _ = lines.rewards(plain, verdicts_BU, responses, answers, exact)
    values = _sums(line_values)
  right_from = config.threshold if graded else 1.0
  correct = np.maximum(exact, shaping.reaches(values, right_from))
  correct[list(unknown)] = 0
  # Every outcome has a count, so that metrics have the same names in every batch.
  labels = ["right" if right else str(outcome) for right, (outcome, _) in zip(correct, verdicts)]
  outcomes = dict.fromkeys(map(str, names), 0) | collections.Counter(labels) | flips
  scores = Scores(values, outcomes, correct, unknown, by_line, values, line_values)
  if by_line is None and (config.false_positive or config.false_negative):
    scores = _add_noise(config, scores, responses, answers, right_from)
  return _with_additions(config, scores, responses, lengths)


def _add_noise(
  config: RewardConfig,
  scores: Scores,
  responses: Sequence[str],
  answers: Sequence[str],
  right_from: float,
) -> Scores:
  """Flips verdicts at the configured rates, and counts the flips."""
  right, rates = scores.correct > 0, (config.false_positive, config.false_negative)
  flips = scores.known & shaping.flipped(right, responses, answers, *rates)
  low, high = shaping.extremes(scores.reward[scores.known], right_from)
  reward = np.where(flips, np.where(right, low, high), scores.reward).astype(np.float32)
  counts = dict(false_positive=(flips & ~right).sum(), false_negative=(flips & right).sum())
  outcomes = dict(scores.outcomes) | {name: int(count) for name, count in counts.items()}
  return dataclasses.replace(scores, reward=reward, outcomes=outcomes)


def _with_additions(
  config: RewardConfig,
  scores: Scores,
  responses: Sequence[str],
  lengths: Sequence[int] | None,
) -> Scores:
  """Adds the format's reward and the overlong penalty.

  The reward of a response without a verdict is 0.
  """
  addition_B = np.zeros(len(responses), np.float32)
  outcomes, reward = dict(scores.outcomes), scores.reward
  if config.format_weight:
    formats = [shaping.keeps_format(response, config.format) for response in responses]
    outcomes["format_kept"] = sum(formats)
    addition_B += config.format_weight * np.array(formats, np.float32)
  if config.overlong_weight and lengths is not None:
    buffer = config.overlong_buffer
    addition_B += config.overlong_weight * shaping.overlong(lengths, config.overlong_max, buffer)
  if scores.lines is not None:
    reward = _sums(scores.lines)
    for reward_U, addition, has_verdict in zip(scores.lines, addition_B, scores.known):
      reward_U[-1] += addition
      reward_U *= has_verdict
  reward = np.where(scores.known, reward + addition_B, 0).astype(np.float32)
  return dataclasses.replace(scores, reward=reward, outcomes=outcomes)


def _sums(rewards_BU: Sequence[np.ndarray]) -> np.ndarray:
  """Sums each response's line rewards in float64; returns float32 [B]."""
  return np.array([reward_U.sum(dtype=np.float64) for reward_U in rewards_BU], np.float32)


def _verdicts(
  verify: Verify, batch: list[tuple[str, Prompt, bool]]
) -> list[tuple[str, float | None]]:
  """Returns each response's outcome, with its value or None.

  If the verifier raises an exception, the two halves of the batch are verified separately. A half
  that fails is halved again, down to single responses. So only the failing responses have no
  verdict.
  """
  if not batch:
    return []
  try:
    outcomes, values = verify(*map(list, zip(*batch)))
    values = [None] * len(batch) if values is None else values
    return [
      _finite(*pair) for pair, _ in zip(zip(outcomes, values, strict=True), batch, strict=True)
    ]
  except Exception as error:  # Verifiers may raise anything, on arbitrary policy output.
    if len(batch) == 1:
      return [(pool.Failure("crash", f"{type(error).__name__}: {error}"), None)]
  middle = len(batch) // 2
  return _verdicts(verify, batch[:middle]) + _verdicts(verify, batch[middle:])


def _finite(outcome: str, value: float | None) -> tuple[str, float | None]:
  """Returns the outcome and its value, or a crash if the value is NaN, infinite or huge."""
  if value is None or abs(value) <= LARGEST_REWARD:
    return outcome, value
  reason = f"the reward {value} is no number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
  return pool.Failure("crash", reason), None


class NoVerdictError(ValueError):
  """The verifier failed on all responses of a batch."""


def require_verdicts(reasons: Sequence[str], total: int, place: str) -> None:
  """Raises NoVerdictError if no response has a verdict.

  Args:
    reasons: the reason for each response without a verdict.
    total: number of responses.
    place: file with the responses, for the message.
  """
  if total and len(reasons) == total:
    (reason, times), *_ = collections.Counter(reasons).most_common(1)
    raise NoVerdictError(
      f"there is no verdict on any of {total} responses. Main reason, {times} times: {reason}. "
      f"The responses are in {place}. Check reward.name or environment.name, the gold answers, and "
      "the verifier's machine or service; then the same command continues from the last checkpoint"
    )
