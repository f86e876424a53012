r"""Task with long responses, whose problems are generated (docs/data.md).

A response continues a recurrence of second order, modulo 100.

A problem is two lines, such as `33:70\n32:04\n`. A line is a label, a colon, and a number of two
digits. The units of the number come first, so the numbers of this problem are 7 and 40. Labels
count down. Tens above 9 are letters, so the label 100 is `A0`. A response continues with the next
labels, down to `00`: `31:74\n...\n00:38`. Each number is the sum of the numbers of the two lines
before, modulo 100. With the tokenizer "bytes", a response of n lines has exactly 6 n tokens, the
stop token included.

A response is right if its last line is right. `right_lines` compares all lines, for rewards per
line. In demonstrations some carries are forgotten, and the lines after an error continue with the
wrong number.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gspo_jax.tasks.problems import Problem, Problems, held_out

SIZES = ("lines",)  # Keys of section `data` that determine the problems.
TEACHER = ("carry_errors",)  # Keys that determine the demonstrations.
OUTCOMES = ("right", "wrong")
_TENS = "0123456789ABCDEFGHIJ"  # Characters for the tens of a label, 0 to 19.


def problems(split: str, lines: Sequence[int]) -> Problems:
  """Returns the problems of a split, from all pairs of numbers below 100.

  For each length in `lines`, there is a problem of each pair. For example, `lines` of (8, 32) give
  each pair a problem with a response of 8 lines, and another problem with a response of 32 lines.
  The two problems are in the same split. All problems of the first length come first, then as many
  of the second, and so on. So an evenly spaced sample has all lengths equally often.

  Args:
    split: "train" or "heldout".
    lines: lengths of responses, in lines.

  Raises:
    ValueError: `split` or `lines` is invalid.
  """
  if not lines or len(set(lines)) < len(lines):
    raise ValueError(f"data.lines={tuple(lines)} must have at least one length, and none twice")

  def make(number: int) -> Problem:
    index, pair = divmod(number, 10_000)
    a, b = divmod(pair, 100)
    n = lines[index]
    start = f"{_line(n + 1, a)}\n{_line(n, b)}\n"
    return dict(id=f"{n}:{a},{b}", question=start, answer=_work(n, a, b, lambda: False))

  numbers = np.arange(10_000 * len(lines), dtype=np.uint64)
  return Problems("recurrence", split, held_out(numbers % np.uint64(10_000)), make)


def demonstration(problem: Problem, carry_errors: float, seed: int) -> str:
  """Returns a demonstration: the lines of a response, with errors.

  The same problem and seed give the same text.

  Args:
    problem: the problem.
    carry_errors: probability of forgetting a carry from the units to the tens, for each carry.
    seed: seed of the errors.
  """
  rng = random.Random(f"{seed}/{problem['id']}")
  n, _, pair = problem["id"].partition(":")
  a, b = map(int, pair.split(","))
  return _work(int(n), a, b, lambda: rng.random() < carry_errors)


def _work(n: int, a: int, b: int, forgets: Callable[[], bool]) -> str:
  """Writes n lines after the numbers a and b. `forgets()` decides whether to forget a carry."""
  written = []
  for label in reversed(range(n)):
    carried = a % 10 + b % 10 >= 10
    a, b = b, (a + b - 10 * (carried and forgets())) % 100
    written.append(_line(label, b))
  return "\n".join(written)


def _line(label: int, number: int) -> str:
  """Writes a line: label, colon, and number with its units first."""
  return f"{_TENS[label // 10]}{label % 10}:{number % 10}{number // 10}"


@contextlib.contextmanager
def open_verifier(partial: float) -> Iterator[Callable]:
  """Opens the verifier (`rewards.scorer`).

  Args:
    partial: number from 0 to 1. A response's value is the sum of two terms: 1 − `partial` if the
      last line is right, and `partial` times the share of the gold answer's lines that are right
      in the response. If `partial` is 0, the verifier returns no values.
  """

  def outcomes(responses, prompts, finished):
    right = [verify(response, prompt.answer) for response, prompt in zip(responses, prompts)]
    verdicts = ["right" if is_right else "wrong" for is_right in right]
    if not partial:
      return verdicts, None
    shares = [np.mean(right_lines(r, prompt.answer)) for r, prompt in zip(responses, prompts)]
    return verdicts, [(1 - partial) * last + partial * share for last, share in zip(right, shares)]

  yield outcomes


def verify(response: str, answer: str) -> bool:
  """Whether response and `answer` have the same last line."""
  return response.rpartition("\n")[2] == answer.rpartition("\n")[2]


def right_lines(response: str, answer: str) -> list[bool]:
  """Compares each line of `answer` with the response's line at the same index.

  A missing line counts as wrong. Lines of the response beyond the answer's last index are ignored.
  """
  expected = answer.split("\n")
  written = response.split("\n", len(expected))[: len(expected)]
  written += [""] * (len(expected) - len(written))
  return [line == right for line, right in zip(written, expected)]
