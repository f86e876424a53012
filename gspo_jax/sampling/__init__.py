"""Sampling from a policy.

Use `generate` for single turns, and `Driver` with an `Engine` for several turns and partial
rollouts. Module `sampler` draws tokens from logits.
"""

from gspo_jax.sampling.driver import Driver
from gspo_jax.sampling.engine import Engine, ServersGone
from gspo_jax.sampling.local.engine import LocalEngine
from gspo_jax.sampling.requests import Request, Response, Usage, Workload
from gspo_jax.sampling.rollout import generate, sample_rollout
from gspo_jax.sampling.trajectory import Environment, SingleTurn, Trajectory, assemble
from gspo_jax.settings.sampling import EngineConfig, EnvironmentConfig, SamplingConfig

__all__ = [
  "Driver",
  "Engine",
  "EngineConfig",
  "Environment",
  "EnvironmentConfig",
  "LocalEngine",
  "Request",
  "Response",
  "SamplingConfig",
  "ServersGone",
  "SingleTurn",
  "Trajectory",
  "Usage",
  "Workload",
  "assemble",
  "generate",
  "sample_rollout",
]
