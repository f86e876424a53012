"""Means over seeds with 95 % intervals."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import stats

NONE = "no runs"  # Text of an interval without seeds.


@dataclasses.dataclass(frozen=True)
class Interval:
  """Mean of `count` seeds with its 95 % interval; NaN without seeds."""

  value: float
  low: float
  high: float
  count: int

  def __str__(self) -> str:
    return self.text()

  def text(self, form: str = ".3f") -> str:
    if not self.count:
      return NONE
    if self.count == 1:
      return f"{self.value:{form}} [one seed]"
    return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


def interval(values: Sequence[float]) -> Interval:
  """Returns mean and Student's 95 % interval over seeds, unbounded for one.

  Not a bootstrap: its percentiles hold the mean of three values in 75 % of cases, of seven in 91 %.
  """
  values = np.asarray(values, np.float64)
  if len(values) == 0:
    return Interval(np.nan, np.nan, np.nan, 0)
  mean = float(values.mean())
  if len(values) == 1:
    return Interval(mean, -np.inf, np.inf, 1)
  error = float(stats.sem(values))
  reach = float(stats.t.ppf(0.975, len(values) - 1)) * error
  return Interval(mean, mean - reach, mean + reach, len(values))


def exp(interval: Interval) -> Interval:
  """Converts the interval of x to that of exp(x)."""
  return Interval(
    *(float(np.exp(x)) for x in (interval.value, interval.low, interval.high)), interval.count
  )


def slope(x: Sequence[float], y: Sequence[float]) -> float:
  """Returns the slope of the least-squares line."""
  return float(np.polyfit(np.asarray(x, float), np.asarray(y, float), 1)[0])


def area(steps: Sequence[float], values: Sequence[float]) -> float:
  """Returns a curve's mean height: its area by trapezoids, divided by its width."""
  steps, values = np.asarray(steps, float), np.asarray(values, float)
  if len(steps) < 2:
    return float(values[0]) if len(values) else np.nan
  return float(np.trapezoid(values, steps) / (steps[-1] - steps[0]))
