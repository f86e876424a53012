"""Environments by name: from a problem to the other side of a conversation about it.

What an environment is says `sampling.Environment`; nothing here needs to know.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from gspo_jax.system import user_code

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
  path, label = ENVIRONMENTS.get(name, name), f"environment.name={name!r}"
  module, _, function = path.partition(":")
  if not (module and function):
    raise ValueError(
      f"{label} is not one of {', '.join(ENVIRONMENTS)}, nor package.module:function"
    )
  make = user_code.load(path, label)
  limit_s = time_limit(make)
  if not (isinstance(limit_s, int | float) and 0 < limit_s < math.inf):
    raise ValueError(f"{label}: time_limit_s of {function} is {limit_s!r:.40}: set it to seconds")
  return Factory(make, tokenizer, float(limit_s))
