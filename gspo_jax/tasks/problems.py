"""Splits of the embedded tasks: problems by number, each made when it is read."""

from collections.abc import Callable

import numpy as np

HELD_OUT = 0.02  # Share of problems in the held-out split.
Problem = dict[str, str]  # id, question, answer, and what a task's demonstrations are made of


class Problems:
  """Random access to the problems of one split.

  Args:
    task, split: names, as in `arithmetic:train`.
    held_out: by the problem's number.
    make: from a problem's number to the problem.

  Raises:
    ValueError: if there is no such split.
  """

  def __init__(self, task: str, split: str, held_out: np.ndarray, make: Callable[[int], Problem]):
    if split not in ("train", "heldout"):
      raise ValueError(f"{task}:{split}: the splits are {task}:train and {task}:heldout")
    self._numbers = np.flatnonzero(held_out == (split == "heldout"))
    self._make = make

  def __len__(self) -> int:
    return len(self._numbers)

  def __getitem__(self, index: int) -> Problem:
    return self._make(int(self._numbers[index]))


def held_out(keys: np.ndarray) -> np.ndarray:
  """Selects the problems of the held-out split by keys (uint64). Equal keys go together. A fixed
  pseudo-random number in [0, 1) of each key decides (the finaliser of SplitMix64)."""
  x = (keys + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)) / np.float64(2**53) < HELD_OUT
