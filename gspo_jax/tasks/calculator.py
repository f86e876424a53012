"""Embedded task for conversations: products and sums, with a calculator (docs/multi_turn.md).

A problem is `37*58+46=`. A turn that begins with a bracket is a question to the calculator, for one
operation. The calculator answers `2146;` to `[37*58]`, and `2192;` to `[2146+46]`. It answers `?;`
to a malformed question, which has the reward -0.1. A turn without a bracket at its beginning is the
final answer, and ends the conversation. If the final answer contains colons, only the text after
the last colon counts. The final answer's reward is 1 if it is right, else 0.

In demonstrations, some operations are computed without the calculator. Such an operation forgets
each carry with probability `data.carry_errors`. If `data.checks` is above 0, some questions are
needlessly asked twice.
"""

import operator
import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from gspo_jax.tasks import arithmetic
from gspo_jax.tasks.problems import Problem, Problems, held_out

SIZES = ("digits",)  # Keys of section `data` that determine the problems.
TEACHER = ("carry_errors", "checks")  # Keys that determine the demonstrations.
# Probability that an operation of a demonstration uses the calculator. After an operation without
# the calculator, the demonstration does not use the calculator again.
USES = 0.4
NOT_UNDERSTOOD = -0.1  # Reward of a malformed question.
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_QUESTION = re.compile(r"\[(\d{1,6})([+*-])(\d{1,6})\]")


def problems(split: str, digits: int) -> Problems:
  """Returns a split's problems a*b+c of three numbers of `digits` digits.

  If 37*58+46 is in the held-out split, so is 58*37+46.

  Args:
    split: "train" or "heldout".
    digits: number of digits of each number, 1 or 2.

  Raises:
    ValueError: `split` or `digits` is invalid.
  """
  if not 1 <= digits <= 2:
    raise ValueError(f"data.digits={digits} must be 1 or 2 with the calculator")
  least, count = 10 ** (digits - 1), 9 * 10 ** (digits - 1)

  def make(number: int) -> Problem:
    ab, c = divmod(number, count)
    a, b, c = (least + n for n in (*divmod(ab, count), c))
    return dict(id=f"{a}*{b}+{c}", question=f"{a}*{b}+{c}=", answer=str(a * b + c))

  size = np.uint64(count)
  ab, c = np.divmod(np.arange(count**3, dtype=np.uint64), size)
  a, b = np.divmod(ab, size)
  pair = np.minimum(a, b) * size + np.maximum(a, b)
  return Problems("calculator", split, held_out(pair * size + c), make)


def demonstration(
  problem: Problem, carry_errors: float, seed: int, checks: float = 0.0
) -> tuple[str, ...]:
  """Returns the turns of a demonstration.

  The turns are questions, each with the calculator's answer, and the final answer. The same
  arguments give the same turns.

  Args:
    problem: the problem.
    carry_errors: probability of forgetting a carry, for each carry of an operation without the
      calculator.
    seed: seed of all random choices.
    checks: probability of asking a question twice, for each question.
  """
  rng = random.Random(f"{seed}/{problem['id']}")
  a, b, c = map(int, re.split(r"\D", problem["id"]))
  turns: list[str] = []
  if rng.random() >= USES:
    tens, units = divmod(b, 10)
    product = _in_head(10 * a * tens, a * units, carry_errors, rng)
    return (str(_in_head(product, c, carry_errors, rng)),)
  turns += _call_turns(f"{a}*{b}", a * b, checks, rng)
  if rng.random() >= USES:
    return (*turns, str(_in_head(a * b, c, carry_errors, rng)))
  turns += _call_turns(f"{a * b}+{c}", a * b + c, checks, rng)
  return (*turns, str(a * b + c))


def _call_turns(operation: str, result: int, checks: float, rng: random.Random) -> list[str]:
  """Returns a question and its answer, twice with probability `checks`."""
  twice = checks > 0 and rng.random() < checks
  return [f"[{operation}]", f"{result};"] * (1 + twice)


def _in_head(a: int, b: int, carry_errors: float, rng: random.Random) -> int:
  """Adds a and b, and forgets each carry with probability `carry_errors`."""
  total, carry, unit = 0, 0, 1
  while a or b or carry:
    digit = a % 10 + b % 10 + carry
    carry = int(digit >= 10 and rng.random() >= carry_errors)
    total, unit, a, b = total + digit % 10 * unit, unit * 10, a // 10, b // 10
  return total


class Calculator:
  """The environment of one conversation (`sampling.Environment`)."""

  def __init__(self, prompt: Any, tokenizer: Any):
    self._prompt, self._tokenizer = prompt, tokenizer
    self.tool_calls, self._correct = 0, False

  def reset(self) -> Sequence[int]:
    return self._prompt.tokens

  def step(self, response: Sequence[int]) -> tuple[list[int], float, bool]:
    text = self._tokenizer.decode(response)
    if not text.startswith("["):
      self._correct = arithmetic.verify(text, self._prompt.answer)
      return [], float(self._correct), True
    self.tool_calls += 1
    match = _QUESTION.fullmatch(text)
    if match is None:
      return self._tokenizer.encode("?;"), NOT_UNDERSTOOD, False
    result = _OPERATIONS[match[2]](int(match[1]), int(match[3]))
    return self._tokenizer.encode(f"{result};"), 0.0, False

  def figures(self) -> dict[str, float]:
    """Returns metrics of the conversation.

    These are whether the answer is right, whether the calculator was used, and the number of
    questions.
    """
    return dict(correct=self._correct, tool_use=self.tool_calls > 0, tool_calls=self.tool_calls)
