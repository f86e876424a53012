"""Ratings agree with what makes them likely."""

import numpy as np
import pytest

from gspo_jax.evaluation import elo


def test_expectation_is_elo():
  assert elo.expected(1500, 1500) == 0.5
  assert elo.expected(1900, 1500) == pytest.approx(10 / 11)
  assert elo.expected(0, 1e6) == 0


def test_half_of_the_problems_of_one_rating():
  assert elo.rating([0.5, 0.5], [1600, 1600]) == pytest.approx(1600, abs=0.01)
  assert elo.rating([1, 1, 1, 0], [1200] * 4) == pytest.approx(1200 + 400 * np.log10(3), abs=0.02)


def test_it_is_the_maximum_of_the_likelihood():
  rng = np.random.default_rng(0)
  opponent, score = rng.uniform(800, 2400, 50), rng.integers(0, 9, 50) / 8
  grid = np.arange(0, 4000, 0.5)
  p = elo.expected(grid[:, None], opponent)
  likelihood = (score * np.log(p) + (1 - score) * np.log1p(-p)).sum(1)
  assert elo.rating(score, opponent) == pytest.approx(grid[likelihood.argmax()], abs=0.5)


def test_a_simulated_contestant_gets_his_rating_back():
  rng = np.random.default_rng(1)
  opponent = rng.uniform(800, 3000, 4000)
  score = rng.random(4000) < elo.expected(1750, opponent)
  assert elo.rating(score, opponent) == pytest.approx(1750, abs=30)


def test_all_and_nothing_have_no_finite_maximum():
  np.testing.assert_array_equal(elo.rating([[0, 0], [1, 1]], [1500, 1600]), [0, 4000])


def test_leading_axes_are_independent():
  score = np.array([[0.2, 0.4], [0.6, 0.1], [0.9, 1.0]])
  together = elo.rating(score, [1500, 1700])
  alone = [elo.rating(row, [1500, 1700]) for row in score]
  np.testing.assert_allclose(together, alone)


def test_a_virtual_contest_is_rated_as_codeforces_seeds_it():
  humans = np.array([2400, 2000, 1800, 1500, 1200, 900.0])
  points = np.array([6, 5, 3, 3, 1, 0.0])
  score = elo.virtual_scores(4, points)
  np.testing.assert_array_equal(score, [0, 0, 1, 1, 1, 1])
  rating = elo.rating(score, humans)
  rank = 1 + elo.expected(humans, rating).sum()  # CodeForces' expected place
  assert rank == pytest.approx(3, abs=1e-3)
  np.testing.assert_array_equal(elo.virtual_scores(3, points), [0, 0, 0.5, 0.5, 1, 1])


@pytest.mark.parametrize("score", [[], [1.5], [-0.1], [np.nan]])
def test_impossible_results(score):
  with pytest.raises(ValueError, match="rating needs at least one result"):
    elo.rating(score, [1500] * len(score))


@pytest.mark.parametrize(
  "line",
  [
    "{", "[1]", "[" * 10**5, '{"contest_id": 1, "points": [1], "points": [2], "ratings": [1]}',
    '{"contest_id": 1, "points": [1], "ratings": [1, 2]}',
    '{"contest_id": 1, "points": [], "ratings": []}',
    '{"contest_id": 1, "points": [NaN], "ratings": [1]}',
    '{"contest_id": 1, "points": {"a": 1}, "ratings": [1]}', '{"points": [1], "ratings": [1]}',
  ],
)  # fmt: skip
def test_standings_that_are_none_are_named_with_their_line(line, tmp_path):
  path = tmp_path / "standings.jsonl"
  path.write_text('{"contest_id": 1, "points": [1], "ratings": [1500]}\n\n')
  assert list(elo.read_standings(path)) == ["1"]
  path.write_text('{"contest_id": 1, "points": [1], "ratings": [1500]}\n' + line + "\n")
  with pytest.raises(ValueError, match=f"{path}, line 2 is no contest"):
    elo.read_standings(path)
