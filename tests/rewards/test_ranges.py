"""Rewards of any range: what is right, what noise makes of them, and what is no reward."""

import numpy as np
import pytest
from support.configs import reward_config
from support.prompts import prompts

from gspo_jax.rewards.scorer import _score
from gspo_jax.rewards.user_function import OUTCOMES, UNKNOWN, call


def verify(responses, prompts, finished):
  """A response is its own reward."""
  return ["wrong"] * len(responses), [float(response) for response in responses]


def score(values, **changes):
  config = reward_config("my_module:function", **changes)
  responses = [str(value) for value in values]
  return _score(config, OUTCOMES, UNKNOWN, verify, None, responses, prompts(["a"] * len(responses)))


# Rewards, the smallest right one, verdicts, and rewards with all verdicts reversed.
RANGES = {
  "0 and 1": ([1, 0, 1], None, [1, 0, 1], [0, 1, 0]),
  "+1 and -1": ([1, -1, 1], None, [1, 0, 1], [-1, 1, -1]),
  "partial": ([0.95, 0.5, 0], None, [0, 0, 0], [1, 1, 1]),
  "partial from 0.9": ([0.9, 0.8999, 0], 0.9, [1, 0, 0], [0, 0.9, 0.9]),
  "-1 to 1 from 0": ([0.25, 0, -0.5], 0.0, [1, 1, 0], [-0.5, -0.5, 0.25]),
  "0 to 100": ([100, 80, 0], 80.0, [1, 1, 0], [0, 0, 100]),
  "negative": ([-1, -5, -9], -2.0, [1, 0, 0], [-9, -1, -1]),
  "negative, all right": ([-1, -1.5], -2.0, [1, 1], [-3, -3]),
  "large": ([1e15, -1e15], None, [1, 0], [-1e15, 1e15]),
}


@pytest.mark.parametrize("values, right_from, correct, reversed_", RANGES.values(), ids=RANGES)
def test_every_number_is_a_reward_and_right_from_the_threshold_on(
  values, right_from, correct, reversed_
):
  scores = score(values, right_from=right_from)
  assert scores.known.all() and scores.correct.tolist() == correct
  np.testing.assert_allclose(scores.reward, values, rtol=1e-6)
  np.testing.assert_array_equal(scores.values, scores.reward)
  assert scores.outcomes == dict(
    right=sum(correct), wrong=len(values) - sum(correct), timeout=0, crash=0
  )
  noisy = score(values, right_from=right_from, false_positive=1.0, false_negative=1.0)
  np.testing.assert_allclose(noisy.reward, reversed_, rtol=1e-6)
  np.testing.assert_array_equal(noisy.values, scores.values)


def test_what_is_no_finite_number_is_unknown_and_counted():
  values = [1, "nan", "inf", "-inf", 1e16, -1]
  scores = score(values, right_from=-2.0, false_positive=1.0, false_negative=1.0)
  assert scores.known.tolist() == [True, False, False, False, False, True]
  assert scores.outcomes["crash"] == 4 and scores.outcomes["right"] == 2
  assert scores.correct.tolist() == [1, 0, 0, 0, 0, 1]
  assert scores.reward.tolist() == [-3, 0, 0, 0, 0, -3]  # Unknown ones are in no extreme.
  assert scores.unknown[2] == "crash: the reward inf is no number from -1e+15 to 1e+15"


def test_a_verifier_without_values_decides_itself():
  def verdicts(responses, prompts, finished):
    return ["right", "wrong"], None

  config = reward_config("math", right_from=-1.0)
  scores = _score(config, OUTCOMES, UNKNOWN, verdicts, None, ["a", "b"], prompts("ab"))
  assert scores.correct.tolist() == scores.reward.tolist() == [1, 0]


def test_partial_credit_of_a_verifier_is_right_from_the_threshold_on():
  def verdicts(responses, prompts, finished):
    return ["wrong", "right", "wrong"], [0.8, 0.75, 0.5]

  for right_from, correct in (None, [0, 1, 0]), (0.8, [1, 1, 0]):
    config = reward_config("recurrence", partial=0.5, right_from=right_from)
    scores = _score(config, OUTCOMES, UNKNOWN, verdicts, None, [*"abc"], prompts("abc"))
    assert scores.correct.tolist() == correct


def test_a_function_may_leave_its_working_directory_for_a_temporary_one(tmp_path, monkeypatch):
  (tmp_path / "wanderer.py").write_text(
    "import os, tempfile\n"
    "def reward(response, record):\n"
    "  with tempfile.TemporaryDirectory() as directory:\n"
    "    os.chdir(directory)\n"
    "  return 1.0\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.chdir(tmp_path)
  assert [call(["wanderer:reward", "a", {}]) for _ in range(2)] == [1.0, 1.0]
