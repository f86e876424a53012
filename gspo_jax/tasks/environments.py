"""Environments by name: from a problem to the other side of a conversation about it.

What an environment is says `sampling.Environment`; nothing here needs to know.
"""

import dataclasses
import importlib
import math
import os
import sys
from collections.abc import Callable
from typing import Any

ENVIRONMENTS = dict(calculator="gspo_jax.tasks.calculator:Calculator")  # called as a user's own is

TIME_LIMIT_S = 30.0  # Limit of a call of an environment without its own `time_limit_s`.

Make = Callable[[Any], Any]  # Maps a `Prompt` to an environment.


@dataclasses.dataclass(frozen=True)
class Factory:
  """Constructor of environments with the run's tokenizer."""

  make: Callable[[Any, Any], Any]
  tokenizer: Any
  time_limit_s: float  # Limit of each call of an environment, the constructor included.

  def __call__(self, prompt: Any) -> Any:
    return self.make(prompt, self.tokenizer)


def time_limit(make: Make | None) -> float:
  """Returns the time limit of environments' calls, in seconds."""
  return getattr(make, "time_limit_s", TIME_LIMIT_S)


def find(name: str, tokenizer: Any) -> Make | None:
  """Returns a constructor of environments; None for the name "".

  `package.module:function` is called with the prompt (`structs.Prompt`) and the tokenizer. Its
  attribute `time_limit_s`, of a class or a function, replaces TIME_LIMIT_S.

  Raises:
    ValueError: there is no such environment, or its time limit is no positive number.
  """
  if not name:
    return None
  module, colon, function = ENVIRONMENTS.get(name, name).partition(":")
  if not (module and colon and function):
    raise ValueError(
      f"environment.name={name!r} is not one of {', '.join(ENVIRONMENTS)}, nor"
      " package.module:function"
    )
  sys.path.append(os.getcwd())  # `python -m gspo_jax.main` finds modules there too.
  try:
    make = getattr(importlib.import_module(module), function)
  except (Exception, SystemExit) as error:  # It is the user's.
    message = f"{type(error).__name__}: {error}"
    raise ValueError(f"environment.name={name!r} cannot be imported: {message}") from error
  if not callable(make):
    raise ValueError(f"environment.name={name!r}: {function} is no function or class, but {make!r}")
  limit_s = time_limit(make)
  if not (isinstance(limit_s, int | float) and 0 < limit_s < math.inf):
    raise ValueError(
      f"environment.name={name!r}: time_limit_s of {function} is {limit_s!r:.40}: set it to seconds"
    )
  return Factory(make, tokenizer, float(limit_s))
