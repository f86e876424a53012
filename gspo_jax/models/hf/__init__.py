"""Loads, checks and saves Hugging Face directories."""

from gspo_jax.models.hf.config import CheckpointError, load_config
from gspo_jax.models.hf.convert import check, load, save

__all__ = ["CheckpointError", "check", "load", "load_config", "save"]
