"""Reductions: metrics and losses as sums, to be merged over micro-batches or devices.

If responses differ in length, the mean over a batch is not the mean over micro-batches of their
means. So each loss has two forms. Called directly, it returns (scalar, dict of scalars). Its
attribute `.sums` returns (Mean, dict of reductions), with numerators and denominators not yet
divided. Merge the results of all parts first, and divide once:

  first, second = gspo_loss.sums(...), gspo_loss.sums(...)  # Two micro-batches
  loss, metrics = compute(merge(first, second))

Denominators do not depend on parameters. So the gradient of the loss is the sum of the numerators'
gradients, divided by the merged denominator.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, Protocol, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import logsumexp

from gspo_jax.objectives import signatures


class _Over(NamedTuple):
  """An operation that reduces a field, for example a sum, in three forms."""

  pair: Callable  # (x, y) -> the reduction of two values.
  axis: Callable  # (x, axis) -> the reduction over an axis of an array.
  devices: Callable  # (x, axis name) -> the reduction over a mapped axis.


def _log_psum(log_x: Array, axis_name: str) -> Array:
  """Returns the logarithm of the sum of exp(log_x) over devices."""
  largest = jax.lax.pmax(log_x, axis_name)
  largest = jnp.where(largest == -jnp.inf, 0, largest)
  return largest + jnp.log(jax.lax.psum(jnp.exp(log_x - largest), axis_name))


_SUM = _Over(jnp.add, jnp.sum, jax.lax.psum)
_MAX = _Over(jnp.maximum, jnp.max, jax.lax.pmax)
_MIN = _Over(jnp.minimum, jnp.min, jax.lax.pmin)
_LOG_SUM = _Over(jnp.logaddexp, logsumexp, _log_psum)
_LAST = _Over(
  lambda _, y: y,
  lambda x, axis: jax.lax.index_in_dim(x, -1, axis, keepdims=False),
  lambda x, _: x,  # All devices have the same value.
)


class Mean(NamedTuple):
  """numerator / denominator; 0 if the denominator is 0."""

  numerator: Array
  denominator: Array

  @property
  def empty(self) -> Array:
    """Whether nothing was added."""
    return self.denominator == 0

  def compute(self) -> Array:
    return _divide(self.numerator, self.denominator)


class Max(NamedTuple):
  """The largest value. Without values it is -inf, which `compute` returns as 0."""

  value: Array

  @property
  def empty(self) -> Array:
    """Whether nothing was added."""
    return self.value == -jnp.inf

  def compute(self) -> Array:
    return jnp.where(self.value == -jnp.inf, 0, self.value)


class Min(NamedTuple):
  """The smallest value. Without values it is +inf, which `compute` returns as 0."""

  value: Array

  def compute(self) -> Array:
    return jnp.where(self.value == jnp.inf, 0, self.value)


class Last(NamedTuple):
  """The latest value."""

  value: Array

  def compute(self) -> Array:
    return self.value


class Std(NamedTuple):
  """The standard deviation √(Σwx²/Σw − (Σwx/Σw)²) of x, with weights w.

  If all values are close to a constant, subtract the constant before summing, for example 1 from
  ratios. In float32, the squares of ratios such as 1.0003 would be too coarse.
  """

  weight: Array  # Σw
  first: Array  # Σwx
  second: Array  # Σwx²

  def compute(self) -> Array:
    mean, square = _divide(self.first, self.weight), _divide(self.second, self.weight)
    return jnp.sqrt(jnp.maximum(square - mean**2, 0))


class Explained(NamedTuple):
  """Explained variance, 1 − Var(error)/Var(target).

  The explained variance is 1 if all errors are equal, 0 if predictions are as good as a constant,
  and negative if predictions are worse than a constant. If all targets are equal up to the errors'
  rounding, it is 0.
  """

  weight: Array  # Number of tokens. The next four fields are sums over tokens.
  error: Array
  error_square: Array
  target: Array
  target_square: Array
  # Smallest and largest target, to detect equal targets. Because of rounding, the variance of equal
  # targets may differ from 0.
  low: Array
  high: Array

  def compute(self) -> Array:
    unexplained = Std(self.weight, self.error, self.error_square).compute() ** 2
    whole = Std(self.weight, self.target, self.target_square).compute() ** 2
    varies = (self.high > self.low) & (whole > jnp.finfo(whole.dtype).eps * unexplained)
    return jnp.where(varies, 1 - unexplained / jnp.where(varies, whole, 1), 0)


class EffectiveSize(NamedTuple):
  """The effective sample size (Σw)² / Σw² of n weights, divided by n.

  The fields are logarithms of sums, since weights of whole sequences may be too large for float32.
  """

  number: Array  # n
  log_first: Array  # log Σw
  log_second: Array  # log Σw²

  @property
  def empty(self) -> Array:
    """Whether nothing was added."""
    return self.number == 0

  def compute(self) -> Array:
    return _divide(jnp.exp(2 * self.log_first - self.log_second), self.number)


# Operations for the fields of each reduction.
_OVER = {
  Mean: (_SUM, _SUM),
  Max: (_MAX,),
  Min: (_MIN,),
  Last: (_LAST,),
  Std: (_SUM, _SUM, _SUM),
  Explained: (_SUM,) * 5 + (_MIN, _MAX),
  EffectiveSize: (_SUM, _LOG_SUM, _LOG_SUM),
}
Reduction = Mean | Max | Min | Last | Std | Explained | EffectiveSize
Metrics = dict[str, Reduction]
Arguments = ParamSpec("Arguments")


def merge(tree: Any, addend: Any) -> Any:
  """Merges two trees of reductions of equal structure, for example of two micro-batches."""
  return _field_by_field(lambda over, x, y: over.pair(x, y), tree, addend)


def psum(tree: Any, axis_name: str) -> Any:
  """Merges the reductions of all devices along a mapped axis."""
  return _field_by_field(lambda over, x: over.devices(x, axis_name), tree)


def collapse(tree: Any, axis: int = 0) -> Any:
  """Merges reductions stacked by `lax.scan` or `vmap` along `axis`."""
  return _field_by_field(lambda over, x: over.axis(x, axis), tree)


def compute(tree: Any) -> Any:
  """Computes the scalars of a tree of reductions."""
  return jax.tree.map(lambda a: a.compute(), tree, is_leaf=is_reduction)


class Reduced(Protocol[Arguments]):
  """A function that returns scalars; its `.sums` returns the reductions."""

  __name__: str
  __signature__: inspect.Signature
  sums: Callable[Arguments, Any]

  def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
    """Returns the results of `sums`, computed to scalars."""


def reduced(sums: Callable[Arguments, Any]) -> Reduced[Arguments]:
  """Wraps a function to return scalars instead of reductions."""

  @functools.wraps(sums)
  def computed(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
    return compute(sums(*args, **kwargs))

  function = cast(Reduced[Arguments], computed)
  function.sums = sums
  function.__signature__ = signatures.short(sums, Reduction)
  return function


def is_reduction(x: object) -> bool:
  """Whether `x` is a reduction: Mean, Max, Min, Std, ..."""
  return isinstance(x, Reduction)


def _field_by_field(reduce: Callable, *trees: Any) -> Any:
  """Calls `reduce` for each field, with the field's operation and values."""

  def by_field(*reductions: Any) -> Any:
    kind = type(reductions[0])
    return kind(*map(reduce, _OVER[kind], *reductions))

  return jax.tree.map(by_field, *trees, is_leaf=is_reduction)


def _divide(numerator: Array, denominator: Array) -> Array:
  """Divides; returns 0 if the denominator is 0."""
  empty = denominator == 0
  return jnp.where(empty, 0, numerator / jnp.where(empty, 1, denominator))
