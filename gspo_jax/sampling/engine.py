"""Protocol of sampling engines, for the host loop (driver.py).

A run has one engine for its whole lifetime. A `LocalEngine` (local/) decodes on the run's own
devices; a `ServerEngine` (servers/) uses external servers. Callers of this protocol do not depend
on the kind of engine.
"""

from typing import Any, Protocol

from gspo_jax.sampling.requests import Request, Response, Usage, Workload


class ServersGone(Exception):
  """No server is usable, or weights for the servers cannot be written."""


class Engine(Protocol):
  """Samples responses to requests with the newest loaded weights.

  Call `load` first, and then `start`. Call `submit` and `step` until the workload is done, and
  finally `stop`.
  """

  usage: Usage  # Counts since the last `start`.
  # Whether one thread may call `load` while another thread is in `step`. If so, the loading thread
  # also calls `revive`.
  loads_beside_steps: bool

  def load(self, params: Any, version: int) -> None:
    """Loads the trainer's parameters. Tokens sampled with them have the version `version`."""

  def revive(self) -> None:
    """Makes the engine usable again if all its servers have failed.

    The loading thread calls `revive` while another thread is in `step`.
    """

  def release(self) -> None:
    """Frees the memory of the weights before updates. Call `load` before the next `start`."""

  def start(self, workload: Workload) -> None:
    """Prepares for the requests of a workload. Drops earlier requests, and resets `usage`."""

  def submit(self, request: Request) -> None:
    """Queues a request. Raises ValueError if the request does not fit the workload."""

  @property
  def busy(self) -> bool:
    """Whether any request is unfinished."""
    ...

  def step(self) -> list[Response]:
    """Samples for a short time; returns newly finished responses.

    Raises:
      Preempted: the run was asked to stop (system/preemption.py).
      ServersGone: no server became usable in time.
    """
    ...

  def stop(self) -> list[Response]:
    """Ends the workload, frees its memory and returns the remaining responses.

    Unfinished responses have their tokens so far.
    """
    ...
