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
    label: key and name, such as "reward.name='my:f'", for error messages.

  Raises:
    ValueError: it cannot be imported, or is not callable.
  """
  module, _, function = name.partition(":")
  if (directory := os.getcwd()) not in sys.path:
    sys.path.append(directory)  # `python -m gspo_jax.main` finds modules there too.
  try:
    imported = importlib.import_module(module)
    exists = hasattr(imported, function)  # Also by the module's __getattr__.
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
