"""Counts of NaN and infinite values in parameters, on the devices, in one pass over memory."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def nonfinite(arrays: Sequence[Any], dtypes: Sequence[Any] | None = None) -> list[int]:
  """Counts the NaN and infinite values of each array.

  All processes must call this function with the same arrays.

  Args:
    arrays: parameters.
    dtypes: dtypes to which values are cast before counting, such as those of files. None means no
      cast.
  """
  kinds = [array.dtype for array in arrays] if dtypes is None else dtypes
  counts = _counts(list(arrays), tuple(map(jnp.dtype, kinds)))
  return [int(count) for count in jax.device_get(counts)]


def describe(name: str, count: int, dtype: Any) -> str:
  """Describes the NaN and infinite values of a tensor.

  name: name of the tensor.
  count: number of these values.
  dtype: dtype of the values.
  """
  values = f"{name} has {count} {'values that are' if count > 1 else 'value that is'}"
  if jnp.dtype(dtype) == jnp.float16:
    return f"{values} NaN or beyond float16, whose largest is 65504: take bfloat16 or float32"
  return f"{values} NaN or infinite"


@functools.partial(jax.jit, static_argnums=1)
def _counts(arrays: list[Any], dtypes: tuple[Any, ...]) -> list[jax.Array]:
  return [
    jnp.sum(~jnp.isfinite(array.astype(dtype)), dtype=jnp.uint32)
    for array, dtype in zip(arrays, dtypes, strict=True)
  ]
