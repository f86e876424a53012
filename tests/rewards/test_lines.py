"""Rewards of single lines: what each is worth, their sum, noise, and who may have them."""

import numpy as np
import pytest
from support.configs import reward_config
from support.cost import assert_linear
from support.prompts import prompts

from gspo_jax import rewards
from gspo_jax.rewards import lines
from gspo_jax.tasks import recurrence

ANSWER = "3:00\n2:10\n1:20\n0:30"
RESPONSES = [
  ANSWER,
  "3:00\n2:10\n1:99\n0:30",
  "3:00\n2:99\n",
  "3:00\n2:10\n1:20\n0:99\n0:30",  # a line too many, which is right as the last one
  "",
]


def score(responses=RESPONSES, lengths=None, answer=ANSWER, **changes):
  section = reward_config("recurrence", **dict(per_line=True) | changes)
  with rewards.open_scorer(section) as scorer:
    return scorer(responses, prompts([answer] * len(responses)), lengths)


@pytest.mark.parametrize("partial", [0.0, 1.0, 0.25])
def test_lines_sum_to_what_the_whole_is_worth(partial):
  """The value of a response for `partial` is the same with and without `per_line`."""
  scores = score(partial=partial)
  whole = score(partial=partial or 1.0, per_line=False)
  np.testing.assert_allclose(scores.reward, whole.reward, rtol=1e-6)
  np.testing.assert_array_equal(scores.correct, [1, 1, 0, 1, 0])
  assert whole.lines is None and scores.outcomes == whole.outcomes
  p = partial or 1.0
  expected = [
    [p / 4, p / 4, p / 4, p / 4 + 1 - p],
    [p / 4, p / 4, 0, p / 4 + 1 - p],
    [p / 4, 0, 0],
    [p / 4, p / 4, p / 4, 0, 1 - p],
    [0],
  ]
  for line_rewards, other in zip(scores.lines, expected, strict=True):
    assert line_rewards.dtype == np.float32
    np.testing.assert_allclose(line_rewards, other, rtol=1e-6)


def test_a_failure_on_the_lines_of_a_response_is_an_outcome_of_this_response(monkeypatch):
  def right_lines(response, answer):
    return [line == "3:00" for line in (response or None).split("\n")]  # Fails on the last one.

  monkeypatch.setattr(recurrence, "right_lines", right_lines)
  scores = score(false_negative=0.1)
  assert scores.unknown == {4: "crash: AttributeError: 'NoneType' object has no attribute 'split'"}
  assert scores.outcomes["crash"] == 1 and scores.reward[4] == scores.correct[4] == 0
  assert scores.correct.tolist() == [1, 1, 0, 1, 0]


def test_what_is_added_goes_to_the_last_line():
  options = dict(overlong_weight=1.0, overlong_max=100, overlong_buffer=50)
  scores, plain = score(lengths=[75] * 5, **options), score()
  np.testing.assert_allclose(scores.reward, plain.reward - 0.5, rtol=1e-6)
  for line_rewards, other in zip(scores.lines, plain.lines):
    np.testing.assert_allclose(line_rewards - other, [*[0] * (len(line_rewards) - 1), -0.5])


def test_noise_misjudges_lines_and_not_responses():
  rng = np.random.default_rng(0)
  texts = [f"{a:02}\n{b:02}\n{c:02}\n30" for a, b, c in rng.integers(0, 100, (2000, 3))]
  answer = "\n".join(["40", "10", "20", "30"])
  rates = dict(false_positive=0.1, false_negative=0.3)
  plain, noisy = (score(texts, answer=answer, **changes) for changes in ({}, rates))
  right, rewarded = (np.array(result.lines) > 0 for result in (plain, noisy))
  assert (right & ~rewarded).sum() / right.sum() == pytest.approx(0.3, abs=0.04)
  assert (~right & rewarded).sum() / (~right).sum() == pytest.approx(0.1, abs=0.02)
  assert noisy.outcomes["false_negative"] == (right & ~rewarded).sum()
  assert noisy.outcomes["false_positive"] == (~right & rewarded).sum()
  np.testing.assert_array_equal(noisy.correct, plain.correct)
  np.testing.assert_array_equal(noisy.values, plain.values)
  np.testing.assert_allclose(plain.values, right.sum(1) / 4, rtol=1e-6)
  np.testing.assert_allclose(noisy.reward, rewarded.sum(1) / 4, rtol=1e-6)


def test_a_verdict_on_a_line_depends_on_the_text_up_to_its_end():
  texts = ["10\n20\n30\n40", "10\n20\n31\n40", "10\n20", "10\n20\n30\n40"]
  scores = [
    score(texts, answer=f"11\n21\n35\n{end}", false_positive=0.5).lines for end in range(41, 81)
  ]
  for line_rewards, other, short, again in scores:
    assert line_rewards[:2].tolist() == other[:2].tolist() == short.tolist()
    assert line_rewards.tolist() == again.tolist()
  assert any(line_rewards[3] != other[3] for line_rewards, other, *_ in scores)


def test_lines_that_nobody_asked_for_or_wrote_are_not_misjudged():
  scores = score([ANSWER + "\n\n\n", "3:00"], false_positive=1.0)
  assert [len(line_rewards) for line_rewards in scores.lines] == [7, 1]
  assert scores.reward.tolist() == [1, 0.25] and scores.outcomes["false_positive"] == 0


def test_a_verifier_that_judges_no_lines_is_refused():
  section = reward_config("string", per_line=True)
  refused = pytest.raises(ValueError, match="per_line=True: reward\\.name='string' scores whole")
  with refused, rewards.open_scorer(section):
    pass


@pytest.mark.parametrize("unit", ["\n", "x", "3:00\n", "\ud800\n"])
def test_lines_are_rewarded_in_linear_time(unit):
  config = reward_config("recurrence", per_line=True, false_positive=0.5)
  answer = "\n".join("x" for _ in range(100))

  def reward(text):
    verdicts = lines.line_verdicts(recurrence.right_lines, [text], [answer])
    lines.rewards(config, verdicts, [text], [answer], np.zeros(1))

  assert_linear(reward, lambda length: (unit * (length // len(unit)),))
