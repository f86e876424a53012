"""Rewards for each line of a response (process supervision), for `reward.per_line`.

The module of the verifier needs a function `right_lines(response, answer)`. The function returns n
bools, one for each line of the expected response. A bool is True if the line of the response at the
same index is right. The function's time must be linear in the length of the response.

Let p be `reward.partial`, or 1 if `reward.partial` is 0. A right line has the reward p/n. If the
verifier accepts the response, the last line has 1 − p more. The additions for format and length
(shaping.py) are also part of the last line's reward. The sum over the lines is the reward of the
response. For example, if p = 0.5 and n = 2, an accepted response with two right lines has the
rewards 0.25 and 0.75.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gspo_jax.rewards import shaping
from gspo_jax.settings.rewards import RewardConfig
from gspo_jax.verifiers.pool import Failure

# Function from a response and a gold answer to verdicts on the expected lines.
RightLines = Callable[[str, str], Sequence[bool]]


def line_verifier(module: Any, name: str) -> RightLines:
  """Returns the function `right_lines` of a verifier.

  Args:
    module: module of the verifier.
    name: `reward.name`, for the message.

  Raises:
    ValueError: the verifier does not have this function.
  """
  right_lines = getattr(module, "right_lines", None)
  if right_lines is None:
    raise ValueError(
      f"reward.per_line=True: reward.name={name!r} scores whole responses only; set"
      " reward.per_line=False or reward.name=recurrence"
    )
  return right_lines


def line_verdicts(
  right_lines: RightLines, responses: Sequence[str], answers: Sequence[str]
) -> list[Sequence[bool] | Failure]:
  """Verifies each response's lines. If `right_lines` raises, the response has a `pool.Failure`."""
  results = []
  for response, answer in zip(responses, answers, strict=True):
    try:
      results.append(right_lines(response, answer))
    except Exception as error:  # Verifiers may raise anything, on arbitrary policy output.
      results.append(Failure("crash", f"{type(error).__name__}: {error}"))
  return results


def rewards(
  config: RewardConfig,
  verdicts_BU: Sequence[Sequence[bool] | Failure],
  responses: Sequence[str],
  answers: Sequence[str],
  correct_B: np.ndarray,
) -> tuple[list[np.ndarray], dict[str, int]]:
  """Computes rewards of B responses' lines, with noise.

  The additions for format and length are not included. Noise flips the verdicts on single lines, at
  the rates `reward.false_positive` and `reward.false_negative`. The flip of a line depends only on
  the answer and on the response's text up to the end of the line, so equal texts have equal flips.
  Noise does not change `correct_B`.

  Args:
    config: section `reward`: partial credit and noise rates.
    verdicts_BU: result of `line_verdicts`. After a failure, no line counts as right.
    responses: texts of the responses.
    answers: gold answers.
    correct_B: 1 for responses that the verifier accepts as a whole, 0 otherwise.

  Returns:
    Two values. The first has the rewards of each response's U lines, float32 [U]. Line breaks
    separate lines. The second is a dict with the numbers of verdicts flipped by noise. It is {} if
    both rates of noise are 0.
  """
  rates, rewards_BU = (config.false_positive, config.false_negative), []
  flips = dict(false_positive=0, false_negative=0) if any(rates) else {}
  batch = zip(verdicts_BU, responses, answers, correct_B, strict=True)
  for verdicts, response, answer, correct in batch:
    texts, verdicts = response.split("\n"), [] if isinstance(verdicts, Failure) else verdicts
    right_U = np.array(verdicts[: len(texts)], bool)
    if flips:
      chance_U = _chances(texts[: len(right_U)], f"0/{answer}\0")
      flips_U = chance_U < np.where(right_U, *rates[::-1])
      flips["false_positive"] += int((flips_U & ~right_U).sum())
      flips["false_negative"] += int((flips_U & right_U).sum())
      right_U ^= flips_U
    partial = config.partial or 1.0
    reward_U = np.zeros(len(texts), np.float32)
    reward_U[: len(right_U)] = right_U * (partial / (len(verdicts) or 1))
    reward_U[-1] += (1 - partial) * correct
    rewards_BU.append(reward_U)
  return rewards_BU, flips


def _chances(texts: Sequence[str], start: str) -> np.ndarray:
  """Returns a number in [0, 1) for each line: a hash of `start` and the text to the line's end."""
  digest, chances = hashlib.sha256(start.encode("utf-8", "surrogatepass")), []
  for text in texts:
    digest.update(f"{text}\n".encode("utf-8", "surrogatepass"))
    chances.append(shaping.uniform(digest))
  return np.array(chances)
