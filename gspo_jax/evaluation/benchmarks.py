"""Benchmarks of an evaluation: settings, problems and verifiers.

The problems of `data.eval` are the benchmark with the name "".
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

from gspo_jax.evaluation import elo
from gspo_jax.rewards import Scorer
from gspo_jax.settings.evaluation import BenchmarkConfig
from gspo_jax.structs import Prompt
from gspo_jax.tasks.environments import Make


@dataclasses.dataclass(frozen=True)
class HeldOut:
  """Problems of a benchmark, read before the benchmark's verifier is opened."""

  name: str  # "" for `data.eval`.
  config: BenchmarkConfig
  key: str  # Configuration key of the data, for messages.
  problems: Sequence[Prompt]
  shared: int = 0  # Number of problems that also occur in training data.


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """Benchmark with its problems, and with a verifier or environments to score responses."""

  name: str  # "" for `data.eval`.
  config: BenchmarkConfig
  problems: Sequence[Prompt]
  score: Scorer  # Unused if there is an environment.
  environment: Make | None = None  # Constructor of environments; None for single turns.

  @property
  def prefix(self) -> str:
    """Prefix of the benchmark's metric names."""
    return f"eval/{self.name}/" if self.name else "eval/"

  @functools.cached_property
  def contests(self) -> dict[str, elo.Contest]:
    """Contests of the file `standings`, by id; {} if no file is set."""
    return elo.read_standings(self.config.standings) if self.config.standings else {}


def check_problems(name: str, config: BenchmarkConfig, problems: Sequence[Prompt]) -> None:
  """Checks the fields `rating`, `contest_id` and `points` of all problems.

  Raises:
    ValueError: `config.rating` is set, and a problem has no numeric rating. Or `config.standings`
      is set, and a problem's contest is not in this file or a problem's points are not a number.
  """
  unrated = [p for p in problems if config.rating and not _has_number(p, "rating")]
  if unrated:
    field = dict(unrated[0].info).get("rating", "none")
    raise ValueError(
      f"eval.benchmarks.{name}: the problem {unrated[0].id} has no numeric rating ({field}). "
      f"Problems without a rating: {len(unrated)}. Filter them out (`... where rating>0` in "
      f"eval.benchmarks.{name}.data), or set eval.benchmarks.{name}.rating=False"
    )
  if config.standings:
    contests = elo.read_standings(config.standings)
    contest_ids = {dict(p.info).get("contest_id", "(no contest_id)") for p in problems}
    if unknown := sorted(contest_ids - {*contests}):
      raise ValueError(
        f"eval.benchmarks.{name}: contests of problems are missing in {config.standings}: "
        f"{', '.join(unknown)}; add them to the file, or filter their problems out"
      )
    for problem in problems:  # Without `points`, a problem is worth one point.
      if "points" in dict(problem.info) and not _has_number(problem, "points"):
        raise ValueError(
          f"eval.benchmarks.{name}: the problem {problem.id} has non-numeric points "
          f"({dict(problem.info)['points']}); correct or remove the field `points` (a problem "
          "without this field is worth one point)"
        )


def _has_number(problem: Prompt, field: str) -> bool:
  """Whether a problem's field is a finite number."""
  try:
    return math.isfinite(float(dict(problem.info)[field]))
  except (KeyError, ValueError):
    return False


def choose(source: Sequence[Prompt], problems: int) -> list[Prompt]:
  """Chooses evenly spread problems of a held-out set.

  Args:
    source: held-out set.
    problems: maximum number of problems; 0 for all.
  """
  count = len(source) if problems == 0 else min(problems, len(source))
  return [source[i * len(source) // count] for i in range(count)]
