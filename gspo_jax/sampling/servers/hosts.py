"""Several processes of a run, of which the first one talks to servers."""

import pickle
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gspo_jax.runs import preemption


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


def check_alone() -> None:
  """`preemption.check` where there is one process; of several, all would have to call it."""
  if jax.process_count() == 1:
    preemption.check()
