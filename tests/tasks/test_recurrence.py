"""The embedded task of long responses: exact, disjoint, taught by a pupil who forgets."""

import collections
import dataclasses

import numpy as np
import pytest
from support.cost import assert_linear
from support.data_cases import BYTES, config
from support.prompts import prompts

from configs import common
from gspo_jax.data import sources
from gspo_jax.rewards import open_scorer
from gspo_jax.settings.rewards import RewardConfig
from gspo_jax.tasks import recurrence
from gspo_jax.tasks.recurrence import right_lines, verify

LENGTHS = (8, 16, 32)


def rows(split="train", lines=LENGTHS):
  problems = recurrence.problems(split, lines)
  return [problems[i] for i in range(len(problems))]


def numbers(text):
  """Reads labels and values of lines by an independent rule."""
  pairs = [line.split(":") for line in text.removesuffix("\n").split("\n")]
  return [int(label[0], 36) * 10 + int(label[1]) for label, _ in pairs], [
    int(value[::-1]) for _, value in pairs
  ]


@pytest.mark.parametrize("n", [1, 8, 32, 99, 128])
def test_answers_follow_the_recurrence_and_count_down(n):
  for row in rows("heldout", (n,)):
    labels, values = numbers(row["question"] + row["answer"])
    assert labels == list(range(n + 1, -1, -1))
    assert all((a + b) % 100 == c for a, b, c in zip(values, values[1:], values[2:]))
    assert len(row["question"]) == 12 and len(row["answer"]) + 1 == 6 * n  # Includes the end token.


def test_the_example_of_the_docs():
  row = next(row for row in rows() if row["id"] == "8:7,40")
  assert row["question"] == "09:70\n08:04\n"
  assert row["answer"].startswith("07:74\n06:78\n") and row["answer"].endswith("\n00:70")


def test_splits_are_disjoint_by_their_numbers_and_hold_all_lengths_equally():
  pairs = []
  for split in ("train", "heldout"):
    lengths, numbers_of = zip(*(row["id"].split(":") for row in rows(split)))
    assert len(set(collections.Counter(lengths).values())) == 1
    assert set(map(int, lengths)) == set(LENGTHS)
    pairs.append(set(numbers_of))
  train, heldout = pairs
  assert not train & heldout and len(train | heldout) == 10_000
  assert 150 < len(heldout) < 250


@pytest.mark.parametrize("count", [48, 60, 96, 150])
def test_problems_evenly_spread_have_all_lengths_equally(count):
  heldout = rows("heldout")
  lengths = [heldout[i * len(heldout) // count]["id"].split(":")[0] for i in range(count)]
  assert set(collections.Counter(lengths).values()) == {count // 3}


def test_a_pupil_who_forgets_nothing_is_right():
  for row in rows("heldout"):
    assert recurrence.demonstration(row, 0.0, seed=1) == row["answer"]


def test_a_pupil_forgets_each_carry_with_the_probability_he_is_given():
  carries = forgot = 0
  for row in rows("heldout", (32,)):
    _, values = numbers(row["question"] + recurrence.demonstration(row, 0.06, seed=1))
    for a, b, c in zip(values, values[1:], values[2:]):
      carried = a % 10 + b % 10 >= 10
      assert (a + b - c) % 100 in ((0, 10) if carried else (0,))
      carries, forgot = carries + carried, forgot + ((a + b - c) % 100 == 10)
  assert 2500 < carries < 3300
  assert abs(forgot / carries - 0.06) < 4 * np.sqrt(0.06 * 0.94 / carries)


@pytest.mark.parametrize(
  "n, rate",
  [
    pytest.param(8, 0.802, marks=pytest.mark.long),
    (16, 0.669),
    pytest.param(32, 0.465, marks=pytest.mark.long),
  ],
)
def test_the_pupil_is_right_less_often_on_longer_responses(n, rate):
  problems = rows("train", (n,))[::4]
  first, again, different = (
    [recurrence.demonstration(row, 0.06, seed) for row in problems] for seed in (0, 0, 1)
  )
  right = [verify(text, row["answer"]) for text, row in zip(first, problems)]
  assert abs(np.mean(right) - rate) < 0.04
  assert first == again != different


ANSWER = "02:74\n01:78\n00:43"


@pytest.mark.parametrize(
  "response, right, lines",
  [
    (ANSWER, True, [1, 1, 1]), ("02:00\n01:78\n00:43", True, [0, 1, 1]), ("00:43", True, [0, 0, 0]),
    ("02:74\n01:78\n00:44", False, [1, 1, 0]), (ANSWER + "\n", False, [1, 1, 1]),
    (ANSWER + "\n00:44", False, [1, 1, 1]), (ANSWER + " ", False, [1, 1, 0]),
    ("02:74\r\n01:78\r\n00:43", True, [0, 0, 1]), ("02:74\n01:78", False, [1, 1, 0]),
    ("\n02:74\n01:78\n00:43", True, [0, 0, 0]), ("", False, [0, 0, 0]),
    ("\n" * 9, False, [0, 0, 0]), ("\0�٣٤:43", False, [0, 0, 0]),
  ],
)  # fmt: skip
def test_the_last_line_decides_exactly(response, right, lines):
  assert verify(response, ANSWER) is right
  assert right_lines(response, ANSWER) == list(map(bool, lines))


@pytest.mark.parametrize("unit", ["\n", "00:43\n", "9", "\0", "\r", "00:", "é"])
def test_hostile_text_takes_linear_time(unit):
  answer = rows("heldout", (128,))[0]["answer"]

  def make(length):
    return ((unit * length)[:length],)

  assert_linear(lambda text: (verify(text, answer), right_lines(text, answer)), make)


def scores(responses, **changes):
  settings = common.base().reward
  settings.update(name="recurrence", **changes)
  with open_scorer(RewardConfig(**settings)) as score:
    return score(responses, prompts([ANSWER] * len(responses)))


RESPONSES = [ANSWER, "02:74\n01:79\n00:53", "00:43", "x"]


def test_the_scorer_needs_the_last_line_alone():
  scored = scores(RESPONSES)
  assert scored.reward.tolist() == [1, 0, 1, 0]
  assert scored.outcomes == {"right": 2, "wrong": 2}


def test_partial_credit_counts_lines():
  scored = scores(RESPONSES, partial=0.75)
  np.testing.assert_allclose(scored.reward, [1, 0.25, 0.25, 0], rtol=1e-6)
  assert scored.correct.tolist() == [1, 0, 1, 0]  # evaluation stays exact
  assert scored.outcomes == {"right": 2, "wrong": 2}


def test_partial_credit_needs_lines():
  with pytest.raises(ValueError, match=r"reward\.partial=0\.5 needs reward\.name=recurrence"):
    RewardConfig(**(common.base().reward.to_dict() | dict(partial=0.5)))


def test_it_is_a_source_with_its_lengths_from_the_config():
  c = config(train="recurrence:train", eval="recurrence:heldout", lines=(8, 128))
  heldout = sources.load(dataclasses.replace(c, max_prompt_tokens=12), BYTES, "eval")
  lengths = {len(heldout[i].demonstration) + 1 for i in range(len(heldout))}
  assert lengths == {48, 768}
  with pytest.raises(sources.DataError, match=r"data\.max_prompt_tokens=11"):
    sources.load(dataclasses.replace(c, max_prompt_tokens=11), BYTES, "eval")


@pytest.mark.parametrize("split, lines", [("test", (8,)), ("train", ()), ("train", (8, 8))])
def test_bad_settings_are_errors(split, lines):
  with pytest.raises(ValueError, match=r"recurrence:|data\.lines"):
    recurrence.problems(split, lines)
