"""Rewards put together by the config: verifier, format, length, noise; raw correctness beside."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from support import tables
from support.configs import reward_config as config
from support.prompts import prompts
from support.sandboxes import PRINTS_2, needs_namespaces

from gspo_jax import rewards
from gspo_jax.rewards import shaping
from gspo_jax.settings.rewards import VERIFIERS
from gspo_jax.structs import Prompt

HERE = Path(__file__).parent


def score(responses, answers, lengths=None, **changes):
  with rewards.open_scorer(config(**changes)) as scorer:
    return scorer(responses, prompts(answers), lengths)


def test_the_verifier_alone():
  scores = score(["b", "x", ""], ["b", "b", "b"])
  assert scores.reward.dtype == scores.correct.dtype == np.float32
  assert scores.reward.tolist() == scores.correct.tolist() == [1, 0, 0]
  assert scores.outcomes == {"right": 1, "wrong": 1, "unparsable": 1}


def test_counts_of_nothing_are_zero():
  assert score([], []).outcomes == {"right": 0, "wrong": 0, "unparsable": 0}


def test_shaping_leaves_correctness_alone():
  good = "<think>2 + 2</think><answer>4</answer>"
  responses = [good, "4", good.replace(">4<", ">5<"), "5"]
  scores = score(
    responses, ["4"] * 4, [10, 75, 100, 300], format="think_answer", format_weight=0.5,
    overlong_weight=1.0, overlong_max=100, overlong_buffer=50,
  )  # fmt: skip
  assert scores.correct.tolist() == scores.values.tolist() == [1, 1, 0, 0]
  np.testing.assert_allclose(scores.reward, [1 + 0.5, 1 - 0.5, 0 + 0.5 - 1, 0 - 1])
  assert scores.outcomes["format_kept"] == 2
  # Evaluation has no lengths to give and looks at correctness.
  scores = score(["4"], ["4"], overlong_weight=1.0, overlong_max=100, overlong_buffer=50)
  assert scores.reward.tolist() == [1]


def test_overlong_is_the_formula_of_the_objectives():
  from gspo_jax.objectives import length_penalty as reference

  lengths = np.array([0, 15_000, 16_384, 18_432, 20_480, 30_000])
  ours = shaping.overlong(lengths, 20_480, 4096)
  np.testing.assert_allclose(ours, [0, 0, 0, -0.5, -1, -1])
  np.testing.assert_allclose(ours, reference.overlong_penalty(lengths, 20_480, 4096), atol=1e-6)


@pytest.mark.parametrize("response, formats", tables.read(HERE / "formats.txt"))
def test_format(response, formats):
  names = [name for name in ("think", "think_answer") if shaping.keeps_format(response, name)]
  assert names == formats.replace("none", "").split()


def test_noise_has_the_given_rates_and_is_repeatable():
  responses = [str(i) for i in range(20_000)]
  answers = [str(i if i % 4 else -1) for i in range(20_000)]  # three in four are right
  noise = dict(false_positive=0.1, false_negative=0.3)
  scores = score(responses, answers, **noise)
  right = scores.correct == 1
  assert right.mean() == 0.75 and scores.outcomes["right"] == 15_000
  assert abs((scores.reward[~right] == 1).mean() - 0.1) < 0.015
  assert abs((scores.reward[right] == 0).mean() - 0.3) < 0.015
  assert scores.outcomes["false_positive"] == (scores.reward[~right] == 1).sum()
  assert scores.outcomes["false_negative"] == (scores.reward[right] == 0).sum()
  again = score(responses[::-1], answers[::-1], **noise)
  assert (again.reward[::-1] == scores.reward).all()  # not the place in the batch
  assert (score(responses, answers, false_negative=1.0).reward == 0).all()
  assert (score(responses, answers, false_positive=1.0).reward == 1).all()


def test_noise_does_not_follow_other_text():
  """Flips of responses with one different character are independent."""
  pairs = [(f"{i}a", f"{i}b") for i in range(5000)]
  flips = [
    shaping.flipped(np.zeros(5000), [pair[k] for pair in pairs], ["x"] * 5000, 0.5, 0.0)
    for k in (0, 1)
  ]
  assert abs((flips[0] == flips[1]).mean() - 0.5) < 0.03


def test_a_function_of_the_users(monkeypatch):
  monkeypatch.chdir(Path(__file__).parents[1])
  responses = ["abcd", "ab", "raise", "hang", "nan", "text", "abcd"]
  scores = score(responses, ["wxyz"] * 7, name="support.user_rewards:by_length")
  assert scores.reward.tolist() == [1, 0.5, 0, 0, 0, 0, 1]
  assert scores.correct.tolist() == [1, 0, 0, 0, 0, 0, 1]
  assert scores.values.tolist() == [1, 0.5, 0, 0, 0, 0, 1]
  assert scores.outcomes == {"right": 2, "wrong": 1, "timeout": 1, "crash": 3}
  scores = score(["a", "b"], ["a", "a"], name="support.user_rewards:is_equal")
  assert scores.reward.tolist() == [1, 0]
  scores = score(["a", "b"], ["a", "a"], name="support.user_rewards:sign")
  assert scores.reward.tolist() == [1, -1] and scores.correct.tolist() == [1, 0]
  assert scores.outcomes == {"right": 1, "wrong": 1, "timeout": 0, "crash": 0}


def test_a_function_gets_the_whole_prompt(monkeypatch):
  monkeypatch.chdir(Path(__file__).parents[1])
  info = (("tolerance", "0.01"), ("id", "hidden by the prompt's own"))
  prompt = Prompt("own", "π?", "3.14159", (1,), info=info)
  with rewards.open_scorer(config("support.user_rewards:is_close")) as scorer:
    scores = scorer(["3.14", "3.1"], [prompt] * 2)
  assert scores.outcomes == {"right": 1, "wrong": 1, "timeout": 0, "crash": 0}
  assert scores.reward.tolist() == [1, 0]


def test_responses_without_prompts_are_an_error():
  with pytest.raises(ValueError, match="2 responses and 1 prompts"):
    score(["a", "b"], ["a"])


@pytest.mark.parametrize("name", VERIFIERS)
def test_verifiers_say_what_they_find(name):
  outcomes = importlib.import_module(VERIFIERS[name]).OUTCOMES
  assert {"right", "wrong"} <= set(outcomes)
  with rewards.open_scorer(config(name)) as scorer:
    assert scorer([], []).outcomes == dict.fromkeys(outcomes, 0)


def test_a_function_of_the_users_may_take_much_memory(monkeypatch, tmp_path):
  code = "import mmap\n\ndef f(response, prompt):\n  return len(mmap.mmap(-1, 3 << 30)) > 0\n"
  (tmp_path / "large.py").write_text(code)
  monkeypatch.chdir(tmp_path)
  assert score(["a"], ["a"], name="large:f").outcomes["right"] == 1


def test_a_function_that_is_not_there():
  with pytest.raises(RuntimeError, match="no_such_module"):
    score([], [], name="no_such_module:f")


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(name="maths"), "reward.name='maths'.*package.module:function"),
    (dict(name="a.b:c.d"), "reward.name"),
    (dict(format_weight=1.0), "reward.format_weight=1.0 needs"),
    (dict(overlong_weight=1.0), "reward.overlong_buffer=0"),
    (dict(overlong_weight=1.0, overlong_max=5, overlong_buffer=9), "reward.overlong_buffer=9"),
  ],
)
def test_bad_settings_are_errors(changes, message):
  with pytest.raises(ValueError, match=message):
    config(**changes)


@needs_namespaces
def test_programs_say_what_confines_them(capfd):
  responses = ["```\nprint(2)\n```", "```\nprint(3)\n```", "none"]
  for isolation, text in (
    ("auto", "namespaces; a trial program had no network"),
    ("none", "programs run with your rights"),
  ):
    with rewards.open_scorer(config("code", isolation=isolation)) as scorer:
      (line,) = capfd.readouterr().err.splitlines()  # The scorer writes it when it opens.
      assert line.startswith(f"reward.isolation={isolation}: ") and text in line
      scores = scorer(responses, prompts([PRINTS_2] * 3))
    name = "namespaces" if isolation == "auto" else isolation
    assert scorer.notes == {
      f"verifier/isolation/{name}": 1
    }  # They are in the metrics of every step.
    counts = dict(right=1, wrong=1, unparsable=1, error=0, timeout=0, memory=0, crash=0)
    assert scores.outcomes == counts and scores.reward.tolist() == [1, 0, 0]


@needs_namespaces
@pytest.mark.parametrize("tolerance, right", [(None, 1), (0.0, 0)])
def test_an_expected_decimal_has_a_tolerance(tolerance, right):
  tests = '{"inputs": [""], "outputs": ["0.333333333"]}'
  changes = {} if tolerance is None else dict(tolerance=tolerance)
  with rewards.open_scorer(config("code", **changes)) as scorer:
    assert scorer(["```\nprint(0.3333333)\n```"], prompts([tests])).reward.tolist() == [right]


def test_verifiers_that_cannot_read_every_answer_say_so():
  check = rewards.answer_check("code")
  check(PRINTS_2)
  with pytest.raises(ValueError, match="JSON object"):
    check("42")
  with pytest.raises(ValueError, match="only white space and punctuation"):
    rewards.answer_check("string")(" .")
  with pytest.raises(ValueError, match="'1,234' is no whole number"):
    rewards.answer_check("arithmetic")("1,234")
  with pytest.raises(ValueError, match="'proof' is a placeholder"):
    rewards.answer_check("math")("proof")
  rewards.answer_check("string")("Paris"), rewards.answer_check("arithmetic")("-12")
  rewards.answer_check("math")("no solution")
  assert rewards.answer_check("recurrence") is None and rewards.answer_check("") is None
