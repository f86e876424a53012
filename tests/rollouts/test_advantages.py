"""The host's part of advantages, by the rewards of an iteration's groups."""

from types import SimpleNamespace

import numpy as np
from support.configs import config_of

from configs import tiny
from gspo_jax.rollouts import advantages
from gspo_jax.rollouts.advantages import Judged

REWARDS = np.array([[1, 0, 0, 1], [0, 0, 5, 0]], np.float32)


def of_groups(stopped, **changes):
  config = config_of(tiny.get_config, objective__advantage="batch", **changes)
  groups = [SimpleNamespace(reward_G=row, known_G=np.ones(4, bool)) for row in REWARDS]
  rollout = SimpleNamespace(stopped=np.array(stopped))
  return advantages.of_groups(Judged(config, groups, rollout)).of_responses_PG


def test_what_is_masked_out_is_in_neither_mean_nor_deviation_of_the_batch():
  stopped = [True] * 8
  stopped[6] = False  # the 5
  left = of_groups(stopped, rl__mask_truncated=True)
  deviation = np.std([1, 0, 0, 1, 0, 0, 0], ddof=1)
  np.testing.assert_allclose(left[0], np.array([0.5, -0.5, -0.5, 0.5]) / deviation, rtol=1e-5)
  assert not left[1].any(), "without it the group has no spread"
  assert of_groups(stopped)[1].all()
