"""Sampling responses: `generate` for everybody, `sampler` for the distribution itself."""

from gspo_jax.sampling.rollout import generate
from gspo_jax.sampling.sampler import SamplingConfig

__all__ = ["SamplingConfig", "generate"]
