"""Functions and classes written by the user, named `package.module:function`."""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
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
    sys.path.append(directory)  # `python -m` does so; `gspo-jax` does not.
  try:
    imported = importlib.import_module(module)
    exists = hasattr(imported, function)  # True also if the module's __getattr__ returns a value.
    loaded = getattr(imported, function) if exists else None
  except (Exception, SystemExit) as error:  # User code may raise anything.
    raise import_error(error, module, label) from error
  if not exists:
    hint = did_you_mean(function, vars(imported))
    raise ValueError(f"{label} cannot be imported: {module} has no {function}{hint}")
  if not callable(loaded):
    raise ValueError(f"{label}: {function} is not a function or class, but {loaded!r}")
  return loaded


def import_error(error: BaseException, module: str, label: str) -> ValueError:
  """Returns the error of `load` for an `error` during the import of a module."""
  hint = ""
  if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
    name = module.removesuffix(".py").rpartition("/")[2]
    near = did_you_mean(name, (path.stem for path in Path().glob("*.py")))
    hint = f"; it is searched in {os.getcwd()} and on PYTHONPATH{near}"
  return ValueError(f"{label} cannot be imported: {type(error).__name__}: {error}{hint}")


def describe_error(error: BaseException, name: str) -> str:
  """Describes an error, for example by "KeyError: 'x' (my.py, line 3)".

  Args:
    error: the error.
    name: `package.module:function`, the user's function that was called.
  """
  text = str(error).strip().partition(chr(10))[0]
  return f"{type(error).__name__}: {text}{place(name, error)}"


def place(name: str, error: BaseException | None = None) -> str:
  """Locates a user's function. Returns, for example, " (my.py, line 3)"; "" if it is unknown.

  Args:
    name: `package.module:function`.
    error: exception from the function, to return its innermost line in the user's module. None, or
      an exception without such a line, means the function's first line.
  """
  module, _, function = name.partition(":")
  file = getattr(sys.modules.get(module), "__file__", None)
  line = _innermost_line(file, error) if error else 0
  loaded = getattr(sys.modules.get(module), function, None)
  code = getattr(inspect.unwrap(loaded), "__code__", None)
  if not line and code and code.co_filename == file:
    line = code.co_firstlineno
  return _describe(file, line)


def locate(error: BaseException) -> str:
  """Locates an exception from user code, as `place` does.

  The file is the first one outside this package in the traceback, and the line its innermost one.
  """
  package = f"{Path(__file__).parents[1]}{os.sep}"
  files = (frame.filename for frame in traceback.extract_tb(error.__traceback__))
  file = next((x for x in files if not x.startswith((package, "<"))), None)
  return _describe(file, _innermost_line(file, error))


def _innermost_line(file: str | None, error: BaseException) -> int:
  """Returns the innermost line of an exception in a file; 0 if there is none."""
  frames = traceback.extract_tb(error.__traceback__)
  return next((x.lineno for x in reversed(frames) if x.filename == file), 0)


def _describe(file: str | None, line: int) -> str:
  return f" ({Path(file).name}, line {line})" if line else ""
