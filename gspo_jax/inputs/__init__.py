"""Inputs of a run, read and checked before the first write."""

from gspo_jax.inputs.devices import Meshes
from gspo_jax.inputs.reading import Inputs, model_of_weights, read_inputs

__all__ = ["Inputs", "Meshes", "model_of_weights", "read_inputs"]
