"""Environments by name: from a problem to the other side of a conversation about it.

What an environment is says `sampling.Environment`; nothing here needs to know.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

ENVIRONMENTS = dict(calculator="gspo_jax.tasks.calculator:Calculator")  # called as a user's own is

Make = Callable[[Any], Any]  # Maps a `Prompt` to an environment.


def find(name: str, tokenizer: Any) -> Make | None:
  """Returns a constructor of environments; None for the name "".

  `package.module:function` is called with the prompt (`structs.Prompt`) and the tokenizer.

  Raises:
    ValueError: there is no such environment.
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
  except Exception as error:  # it is the user's
    message = f"{type(error).__name__}: {error}"
    raise ValueError(f"environment.name={name!r} cannot be imported: {message}") from error
  if not callable(make):
    raise ValueError(f"environment.name={name!r}: {function} is no function or class, but {make!r}")
  return lambda prompt: make(prompt, tokenizer)
