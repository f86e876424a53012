"""The embedded task of long responses: a recurrence of second order, modulo 100 (docs/data.md).

A problem is two lines, `33:70\n32:04\n`: labels that count down, and numbers with their units first
(7 and 40). Each of the n lines of a response is the sum of the two before it, `31:74\n...\n00:32`:
exactly 6 n tokens of bytes with the end token in the place of the last newline. The tens of a label
go on with letters: `A0` is 100. The last line decides, exactly; `right_lines` says which of the
others are right. The pupil of the demonstrations goes on from the wrong numbers that he writes.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gspo_jax.tasks.problems import Problem, Problems, held_out

SIZES = ("lines",)  # Keys of `data` for the set of problems.
TEACHER = ("carry_errors",)  # Keys of `data` for the demonstrations.
OUTCOMES = ("right", "wrong")
_TENS = "0123456789ABCDEFGHIJ"  # Tens of a label.


def problems(split: str, lines: Sequence[int]) -> Problems:
  """Returns all pairs of numbers below 100, with all numbers of lines, in a split.

  The split is by the two numbers. Problems of as many lines follow one another, so that those
  evenly spread over a split have all lengths equally often.
  """
  if not lines or len(set(lines)) < len(lines):
    raise ValueError(f"data.lines={tuple(lines)} must be at least one length, and none twice")

  def make(number: int) -> Problem:
    index, pair = divmod(number, 10_000)
    a, b = divmod(pair, 100)
    n = lines[index]
    start = f"{_line(n + 1, a)}\n{_line(n, b)}\n"
    return dict(id=f"{n}:{a},{b}", question=start, answer=_work(n, a, b, lambda: False))

  numbers = np.arange(10_000 * len(lines), dtype=np.uint64)
  return Problems("recurrence", split, held_out(numbers % np.uint64(10_000)), make)


def demonstration(problem: Problem, carry_errors: float, seed: int) -> str:
  """Writes the pupil's work; he forgets each carry with probability `carry_errors`. The same
  problem and seed give the same text."""
  rng = random.Random(f"{seed}/{problem['id']}")
  n, _, pair = problem["id"].partition(":")
  a, b = map(int, pair.split(","))
  return _work(int(n), a, b, lambda: rng.random() < carry_errors)


def _work(n: int, a: int, b: int, forgets: Callable[[], bool]) -> str:
  """Writes n lines after a and b; calls `forgets` at each carry."""
  written = []
  for label in reversed(range(n)):
    carried = a % 10 + b % 10 >= 10
    a, b = b, (a + b - 10 * (carried and forgets())) % 100
    written.append(_line(label, b))
  return "\n".join(written)


def _line(label: int, number: int) -> str:
  return f"{_TENS[label // 10]}{label % 10}:{number % 10}{number // 10}"


@contextlib.contextmanager
def open_verifier(partial: float) -> Iterator[Callable]:
  """Opens `verify` for batches (see `gspo_jax.rewards`). A share of `partial` of the value is the
  share of right lines; the rest goes to a right last line."""

  def outcomes(responses, prompts, finished):
    right = [verify(response, prompt.answer) for response, prompt in zip(responses, prompts)]
    verdicts = ["right" if is_right else "wrong" for is_right in right]
    if not partial:
      return verdicts, None
    shares = [np.mean(right_lines(r, prompt.answer)) for r, prompt in zip(responses, prompts)]
    return verdicts, [(1 - partial) * last + partial * share for last, share in zip(right, shares)]

  yield outcomes


def verify(response: str, answer: str) -> bool:
  """Whether the last line is exactly that of `answer`. The lines before do not count."""
  return response.rpartition("\n")[2] == answer.rpartition("\n")[2]


def right_lines(response: str, answer: str) -> list[bool]:
  """Compares each line of `answer` with the response's line in its place.

  Lines beyond those asked for do not count; a line that is not there is wrong.
  """
  expected = answer.split("\n")
  written = response.split("\n", len(expected))[: len(expected)]
  written += [""] * (len(expected) - len(written))
  return [line == right for line, right in zip(written, expected)]
