"""Several processes of a run, of which the first one talks to servers."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from gspo_jax.runs import preemption
from gspo_jax.sampling.engine import ServersGone

T = TypeVar("T")


def told(value: Any) -> Any:
  """The value that the first process has, on all of them."""
  if jax.process_count() == 1:
    return value
  content = pickle.dumps(value)
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
  padded = np.zeros(size, np.uint8)
  if jax.process_index() == 0:
    padded[:] = np.frombuffer(content, np.uint8)
  return pickle.loads(multihost_utils.broadcast_one_to_all(padded).tobytes())


def of_first(work: Callable[[], T]) -> T:
  """What the first process finds, on all of them. What it raises it raises there, and the others
  raise `ServersGone` with its text, or ValueError where it does: all end in the same way, so that
  none waits for another."""
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
    raise (ValueError if wrong else ServersGone)(text)
  return found


def check_alone() -> None:
  """`preemption.check` where there is one process; of several, all would have to call it."""
  if jax.process_count() == 1:
    preemption.check()
