"""An engine that changes the responses of another engine."""

from collections.abc import Callable
from typing import Any

from gspo_jax.sampling import Engine, Response


class ChangedEngine:
  """Changes the responses of an engine (an `Engine`).

  Args:
    engine: samples the responses.
    change: function from the trainer's newest parameters and a response to the changed response.
  """

  def __init__(self, engine: Engine, change: Callable[[Any, Response], Response]):
    self._engine, self._change, self._params = engine, change, None

  def __getattr__(self, name: str) -> Any:
    return getattr(self._engine, name)

  def load(self, params: Any, version: int) -> None:
    self._params = params
    self._engine.load(params, version)

  def step(self) -> list[Response]:
    return [self._change(self._params, response) for response in self._engine.step()]

  def stop(self) -> list[Response]:
    return [self._change(self._params, response) for response in self._engine.stop()]
