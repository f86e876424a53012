"""Problem sets of an evaluation, and what they refuse."""

import dataclasses

import pytest
from support.data_cases import write

from configs import common
from gspo_jax.evaluation.benchmarks import check_problems, choose
from gspo_jax.settings.evaluation import BenchmarkConfig
from gspo_jax.structs import Prompt

SET = BenchmarkConfig(**common.benchmark(samples=3))
PROBLEMS = [Prompt(str(i), f"q{i}", "a", (1,), info=(("rating", "1000"),)) for i in range(5)]


def test_problems_are_chosen_all_over_the_set():
  assert [p.id for p in choose(PROBLEMS, 2)] == ["0", "2"]
  assert len(choose(PROBLEMS, 0)) == len(choose(PROBLEMS, 99)) == 5


def test_problems_without_a_rating_are_found_before_sampling():
  rated, plain = dataclasses.replace(SET, rating=True), dataclasses.replace(PROBLEMS[1], info=())
  check_problems("cf", rated, PROBLEMS)
  with pytest.raises(ValueError, match=r"eval.benchmarks.cf: the problem 1 has no numeric rating"):
    check_problems("cf", rated, [PROBLEMS[0], plain])
  for text in ("unrated", "nan", ""):
    worded = dataclasses.replace(PROBLEMS[1], info=(("rating", text),))
    message = rf"no numeric rating \({text}\)\. Problems without a rating: 1\."
    with pytest.raises(ValueError, match=message):
      check_problems("cf", rated, [PROBLEMS[0], worded])


def test_points_that_are_no_number_are_found_before_sampling(tmp_path):
  def worth(number, **points):
    info = dict(contest_id="1", **points)
    return dataclasses.replace(PROBLEMS[number], info=tuple(info.items()))

  standings = dict(contest_id="1", points=[3, 0], ratings=[1500, 1200])
  rated = dataclasses.replace(SET, standings=write(tmp_path / "standings.jsonl", [standings]))
  good = [worth(0), worth(2, points="500")]
  check_problems("cf", rated, good)
  for text in "500 points", "inf", "":
    with pytest.raises(ValueError, match=rf"problem 1 has non-numeric points \({text}\)"):
      check_problems("cf", rated, [*good, worth(1, points=text)])
