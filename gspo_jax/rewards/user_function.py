"""A verifier of the user's own, named `package.module:function`, in processes that can be killed.

The function takes the text of a response and the record of its prompt, and returns a bool or a
number from 0 to 1, where 1 is right and anything less is wrong with partial credit. The record is a
dict of texts: `id`, `question`, `answer`, and the further fields of the row in the data set. The
function runs in worker processes: one that hangs is a timeout, one that raises or returns something
else is a crash, and neither is a wrong answer: nothing is known about the response then. Its memory
has no limit: what it needs, a model with its libraries perhaps, only its author knows.
"""

import contextlib
import functools
import importlib.util
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gspo_jax.verifiers import pool

OUTCOMES = ("right", "wrong", "timeout", "crash")
UNKNOWN = ("timeout", "crash")


@contextlib.contextmanager
def open_verifier(name: str, workers: int, time_limit_s: float) -> Iterator[Callable]:
  """The function `name` in `workers` processes.

  Raises:
    RuntimeError: if the function cannot be imported, with the traceback.
  """
  function = f"{__name__}:call"
  with pool.Pool(function, workers, time_limit_s, warm_up=[name], memory_bytes=None) as processes:

    def verify(responses, prompts, finished):
      results = processes.map([[name, r, record(p)] for r, p in zip(responses, prompts)])
      failed = [isinstance(result, pool.Failure) for result in results]
      outcomes = [
        result if bad else "right" if result == 1 else "wrong"
        for result, bad in zip(results, failed)
      ]
      return outcomes, [0.0 if bad else result for result, bad in zip(results, failed)]

    yield verify


def record(prompt: Any) -> dict[str, str]:
  """Returns the prompt's record. Further fields do not hide `id`, `question` and `answer`."""
  return dict(prompt.info) | dict(id=prompt.id, question=prompt.question, answer=prompt.answer)


def call(item: list[Any]) -> float:
  """Maps `[name, response, record]` to a value, in a worker; `[name]` only imports the function."""
  name, *arguments = item
  function = _find(name)
  if not arguments:
    return 0.0
  value = float(function(*arguments))
  if not (math.isfinite(value) and 0 <= value <= 1):
    raise ValueError(f"{name} returned {value}, and rewards lie between 0 and 1")
  return value


def checksum(name: str) -> str:
  """Returns the checksum of the function's file. Empty for a name without a module."""
  module, colon, _ = name.partition(":")
  if not colon:
    return ""
  try:
    spec = importlib.util.find_spec(module)
    return f"{zlib.crc32(Path(spec.origin).read_bytes()):08x}"
  except (ImportError, AttributeError, TypeError, ValueError, OSError):  # it is in no file
    return ""


@functools.cache
def _find(name: str) -> Callable[[str, Mapping[str, str]], float]:
  sys.path.append(os.getcwd())  # `python -m gspo_jax.main` finds modules there too.
  module, _, function = name.partition(":")
  verify = getattr(importlib.import_module(module), function)
  if not callable(verify):
    raise TypeError(f"{name} is no function, but {verify!r:.40}")
  return verify
