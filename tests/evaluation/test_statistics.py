"""Figures of samples, counted by hand."""

import itertools

import numpy as np
import pytest

from gspo_jax.evaluation.statistics import bootstrap, pass_at_k


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
  assert bootstrap(np.ones(10)) == (1.0, 1.0)
