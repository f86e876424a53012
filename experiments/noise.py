"""Adds noise to an engine's log-probs."""

import dataclasses
import zlib
from collections.abc import Callable

import numpy as np

from experiments.engines import ChangedEngine
from gspo_jax import main
from gspo_jax.run import Run
from gspo_jax.sampling import Request, Response

# Functions of a generator and a number of tokens. Deviations are 1. Student's t with two degrees of
# freedom has none.
NOISES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
  "independent": lambda rng, count: rng.standard_normal(count),
  "student": lambda rng, count: rng.standard_t(2, count),
  "constant": lambda rng, count: np.full(count, rng.standard_normal()),
}


def generator(request: Request, sample: int) -> np.random.Generator:
  """Returns a response's generator, seeded by the request's seed, the prompt and the sample."""
  prompt = zlib.crc32(np.asarray(request.prompt, np.int64).tobytes())
  return np.random.default_rng([request.seed, prompt, sample])


def add_noise(response: Response, kind: str, scale: float) -> Response:
  """Adds noise to a response's log-probs.

  It depends on the request's seed, the prompt, the sample number and the token's position alone.

  Args:
    response: response of an engine.
    kind: name in NOISES.
    scale: factor on the noise, in nats.
  """
  prior = len(response.request.prior)
  rng = generator(response.request, response.sample)
  drawn = NOISES[kind](rng, prior + len(response.tokens))[prior:]
  noise = (scale * drawn).astype(np.float32)
  return dataclasses.replace(
    response, logp=response.logp + noise, full_logp=response.full_logp + noise
  )


def train(run: Run, kind: str, scale: str) -> None:
  """Trains with noise on the sampler's log-probs."""
  engine = ChangedEngine(run.engine, lambda _, x: add_noise(x, kind, float(scale)))
  main.run_job(dataclasses.replace(run, engine=engine))
