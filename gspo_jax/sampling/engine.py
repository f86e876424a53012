"""Protocol of sampling engines, for the host loop (driver.py).

A run has one engine for its whole lifetime: decoding slots on the mesh (local/) or servers
(servers/). Code above this protocol does not depend on the kind of engine.
"""

from typing import Any, Protocol

from gspo_jax.sampling.requests import Request, Response, Usage, Workload


class ServersGone(Exception):
  """All servers have failed, or refuse the requests."""


class Engine(Protocol):
  """Samples responses to requests with the newest loaded weights."""

  usage: Usage  # Counts since the last `start`.
  # Whether one thread may call `load` during `step` in another thread. The loading thread then
  # calls `revive` too.
  loads_beside_steps: bool

  def load(self, params: Any, version: int) -> None:
    """Copies the trainer's parameters of version `version`."""

  def revive(self) -> None:
    """Restores lost samplers, from the loading thread during `step` in another thread."""

  def release(self) -> None:
    """Frees the weights during updates. Call `load` before the next `start`."""

  def start(self, workload: Workload) -> None:
    """Prepares for the requests of a workload, and drops earlier requests."""

  def submit(self, request: Request) -> None:
    """Queues a request. Raises ValueError if the request does not fit the workload."""

  @property
  def busy(self) -> bool:
    """Whether any request is unfinished."""
    ...

  def step(self) -> list[Response]:
    """Samples for a short time, and returns finished responses.

    Raises:
      Preempted: the run was asked to stop (system/preemption.py).
    """
    ...

  def stop(self) -> list[Response]:
    """Ends the workload and frees its memory. Returns the remaining responses: finished ones, and
    unfinished ones with their tokens so far."""
    ...
