"""Search for NaN and infinity in parameters: one pass over the memory, on the devices."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def nonfinite(arrays: Sequence[Any], dtypes: Sequence[Any] | None = None) -> list[int]:
  """Counts NaN and infinite values of each array. Collective.

  Args:
    arrays: parameters.
    dtypes: dtypes of the values as they will be written. None keeps the arrays' own.
  """
  kinds = [array.dtype for array in arrays] if dtypes is None else dtypes
  counts = _counts(list(arrays), tuple(map(jnp.dtype, kinds)))
  return [int(count) for count in jax.device_get(counts)]


def describe(name: str, count: int, dtype: Any) -> str:
  """Describes the NaN and infinite values of a tensor."""
  values = f"{name} has {count} {'values that are' if count > 1 else 'value that is'}"
  if jnp.dtype(dtype) == jnp.float16:
    return f"{values} NaN or beyond float16, which ends at 65504: take bfloat16 or float32"
  return f"{values} NaN or infinite"


@functools.partial(jax.jit, static_argnums=1)
def _counts(arrays: list[Any], dtypes: tuple[Any, ...]) -> list[jax.Array]:
  return [
    jnp.sum(~jnp.isfinite(array.astype(dtype)), dtype=jnp.uint32)
    for array, dtype in zip(arrays, dtypes, strict=True)
  ]
