"""The host's part of advantages, by the rewards of an iteration's groups."""

from types import SimpleNamespace

import numpy as np
from support.configs import config_of

from configs import tiny
from gspo_jax import objectives
from gspo_jax.rollouts import advantages
from gspo_jax.rollouts.advantages import ScoredGroups
from gspo_jax.rollouts.multipliers import Constraints

REWARDS = np.array([[1, 0, 0, 1], [0, 0, 5, 0]], np.float32)


def group_advantages(stopped, advantage="batch", **changes):
  config = config_of(tiny.get_config, objective__advantage=advantage, **changes)
  groups = [SimpleNamespace(reward_G=row, known_G=np.ones(4, bool)) for row in REWARDS]
  rollout = SimpleNamespace(stopped=np.array(stopped))
  return advantages.group_advantages(ScoredGroups(config, groups, rollout)).response_PG


def test_what_is_masked_out_is_in_neither_mean_nor_deviation_of_the_batch():
  stopped = [True] * 8
  stopped[6] = False  # the 5
  remainder = group_advantages(stopped, rl__mask_truncated=True)
  deviation = np.std([1, 0, 0, 1, 0, 0, 0], ddof=1)
  np.testing.assert_allclose(remainder[0], np.array([0.5, -0.5, -0.5, 0.5]) / deviation, rtol=1e-5)
  assert not remainder[1].any(), "without it the group has no spread"
  assert group_advantages(stopped)[1].all()


def test_a_selected_response_is_not_masked_out():
  stopped = [False, *[True] * 7]  # The first right response of the first group.
  changes = dict(objective__name="rft", advantage="best", rl__mask_truncated=True)
  weight_PG = group_advantages(stopped, **changes)
  assert weight_PG[0].tolist() == [0, 0, 0, 1] and weight_PG[1].sum() == 1


def test_of_several_rewards_what_is_masked_out_is_in_no_mean_and_no_deviation():
  """GDPO of a right answer and of short ones; the response that was cut off would shift both."""
  config = config_of(
    tiny.get_config,
    objective__advantage="gdpo",
    rl__mask_truncated=True,
    constraints__rewards__extra__signal="length",
    constraints__rewards__extra__weight=-0.5,
  )
  length = np.array([[3, 9, 4, 5], [7, 8, 200, 2]], np.float32)
  groups = [
    SimpleNamespace(reward_G=row, known_G=np.ones(4, bool), signals=dict(extra=length_G))
    for row, length_G in zip(REWARDS, length)
  ]
  stopped = np.arange(8) != 6
  scored = ScoredGroups(
    config, groups, SimpleNamespace(stopped=stopped), Constraints(config.constraints)
  )
  result = advantages.PARTS["gdpo"](scored)
  rest = [(REWARDS[0], length[0]), (REWARDS[1, [0, 1, 3]], length[1, [0, 1, 3]])]
  standardised = [[(x - x.mean()) / max(x.std(ddof=1), 1e-6) for x in pair] for pair in rest]
  combined = np.concatenate([right - 0.5 * short for right, short in standardised])
  actual = result.response_PG.reshape(-1)[stopped]
  np.testing.assert_allclose(actual, combined / combined.std(ddof=1), rtol=1e-5)
  assert result.response_PG[1, 2] == 0
  assert result.metrics["constraint/extra/reward"] == np.float32(length.reshape(-1)[stopped].mean())


def test_options_of_a_loss_reach_its_estimator():
  """SPO's are both used: another soft value shifts all advantages."""
  changes = dict(objective__name="spo", objective__beta=0.5, objective__soft_value=0.25)
  config = config_of(tiny.get_config, **changes).objective
  valid_PG = np.ones(REWARDS.shape, bool)
  expected = objectives.soft_advantages(REWARDS, 0.5, 0.25, valid_PG=valid_PG)
  actual = advantages.advantages(config, REWARDS, valid_PG)
  np.testing.assert_allclose(actual, expected, rtol=1e-5)
