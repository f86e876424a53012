"""Functions and classes of the user's own, named `package.module:function`."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from gspo_jax.system.text import did_you_mean


def load(name: str, key: str) -> Callable[..., Any]:
  """Imports a function or class, from the working directory too.

  Args:
    name: `package.module:function`.
    key: configuration key of the name, for error messages.

  Raises:
    ValueError: it cannot be imported, or is not callable.
  """
  module, _, function = name.partition(":")
  if (directory := os.getcwd()) not in sys.path:
    sys.path.append(directory)  # `python -m gspo_jax.main` finds modules there too.
  try:
    scope = vars(importlib.import_module(module))
  except (Exception, SystemExit) as error:  # It is the user's.
    message = f"{type(error).__name__}: {error}"
    raise ValueError(f"{key}={name!r} cannot be imported: {message}") from error
  if function not in scope:
    hint = did_you_mean(function, scope)
    raise ValueError(f"{key}={name!r} cannot be imported: {module} has no {function}{hint}")
  if not callable(scope[function]):
    raise ValueError(f"{key}={name!r}: {function} is no function or class, but {scope[function]!r}")
  return scope[function]
