"""Hugging Face directories: `load` and `save`."""

from gspo_jax.models.hf.convert import load, save

__all__ = ["load", "save"]
