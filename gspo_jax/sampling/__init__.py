"""Sampling responses: `generate` for everybody, `converse` for several turns with an environment,
`Scheduler` for those with requests of their own, `sampler` for the distribution itself."""

from gspo_jax.sampling.conversation import Environment, EnvironmentConfig, converse
from gspo_jax.sampling.requests import EngineConfig, Request, Response, Usage
from gspo_jax.sampling.rollout import generate
from gspo_jax.sampling.sampler import SamplingConfig
from gspo_jax.sampling.scheduler import Scheduler

__all__ = [
  "EngineConfig",
  "Environment",
  "EnvironmentConfig",
  "Request",
  "Response",
  "SamplingConfig",
  "Scheduler",
  "Usage",
  "converse",
  "generate",
]
