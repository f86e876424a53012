"""Benchmarks: their settings, problems and verifiers."""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Annotated

from gspo_jax.evaluation import elo
from gspo_jax.rewards import VERIFIERS, Scorer
from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import Name, NonNegativeInt, PositiveInt, Temperature
from gspo_jax.structs import Prompt
from gspo_jax.tasks.environments import Make


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
  """One benchmark beside `data.eval`; its metrics are eval/<name>/..."""

  data: str  # a source, as data.eval; "": the benchmark is left out
  reward: Annotated[str, Name(("", *VERIFIERS))]  # verifier, as reward.name; "": that of the run
  problems: NonNegativeInt  # to use, evenly spread over the set; 0: all
  samples: PositiveInt  # k, per problem
  pass_at: tuple[PositiveInt, ...]  # pass@k as well, for k up to `samples`
  rating: bool  # a rating against the problems' own, their field `rating`
  standings: str  # file of contests, for a rating against those who took part (elo.read_standings)

  def __post_init__(self):
    ranges.check(self, "eval.benchmarks")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  every: PositiveInt  # iterations between evaluations while training
  problems: NonNegativeInt  # to use of the held-out ones, evenly spread over the set; 0: all
  samples: PositiveInt  # k, per problem
  temperature: Temperature
  top_k: NonNegativeInt  # 0: all tokens
  top_p: ranges.PositiveFraction  # 1: all tokens
  min_p: ranges.FractionBelowOne  # 0: all tokens
  max_new_tokens: NonNegativeInt  # 0: sampling.max_new_tokens, by `config.derived`
  greedy: bool  # one greedy response per problem as well
  batch: PositiveInt  # problems that are scored and written down together
  benchmarks: dict[str, BenchmarkConfig]  # further ones, by name

  def __post_init__(self):
    ranges.check(self, "eval")
    for name, benchmark in self.benchmarks.items():
      key, k = f"eval.benchmarks.{name}", max(benchmark.pass_at, default=0)
      if name == "eval" or not re.fullmatch(r"[\w-]+", name):
        raise ValueError(
          f"{key}: files and metrics are named by it: take letters, digits, _ and -, and not eval, "
          "as data.eval is called there"
        )
      if k > benchmark.samples:
        raise ValueError(f"{key}.pass_at={k} must be at most {key}.samples={benchmark.samples}")

  def figures(self) -> list[str]:
    """Names of the metrics of an evaluation, without those of verifiers and environments."""
    found = []
    for name, benchmark in [("", None), *self.benchmarks.items()]:
      names = ["accuracy", *(f"pass@{k}" for k in benchmark.pass_at)] if benchmark else ["accuracy"]
      names += ["rating"] * (benchmark is not None and benchmark.rating)
      names += ["contest_rating"] * bool(benchmark and benchmark.standings)
      names = [figure + end for figure in names for end in ("", "/low", "/high")]
      names += ["response_length/mean", "truncated_fraction", *["greedy"] * self.greedy]
      found += [f"eval/{name}/{figure}" if name else f"eval/{figure}" for figure in names]
    return found


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """A benchmark with its problems and verifier; the one without a name is `data.eval`."""

  name: str
  config: BenchmarkConfig
  problems: Sequence[Prompt]
  score: Scorer
  environment: Make | None = None  # where responses are conversations, which it judges

  def __post_init__(self):
    check_problems(self.name, self.config, self.problems)

  @functools.cached_property
  def contests(self) -> dict[str, elo.Contest]:
    return elo.read_standings(self.config.standings) if self.config.standings else {}


def check_problems(name: str, config: BenchmarkConfig, problems: Sequence[Prompt]) -> None:
  """ValueError for a rating or standings that some problem has no part in."""
  without = [p for p in problems if config.rating and not _has_number(p, "rating")]
  if without:
    found = dict(without[0].info).get("rating", "none")
    raise ValueError(
      f"eval.benchmarks.{name}: the problem {without[0].id} has no rating that is a number "
      f"({found}), and {len(without) - 1} more; filter them out (`where rating>0`) or set "
      "rating=False"
    )
  if config.standings:
    contests = elo.read_standings(config.standings)
    if unknown := sorted({dict(p.info).get("contest_id", "") for p in problems} - {*contests}):
      raise ValueError(
        f"eval.benchmarks.{name}: problems of the contests {', '.join(unknown)}, which"
        f" {config.standings} does not have"
      )
    for problem in problems:  # one without points is worth 1
      if "points" in dict(problem.info) and not _has_number(problem, "points"):
        raise ValueError(
          f"eval.benchmarks.{name}: the problem {problem.id} has points that are no number "
          f"({dict(problem.info)['points']}); correct the field, or leave it out for 1"
        )


def _has_number(problem: Prompt, field: str) -> bool:
  try:
    return math.isfinite(float(dict(problem.info)[field]))
  except (KeyError, ValueError):
    return False


def choose(source: Sequence[Prompt], problems: int) -> list[Prompt]:
  """`problems` of the held-out set, evenly spread over it; all of them for 0."""
  count = len(source) if problems == 0 else min(problems, len(source))
  return [source[i * len(source) // count] for i in range(count)]
