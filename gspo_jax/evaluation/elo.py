"""Ratings on CodeForces' scale, from solved problems or from contest standings.

In the Elo model, a contestant of rating r beats an opponent of rating o with probability

  p(r, o) = 1 / (1 + 10^((o - r) / 400)).

Given results s_i in [0, 1] (1 win, 1/2 tie, 0 loss) against opponents rated o_i, the log-likelihood
Σ_i s_i ln p(r, o_i) + (1 - s_i) ln(1 - p(r, o_i)) is concave in r. The rating maximises it, so that
actual and expected results have equal sums:

  Σ_i s_i = Σ_i p(r, o_i).

There are two kinds of opponents:

- Problems. CodeForces gives a problem the rating o_i at which a contestant solves the problem with
  probability 1/2. Result s_i is the share of samples that solve problem i.
- Human participants of a contest, with the model as a virtual participant. For n humans and the
  model at rank m, Σ_i s_i = n + 1 - m. The equation becomes m = 1 + Σ_i p(o_i, r), the rank that
  CodeForces expects at rating r (the "seed", codeforces.com/blog/entry/20762). CodeElo
  (arXiv:2501.01257) solves this equation for each contest separately. Here one rating maximises the
  likelihood of all contests together.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gspo_jax.system import jsons

# Bounds of ratings. If all results are losses or all are wins, the likelihood has no maximum.
LOWEST, HIGHEST = 0.0, 4000.0


def expected(rating: np.ndarray, opponent: np.ndarray) -> np.ndarray:
  """Returns the expected result p(rating, opponent)."""
  # For a far better opponent 10^x overflows to infinity; the probability is then 0.
  with np.errstate(over="ignore"):
    return 1 / (1 + 10 ** ((np.asarray(opponent) - rating) / 400))


def rating(score: np.ndarray, opponent: np.ndarray) -> np.ndarray:
  """Returns the maximum-likelihood rating, to within 0.01.

  The rating is HIGHEST if all results are wins, and LOWEST if all are losses.

  Args:
    score: results in [0, 1], [..., n]; leading axes are independent contestants.
    opponent: ratings of the opponents, [..., n] or [n].

  Raises:
    ValueError: there are no opponents, or a score is outside [0, 1].
  """
  score, opponent = np.asarray(score, float), np.asarray(opponent, float)
  if score.shape[-1:] in ((), (0,)) or not ((score >= 0) & (score <= 1)).all():
    raise ValueError(f"a rating needs at least one result, and results from 0 to 1, not {score}")
  total = score.sum(-1)
  low, high = np.full(total.shape, LOWEST), np.full(total.shape, HIGHEST)
  while np.max(high - low) > 0.01:  # Bisection: Σ p rises with the rating.
    middle = (low + high) / 2
    above = expected(middle[..., None], opponent).sum(-1) > total
    low, high = np.where(above, low, middle), np.where(above, middle, high)
  # If all results are losses or all are wins, bisection only comes near the bounds.
  return np.where(total == 0, LOWEST, np.where(total == score.shape[-1], HIGHEST, (low + high) / 2))


@dataclasses.dataclass(frozen=True)
class Contest:
  """The n human participants of a contest, in any order."""

  points: np.ndarray  # Points in the standings, [n].
  ratings: np.ndarray  # Ratings before the contest, [n].


def virtual_scores(points: np.ndarray, standings: np.ndarray) -> np.ndarray:
  """Returns the results (1, 1/2 or 0) of `points` against each participant."""
  return (np.sign(np.asarray(points, float) - np.asarray(standings, float)) + 1) / 2


def virtual_rating(
  points: Sequence[np.ndarray], contests: Sequence[Contest]
) -> tuple[float, float, float]:
  """Returns the rating from virtual participation, and its 95 % interval.

  The rating maximises the likelihood of all contests, to within about one point. The interval is
  computed from 1,000 random samples of contests, drawn with replacement.

  Args:
    points: for each contest, the points of each participation of the model. The results of a
      contest's participations are averaged.
    contests: human participants of each contest.

  Returns:
    The rating, and the lower and upper end of the interval.
  """
  grid = np.arange(LOWEST, HIGHEST + 1, 4.0)
  # Expected minus actual results, [contests, ratings of the grid]. At the maximum of the likelihood
  # their sum over contests is 0.
  excess = np.stack([
    expected(grid[:, None], c.ratings).sum(1)
    - virtual_scores(np.asarray(p)[:, None], c.points).mean(0).sum()
    for p, c in zip(points, contests)
  ])  # fmt: skip
  rng = np.random.default_rng(0)
  counts = rng.multinomial(len(contests), [1 / len(contests)] * len(contests), 1000)
  estimate, *resampled = (np.interp(0, row, grid) for row in (excess.sum(0), *(counts @ excess)))
  low, high = np.percentile(resampled, [2.5, 97.5])
  return float(estimate), float(low), float(high)


def read_standings(path: str | Path) -> dict[str, Contest]:
  """Reads contests by id from JSON lines.

  Each line has the form `{"contest_id": "1", "points": [...], "ratings": [...]}`.

  Raises:
    ValueError: the file does not exist, or a contest is malformed.
  """
  contests = {}
  if not Path(path).is_file():
    raise ValueError(f"standings={path}: there is no such file; name one, or leave the key empty")
  for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
    if not line.strip():
      continue
    try:
      row = jsons.parse_object(line)
      points, ratings = (np.asarray(row[name], float) for name in ("points", "ratings"))
      if not (np.isfinite(points).all() and np.isfinite(ratings).all()):
        raise ValueError("a number is not finite")
      if points.ndim != 1 or points.shape != ratings.shape or not len(points):
        raise ValueError(f"points have shape {points.shape}, ratings {ratings.shape}")
      contests[str(row["contest_id"])] = Contest(points, ratings)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
      raise ValueError(
        f"{path}, line {number} is no contest: {error!r}. A contest has contest_id, points and "
        "ratings, with as many points as ratings"
      ) from error
  return contests
