"""Sums that travel apart from what they are divided by, and the metrics that travel with them.

A mean over a batch that is split over micro-batches or devices is not the mean of the parts' means
once lengths differ. So each loss exists in two forms: called, it returns (scalar, scalars); its
`.sums` returns (Mean, reductions) undivided, to be merged first and computed once:

  total, metrics = gspo_loss.sums(...)                # on each micro-batch
  total, metrics = total.merge(other), merge(metrics, other_metrics)
  loss, scalars = total.compute(), compute(metrics)

No denominator depends on parameters, so the gradient of the loss is the sum of the numerators'
gradients over the merged denominator.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


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


class Share(NamedTuple):
  """(Σw)² / (n Σw²): the effective sample size of n weights as a share of n."""

  size: Array
  first: Array
  second: Array

  def merge(self, other: "Share") -> "Share":
    return Share(*(a + b for a, b in zip(self, other)))

  def psum(self, axis_name) -> "Share":
    return jax.lax.psum(self, axis_name)

  def collapse(self, axis: int = 0) -> "Share":
    return Share(*(moment.sum(axis) for moment in self))

  def compute(self) -> Array:
    return _divide(self.first, self.size) * _divide(self.first, self.second)


Reduction = Mean | Max | Min | Std | Share
Metrics = dict[str, Reduction]


def merge(metrics: Metrics, other: Metrics) -> Metrics:
  """The metrics of two micro-batches as one."""
  return {name: value.merge(other[name]) for name, value in metrics.items()}


def psum(metrics: Metrics, axis_name) -> Metrics:
  """The metrics of all devices along a mapped axis as one."""
  return {name: value.psum(axis_name) for name, value in metrics.items()}


def collapse(metrics: Metrics, axis: int = 0) -> Metrics:
  """Metrics stacked by `lax.scan` or `vmap` as one."""
  return {name: value.collapse(axis) for name, value in metrics.items()}


def compute(metrics: Metrics) -> dict[str, Array]:
  """Scalars, divided once."""
  return {name: value.compute() for name, value in metrics.items()}


def reduced(sums: Callable[..., tuple[Mean, Metrics]]) -> Callable[..., tuple[Array, dict]]:
  """Makes (Mean, reductions) into (scalar, scalars) and keeps the undivided form as `.sums`."""

  @functools.wraps(sums)
  def loss(*args, **kwargs):
    total, metrics = sums(*args, **kwargs)
    return total.compute(), compute(metrics)

  loss.sums = sums
  return loss


def _divide(numerator: Array, denominator: Array) -> Array:
  empty = denominator == 0
  return jnp.where(empty, 0, numerator / jnp.where(empty, 1, denominator))
