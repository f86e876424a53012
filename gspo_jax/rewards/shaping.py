"""Additions to a verifier's reward, and noise on its verdicts, in NumPy.

The reward of a response is

  r = v + format_weight · F + overlong_weight · L

where v is the verifier's value, with noise. F is 1 if the response has the required format, else 0.
L is the penalty for overlong responses, from -1 to 0. Noise makes verdicts wrong at a configured
rate, as if the verifier were unreliable. A response is right if the verifier's outcome is "right",
or if the verifier returns a value of at least `reward.right_from`. Noise does not change this.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

# Required tags of a response, by format.
TAGS = dict(none=(), think=("</think>",), think_answer=("</think>", "<answer>", "</answer>"))
_TAG = re.compile(r"</?(?:think|answer)>")


def keeps_format(response: str, name: str) -> bool:
  """Whether a response has the required tags in the required places.

  Format "think" is a thought, `</think>`, and then text. Format "think_answer" is a thought,
  `</think>`, and then exactly `<answer>text</answer>`. Thought and text must not be empty, and must
  not contain further tags, except that in format "think" the text may contain `<answer>` and
  `</answer>`. The opening `<think>` is optional, since chat templates of reasoning models often add
  it to the prompt.

  Reference: arXiv:2501.12948 (format rewards).

  Args:
    response: text of the response.
    name: "think" or "think_answer".
  """
  thought, tag, answer = response.removesuffix("<|im_end|>").partition("</think>")
  thought = thought.strip().removeprefix("<think>")
  if not tag or not thought.strip() or _TAG.search(thought):
    return False
  answer = answer.strip()
  if name == "think":
    return bool(answer) and "<think>" not in answer and "</think>" not in answer
  content = answer.removeprefix("<answer>").removesuffix("</answer>")
  has_tags = len(answer) - len(content) == len("<answer></answer>")
  return has_tags and bool(content.strip()) and not _TAG.search(content)


def overlong(length_B: Sequence[int], longest: int, buffer: int) -> np.ndarray:
  """Returns the penalty of overlong responses, float32 [B].

  The penalty is 0 up to `longest - buffer` tokens, -1 from `longest` tokens on, and linear between
  these lengths.

  Args:
    length_B: number of tokens of each response.
    longest: smallest number of tokens with the full penalty.
    buffer: number of tokens over which the penalty grows, at least 1.

  Reference: arXiv:2503.14476, eq. 13 (with `longest` 20,480 and `buffer` 4,096). The same formula
  in JAX is `objectives.overlong_penalty`.
  """
  excess_B = np.asarray(length_B, np.float32) - (longest - buffer)
  return -np.clip(excess_B / buffer, 0, 1)


def flipped(
  correct_B: np.ndarray,
  responses: Sequence[str],
  answers: Sequence[str],
  false_positive: float,
  false_negative: float,
) -> np.ndarray:
  """Chooses verdicts to flip, bool [B].

  The choice depends on the gold answer, the response's text and its verdict alone. So equal
  responses to a prompt have equal verdicts. The errors of a real verifier repeat in the same way.

  Args:
    correct_B: whether each response is right.
    responses: texts of the responses.
    answers: gold answers.
    false_positive: share of wrong responses whose verdict is flipped.
    false_negative: share of right responses whose verdict is flipped.
  """
  texts = (f"0/{a}\0{r}".encode("utf-8", "surrogatepass") for r, a in zip(responses, answers))
  chance_B = np.array([uniform(hashlib.sha256(text)) for text in texts])
  return chance_B < np.where(correct_B, false_negative, false_positive)


def reaches(value_B: np.ndarray, right_from: float) -> np.ndarray:
  """Whether values are at least `right_from`, bool [B]."""
  return np.asarray(value_B, np.float32) >= np.float32(right_from)


def extremes(value_B: np.ndarray, right_from: float) -> tuple[float, float]:
  """Returns the values of right and of wrong responses with flipped verdicts.

  The first value is the smallest of 0 and all values, or `right_from - 1` if the smallest is not
  below `right_from`. The second value is the largest of `right_from` and all values.

  Args:
    value_B: values of the batch's responses with a verdict.
    right_from: smallest value of a right response.
  """
  low = float(np.min(value_B, initial=0.0))
  high = float(np.max(value_B, initial=right_from))
  return (low if low < right_from else right_from - 1), high


def uniform(digest: Any) -> float:
  """Returns a number in [0, 1) from a SHA-256 hash object."""
  return int.from_bytes(digest.digest()[:7], "big") / 2**56
