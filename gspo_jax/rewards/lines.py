"""Rewards of a response's lines: process supervision by verifiers of single lines.

The module of such a verifier has a function `right_lines(response, answer)`. For each of the n
expected lines, it returns whether the response's line at this index is right, in time linear in the
response. Let p be `reward.partial`, or 1 if that is 0. A right line gets p/n. The response's last
line also gets 1 − p if the whole response is right, and the additions for format and length. The
sum over lines equals the reward of the whole response.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gspo_jax.rewards import shaping
from gspo_jax.settings.rewards import RewardConfig

RightLines = Callable[[str, str], Sequence[bool]]


def line_verifier(module: Any, name: str) -> RightLines:
  """Returns `right_lines` of verifier `name`. Raises ValueError without this function."""
  right_lines = getattr(module, "right_lines", None)
  if right_lines is None:
    raise ValueError(
      f"reward.per_line=True: reward.name={name!r} judges whole responses; set"
      " reward.per_line=False or reward.name=recurrence"
    )
  return right_lines


def rewards(
  config: RewardConfig,
  right_lines: RightLines,
  responses: Sequence[str],
  answers: Sequence[str],
  correct_B: np.ndarray,
) -> tuple[list[np.ndarray], dict[str, int]]:
  """Computes rewards of the lines of B responses, with noise.

  Noise flips verdicts on expected lines, if they exist in the response. A flip depends on the
  answer and the text up to the line's end, as in `shaping.flipped`. Noise does not change
  `correct_B`.

  Args:
    config: partial credit and noise rates.
    right_lines: verdicts on the lines of a response.
    responses: texts of the responses.
    answers: gold answers.
    correct_B: 1 for right responses, 0 otherwise.

  Returns:
    Rewards of each response's lines (texts between line breaks), float32 [U]; and counts of lines
    flipped by noise, {} without noise.
  """
  rates, rewards_BU = (config.false_positive, config.false_negative), []
  flips = dict(false_positive=0, false_negative=0) if any(rates) else {}
  for response, answer, correct in zip(responses, answers, correct_B, strict=True):
    texts, verdicts = response.split("\n"), right_lines(response, answer)
    right_U = np.array(verdicts[: len(texts)], bool)
    if flips:
      chance_U = _chances(texts[: len(right_U)], f"0/{answer}\0")
      flips_U = chance_U < np.where(right_U, *rates[::-1])
      flips["false_positive"] += int((flips_U & ~right_U).sum())
      flips["false_negative"] += int((flips_U & right_U).sum())
      right_U ^= flips_U
    partial = config.partial or 1.0
    reward_U = np.zeros(len(texts), np.float32)
    reward_U[: len(right_U)] = right_U * (partial / len(verdicts))
    reward_U[-1] += (1 - partial) * correct
    rewards_BU.append(reward_U)
  return rewards_BU, flips


def _chances(texts: Sequence[str], start: str) -> np.ndarray:
  """Returns a number in [0, 1) for each line, a hash of all lines up to this one."""
  digest, chances = hashlib.sha256(start.encode("utf-8", "surrogatepass")), []
  for text in texts:
    digest.update(f"{text}\n".encode("utf-8", "surrogatepass"))
    chances.append(shaping.uniform(digest))
  return np.array(chances)
