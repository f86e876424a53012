"""Intervals over seeds: interquartile means and 95 % bootstrap, of paired differences above all."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import stats

RESAMPLES = 9999


@dataclasses.dataclass(frozen=True)
class Interval:
  """An estimate from `count` seeds, and the ends of its 95 % interval; NaN without any seed."""

  value: float
  low: float
  high: float
  count: int

  def __str__(self) -> str:
    return self.text()

  def text(self, form: str = ".3f") -> str:
    if not self.count:
      return "no runs"
    return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


def interquartile_mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
  """The mean of the middle half; of fewer than four values, the mean."""
  return stats.trim_mean(values, 0.25, axis=axis)


def interval(values: Sequence[float]) -> Interval:
  """Interquartile mean of values of several seeds, and its percentile bootstrap. Resamples are
  always the same; of a single value the interval is without bounds."""
  values = np.asarray(values, np.float64)
  if len(values) == 0:
    return Interval(np.nan, np.nan, np.nan, 0)
  middle = float(interquartile_mean(values))
  if len(values) == 1:
    return Interval(middle, -np.inf, np.inf, 1)
  found = stats.bootstrap(
    (values,),
    interquartile_mean,
    n_resamples=RESAMPLES,
    vectorized=True,
    method="percentile",
    rng=np.random.default_rng(0),
  ).confidence_interval
  return Interval(middle, float(found.low), float(found.high), len(values))


def exp(of: Interval) -> Interval:
  """The interval of a logarithm as one of its argument."""
  return Interval(*(float(np.exp(x)) for x in (of.value, of.low, of.high)), of.count)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
  """The slope of the line of least squares."""
  return float(np.polyfit(np.asarray(x, float), np.asarray(y, float), 1)[0])


def area(steps: Sequence[float], values: Sequence[float]) -> float:
  """Mean height of a curve: its area by trapezoids, over its width."""
  steps, values = np.asarray(steps, float), np.asarray(values, float)
  if len(steps) < 2:
    return float(values[0]) if len(values) else np.nan
  return float(np.trapezoid(values, steps) / (steps[-1] - steps[0]))
