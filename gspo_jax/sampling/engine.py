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

  usage: Usage  # since the last `start`
  # Whether one thread may load weights while another one steps; what loads then calls `revive`.
  loads_beside_steps: bool

  def load(self, params: Any, version: int) -> None:
    """Takes a copy of the trainer's parameters, in place when it returns; `version` names them."""

  def revive(self) -> None:
    """Brings back what samples if it was lost, for a thread that loads while another one steps."""

  def release(self) -> None:
    """Gives up the weights, whose memory the updates need; `load` comes before the next `start`."""

  def start(self, workload: Workload) -> None:
    """Makes ready for the requests of one workload; those of an earlier one are forgotten."""

  def submit(self, request: Request) -> None:
    """Queues a request. Raises ValueError if it does not fit the workload."""

  @property
  def busy(self) -> bool:
    """Whether there is anything left to sample."""
    ...

  def step(self) -> list[Response]:
    """Goes on for a while and returns the responses that were finished meanwhile.

    Raises:
      Preempted: in a run that was told to go (system/preemption.py).
    """
    ...

  def stop(self) -> list[Response]:
    """Ends the workload and frees what it took. Returns what is finished by now, and the others
    with the tokens that they have, so that they may be gone on with."""
    ...
