"""A verifier of the user's own, named `package.module:function`, in processes that can be killed.

The function takes the texts of a response and of an answer and returns a bool or a number from 0 to
1, where 1 is right and anything less is wrong with partial credit. It runs in worker processes: one
that hangs is a timeout, one that raises or returns something else is a crash, and neither is a
wrong answer.
"""

import functools
import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence

from gspo_jax.rewards import pool


class UserVerifier:
  """Scores responses by the function `name` in `workers` processes.

  Raises:
    RuntimeError: if the function cannot be imported, with the traceback.
  """

  def __init__(self, name: str, workers: int, time_limit_s: float):
    self._name = name
    self._pool = pool.Pool(f"{__name__}:call", workers, time_limit_s, warm_up=[name])

  def score(
    self, responses: Sequence[str], answers: Sequence[str]
  ) -> tuple[list[str], list[float]]:
    """Outcomes and values of all responses, in order."""
    results = self._pool.map([[self._name, r, a] for r, a in zip(responses, answers)])
    outcomes = [
      result.value if isinstance(result, pool.Failure) else "right" if result == 1 else "wrong"
      for result in results
    ]
    return outcomes, [0.0 if isinstance(r, pool.Failure) else r for r in results]

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._pool.close()


def call(item: list[str]) -> float:
  """In a worker: `[name, response, answer]` to a value; `[name]` only imports the function."""
  name, *texts = item
  function = _find(name)
  if not texts:
    return 0.0
  value = float(function(*texts))
  if not (math.isfinite(value) and 0 <= value <= 1):
    raise ValueError(f"{name} returned {value}, and rewards lie between 0 and 1")
  return value


@functools.cache
def _find(name: str) -> Callable[[str, str], float]:
  sys.path.append(os.getcwd())  # where `python -m gspo_jax.main` finds modules too
  module, _, function = name.partition(":")
  return getattr(importlib.import_module(module), function)
