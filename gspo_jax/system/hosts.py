"""Communication between the processes of a run.

The first process decides for all processes. All processes must call the functions with "Collective"
in their docstring.
"""

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")

CHUNK = 2**28  # Maximum number of bytes in one broadcast, since each device has a copy.


def is_first() -> bool:
  """Whether this is the first process, which decides and writes for all processes."""
  return jax.process_index() == 0


def join() -> None:
  """Connects the processes of all hosts, unless they are connected already.

  JAX finds the processes on a TPU slice, under Slurm, Open MPI and Kubernetes. Elsewhere, set the
  environment variables JAX_COORDINATOR_ADDRESS (host:port of the first process),
  JAX_NUM_PROCESSES and JAX_PROCESS_ID. (JAX itself reads only JAX_COORDINATOR_ADDRESS.)

  Raises:
    ValueError: a variable is not a number, or the processes cannot be connected.
  """
  if jax.distributed.is_initialized():
    return
  variables = dict(num_processes="JAX_NUM_PROCESSES", process_id="JAX_PROCESS_ID")
  try:
    numbers = {key: int(os.environ[name]) for key, name in variables.items() if name in os.environ}
    jax.distributed.initialize(**numbers)
  except (ValueError, RuntimeError) as error:
    raise ValueError(
      f"jax.distributed.initialize: {error}. On a single host, set --config.distributed=false. On "
      "several hosts, set the environment variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
      "JAX_PROCESS_ID"
    ) from error


def broadcast(value: Any) -> Any:
  """Returns the first process's value on all processes. Collective."""
  if jax.process_count() == 1:
    return value
  content = pickle.dumps(value)
  size = _broadcast_size(len(content))
  chunks = []
  for start in range(0, size, CHUNK):
    chunk = np.zeros(min(CHUNK, size - start), np.uint8)
    if is_first():
      chunk[:] = np.frombuffer(content, np.uint8, len(chunk), start)
    chunks.append(multihost_utils.broadcast_one_to_all(chunk))
  return pickle.loads(b"".join(chunks))


def _broadcast_size(size: int) -> int:
  """Broadcasts a size in single bytes, since JAX integers may be limited to 32 bits."""
  content = np.frombuffer(size.to_bytes(8, "little"), np.uint8)
  return int.from_bytes(multihost_utils.broadcast_one_to_all(content).tobytes(), "little")


def gather(number: int) -> list[int]:
  """Returns each process's `number`, in the order of processes. Collective.

  number: integer from 0 to 2**32 - 1.
  """
  if jax.process_count() == 1:
    return [number]
  return multihost_utils.process_allgather(np.uint32(number)).tolist()


def run_on_first_host(work: Callable[[], T], otherwise: type[Exception] = RuntimeError) -> T:
  """Runs `work` on the first process, and returns the result on all processes. Collective.

  If `work` raises an error, the first process raises this error. The other processes raise an error
  with the same text. Its type is ValueError if `work` raised a ValueError, and `otherwise` in all
  other cases. So all processes stop, and no process waits for another.
  """
  result = error = None
  if is_first():
    try:
      result = work()
    except Exception as raised:
      error = raised
  text = None if error is None else str(error) or repr(error)
  result, text, is_value_error = broadcast((result, text, isinstance(error, ValueError)))
  if error is not None:
    raise error
  if text is not None:
    raise (ValueError if is_value_error else otherwise)(text)
  return result


@contextlib.contextmanager
def enter_on_first_host(context: contextlib.AbstractContextManager[T]) -> Iterator[T | None]:
  """Enters a context on the first process alone. Collective.

  Yields the context's value on the first process, and None on other processes. If entering fails,
  all processes raise errors as in `run_on_first_host`.
  """
  values: list[T] = []
  with contextlib.ExitStack() as stack:
    run_on_first_host(lambda: values.append(stack.enter_context(context)))
    yield values[0] if values else None
