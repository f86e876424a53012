"""What is said of responses by their length, against NumPy."""

import jax
import numpy as np
import pytest

from gspo_jax import objectives as O
from gspo_jax.learner import by_length


@pytest.mark.parametrize(
  "longest, expected",
  [(1, [4]), (4, [4]), (5, [4, 8]), *((n, [8, 16, 32, 64, 128, 256]) for n in (192, 256))],
)
def test_the_classes_follow_from_the_longest_response_alone(longest, expected):
  assert by_length.limits(longest) == expected


def classes(length_B, longest):
  """{name: rows}, by a loop."""
  limits, rows = by_length.limits(longest), {}
  for limit, above in zip(limits, [0, *limits]):
    rows[f"le_{limit}"] = [i for i, n in enumerate(length_B) if above < n <= limit]
  return rows


def test_rewards_by_length():
  rng = np.random.default_rng(0)
  length_B, reward_B = rng.integers(1, 100, 300), rng.normal(size=300)
  known_B = rng.random(300) < 0.8
  length_B[length_B > 64] = 128  # and nothing is in le_64 but the lengths up to 64
  length_B[(length_B > 16) & (length_B <= 32)] = 40  # an empty class
  row = by_length.reward_metrics(np.where(known_B, reward_B, 9), known_B, length_B, 128)
  assert len(row) == 12
  for name, rows in classes(length_B, 128).items():
    assert row[f"by_length/responses/{name}"] == len(rows) / 300
    rewards = [reward_B[i] for i in rows if known_B[i]]
    expected = np.mean(rewards) if rewards else 0
    assert row[f"by_length/reward/{name}"] == pytest.approx(expected)
  assert row["by_length/responses/le_32"] == 0 != row["by_length/reward/le_16"]
  assert sum(v for k, v in row.items() if "responses" in k) == pytest.approx(1)


def case(rows, longest, seed):
  rng = np.random.default_rng(seed)
  length_B = rng.integers(0, longest + 1, rows)  # a row without tokens is padding
  mask_BT = (np.arange(longest + 3)[None] < length_B[:, None]).astype(np.float32)
  logp_BT, old_BT = rng.normal(-2, 0.1, (2, *mask_BT.shape)).astype(np.float32)
  logp_BT = np.where(mask_BT > 0, logp_BT, np.nan)
  return logp_BT, old_BT, mask_BT, rng.random(mask_BT.shape) < 0.3


def test_ratios_and_clipping_by_length():
  """Of two mini-batches together; what is masked does not count."""
  longest, parts = 40, [case(12, 40, 0), case(12, 40, 1)]
  sums = [jax.jit(by_length.ratio_metrics, static_argnums=4)(*part, longest) for part in parts]
  row = O.compute(O.merge(*sums))
  logp_BT, old_BT, mask_BT, clipped_BT = (np.concatenate(both) for both in zip(*parts))
  live_BT = mask_BT > 0
  length_B = live_BT.sum(1)
  found = classes(length_B, longest)
  assert len(row) == 2 * len(found) == 10
  for name, rows in found.items():
    means = [(logp_BT[i] - old_BT[i])[live_BT[i]].mean(dtype=np.float64) for i in rows]
    share = clipped_BT[rows][live_BT[rows]].mean() if rows else 0
    spread = np.std(means) if rows else 0
    assert row[f"by_length/log_ratio_std/{name}"] == pytest.approx(spread, rel=1e-4)
    assert row[f"by_length/clip_fraction/{name}"] == pytest.approx(share, rel=1e-5)
  assert sum(len(rows) > 1 for rows in found.values()) >= 3
