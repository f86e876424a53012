"""Figures of samples, counted by hand."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from gspo_jax.evaluation.statistics import accuracy_lines, bootstrap, pass_at_k


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
  n = 6
  for right in range(n + 1):
    samples = [1] * right + [0] * (n - right)
    for k in range(1, n + 1):
      subsets = [any(s) for s in itertools.combinations(samples, k)]
      assert pass_at_k(n, np.array([right]), k)[0] == pytest.approx(np.mean(subsets))


def test_bootstrap_interval_shrinks_with_problems():
  few, many = (np.ptp(bootstrap(np.arange(n) % 2)) for n in (40, 400))
  assert many < few > 0.2
  assert bootstrap(np.zeros(10)) == (0.0, pytest.approx(0.3085, abs=1e-4))  # Clopper-Pearson.
  assert bootstrap(np.ones(10)) == (pytest.approx(0.6915, abs=1e-4), 1.0)
  assert bootstrap(np.full(10, 0.5)) == pytest.approx((0.1871, 0.8129), abs=1e-4)
  assert bootstrap(np.array([0.25]))[1] > 0.9


def test_an_accuracy_is_printed_with_its_interval():
  bounds = {"accuracy": 0.5, "accuracy/low": 0.25, "accuracy/high": 0.625}
  row = {f"eval/aime/{k}": v for k, v in bounds.items()} | {f"eval/{k}": 1.0 for k in bounds}
  sets = [
    SimpleNamespace(prefix=f"eval/{name}", config=SimpleNamespace(samples=4), problems=range(30))
    for name in ("", "aime/")
  ]
  assert list(accuracy_lines(sets, row | {"eval/aime/greedy": 0.75})) == [
    "eval/accuracy 100.0%, 95% interval 100.0% to 100.0% (avg@4, problems: 30)\n",
    "eval/aime/accuracy 50.0%, 95% interval 25.0% to 62.5% (avg@4, problems: 30); greedy 75.0%\n",
  ]
  graded = row | {"eval/reward/mean": 1.0, "eval/aime/reward/mean": 0.625}
  assert list(accuracy_lines(sets, graded)) == [
    "eval/accuracy 100.0%, 95% interval 100.0% to 100.0% (avg@4, problems: 30)\n",
    "eval/aime/accuracy 50.0%, 95% interval 25.0% to 62.5% (avg@4, problems: 30); "
    "mean reward 0.625\n",
  ]
  unknown = row | {"eval/aime/reward/mean": 0.625, "eval/aime/verifier/unknown": 0.2}
  assert not any("mean reward" in line for line in accuracy_lines(sets, unknown))
