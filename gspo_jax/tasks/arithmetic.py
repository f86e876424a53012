"""Embedded task: sums of two integers, as text.

A problem is `358+967=`, and its demonstration is `5231:1325`. The text before the colon is the
work: the digits of the sum in the order of addition, units first. The text after the colon is the
sum. The verifier reads the text after the last colon of a response, and accepts only the exact sum.

Demonstrations imitate a pupil who can add, but forgets each carry with a given probability. So a
model trained on demonstrations is sometimes right and often wrong. Reinforcement learning can then
make the model always right, because every step is right in some demonstrations.
"""

import contextlib
import random
import re
from collections.abc import Callable, Iterator

import numpy as np

from gspo_jax.tasks.problems import Problem, Problems, held_out

SIZES = ("digits",)  # Keys of section `data` that determine the problems.
TEACHER = ("carry_errors", "skipped_work")  # Keys that determine the demonstrations.
OUTCOMES = ("right", "wrong")
# `int` refuses numbers of thousands of digits, so the number of digits is limited.
_ANSWER = re.compile(r"\s*([+-]?\d{1,100})\s*")


def problems(split: str, digits: int) -> Problems:
  """Returns a split's sums of two numbers of `digits` digits.

  If 12+34 is in the held-out split, so is 34+12.

  Args:
    split: "train" or "heldout".
    digits: number of digits of each number, 1 to 3.

  Raises:
    ValueError: `split` or `digits` is invalid.
  """
  if not 1 <= digits <= 3:
    raise ValueError(f"data.digits={digits} must be 1, 2 or 3")
  least, count = 10 ** (digits - 1), 9 * 10 ** (digits - 1)

  def make(number: int) -> Problem:
    a, b = (least + n for n in divmod(number, count))
    return dict(id=f"{a}+{b}", question=f"{a}+{b}=", answer=str(a + b))

  a, b = np.divmod(np.arange(count**2, dtype=np.uint64), np.uint64(count))
  keys = np.minimum(a, b) * np.uint64(count) + np.maximum(a, b)
  return Problems("arithmetic", split, held_out(keys), make)


def demonstration(
  problem: Problem, carry_errors: float, seed: int, skipped_work: float = 0.0
) -> str:
  """Returns a demonstration: the work, a colon, and the sum.

  Work and sum may have errors. The same arguments give the same text.

  Args:
    problem: the problem.
    carry_errors: probability of forgetting a carry, for each carry.
    seed: seed of the errors.
    skipped_work: probability of a demonstration without text before the colon. Such a demonstration
      forgets all carries.
  """
  rng = random.Random(f"{seed}/{problem['id']}")
  a, b = (term[::-1] for term in problem["id"].split("+"))
  # A separate generator makes this choice, so that all others do not depend on `skipped_work`.
  skips = random.Random(f"{seed}/{problem['id']}/work").random() < skipped_work
  digits, carry = "", 0
  for x, y in zip(a, b):
    total = int(x) + int(y) + carry
    digits += str(total % 10)
    carry = int(total >= 10 and rng.random() >= carry_errors and not skips)
  if carry:
    digits += "1"
  return f"{'' if skips else digits}:{int(digits[::-1])}"


@contextlib.contextmanager
def open_verifier() -> Iterator[Callable]:
  """Opens the verifier, a function of a batch of responses (`rewards.scorer`)."""

  def outcomes(responses, prompts, finished):
    right = [verify(response, prompt.answer) for response, prompt in zip(responses, prompts)]
    return ["right" if is_right else "wrong" for is_right in right], None

  yield outcomes


def check_answer(text: str) -> None:
  """Raises ValueError unless the gold answer is a whole number."""
  try:
    int(text)
  except ValueError as error:
    raise ValueError(f"the gold answer {text!r:.80} is no whole number") from error


def verify(response: str, answer: str) -> bool:
  """Whether the text after the last colon is exactly the number `answer`.

  If there is no colon, the whole response is compared. White space is ignored at both ends.

  Raises:
    ValueError: `answer` is not an integer.
  """
  gold, match = int(answer), _ANSWER.fullmatch(response.rsplit(":", 1)[-1])
  return match is not None and int(match[1]) == gold
