"""Environments by name (`environment.name`), and the time limit of their calls.

`sampling.trajectory.Environment` describes an environment's methods.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from gspo_jax.system import user_code

# Built-in environments. They are constructed in the same way as a user's.
ENVIRONMENTS = dict(calculator="gspo_jax.tasks.calculator:Calculator")

TIME_LIMIT_S = 30.0  # Time limit of a call if the environment does not set `time_limit_s`.

Make = Callable[[Any], Any]  # Function from a `structs.Prompt` to an environment.


@dataclasses.dataclass(frozen=True)
class Factory:
  """Constructor of environments, of type `Make`. All environments have the run's tokenizer."""

  make: Callable[[Any, Any], Any]  # Function from a prompt and a tokenizer to an environment.
  tokenizer: Any
  time_limit_s: float  # Time limit of each call of an environment, the constructor included.

  def __call__(self, prompt: Any) -> Any:
    return self.make(prompt, self.tokenizer)


def time_limit(make: Make | None) -> float:
  """Returns the time limit of an environment's calls in seconds, TIME_LIMIT_S if none is set."""
  return getattr(make, "time_limit_s", TIME_LIMIT_S)


def find(name: str, tokenizer: Any) -> Make | None:
  """Returns the constructor of an environment by its name.

  Args:
    name: a key of ENVIRONMENTS, or `package.module:function`. The function or class is called with
      the prompt (`structs.Prompt`) and the tokenizer. Its attribute `time_limit_s`, if set,
      replaces TIME_LIMIT_S.
    tokenizer: tokenizer of the run.

  Returns:
    The constructor; None for the name "".

  Raises:
    ValueError: there is no such environment, or its time limit is not a positive number.
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
    raise ValueError(
      f"{label}: time_limit_s of {function} is {limit_s!r:.40}: set it to seconds, above 0"
    )
  return Factory(make, tokenizer, float(limit_s))
