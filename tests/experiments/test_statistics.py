"""Intervals against values that are known, and that a verdict could have been another one."""

import math

import numpy as np
import pandas as pd
import pytest
from support.cases import long

from experiments import report, statistics
from experiments.report import FAILS, HOLDS, OPEN, Results
from experiments.statistics import Interval


def test_the_interval_of_two_values_is_known():
  """One degree of freedom: t is tan(0.475 π), 12.7 standard errors of 1/2."""
  interval = statistics.interval([0.0, 1.0])
  assert (interval.value, interval.count) == (0.5, 2)
  assert interval.high - interval.value == pytest.approx(math.tan(0.475 * math.pi) / 2)


@pytest.mark.parametrize("seeds", [3, *long((5, 7))])
def test_the_interval_covers_the_mean_as_often_as_it_says_of_few_seeds(seeds):
  samples = np.random.default_rng(1).normal(3, 2, (2000, seeds))
  intervals = [statistics.interval(sample) for sample in samples]
  assert np.mean([i.low <= 3 <= i.high for i in intervals]) == pytest.approx(0.95, abs=0.015)


def test_few_values():
  single = statistics.interval([0.3])
  assert (single.value, single.low, single.high) == (0.3, -math.inf, math.inf)
  assert statistics.interval([]).text() == "no runs"
  same = statistics.interval([0.5, 0.5, 0.5])
  assert (same.low, same.high) == (0.5, 0.5)


def test_the_interval_of_a_ratio_is_of_its_logarithm():
  ratio = statistics.exp(Interval(*np.log([100.0, 10.0, 1000.0]), 2))
  assert (ratio.value, ratio.low, ratio.high) == pytest.approx((100, 10, 1000))


def test_area_is_the_mean_height():
  assert statistics.area([0, 10, 40], [0, 1, 1]) == pytest.approx(35 / 40)
  assert statistics.slope([0, 1, 2], [1, 3, 5]) == pytest.approx(2)


@pytest.mark.parametrize(
  "low, high, outcome",
  [(0.01, 0.1, HOLDS), (-0.02, 0.02, FAILS), (-0.2, -0.1, FAILS), (-0.1, 0.1, OPEN)],
)
def test_verdicts(low, high, outcome):
  estimate = Interval((low + high) / 2, low, high, 5)
  assert report.compare(estimate, negligible=0.03) == outcome
  assert report.compare(Interval(0.5, -math.inf, math.inf, 1)) == OPEN


def test_pairs_are_of_the_same_seed_and_a_run_that_diverged_has_learned_nothing():
  rows = [
    ("a", 0, "done", 0.5), ("a", 1, "done", 0.7), ("a", 2, "failed", 0.9),
    ("b", 1, "done", 0.4), ("b", 0, "nan", 0.3), ("b", 2, "done", 0.1),
  ]  # fmt: skip
  runs = pd.DataFrame(rows, columns=["condition", "seed", "status", "eval/final"])
  runs = runs.assign(stage="final", entropy=runs["eval/final"])
  results = Results(runs, pd.DataFrame())
  pairs = results.paired("a", "b", "eval/final")
  assert dict(pairs.round(6)) == {0: 0.5, 1: 0.3}
  assert dict(results.paired("a", "b", "entropy").round(6)) == {0: 0.2, 1: 0.3}
  assert results.values("a", "nothing").empty
