"""The embedded verifiable task: sums of two integers, as text.

A problem is `358+967=`. A response works from the units to the left, one digit at a time, and
then writes the sum: `5231:1325`. The verifier reads what follows the last colon and accepts the
exact sum only; how the response got there does not count.

Demonstrations come from a pupil who knows how to add and who forgets each carry with a given
probability. A model that imitates him is right sometimes and wrong often, and everything that it
needs to be right always is there for reinforcement learning to bring out.
"""

import contextlib
import random
import re
from collections.abc import Callable, Iterator

import numpy as np

from gspo_jax.tasks.problems import Problem, Problems, held_out

SIZES = ("digits",)  # Keys of `data` for the set of problems.
TEACHER = ("carry_errors", "skipped_work")  # Keys of `data` for the demonstrations.
OUTCOMES = ("right", "wrong")
_ANSWER = re.compile(r"\s*([+-]?\d{1,100})\s*")  # Python reads no numbers of thousands of digits


def problems(split: str, digits: int) -> Problems:
  """Returns all sums of two numbers of `digits` digits in a split, "train" or "heldout".

  The split is by unordered pair: if 12+34 is held out, so is 34+12.
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
  """Writes the pupil's work: digits from the units up, a colon, the number.

  He forgets each carry with probability `carry_errors`. With `skipped_work` he writes nothing
  before the colon, and then forgets them all. The same problem and seed give the same text.
  """
  rng = random.Random(f"{seed}/{problem['id']}")
  a, b = (term[::-1] for term in problem["id"].split("+"))
  # A generator of its own, so that what he forgets when he works does not depend on it.
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
  """`verify` of many (see `gspo_jax.rewards`); there is nothing to configure."""

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
  """Whether the number after the last colon is exactly `answer`. Raises ValueError for an answer
  without an integer."""
  gold, match = int(answer), _ANSWER.fullmatch(response.rsplit(":", 1)[-1])
  return match is not None and int(match[1]) == gold
