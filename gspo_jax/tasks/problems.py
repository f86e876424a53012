"""Problems of the embedded tasks, numbered, split and generated on access."""

from collections.abc import Callable

import numpy as np

HELD_OUT = 0.02  # Share of all problems that `held_out` selects, on average.
Problem = dict[str, str]  # Fields id, question and answer; a task may add others.


class Problems:
  """Random access to the problems of one split.

  Args:
    task: name of the task, for messages.
    split: "train" or "heldout".
    held_out: bool [problems of both splits], True for those of the held-out split.
    make: function from a problem's number, its index in `held_out`, to the problem.

  Raises:
    ValueError: there is no such split.
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
  """Selects the problems of the held-out split, bool [problems].

  A problem is selected if a hash of its key (the finaliser of SplitMix64) is in the lowest 2 % of
  all hashes. So problems with equal keys are in the same split.

  Args:
    keys: a key for each problem, uint64.
  """
  x = (keys + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)) / np.float64(2**53) < HELD_OUT
