"""Section `eval`."""

import dataclasses
import re
from typing import Annotated

from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import Name, NonNegativeInt, PositiveInt, Temperature
from gspo_jax.settings.rewards import VERIFIERS


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
