"""Declared estimators of a group's rewards; tests/settings has what they go with."""

import numpy as np
import pytest
from support.compiled import compiled

from gspo_jax import objectives as O

OF_GROUP = [name for name, estimator in O.ESTIMATORS.items() if estimator.of_group]
REWARD_PG = np.float32([[1.0, 0.0, 0.5, 9.0], [0.25, 0.25, 0.25, 9.0], [0.0, 1.0, 1.0, 9.0]])
VALID_PG = np.array([[1, 1, 1, 0]] * 3, bool)
OPTIONS = dict(beta=0.5, soft_value=None, right_from=None)


def estimate(name, reward_PG, valid_PG):
  estimator = O.ESTIMATORS[name]
  options = {option: OPTIONS[option] for option in estimator.options}
  return np.asarray(compiled(estimator.of_group, reward_PG, valid_PG=valid_PG, **options))


@pytest.mark.parametrize("name", OF_GROUP)
def test_a_member_that_is_not_valid_has_none_and_is_in_no_mean(name):
  advantages = estimate(name, REWARD_PG, VALID_PG)
  assert not advantages[~VALID_PG].any() and np.isfinite(advantages).all()
  np.testing.assert_allclose(
    advantages[:, :3], estimate(name, REWARD_PG[:, :3], VALID_PG[:, :3]), atol=1e-6
  )


@pytest.mark.parametrize("name", OF_GROUP)
def test_what_is_declared_relative_learns_nothing_from_equal_rewards(name):
  rewards = [
    estimate(name, np.full((1, 4), x, np.float32), np.ones((1, 4), bool)) for x in (0.5, 1, 2)
  ]
  assert O.ESTIMATORS[name].relative <= (not np.any(rewards))


def test_those_of_a_groups_rewards_are_the_functions_of_their_names():
  for name in ("std", "none", "leave_one_out"):
    expected = compiled(O.group_advantages, REWARD_PG, name, valid_PG=VALID_PG)
    np.testing.assert_array_equal(estimate(name, REWARD_PG, VALID_PG), expected)
  for name in ("best", "reward"):
    expected = compiled(O.selection_weights, REWARD_PG, name, valid_PG=VALID_PG)
    np.testing.assert_array_equal(estimate(name, REWARD_PG, VALID_PG), expected)
  expected = compiled(O.soft_advantages, REWARD_PG, 0.5, valid_PG=VALID_PG)
  np.testing.assert_array_equal(estimate("soft", REWARD_PG, VALID_PG), expected)


def test_turns_and_lines_are_not_relative_to_sums():
  """Groups of equal sums learn from their parts."""
  reward_PGU = np.float32([[[1, 0], [0, 1]]])
  advantages = compiled(O.turn_advantages, reward_PGU, np.ones((1, 2, 2), bool))
  assert np.asarray(advantages)[..., 1].any() and np.ptp(reward_PGU.sum(2)) == 0
  for name in ("turns", "lines"):
    assert O.ESTIMATORS[name].parts and not O.ESTIMATORS[name].relative


@pytest.mark.parametrize(
  "rewards, right_from, chosen",
  [
    ([-1, 1, 1, -1], None, [0, 1, 0, 0]),
    ([-3, -1, -2, -1], None, [0, 0, 0, 0]),  # None of them is right.
    ([-3, -1, -2, -1], -2, [0, 1, 0, 0]),
    ([-3, -4, -5, -4], -2, [0, 0, 0, 0]),
    ([0.2, 0.6, 0.5, 0.1], 0.9, [0, 1, 0, 0]),
  ],
)
def test_best_of_a_group_is_right_or_positive(rewards, right_from, chosen):
  weights = O.selection_weights(np.float32([rewards]), "best", right_from)
  assert np.asarray(weights).tolist() == [chosen]
