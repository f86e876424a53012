"""Adds noise to an engine's log-probs."""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from gspo_jax import main
from gspo_jax.run import Run
from gspo_jax.sampling import Engine
from gspo_jax.sampling.requests import Request, Response

# Functions of a generator and a number of tokens. Deviations are 1. Student's t with two degrees of
# freedom has none.
NOISES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
  "independent": lambda rng, count: rng.standard_normal(count),
  "student": lambda rng, count: rng.standard_t(2, count),
  "constant": lambda rng, count: np.full(count, rng.standard_normal()),
}


class NoisyEngine:
  """Adds noise to an engine's log-probs (an `Engine`).

  It depends on the request's seed, the prompt, the sample number and the token's position alone.

  Args:
    engine: samples the responses.
    kind: name in NOISES.
    scale: factor on the noise, in nats.
  """

  def __init__(self, engine: Engine, kind: str, scale: float):
    self._engine, self._draw, self._scale = engine, NOISES[kind], scale

  def __getattr__(self, name: str) -> Any:
    return getattr(self._engine, name)

  def step(self) -> list[Response]:
    return [self._noisy(response) for response in self._engine.step()]

  def stop(self) -> list[Response]:
    return [self._noisy(response) for response in self._engine.stop()]

  def _noisy(self, response: Response) -> Response:
    noise = self.noise(response.request, response.sample, len(response.tokens))
    return dataclasses.replace(
      response, logp=response.logp + noise, full_logp=response.full_logp + noise
    )

  def noise(self, request: Request, sample: int, count: int) -> np.ndarray:
    """Draws the noise of a response's tokens after the prefix, float32 [count]."""
    prompt = zlib.crc32(np.asarray(request.prompt, np.int64).tobytes())
    rng = np.random.default_rng([request.seed, prompt, sample])
    drawn = self._draw(rng, len(request.prior) + count)[len(request.prior) :]
    return (self._scale * drawn).astype(np.float32)


def train(run: Run, kind: str, scale: str) -> None:
  """Trains with a noisy engine. Evaluations have no noise."""
  main.run_job(dataclasses.replace(run, engine=NoisyEngine(run.engine, kind, float(scale))))
