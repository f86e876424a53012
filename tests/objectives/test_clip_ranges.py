"""Clip ranges by length and towards a target, against NumPy."""

import numpy as np
import pytest
from support.compiled import compiled, value_and_grad

from gspo_jax import objectives as O

LENGTHS = np.array([4, 16, 1, 0, 9])
T = 16
MASK = (np.arange(T) < LENGTHS[:, None]).astype(np.float32)
SEGMENTS = np.broadcast_to(np.arange(T) // 4, MASK.shape)


def test_the_factor_of_a_length():
  factor = O.length_factor(LENGTHS.astype(np.float32), 16, 0.5)
  np.testing.assert_allclose(factor, [2, 1, 4, 4, 4 / 3], rtol=1e-6)  # empty: as one token
  assert O.length_factor(LENGTHS, None, 0.0) is None


def drifted(seed):
  """A batch with log s of a few thousandths at any length."""
  rng = np.random.default_rng(seed)
  shift = np.where(rng.random(len(LENGTHS)) < 0.5, -1, 1) * rng.uniform(0.2, 1.5, len(LENGTHS))
  shift = 4e-3 * shift[:, None] + rng.normal(0, 1e-4, MASK.shape)
  size = rng.uniform(0.5, 1, len(LENGTHS))
  advantage = np.sign(shift.mean(1)) * size  # All may be clipped.
  logp = np.where(MASK > 0, shift - 1, np.nan).astype(np.float32)
  return logp, np.full_like(logp, -1), advantage.astype(np.float32)


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "segment"])
def test_each_response_is_clipped_by_the_range_of_its_length(name):
  loss, low, high, L, exponent = O.POLICY_LOSSES[name], 1e-3, 2e-3, 16, 0.5
  ids = SEGMENTS if name == "segment" else np.zeros_like(SEGMENTS)
  by_default = 0
  for seed in range(4):
    logp, old, advantage = drifted(seed)
    if loss.by_token:
      advantage = np.repeat(advantage[:, None], T, 1)
    args = [logp, old, advantage, MASK, *([SEGMENTS] if name == "segment" else [])]
    ranges = dict(clip_low=low, clip_high=high)
    scaled = dict(clip_length=L, clip_exponent=exponent, **ranges)
    clipped = np.asarray(compiled(loss.clipped, *args, **scaled))
    by_default += (clipped != np.asarray(compiled(loss.clipped, *args, **ranges))).sum()
    expected = np.zeros_like(clipped)
    for i, live in enumerate(MASK > 0):
      for k in np.unique(ids[i, live]):
        unit = live & (ids[i] == k)
        ratio = np.exp((logp[i, unit].astype(np.float64) - old[i, unit]).mean())
        wide = (L / unit.sum()) ** exponent
        up = ratio > 1 + high * wide
        expected[i, unit] = up if advantage[i].max() > 0 else ratio < 1 - low * wide
    np.testing.assert_array_equal(clipped, expected)
  assert by_default, "a constant range clips other tokens"


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_the_loss_is_that_of_ranges_given_by_row(name):
  logp, old, advantage = drifted(1)
  wide = (8 / np.maximum(LENGTHS, 1)) ** 0.7
  loss = O.POLICY_LOSSES[name]
  f, args = value_and_grad(loss), (logp, old, advantage, MASK)
  options = dict(clip_low=1e-3, clip_high=2e-3, clip_length=8.0, clip_exponent=0.7)
  (by_length, _), grad = compiled(f, *args, **options)
  (by_row, _), grad_by_row = compiled(f, *args, clip_low=1e-3 * wide, clip_high=2e-3 * wide)
  for ours, expected in (by_length, by_row), (grad, grad_by_row):
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-9)


def test_effective_length_is_how_many_tokens_the_log_ratio_is_spread_over():
  rng = np.random.default_rng(0)
  x = rng.normal(size=MASK.shape).astype(np.float32)
  x[0], x[1], x[2] = 0.3, 0, 0  # all alike; one of them alone; nothing has moved
  x[1, 5] = -0.2
  expected = [4, 1, 0, 0, abs(x[4, :9]).sum() ** 2 / (x[4, :9] ** 2).sum()]
  size_BU = compiled(O.effective_length, np.where(MASK > 0, x, np.nan), MASK > 0)
  np.testing.assert_allclose(size_BU[:, 0], expected, rtol=1e-6)
  dirty = np.where(MASK > 0, x, np.nan)
  metrics = compiled(O.gspo_loss, dirty, np.zeros_like(x), np.ones(5), MASK)[1]
  np.testing.assert_allclose(metrics["ratio/effective_length"], sum(expected) / 3, rtol=1e-6)
  noise = rng.normal(0, 3e-6, MASK.shape).astype(np.float32)  # nothing has moved
  metrics = compiled(O.gspo_loss, x + noise, x, np.ones(5), MASK)[1]
  assert metrics["ratio/effective_length"] == 0
  by_segment = compiled(O.effective_length, x, MASK > 0, SEGMENTS)
  np.testing.assert_allclose(by_segment[1, :4], [0, 1, 0, 0])


def test_the_factor_comes_to_the_range_that_clips_the_target():
  """For normal log-ratios, all with a bound above."""
  rng, target, factor = np.random.default_rng(0), 0.15, 1.0
  fractions = []
  for _ in range(200):
    log_s = rng.normal(0, 3e-3, 512)
    factor = float(O.adapted_factor(factor, (log_s > 3e-4 * factor).mean(), target))
    fractions.append(factor)
  assert np.mean(fractions[100:]) == pytest.approx(
    1.0364 * 10, rel=0.05
  )  # the normal's 0.85 quantile
  np.testing.assert_allclose(O.adapted_factor(2.0, 0.4, 0.1, gain=0.5), 2 * np.exp(0.15), rtol=1e-6)
  assert O.adapted_factor(0.5, 0.0, 0.9, gain=9.0, span=4.0) == 0.25
  assert O.adapted_factor(0.5, 1.0, 0.1, gain=9.0, span=4.0) == 4
