"""Additions to a verifier's reward, and noise on it. NumPy, and no JAX, as all of rewards.

The shaped reward of a response is

  r = v + format_weight · F + overlong_weight · L

with v the verifier's value after noise, F whether the format is kept (0 or 1), and L the soft
overlong punishment (-1 to 0). Raw correctness stays beside it.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

# By format: the tags that a response must have.
TAGS = dict(none=(), think=("</think>",), think_answer=("</think>", "<answer>", "</answer>"))
_TAG = re.compile(r"</?(?:think|answer)>")


def keeps_format(response: str, name: str) -> bool:
  """Whether the tags stand in their places, once each.

  "think": reasoning, `</think>`, and then something. "think_answer": after it exactly
  `<answer>something</answer>`. The opening `<think>` may stand at the end of the prompt, as chat
  templates of reasoning models have it. Reference: arXiv:2501.12948 (format rewards).
  """
  thought, closed, answer = response.removesuffix("<|im_end|>").partition("</think>")
  thought = thought.strip().removeprefix("<think>")
  if not closed or not thought.strip() or _TAG.search(thought):
    return False
  answer = answer.strip()
  if name == "think":
    return bool(answer) and "<think>" not in answer and "</think>" not in answer
  content = answer.removeprefix("<answer>").removesuffix("</answer>")
  tagged = len(answer) - len(content) == len("<answer></answer>")
  return tagged and bool(content.strip()) and not _TAG.search(content)


def overlong(length_B: Sequence[int], longest: int, buffer: int) -> np.ndarray:
  """Returns 0 up to longest - buffer tokens, -1 from `longest` on, linear between.

  Reference: arXiv:2503.14476, eq. 13 (soft overlong punishment; 20,480 and 4,096 tokens there). The
  same formula in JAX is `objectives.overlong_penalty`.
  """
  excess_B = np.asarray(length_B, np.float32) - (longest - buffer)
  return -np.clip(excess_B / buffer, 0, 1)


def flipped(
  correct_B: np.ndarray,
  responses: Sequence[str],
  answers: Sequence[str],
  false_positive: float,
  false_negative: float,
  seed: int,
) -> np.ndarray:
  """Draws the misjudged verdicts of a verifier of these error rates, bool [B].

  A verdict depends on the seed, the answer and the text of the response and on nothing else, as
  those of a bad verifier do: the same response is misjudged again whenever it comes up.
  """
  texts = (f"{seed}/{a}\0{r}".encode("utf-8", "surrogatepass") for r, a in zip(responses, answers))
  chance_B = np.array([uniform(hashlib.sha256(text)) for text in texts])
  return chance_B < np.where(correct_B, false_negative, false_positive)


def uniform(digest: Any) -> float:
  """Returns a number in [0, 1) from a SHA-256 digest."""
  return int.from_bytes(digest.digest()[:7], "big") / 2**56
