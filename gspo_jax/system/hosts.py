"""What the first process of a run says, on all of its processes."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")


def told(value: Any) -> Any:
  """The value that the first process has, on all of them. All call it."""
  if jax.process_count() == 1:
    return value
  content = pickle.dumps(value)
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
  padded = np.zeros(size, np.uint8)
  if jax.process_index() == 0:
    padded[:] = np.frombuffer(content, np.uint8)
  return pickle.loads(multihost_utils.broadcast_one_to_all(padded).tobytes())


def of_first(work: Callable[[], T], otherwise: type[Exception] = RuntimeError) -> T:
  """What the first process finds, on all of them.

  What it raises it raises there, and the others raise ValueError with its text where it is one, and
  `otherwise` where it is not: all end in the same way, so that none waits for another.
  """
  found = error = None
  if jax.process_index() == 0:
    try:
      found = work()
    except Exception as raised:
      error = raised
  text = None if error is None else str(error) or repr(error)
  found, text, wrong = told((found, text, isinstance(error, ValueError)))
  if error is not None:
    raise error
  if text is not None:
    raise (ValueError if wrong else otherwise)(text)
  return found
