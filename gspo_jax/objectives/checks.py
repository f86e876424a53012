"""Checks and conversions of arguments. Every error message names the argument.

Functions that check an array return the converted array. Masked positions may have any value, such
as NaN, since these values are replaced by 0. Shapes and dtypes are always checked. Values are
checked unless they are traced by `jit` or `grad`, or distributed over several processes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from gspo_jax.objectives.reductions import Mean, is_reduction

# A number, possibly traced. Clip ranges may also be arrays [B], with a value for each response.
Number = float | Array


def require(ok: Any, message: str) -> None:
  """Raises ValueError if `ok` is not true everywhere.

  Traced arrays, and arrays distributed over several processes, are not checked.
  """
  if isinstance(ok, jax.core.Tracer) or not getattr(ok, "is_fully_addressable", True):
    return
  if not (ok.all() if hasattr(ok, "all") else ok):
    raise ValueError(message)


def numbers(**named: Number | None) -> None:
  """Raises ValueError for arrays with axes instead of numbers.

  Such an array would be broadcast along some axis without a warning. None is allowed.
  """
  for name, value in named.items():
    if value is not None and jnp.ndim(value):
      raise ValueError(f"{name} has shape {jnp.shape(value)}, expected one number")


def log_probs(value: ArrayLike, name: str) -> Array:
  """Checks log-probs [B, T]; returns them in float32 or wider."""
  array = _array(value, name)
  if array.ndim != 2 or 0 in array.shape:
    raise ValueError(f"{name} has shape {array.shape}, expected [B, T] with B, T > 0")
  _floating(array, name)
  return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def mask(value: ArrayLike, name: str, shape: tuple[int, ...]) -> Array:
  """Checks a mask [B, T] of 0 and 1; returns bool."""
  array = _array(value, name)
  _shape(array, name, BT=shape)
  if array.dtype == jnp.bool_:
    return array
  require((array == 0) | (array == 1), f"{name} must hold only 0 and 1")
  return array != 0


def tokens(value: ArrayLike, name: str, mask_BT: Array, dtype: Any) -> Array:
  """Checks floats [B, T] for NaN, and converts them to `dtype`.

  The result is 0 at masked positions.
  """
  array = _array(value, name)
  _shape(array, name, BT=mask_BT.shape)
  _floating(array, name)
  array = jnp.where(mask_BT, array.astype(dtype), 0)
  require(~jnp.isnan(array), f"{name} is NaN where mask_BT is 1")
  return array


def constant(
  value: ArrayLike, name: str, mask_BT: Array, dtype: Any, letters: Sequence[str] = ("B", "BT")
) -> Array:
  """Checks finite constants [B] or [B, T]; returns them without gradient.

  [B] becomes [B, 1]. Masked positions, and empty rows of [B, 1], are 0.

  Args:
    letters: names of the allowed shapes, "B" and "BT".
  """
  array = _array(value, name)
  shapes = {"B": mask_BT.shape[:1], "BT": mask_BT.shape}
  _shape(array, name, **{key: shapes[key] for key in letters})
  if array.ndim == 1:
    array, mask_BT = array[:, None], mask_BT.any(axis=1, keepdims=True)
  array = jnp.where(mask_BT, jax.lax.stop_gradient(array).astype(dtype), 0)
  require(jnp.isfinite(array), f"{name} is not finite where mask_BT is 1")
  return array


def ids(value: ArrayLike, name: str, mask_BT: Array) -> Array:
  """Checks integers [B, T] to be in [0, T).

  Returns the integers, with 0 at masked positions.
  """
  array = _array(value, name)
  _shape(array, name, BT=mask_BT.shape)
  if not jnp.issubdtype(array.dtype, jnp.integer):
    raise TypeError(f"{name} must be integer, got {array.dtype}")
  array = array.astype(jnp.promote_types(array.dtype, jnp.int32))  # int8 cannot hold T = 200.
  array = jnp.where(mask_BT, array, 0)
  length = mask_BT.shape[1]
  require((array >= 0) & (array < length), f"{name} must be in [0, T) = [0, {length})")
  return array


def bound(value: ArrayLike, name: str, like: Array, least: float = 0.0) -> Array:
  """Checks a bound [] or [B]; returns [] or [B, 1].

  Args:
    like: array [B, ...] whose dtype the bound is converted to.
    least: smallest allowed value of the bound.
  """
  array = _array(value, name)
  if array.ndim:
    _shape(array, name, B=like.shape[:1])
    array = array[:, None]
  # Python numbers have a value even inside jit.
  concrete = value if isinstance(value, int | float) else array
  require(concrete >= least, f"{name} must be at least {least:g}")
  return array.astype(like.dtype)


def sums(name: str, results: object) -> None:
  """Raises TypeError if a loss has not returned `terms.Sums`."""
  form = "(Mean(numerator, denominator), metrics, clipped_BT) with two numbers in the Mean"
  if not (isinstance(results, tuple) and len(results) == 3 and isinstance(results[0], Mean)):
    raise TypeError(f"{name} returned {describe(results)}, expected {form}")
  total, metrics, clipped_BT = results
  if not all(map(_is_number, total)) or not isinstance(metrics, Mapping):
    raise TypeError(f"{name} returned {describe(results)}, expected {form}")
  dtype = getattr(clipped_BT, "dtype", None)
  if dtype != jnp.bool_ or jnp.ndim(clipped_BT) != 2:
    form = describe(clipped_BT) if dtype is None else f"{dtype} {list(jnp.shape(clipped_BT))}"
    raise TypeError(f"{name} returned clipped_BT as {form}, expected bool [B, T]")
  for key, value in metrics.items():
    if not is_reduction(value) or not all(map(_is_number, value)):
      raise TypeError(
        f"{name} returned the metric {key!r} as {describe(value)}, expected a Mean, Max, Min or "
        "Std of numbers"
      )


def _is_number(value: object) -> bool:
  return isinstance(value, int | float) or getattr(value, "shape", None) == ()


def describe(value: object) -> str:
  """Describes a value, and each entry of a tuple, in at most 80 characters."""
  if isinstance(shape := getattr(value, "shape", None), tuple):
    return f"an array of shape {list(shape)}"
  if isinstance(value, tuple) and len(value) <= 4:  # Arrays of a transformation print as tracers.
    name = "" if type(value) is tuple else type(value).__name__
    return f"{name}({', '.join(map(describe, value))})"
  text = " ".join(repr(value).split())
  return text if len(text) <= 80 else f"{text[:77]}..."


def _array(value: ArrayLike, name: str) -> Array:
  try:
    array = jnp.asarray(value)
  except jax.errors.JaxRuntimeError:
    raise  # For example, the device has too little memory.
  except (TypeError, ValueError, RuntimeError) as error:  # PyTorch raises a RuntimeError.
    raise TypeError(f"{name} is no array of JAX or NumPy: {error}") from error
  if jnp.issubdtype(array.dtype, jnp.complexfloating):
    raise TypeError(f"{name} must be real, got {array.dtype}")
  return array


def _shape(array: Array, name: str, **shapes: tuple[int, ...]) -> None:
  if array.shape not in shapes.values():
    expected = " or ".join(f"[{', '.join(key)}] = {shape}" for key, shape in shapes.items())
    raise ValueError(f"{name} has shape {array.shape}, expected {expected}")


def _floating(array: Array, name: str) -> None:
  if not jnp.issubdtype(array.dtype, jnp.floating):
    raise TypeError(f"{name} must be floating point, got {array.dtype}")
