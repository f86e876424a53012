"""The embedded verifiable task: sums of two integers, as text.

A problem is `358+967=`. A response works from the units to the left, one digit at a time, and
then writes the sum: `5231:1325`. The verifier reads what follows the last colon and accepts the
exact sum only; how the response got there does not count.

Demonstrations come from a pupil who knows how to add and who forgets each carry with a given
probability. A model that imitates him is right sometimes and wrong often, and everything that it
needs to be right always is there for reinforcement learning to bring out.
"""

import random
import re

import numpy as np

HELD_OUT = 0.02  # share of the problems that training never sees
_ANSWER = re.compile(r"\s*([+-]?\d+)\s*")


class Problems:
  """Random access to every sum of two numbers of `digits` digits in one split.

  The split is by unordered pair: if 12+34 is held out, so is 34+12.
  """

  def __init__(self, split: str, digits: int):
    if split not in ("train", "heldout"):
      raise ValueError(
        f"arithmetic:{split}: the splits are arithmetic:train and arithmetic:heldout"
      )
    if not 1 <= digits <= 3:
      raise ValueError(f"data.digits={digits} must be 1, 2 or 3")
    self._least, self._count = 10 ** (digits - 1), 9 * 10 ** (digits - 1)
    a, b = np.divmod(np.arange(self._count**2, dtype=np.uint64), np.uint64(self._count))
    held_out = mixed(np.minimum(a, b) * np.uint64(self._count) + np.maximum(a, b)) < HELD_OUT
    self._index = np.flatnonzero(held_out == (split == "heldout"))

  def __len__(self) -> int:
    return len(self._index)

  def __getitem__(self, i: int) -> dict[str, str]:
    a, b = (self._least + n for n in divmod(int(self._index[i]), self._count))
    return dict(id=f"{a}+{b}", question=f"{a}+{b}=", answer=str(a + b))


def mixed(x: np.ndarray) -> np.ndarray:
  """A fixed pseudo-random number in [0, 1) for each integer (the finaliser of SplitMix64)."""
  x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)) / np.float64(2**53)


def problems(split: str, digits: int) -> Problems:
  """The problems of a split, "train" or "heldout"."""
  return Problems(split, digits)


def demonstration(row: dict[str, str], carry_errors: float, seed: int) -> str:
  """The pupil's work on a problem: digits from the units up, a colon, the number they spell.

  He forgets each carry with probability `carry_errors`. The same row and seed give the same text.
  """
  rng = random.Random(f"{seed}/{row['id']}")
  a, b = (term[::-1] for term in row["id"].split("+"))
  digits, carry = "", 0
  for x, y in zip(a, b):
    total = int(x) + int(y) + carry
    digits += str(total % 10)
    carry = int(total >= 10 and rng.random() >= carry_errors)
  if carry:
    digits += "1"
  return f"{digits}:{int(digits[::-1])}"


def verify(response: str, answer: str) -> bool:
  """Whether the number after the last colon is exactly `answer`."""
  match = _ANSWER.fullmatch(response.rsplit(":", 1)[-1])
  return match is not None and int(match[1]) == int(answer)
