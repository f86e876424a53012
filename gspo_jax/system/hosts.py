"""The word of the first process of a run, on all of its processes."""

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")


def is_first() -> bool:
  """Whether this is the first process, which decides and writes for all."""
  return jax.process_index() == 0


def told(value: Any) -> Any:
  """Returns the value that the first process has, on all of them. All call it."""
  if jax.process_count() == 1:
    return value
  content = pickle.dumps(value)
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
  padded = np.zeros(size, np.uint8)
  if is_first():
    padded[:] = np.frombuffer(content, np.uint8)
  return pickle.loads(multihost_utils.broadcast_one_to_all(padded).tobytes())


def of_first(work: Callable[[], T], otherwise: type[Exception] = RuntimeError) -> T:
  """Does the work on the first process, and returns its result on all of them.

  What it raises it raises there, and the others raise ValueError with its text where it is one, and
  `otherwise` where it is not: all end in the same way, so that none waits for another.
  """
  result = error = None
  if is_first():
    try:
      result = work()
    except Exception as raised:
      error = raised
  text = None if error is None else str(error) or repr(error)
  result, text, wrong = told((result, text, isinstance(error, ValueError)))
  if error is not None:
    raise error
  if text is not None:
    raise (ValueError if wrong else otherwise)(text)
  return result


@contextlib.contextmanager
def on_first(opened: contextlib.AbstractContextManager[T]) -> Iterator[T | None]:
  """A context that the first process alone enters; what that raises is raised as by `of_first`.
  None on the others."""
  entered: list[T] = []
  with contextlib.ExitStack() as stack:
    of_first(lambda: entered.append(stack.enter_context(opened)))
    yield entered[0] if entered else None
