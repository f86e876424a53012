"""The protocol between the host loop (driver.py) and whatever samples.

A run has one engine, which lives as long as the run. Slots on the mesh are one (local.py); nothing
above this protocol knows which one it has.
"""

from typing import Any, Protocol

from gspo_jax.sampling.requests import Request, Response, Usage, Workload


class ServersGone(Exception):
  """No server is left that could sample, or none does what it is asked for."""


class Engine(Protocol):
  """Samples responses to requests with the weights that it was given last."""

  usage: Usage  # counts since the last `start`
  # Whether one thread may load weights while another one steps; what loads then calls `revive`.
  loads_beside_steps: bool

  def load(self, params: Any, version: int) -> None:
    """Copies the trainer's parameters; `version` names them."""

  def revive(self) -> None:
    """Restores lost samplers, for a thread that loads while another one steps."""

  def release(self) -> None:
    """Frees the weights during updates; `load` comes before the next `start`."""

  def start(self, workload: Workload) -> None:
    """Prepares for the requests of one workload, and forgets earlier ones."""

  def submit(self, request: Request) -> None:
    """Queues a request. Raises ValueError if it does not fit the workload."""

  @property
  def busy(self) -> bool:
    """Whether there is anything left to sample."""
    ...

  def step(self) -> list[Response]:
    """Samples for a while, and returns finished responses.

    Raises:
      Preempted: in a run that was told to go (system/preemption.py).
    """
    ...

  def stop(self) -> list[Response]:
    """Ends the workload and frees its memory. Returns finished responses, and others with their
    tokens so far."""
    ...
