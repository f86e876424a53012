"""Rewards of the lines of a response: process supervision for verifiers that judge single lines.

Such a verifier's module has `right_lines(response, answer)`, which tells for each of the n lines
asked for whether the line in its place is right, in time linear in the response. A right line is
worth p/n with p = `reward.partial` (0 is 1 here), and the last line of the response 1 − p of the
verdict on the whole besides: the sum is what p gives to the response as a whole. What is added for
format and length goes to the last line too.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gspo_jax.rewards import shaping
from gspo_jax.settings.rewards import RewardConfig

RightLines = Callable[[str, str], Sequence[bool]]


def judge(module: Any, name: str) -> RightLines:
  """Returns the line judge of verifier `name`; ValueError if it has none."""
  right_lines = getattr(module, "right_lines", None)
  if right_lines is None:
    raise ValueError(
      f"reward.per_line=True: reward.name={name!r} judges whole responses; set it to False, or the"
      " name to recurrence"
    )
  return right_lines


def rewards(
  config: RewardConfig,
  right_lines: RightLines,
  responses: Sequence[str],
  answers: Sequence[str],
  correct_B: np.ndarray,
) -> tuple[list[np.ndarray], dict[str, int]]:
  """Computes rewards of the lines of B responses, float32 [U] each. There are as many as
  `response.split` finds. Counts lines misjudged by noise in either way.

  Noise flips the verdicts on lines that were asked for and are there, as `shaping.flipped` flips
  those on responses: by the seed, the answer and the text up to the line's end. `correct_B`, of the
  whole responses, stays as it is.
  """
  rates, rewards_BU = (config.false_positive, config.false_negative), []
  misjudged = dict(false_positive=0, false_negative=0) if any(rates) else {}
  for response, answer, correct in zip(responses, answers, correct_B, strict=True):
    texts, expected = response.split("\n"), right_lines(response, answer)
    right_U = np.array(expected[: len(texts)], bool)
    if misjudged:
      chance_U = _chances(texts[: len(right_U)], f"{config.noise_seed}/{answer}\0")
      flips_U = chance_U < np.where(right_U, *rates[::-1])
      misjudged["false_positive"] += int((flips_U & ~right_U).sum())
      misjudged["false_negative"] += int((flips_U & right_U).sum())
      right_U ^= flips_U
    partial = config.partial or 1.0
    reward_U = np.zeros(len(texts), np.float32)
    reward_U[: len(right_U)] = right_U * (partial / len(expected))
    reward_U[-1] += (1 - partial) * correct
    rewards_BU.append(reward_U)
  return rewards_BU, misjudged


def _chances(texts: Sequence[str], start: str) -> np.ndarray:
  """Draws numbers in [0, 1). Each depends on the lines up to its own."""
  digest, chances = hashlib.sha256(start.encode("utf-8", "surrogatepass")), []
  for text in texts:
    digest.update(f"{text}\n".encode("utf-8", "surrogatepass"))
    chances.append(shaping.uniform(digest))
  return np.array(chances)
