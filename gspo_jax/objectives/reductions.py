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
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import logsumexp


class Mean(NamedTuple):
  """numerator / denominator, and 0 where there was nothing to average."""

  numerator: Array
  denominator: Array

  def merge(self, other: "Mean") -> "Mean":
    return Mean(self.numerator + other.numerator, self.denominator + other.denominator)

  def psum(self, axis_name) -> "Mean":
    return jax.lax.psum(self, axis_name)

  def collapse(self, axis: int = 0) -> "Mean":
    return Mean(self.numerator.sum(axis), self.denominator.sum(axis))

  def compute(self) -> Array:
    return _divide(self.numerator, self.denominator)


class Max(NamedTuple):
  """The largest value; -inf is the largest of none and is reported as 0."""

  value: Array

  def merge(self, other: "Max") -> "Max":
    return Max(jnp.maximum(self.value, other.value))

  def psum(self, axis_name) -> "Max":
    return Max(jax.lax.pmax(self.value, axis_name))

  def collapse(self, axis: int = 0) -> "Max":
    return Max(self.value.max(axis))

  def compute(self) -> Array:
    return jnp.where(self.value == -jnp.inf, 0, self.value)


class Min(NamedTuple):
  """The smallest value; +inf is the smallest of none and is reported as 0."""

  value: Array

  def merge(self, other: "Min") -> "Min":
    return Min(jnp.minimum(self.value, other.value))

  def psum(self, axis_name) -> "Min":
    return Min(jax.lax.pmin(self.value, axis_name))

  def collapse(self, axis: int = 0) -> "Min":
    return Min(self.value.min(axis))

  def compute(self) -> Array:
    return jnp.where(self.value == jnp.inf, 0, self.value)


class Last(NamedTuple):
  """The latest value; all devices know the same."""

  value: Array

  def merge(self, other: "Last") -> "Last":
    return other

  def psum(self, axis_name) -> "Last":
    return self

  def collapse(self, axis: int = 0) -> "Last":
    return Last(jax.lax.index_in_dim(self.value, -1, axis, keepdims=False))

  def compute(self) -> Array:
    return self.value


class Std(NamedTuple):
  """√(Σwx²/Σw − (Σwx/Σw)²). Give x as the distance from a value that it stays near: for ratios, 1.

  (In float32 the squares of ratios like 1.0003 have no digits left for their spread.)
  """

  weight: Array
  first: Array
  second: Array

  def merge(self, other: "Std") -> "Std":
    return Std(*(a + b for a, b in zip(self, other)))

  def psum(self, axis_name) -> "Std":
    return jax.lax.psum(self, axis_name)

  def collapse(self, axis: int = 0) -> "Std":
    return Std(*(moment.sum(axis) for moment in self))

  def compute(self) -> Array:
    mean, square = _divide(self.first, self.weight), _divide(self.second, self.weight)
    return jnp.sqrt(jnp.maximum(square - mean**2, 0))


class EffectiveSize(NamedTuple):
  """(Σw)² / (n Σw²): the effective sample size of n weights, as a share of n.

  The sums are kept as logarithms: the weights of whole sequences do not fit float32.
  """

  number: Array
  log_first: Array
  log_second: Array

  def merge(self, other: "EffectiveSize") -> "EffectiveSize":
    return EffectiveSize(
      self.number + other.number,
      jnp.logaddexp(self.log_first, other.log_first),
      jnp.logaddexp(self.log_second, other.log_second),
    )

  def psum(self, axis_name) -> "EffectiveSize":
    return EffectiveSize(
      jax.lax.psum(self.number, axis_name),
      _log_psum(self.log_first, axis_name),
      _log_psum(self.log_second, axis_name),
    )

  def collapse(self, axis: int = 0) -> "EffectiveSize":
    return EffectiveSize(
      self.number.sum(axis), logsumexp(self.log_first, axis), logsumexp(self.log_second, axis)
    )

  def compute(self) -> Array:
    return _divide(jnp.exp(2 * self.log_first - self.log_second), self.number)


Reduction = Mean | Max | Min | Last | Std | EffectiveSize
Metrics = dict[str, Reduction]


def merge(tree, other):
  """Two trees of reductions, for example of two micro-batches, as one."""
  return jax.tree.map(lambda a, b: a.merge(b), tree, other, is_leaf=_is_reduction)


def psum(tree, axis_name):
  """The reductions of all devices along a mapped axis as one."""
  return jax.tree.map(lambda a: a.psum(axis_name), tree, is_leaf=_is_reduction)


def collapse(tree, axis: int = 0):
  """Reductions stacked by `lax.scan` or `vmap` as one."""
  return jax.tree.map(lambda a: a.collapse(axis), tree, is_leaf=_is_reduction)


def compute(tree):
  """Scalars: divided here, and only here."""
  return jax.tree.map(lambda a: a.compute(), tree, is_leaf=_is_reduction)


def reduced(sums: Callable) -> Callable:
  """Lets a function that returns reductions return scalars, and keeps the former as `.sums`."""

  @functools.wraps(sums)
  def computed(*args, **kwargs):
    return compute(sums(*args, **kwargs))

  computed.sums = sums
  return computed


def _is_reduction(x) -> bool:
  return isinstance(x, Reduction)


def _log_psum(log_x: Array, axis_name) -> Array:
  largest = jax.lax.pmax(log_x, axis_name)
  largest = jnp.where(largest == -jnp.inf, 0, largest)
  return largest + jnp.log(jax.lax.psum(jnp.exp(log_x - largest), axis_name))


def _divide(numerator: Array, denominator: Array) -> Array:
  empty = denominator == 0
  return jnp.where(empty, 0, numerator / jnp.where(empty, 1, denominator))
