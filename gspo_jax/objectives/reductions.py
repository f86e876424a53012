"""Sums that travel apart from what they are divided by, and the metrics that travel with them.

A mean over a batch that is split over micro-batches or devices is not the mean of the parts' means
once lengths differ. So each loss exists in two forms: called, it returns (scalar, scalars); its
`.sums` returns (Mean, reductions) undivided, to be merged first and computed once:

  sums = merge(gspo_loss.sums(...), gspo_loss.sums(...))  # of two micro-batches
  loss, metrics = compute(sums)

No denominator depends on parameters, so the gradient of the loss is the sum of the numerators'
gradients over the merged denominator.
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
  """How a field of a reduction is reduced: of two values, of an array's axis, of a mapped axis."""

  pair: Callable  # (x, y)
  axis: Callable  # (x, axis)
  devices: Callable  # (x, axis name)


def _log_psum(log_x: Array, axis_name: str) -> Array:
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
  lambda x, _: x,  # all devices know the same
)


class Mean(NamedTuple):
  """numerator / denominator, and 0 where there was nothing to average."""

  numerator: Array
  denominator: Array

  @property
  def empty(self) -> Array:
    """Whether nothing was added."""
    return self.denominator == 0

  def compute(self) -> Array:
    return _divide(self.numerator, self.denominator)


class Max(NamedTuple):
  """The largest value; -inf is the largest of none and is reported as 0."""

  value: Array

  @property
  def empty(self) -> Array:
    """Whether nothing was added."""
    return self.value == -jnp.inf

  def compute(self) -> Array:
    return jnp.where(self.value == -jnp.inf, 0, self.value)


class Min(NamedTuple):
  """The smallest value; +inf is the smallest of none and is reported as 0."""

  value: Array

  def compute(self) -> Array:
    return jnp.where(self.value == jnp.inf, 0, self.value)


class Last(NamedTuple):
  """The latest value."""

  value: Array

  def compute(self) -> Array:
    return self.value


class Std(NamedTuple):
  """√(Σwx²/Σw − (Σwx/Σw)²). Give x as the distance from a value that it stays near: for ratios, 1.

  (In float32 the squares of ratios like 1.0003 have no digits left for how much they differ.)
  """

  weight: Array
  first: Array
  second: Array

  def compute(self) -> Array:
    mean, square = _divide(self.first, self.weight), _divide(self.second, self.weight)
    return jnp.sqrt(jnp.maximum(square - mean**2, 0))


class Explained(NamedTuple):
  """1 − Var(error)/Var(target), of sums over tokens: 1 if there is no error, 0 if a constant would
  do as well, less if it would do better; 0 where the target does not vary."""

  weight: Array
  error: Array
  error_square: Array
  target: Array
  target_square: Array
  low: Array  # the least and the largest target: rounding gives a constant a variance, too
  high: Array

  def compute(self) -> Array:
    unexplained = Std(self.weight, self.error, self.error_square).compute() ** 2
    whole = Std(self.weight, self.target, self.target_square).compute() ** 2
    varies = (self.high > self.low) & (whole > 0)
    return jnp.where(varies, 1 - unexplained / jnp.where(varies, whole, 1), 0)


class EffectiveSize(NamedTuple):
  """(Σw)² / (n Σw²): the effective sample size of n weights, as a share of n.

  The sums are kept as logarithms: the weights of whole sequences do not fit float32.
  """

  number: Array
  log_first: Array
  log_second: Array

  @property
  def empty(self) -> Array:
    """Whether nothing was added."""
    return self.number == 0

  def compute(self) -> Array:
    return _divide(jnp.exp(2 * self.log_first - self.log_second), self.number)


_OVER = {
  Mean: (_SUM, _SUM),
  Max: (_MAX,),
  Min: (_MIN,),
  Last: (_LAST,),
  Std: (_SUM, _SUM, _SUM),
  Explained: (_SUM,) * 5 + (_MIN, _MAX),
  EffectiveSize: (_SUM, _LOG_SUM, _LOG_SUM),
}  # how their fields are reduced
Reduction = Mean | Max | Min | Last | Std | Explained | EffectiveSize
Metrics = dict[str, Reduction]
Arguments = ParamSpec("Arguments")


def merge(tree: Any, addend: Any) -> Any:
  """Two trees of reductions, for example of two micro-batches, as one."""
  return _field_by_field(lambda over, x, y: over.pair(x, y), tree, addend)


def psum(tree: Any, axis_name: str) -> Any:
  """The reductions of all devices along a mapped axis as one."""
  return _field_by_field(lambda over, x: over.devices(x, axis_name), tree)


def collapse(tree: Any, axis: int = 0) -> Any:
  """Reductions stacked by `lax.scan` or `vmap` as one."""
  return _field_by_field(lambda over, x: over.axis(x, axis), tree)


def compute(tree: Any) -> Any:
  """Scalars: divided here, and only here."""
  return jax.tree.map(lambda a: a.compute(), tree, is_leaf=is_reduction)


class Reduced(Protocol[Arguments]):
  """A function of scalars, and with `.sums` of what they are made of."""

  __name__: str
  __signature__: inspect.Signature
  sums: Callable[Arguments, Any]

  def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
    """Returns the results of `sums`, computed to scalars."""


def reduced(sums: Callable[Arguments, Any]) -> Reduced[Arguments]:
  """Makes a function of reductions return scalars; `.sums` keeps the reductions."""

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
  def by_field(*reductions: Any) -> Any:
    kind = type(reductions[0])
    return kind(*map(reduce, _OVER[kind], *reductions))

  return jax.tree.map(by_field, *trees, is_leaf=is_reduction)


def _divide(numerator: Array, denominator: Array) -> Array:
  empty = denominator == 0
  return jnp.where(empty, 0, numerator / jnp.where(empty, 1, denominator))
