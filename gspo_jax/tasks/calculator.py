"""The embedded task for conversations: products and sums, and a calculator to do them with.

A problem is `37*58+46=`. A turn in brackets asks the calculator, one operation at a time: `[37*58]`
is answered by `2146;`, and then `[2146+46]` by `2192;`. Any other turn is the answer, and the last
one: `2192`. The reward is 1 for the exact number; a question that the calculator does not
understand costs 0.1 and is answered by `?;`.

Demonstrations come from a pupil who takes the calculator for some operations and does the rest in
his head, where he forgets carries. A model that imitates him can copy numbers into the calculator
and out of it; that it pays to do so always is left for reinforcement learning to find out.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gspo_jax.tasks import arithmetic

USES = 0.4  # share of the operations for which the pupil takes the calculator
NOT_UNDERSTOOD = -0.1  # reward of such a question
_QUESTION = re.compile(r"\[(\d{1,6})([+*-])(\d{1,6})\]")


class Problems:
  """Random access to every a*b+c of three numbers of `digits` digits in one split.

  If 37*58+46 is held out, so is 58*37+46.
  """

  def __init__(self, split: str, digits: int):
    if split not in ("train", "heldout"):
      raise ValueError(
        f"calculator:{split}: the splits are calculator:train and calculator:heldout"
      )
    if not 1 <= digits <= 2:
      raise ValueError(f"data.digits={digits} must be 1 or 2 with the calculator")
    self._least, self._count = 10 ** (digits - 1), np.uint64(9 * 10 ** (digits - 1))
    rest, c = np.divmod(np.arange(int(self._count) ** 3, dtype=np.uint64), self._count)
    a, b = np.divmod(rest, self._count)
    pair = np.minimum(a, b) * self._count + np.maximum(a, b)
    held_out = arithmetic.mixed(pair * self._count + c) < arithmetic.HELD_OUT
    self._index = np.flatnonzero(held_out == (split == "heldout"))

  def __len__(self) -> int:
    return len(self._index)

  def __getitem__(self, i: int) -> dict[str, str]:
    rest, c = divmod(int(self._index[i]), int(self._count))
    a, b, c = (self._least + n for n in (*divmod(rest, int(self._count)), c))
    return dict(id=f"{a}*{b}+{c}", question=f"{a}*{b}+{c}=", answer=str(a * b + c))


def problems(split: str, digits: int) -> Problems:
  """The problems of a split, "train" or "heldout"."""
  return Problems(split, digits)


def demonstration(row: Mapping[str, str], carry_errors: float, seed: int) -> tuple[str, ...]:
  """The pupil's work on a problem: turn, what the calculator says, turn, ..., his answer.

  Once he has begun to work in his head he stays with it. The same row and seed give the same texts.
  """
  rng = random.Random(f"{seed}/{row['id']}")
  a, b, c = map(int, re.split(r"\D", row["id"]))
  said: list[str] = []
  if rng.random() >= USES:
    tens, units = divmod(b, 10)
    product = _in_head(10 * a * tens, a * units, carry_errors, rng)
    return (str(_in_head(product, c, carry_errors, rng)),)
  said += [f"[{a}*{b}]", f"{a * b};"]
  if rng.random() >= USES:
    return (*said, str(_in_head(a * b, c, carry_errors, rng)))
  return (*said, f"[{a * b}+{c}]", f"{a * b + c};", str(a * b + c))


def _in_head(a: int, b: int, carry_errors: float, rng: random.Random) -> int:
  """a + b, each carry forgotten with probability `carry_errors`."""
  total, carry, unit = 0, 0, 1
  while a or b or carry:
    digit = a % 10 + b % 10 + carry
    carry = int(digit >= 10 and rng.random() >= carry_errors)
    total, unit, a, b = total + digit % 10 * unit, unit * 10, a // 10, b // 10
  return total


class Calculator:
  """The environment of one conversation (see `sampling.conversation.Environment`)."""

  def __init__(
    self,
    prompt: Sequence[int],
    answer: str,
    encode: Callable[[str], list[int]],
    decode: Callable[[Sequence[int]], str],
  ):
    self._prompt, self._answer = prompt, answer
    self._encode, self._decode = encode, decode
    self._calls, self._correct = 0, False

  def reset(self) -> Sequence[int]:
    return self._prompt

  def step(self, response: Sequence[int]) -> tuple[list[int], float, bool]:
    text = self._decode(response)
    if not text.startswith("["):
      self._correct = arithmetic.verify(text, self._answer)
      return [], float(self._correct), True
    self._calls += 1
    match = _QUESTION.fullmatch(text)
    if match is None:
      return self._encode("?;"), NOT_UNDERSTOOD, False
    return self._encode(f"{_compute(int(match[1]), match[2], int(match[3]))};"), 0.0, False

  def figures(self) -> dict[str, float]:
    """Whether the answer was right, whether the calculator was asked, and how often."""
    return dict(correct=self._correct, tool_use=self._calls > 0, tool_calls=self._calls)


def _compute(a: int, operator: str, b: int) -> int:
  return {"+": a + b, "-": a - b, "*": a * b}[operator]
