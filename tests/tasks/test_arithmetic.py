"""The embedded task: exact, disjoint, and taught by a pupil who forgets carries."""

import random

import pytest
from support.prompts import prompts

from configs import common
from gspo_jax.rewards import open_scorer
from gspo_jax.settings.rewards import RewardConfig
from gspo_jax.tasks import arithmetic


def test_splits_are_disjoint_whatever_the_order_of_the_terms():
  train, heldout = (arithmetic.problems(split, 2) for split in ("train", "heldout"))
  trained, held_out = (
    {tuple(sorted(problems[i]["id"].split("+"))) for i in range(len(problems))}
    for problems in (train, heldout)
  )
  assert len(train) + len(heldout) == 90**2
  assert 0.01 < len(heldout) / 90**2 < 0.04
  assert not trained & held_out


def test_problems_are_sums():
  source = arithmetic.problems("train", 3)
  for i in random.Random(0).sample(range(len(source)), 200):
    row = source[i]
    a, b = row["id"].split("+")
    assert 100 <= int(a) <= 999 and 100 <= int(b) <= 999
    assert row["question"] == f"{a}+{b}=" and int(row["answer"]) == int(a) + int(b)


def test_a_pupil_who_forgets_nothing_is_always_right():
  source = arithmetic.problems("train", 3)
  for i in range(0, len(source), 4001):
    text = arithmetic.demonstration(source[i], 0.0, seed=i)
    assert arithmetic.verify(text, source[i]["answer"])
    working, answer = text.split(":")
    assert int(working[::-1]) == int(answer)


def test_a_pupil_who_forgets_is_right_sometimes_and_wrong_often():
  source = arithmetic.problems("train", 3)
  rows = [source[i] for i in range(0, len(source), 997)]
  right = [arithmetic.verify(arithmetic.demonstration(r, 0.5, seed=0), r["answer"]) for r in rows]
  assert 0.3 < sum(right) / len(right) < 0.6
  wrong = next(r for r, ok in zip(rows, right) if not ok)
  carries = [int(x) + int(y) >= 10 for x, y in zip(*wrong["id"].split("+"))]
  assert any(carries)
  assert arithmetic.demonstration(wrong, 0.5, 0) == arithmetic.demonstration(wrong, 0.5, 0)


def test_a_pupil_who_skips_his_work_forgets_every_carry():
  source = arithmetic.problems("train", 2)
  for i in range(0, 4000, 7):
    worked = arithmetic.demonstration(source[i], 0.5, seed=i)
    either = arithmetic.demonstration(source[i], 0.5, seed=i, skipped_work=0.5)
    skipped = arithmetic.demonstration(source[i], 0.0, seed=i, skipped_work=1.0)
    assert either in (worked, skipped) and skipped[0] == ":"
    digits = [(int(x) + int(y)) % 10 for x, y in zip(*source[i]["id"].split("+"))]
    assert int(skipped[1:]) == 10 * digits[0] + digits[1]


def test_only_the_exact_sum_after_the_last_colon_counts():
  right = ["5231:1325", "1325", ": 1325 "]
  wrong = ["5231:1326", "5231:13250", "1325:", "", "5231:1325.0", "5231:1325:x", "1325 or 1326"]
  for response in right + wrong:
    assert arithmetic.verify(response, "1325") is (response in right), response


def test_scorer_gives_rewards_and_outcomes():
  with open_scorer(RewardConfig(**common.base().reward)) as score:
    scores = score([":3", ":4", ":3"], prompts(["3"] * 3))
  assert scores.reward.tolist() == [1, 0, 1]
  assert scores.outcomes == {"right": 2, "wrong": 1}


@pytest.mark.parametrize("split, digits", [("test", 2), ("train", 0), ("train", 4)])
def test_bad_settings_are_errors(split, digits):
  with pytest.raises(ValueError, match=r"arithmetic:|data\.digits"):
    arithmetic.problems(split, digits)
