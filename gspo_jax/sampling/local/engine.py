"""Engine with decoding slots on the run's own devices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from gspo_jax.models import publication, transformer
from gspo_jax.sampling.local.scheduler import Scheduler
from gspo_jax.sampling.requests import Request, Response, Usage, Workload
from gspo_jax.settings.model import REFERENCE, ComputeConfig, ModelConfig
from gspo_jax.settings.sampling import LOCAL_ENGINE, EngineConfig


class LocalEngine:
  """Continuous batching on the devices of the current mesh (an `Engine`).

  A slot is one row of the decoding batch. Once its response ends, the slot takes a new response.

  Args:
    model: configuration of the model.
    config: section `engine` of the configuration.
    compute: the trainer's compute settings; `config.dtype`, if set, overrides their dtype.
    publish: function from the trainer's parameters to parameters in the sampler's layout and dtype.
    text_bytes: bytes of each token id's text, for stop strings; None if there are none.
    stepped: function that `step` calls at its end. The argument is `config.steps`, the maximum
      number of decode steps in one call of `step`. None if there is no such function.
  """

  loads_beside_steps = False  # Two threads must not start collectives on the same devices.

  def __init__(
    self,
    model: ModelConfig,
    config: EngineConfig = LOCAL_ENGINE,
    compute: ComputeConfig = REFERENCE,
    publish: Callable[[Any], Any] = lambda params: params,
    text_bytes: Sequence[bytes] | None = None,
    stepped: Callable[[int], None] | None = None,
  ):
    self._model, self._config, self._compute = model, config, config.compute(compute)
    self._publish, self._text_bytes, self._stepped = publish, text_bytes, stepped
    self._params: Any = None
    self._version = 0
    self._scheduler: Scheduler | None = None
    self.usage = Usage()

  def load(self, params: Any, version: int) -> None:
    self.release()
    params = self._publish(params)
    if self._config.weights_dtype == "int8":
      params = publication.in_eight_bits(params, self._model)
    self._params = transformer.decoding_params(params, self._model)
    self._version = version
    jax.block_until_ready(self._params)

  def revive(self) -> None:
    """Does nothing: slots cannot be lost."""

  def release(self) -> None:
    self._params = self._scheduler = None

  def start(self, workload: Workload) -> None:
    if self._params is None:
      raise RuntimeError("the engine has no weights: call load() before start()")
    self._scheduler = None  # Frees the old cache before allocating the new one.
    self._scheduler = Scheduler(
      self._params,
      self._version,
      self._model,
      workload,
      self._config,
      self._compute,
      self._text_bytes,
    )
    self.usage = self._scheduler.usage

  def submit(self, request: Request) -> None:
    self._scheduler.submit(request)

  @property
  def busy(self) -> bool:
    return self._scheduler is not None and self._scheduler.busy

  def step(self) -> list[Response]:
    responses = self._scheduler.step()
    if self._stepped is not None:
      self._stepped(self._config.steps)
    return responses

  def stop(self) -> list[Response]:
    scheduler, self._scheduler = self._scheduler, None
    return [] if scheduler is None else scheduler.stop()
