"""What is said of responses by the age of their weights, against NumPy."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from gspo_jax import objectives as O
from gspo_jax.learner import by_age
from gspo_jax.structs import TrainBatch


def case(rows, classes, seed, T=9):
  rng = np.random.default_rng(seed)
  length_B = rng.integers(0, T + 1, rows)  # a row without tokens is padding
  mask_BT = (np.arange(T)[None] < length_B[:, None]).astype(np.float32)
  logp_BT, old_BT, sampler_BT = rng.normal(-2, 0.1, (3, rows, T)).astype(np.float32)
  logp_BT = np.where(mask_BT > 0, logp_BT, np.nan)
  age_B = rng.integers(0, classes + 2, rows).astype(np.int32)
  age_B[age_B == 1] = 0  # an empty class
  age_B[:3] = -1  # in no class
  plain = np.zeros((rows, T), np.int32)
  batch = TrainBatch(plain, plain, mask_BT, np.zeros(rows), old_BT, sampler_BT, age_B=age_B)
  return logp_BT, batch, rng.random((rows, T)) < 0.3


def test_figures_by_age():
  """Of two mini-batches together; what is masked does not count, and the last class is open."""
  classes, parts = 4, [case(40, 4, seed) for seed in range(2)]
  measure = jax.jit(by_age.metrics, static_argnums=3)
  row = O.compute(O.merge(*[measure(*part, classes) for part in parts]))
  assert len(row) == 4 * classes
  expected = {age: [] for age in range(classes)}
  for logp_BT, batch, clipped_BT in parts:
    for i, live in enumerate(batch.mask_BT > 0):
      if live.any() and batch.age_B[i] >= 0:
        mean = lambda old: (logp_BT[i] - old[i])[live].mean(dtype=np.float64)  # noqa: B023, E731
        ratio = np.exp(mean(batch.old_logp_BT))
        values = abs(ratio - 1), abs(mean(batch.sampler_logp_BT)), clipped_BT[i][live]
        expected[min(batch.age_B[i], classes - 1)].append(values)
  total = sum(map(len, expected.values()))
  assert not expected[1] and len(expected[3]) > len(expected[2]) > 0
  for age, found in expected.items():
    assert row[f"by_age/responses/{age}"] == pytest.approx(len(found) / total)
    deviation, mismatch, clipped = zip(*found) if found else ([0], [0], [[0]])
    assert row[f"by_age/ratio_deviation/{age}"] == pytest.approx(np.mean(deviation), rel=1e-4)
    assert row[f"mismatch/by_age/{age}"] == pytest.approx(np.mean(mismatch), rel=1e-4)
    share = np.concatenate(clipped).mean()
    assert row[f"by_age/clip_fraction/{age}"] == pytest.approx(share, rel=1e-5)


def test_a_response_is_as_old_as_its_oldest_token():
  version_BL = np.array([[-1, 4, 4, -1, 6], [-1, 6, 6, 6, -1], [-1, -1, -1, -1, -1]])
  rollout = SimpleNamespace(version=version_BL)
  assert by_age.ages(rollout, 7).tolist() == [3, 1, -1]
  assert by_age.lag_metrics(rollout, 7) == {"lag/mean": 10 / 6, "lag/max": 3.0}
  nothing = SimpleNamespace(version=version_BL[2:])
  assert by_age.lag_metrics(nothing, 7) == {"lag/mean": 0.0, "lag/max": 0.0}
