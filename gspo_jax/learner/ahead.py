"""Compilation while the first responses are sampled."""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax


def compile_ahead(
  pool: concurrent.futures.Executor,
  mesh: jax.sharding.Mesh,
  function: Callable,
  arguments: Callable[[], tuple[Any, ...]],
) -> Callable:
  """Returns a jitted function, which a thread of `pool` compiles from now on.

  The sampler, which comes first, has to be compiled as well, and XLA leaves most cores of a host
  idle. The first call waits for the thread. (A process that ends sooner, as when the machine is
  taken away, waits too: a compilation cannot be broken off.)

  Args:
    arguments: makes arrays, or their shapes and shardings, like those of all calls.
  """

  def work() -> None:
    with jax.set_mesh(mesh):  # each thread has its own
      function.lower(*arguments()).compile()

  job = pool.submit(work)

  def call(*arguments: Any) -> Any:
    concurrent.futures.wait([job])  # what failed there fails here again, where it is seen
    return function(*arguments)

  return call
