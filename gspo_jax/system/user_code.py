"""Functions and classes written by the user, named `package.module:function`."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from gspo_jax.system.text import did_you_mean


def load(name: str, label: str) -> Callable[..., Any]:
  """Imports a function or class, from the working directory too.

  Args:
    name: `package.module:function`.
    label: beginning of error messages: the key and its value, such as "reward.name='my:f'".

  Raises:
    ValueError: the function or class cannot be imported, or is not callable.
  """
  module, _, function = name.partition(":")
  if (directory := os.getcwd()) not in sys.path:
    sys.path.append(directory)  # `python -m` also imports modules from the working directory.
  try:
    imported = importlib.import_module(module)
    exists = hasattr(imported, function)  # True also if the module's __getattr__ returns a value.
    loaded = getattr(imported, function) if exists else None
  except (Exception, SystemExit) as error:  # User code may raise anything.
    message = f"{type(error).__name__}: {error}"
    raise ValueError(f"{label} cannot be imported: {message}") from error
  if not exists:
    hint = did_you_mean(function, vars(imported))
    raise ValueError(f"{label} cannot be imported: {module} has no {function}{hint}")
  if not callable(loaded):
    raise ValueError(f"{label}: {function} is not a function or class, but {loaded!r}")
  return loaded
