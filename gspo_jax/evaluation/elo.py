"""A contestant's rating on CodeForces' scale, from problems solved or opponents beaten.

In the Elo model a contestant of rating r beats an opponent of rating o with probability

  p(r, o) = 1 / (1 + 10^((o - r) / 400)).

Given results s_i in [0, 1] against opponents o_i (1 won, 0 lost, 1/2 a tie), the log-likelihood
Σ_i s_i ln p(r, o_i) + (1 - s_i) ln(1 - p(r, o_i)) is concave in r. At its maximum, results and
expectations have equal sums:

  Σ_i s_i = Σ_i p(r, o_i).

Two kinds of opponents:

- Problems. CodeForces rates a problem r_i so that a contestant of rating r_i solves it with
  probability 1/2; s_i is the share of the samples that solved it.
- The human participants of a contest, in which the model takes part virtually. With n of them and
  the model at rank m, Σ s_i = n + 1 - m, so that the equation becomes m = 1 + Σ_i p(o_i, r): the
  rank is the one that CodeForces expects of rating r (its "seed", codeforces.com/blog/entry/20762).
  CodeElo (arXiv:2501.01257) rates language models by the same equation, contest by contest; here
  all contests enter one likelihood.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gspo_jax.system import jsons

LOWEST, HIGHEST = 0.0, 4000.0  # Bounds: all lost or all won has no finite maximum.


def expected(rating: np.ndarray, opponent: np.ndarray) -> np.ndarray:
  """Probability of `rating` beating `opponent`."""
  # 10^x overflows quietly to infinity in the far tail, where the probability is 0.
  with np.errstate(over="ignore"):
    return 1 / (1 + 10 ** ((np.asarray(opponent) - rating) / 400))


def rating(score: np.ndarray, opponent: np.ndarray) -> np.ndarray:
  """Maximum-likelihood rating, between LOWEST and HIGHEST, to within 0.01.

  Args:
    score: results in [0, 1], shape [..., n]; leading axes are independent contestants.
    opponent: ratings of the opponents, [..., n] or [n].

  Raises:
    ValueError: no opponents, or a score outside [0, 1].
  """
  score, opponent = np.asarray(score, float), np.asarray(opponent, float)
  if score.shape[-1:] in ((), (0,)) or not ((score >= 0) & (score <= 1)).all():
    raise ValueError(f"a rating needs results in [0, 1], and has {score}")
  total = score.sum(-1)
  low, high = np.full(total.shape, LOWEST), np.full(total.shape, HIGHEST)
  while np.max(high - low) > 0.01:  # Σ p rises with the rating
    middle = (low + high) / 2
    above = expected(middle[..., None], opponent).sum(-1) > total
    low, high = np.where(above, low, middle), np.where(above, middle, high)
  # The bisection does not reach the bounds: nothing won, or everything.
  return np.where(total == 0, LOWEST, np.where(total == score.shape[-1], HIGHEST, (low + high) / 2))


@dataclasses.dataclass(frozen=True)
class Contest:
  """The human participants of a contest, in any order."""

  points: np.ndarray  # [n], from the standings
  ratings: np.ndarray  # [n], before the contest


def virtual_scores(points: np.ndarray, standings: np.ndarray) -> np.ndarray:
  """Results of `points` against each participant of a contest: 1, 1/2 or 0."""
  return (np.sign(np.asarray(points, float) - np.asarray(standings, float)) + 1) / 2


def virtual_rating(
  points: Sequence[np.ndarray], contests: Sequence[Contest]
) -> tuple[float, float, float]:
  """Maximum-likelihood rating from virtual participation, with a 95 % interval.

  `points[c]` has the points of each of the model's participations in contest c. Results of several
  participations in one contest are averaged. The interval is over contests. Exact to about a point.
  """
  grid = np.arange(LOWEST, HIGHEST + 1, 4.0)
  # Expectations minus results, by contest and rating. The rating is the zero of their sum.
  excess = np.stack([
    expected(grid[:, None], c.ratings).sum(1)
    - virtual_scores(np.asarray(p)[:, None], c.points).mean(0).sum()
    for p, c in zip(points, contests)
  ])  # fmt: skip
  rng = np.random.default_rng(0)
  counts = rng.multinomial(len(contests), [1 / len(contests)] * len(contests), 1000)
  whole, *resampled = (np.interp(0, row, grid) for row in (excess.sum(0), *(counts @ excess)))
  low, high = np.percentile(resampled, [2.5, 97.5])
  return float(whole), float(low), float(high)


def read_standings(path: str | Path) -> dict[str, Contest]:
  """Reads contests by id from JSON lines.

  A line is `{"contest_id": "1", "points": [...], "ratings": [...]}`.

  Raises:
    ValueError: names the file and line of a malformed contest.
  """
  contests = {}
  if not Path(path).is_file():
    raise ValueError(f"there is no file {path}. Set `standings` to one, or leave it empty")
  for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
    try:
      row = jsons.parse_object(line)
      points, ratings = (np.asarray(row[name], float) for name in ("points", "ratings"))
      if not (np.isfinite(points).all() and np.isfinite(ratings).all()):
        raise ValueError("a number that is not finite")
      if points.ndim != 1 or points.shape != ratings.shape or not len(points):
        raise ValueError(f"points of shape {points.shape}, ratings of shape {ratings.shape}")
      contests[str(row["contest_id"])] = Contest(points, ratings)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
      raise ValueError(f"{path}, line {number} is no contest: {error!r}") from error
  return contests
