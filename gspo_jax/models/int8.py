"""Matrices in eight bits, with a scale per output channel: W ≈ values · scale.

The sampler's matrices have this form if `engine.weights_dtype` is int8. Products multiply by the
integers, which bfloat16 represents exactly, and scale the sums. So no matrix is written to memory
in a wider dtype, except those of experts in passes with many tokens.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.sharding import P


@flax.struct.dataclass
class Int8:
  """A matrix in eight bits; in brackets the axes of the query projection."""

  values: Any  # int8 [l D N H]
  scale: Any  # float32, with the axes of outputs only [l N H]
  inputs: tuple[int, ...] = flax.struct.field(pytree_node=False)  # Negative indices of input axes.

  def spec(self, matrix: P) -> "Int8":
    """Returns the layouts of values and scale for a layout of the matrix."""
    axes = [*matrix, *[None] * (self.values.ndim - len(matrix))]
    outputs = [x for i, x in enumerate(axes) if i - len(axes) not in self.inputs]
    return self.replace(values=matrix, scale=P(*outputs))


def is_int8(x: Any) -> bool:
  return isinstance(x, Int8)


def quantise(w: jax.Array, inputs: tuple[int, ...]) -> Int8:
  """Rounds a matrix to integers times a scale for each output channel.

  The scale is the largest magnitude of the channel / 127, or 1 if all its weights are 0.

  inputs: negative indices of the input axes.
  """
  w = w.astype(jnp.float32)
  largest = jnp.max(jnp.abs(w), axis=inputs, keepdims=True)
  scale = jnp.where(largest > 0, largest / 127, 1)
  return Int8(jnp.round(w / scale).astype(jnp.int8), scale.squeeze(inputs), inputs)


def matrix(w: jax.Array | Int8) -> jax.Array:
  """Returns the integers of an `Int8`, and a plain matrix unchanged."""
  return w.values if is_int8(w) else w


def as_array(w: jax.Array | Int8, dtype: Any) -> jax.Array:
  """Returns the matrix as a plain array in `dtype`."""
  if not is_int8(w):
    return w.astype(dtype)
  return (w.values * jnp.expand_dims(w.scale, w.inputs)).astype(dtype)


def project(equation: str, x: jax.Array, w: jax.Array | Int8, out: P) -> jax.Array:
  """`sharding.project` for plain and int8 matrices.

  For int8 the matrix's outputs must be the last axes of the result.
  """
  if not is_int8(w):
    return sharding.project(equation, x, w, out)
  y = sharding.einsum(equation, x, w.values.astype(x.dtype), out, jnp.float32)
  return (y * w.scale[(None,) * (y.ndim - w.scale.ndim)]).astype(x.dtype)


def multiply(x_ECD: jax.Array, w_EDF: jax.Array | Int8) -> jax.Array:
  """Multiplies the rows of each expert with its matrix. Returns [E, C, F]."""
  if not is_int8(w_EDF):
    return x_ECD @ w_EDF
  y_ECF = jnp.matmul(x_ECD, w_EDF.values.astype(x_ECD.dtype), preferred_element_type=jnp.float32)
  return (y_ECF * w_EDF.scale[:, None]).astype(x_ECD.dtype)
