"""Mini-batches of an iteration, and the way back to the order of the rollout."""

import jax
import numpy as np

from gspo_jax import sharding
from gspo_jax.learner.batch import in_rollout_order, minibatches
from gspo_jax.structs import TrainBatch

T = 5
ONE = sharding.make_mesh(sharding.MeshConfig(1, 1, 1, 1), jax.devices()[:1])


def batch(rows, old):
  tokens = np.repeat(np.arange(rows)[:, None], T, 1).astype(np.int32)
  ones = np.ones((rows, T), np.float32)
  return TrainBatch(
    tokens, ones.astype(np.int32), ones, np.arange(rows, dtype=np.float32) + 1, old, old
  )


def test_missing_groups_are_padding_in_every_mini_batch():
  groups, G = 4, 3
  old = np.zeros((groups * G, T), np.float32)
  parts = minibatches(batch(groups * G, old), 3, prompts=6, group_size=G, mesh=ONE, packed=False)
  parts = jax.device_get(parts)
  groups_of = [sorted({int(a - 1) // G for a in part.advantage_B if a > 0}) for part in parts]
  assert groups_of == [[0, 3], [1], [2]]
  assert [part.first_B.tolist() for part in parts] == [[True] * 6, [False] * 6, [False] * 6]
  for part in parts:
    assert part.mask_BT.shape == (6, T)
    np.testing.assert_array_equal(part.mask_BT.any(1), part.advantage_B > 0)
    np.testing.assert_array_equal(part.segments_BT.any(1), part.advantage_B > 0)


def test_log_ratios_come_back_in_the_order_of_the_rollout():
  rows = 4 * 3  # two groups are missing
  old = np.arange(rows * T, dtype=np.float32).reshape(rows, T)
  parts = minibatches(batch(rows, old), 3, prompts=6, group_size=3, mesh=ONE, packed=False)
  ratios = [2 * part.old_logp_BT + 1 for part in parts]
  np.testing.assert_array_equal(in_rollout_order(ratios, parts, rows, group_size=3), 2 * old + 1)
