"""Section `eval`."""

import dataclasses
import re
from typing import Annotated

from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import Name, NonNegativeInt, PositiveInt, Temperature, key
from gspo_jax.settings.rewards import VERIFIERS


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
  """One benchmark beside `data.eval`; its metrics are eval/<name>/..."""

  data: str = key("", 'a source, as data.eval; "": the benchmark is left out')
  reward: Annotated[str, Name(("", *VERIFIERS))] = key(
    "", 'verifier, as reward.name; "": that of the run'
  )
  problems: NonNegativeInt = key(0, "to use, evenly spread over the set; 0: all")
  samples: PositiveInt = key(4, "k of avg@k, per problem")
  pass_at: tuple[PositiveInt, ...] = key((), "pass@k as well, for k up to samples")
  rating: bool = key(False, "an Elo rating against the problems' own, their field rating")
  standings: str = key("", "JSON lines of contests: a rating against those who took part")

  def __post_init__(self):
    ranges.check(self, "eval.benchmarks")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Evaluations, while training and by job=eval. docs/evaluation.md"""

  every: PositiveInt = key(20, "iterations between evaluations while training")
  problems: NonNegativeInt = key(0, "of the held-out set, evenly spread over it; 0: all")
  samples: PositiveInt = key(4, "k of avg@k, per problem")
  temperature: Temperature = key(1.0, "0: greedy")
  top_k: NonNegativeInt = key(0, "0: all tokens")
  top_p: ranges.PositiveFraction = key(1.0, "1: all tokens")
  max_new_tokens: NonNegativeInt = key(0, "0: sampling.max_new_tokens")
  greedy: bool = key(True, "one greedy response per problem as well")
  batch: PositiveInt = key(64, "problems that are scored and written down together")
  benchmarks: dict[str, BenchmarkConfig] = key({}, "further ones, by name")

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
