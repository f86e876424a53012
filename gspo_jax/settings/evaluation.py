"""Section `eval`."""

import re
from typing import Annotated

from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import Name, NonNegativeInt, PositiveInt, Range, Temperature, key
from gspo_jax.settings.rewards import VERIFIERS

_NEVER = (
  "the first and the last evaluation are always made; for these two alone set a number above "
  "rl.iterations"
)


@ranges.section("eval.benchmarks")
class BenchmarkConfig:
  """A benchmark in addition to `data.eval`. Its metrics are eval/<name>/..."""

  data: str = key("", 'source of problems, named as in data.train; "": no benchmark')
  reward: Annotated[str, Name(("", *VERIFIERS))] = key(
    "", 'verifier, named as in reward.name; "": the verifier or environment of the run'
  )
  problems: NonNegativeInt = key(0, "number of problems, evenly spread over the set; 0: all")
  samples: PositiveInt = key(
    4, "k, number of responses per problem. The metric accuracy is avg@k, the share of right ones."
  )
  pass_at: tuple[PositiveInt, ...] = key((), "values k of the metrics pass@k, at most samples")
  rating: bool = key(
    False, "True: report an Elo rating of the model, from the field `rating` of the problems"
  )
  standings: str = key(
    "",
    "file of contest standings (JSON lines), for a rating of the model among the human "
    'participants; "": none',
  )


@ranges.section("eval")
class EvalConfig:
  """Evaluations during training, and of job=eval. docs/evaluation.md"""

  every: Annotated[int, Range(1, 1_000_000, reason=_NEVER)] = key(
    20, "number of iterations between evaluations during training"
  )
  problems: NonNegativeInt = key(
    0, "number of held-out problems, evenly spread over the set; 0: all"
  )
  samples: PositiveInt = key(
    4, "k, number of responses per problem. The metric accuracy is avg@k, the share of right ones."
  )
  temperature: Temperature = key(1.0, "temperature of the samples; 0: greedy")
  top_k: NonNegativeInt = key(0, "sample from this number of likeliest tokens; 0: from all tokens")
  top_p: ranges.PositiveFraction = key(
    1.0, "sample from the likeliest tokens up to this total probability; 1: from all tokens"
  )
  max_new_tokens: NonNegativeInt = key(
    0, "largest number of tokens of a response; 0: sampling.max_new_tokens"
  )
  greedy: bool = key(True, "True: also sample one greedy response per problem")
  batch: PositiveInt = key(
    64, "largest number of problems that are scored and logged together; see engine.slots"
  )
  benchmarks: dict[str, BenchmarkConfig] = key({}, "further benchmarks, by name")

  def __post_init__(self):
    for name, benchmark in self.benchmarks.items():
      key, k = f"eval.benchmarks.{name}", max(benchmark.pass_at, default=0)
      if name == "eval" or not re.fullmatch(r"[\w-]+", name):
        raise ValueError(
          f"{key}: a benchmark's name is part of files and metrics: use letters, digits, _ and -; "
          "eval is reserved for data.eval"
        )
      if k > benchmark.samples:
        raise ValueError(f"{key}.pass_at={k} must be at most {key}.samples={benchmark.samples}")

  def figures(self) -> list[str]:
    """Returns names of an evaluation's metrics. Verifiers and environments may add metrics."""
    metrics = []
    for name, benchmark in [("", None), *self.benchmarks.items()]:
      names = ["accuracy", *(f"pass@{k}" for k in benchmark.pass_at)] if benchmark else ["accuracy"]
      names += ["rating"] * (benchmark is not None and benchmark.rating)
      names += ["contest_rating"] * bool(benchmark and benchmark.standings)
      names = [figure + end for figure in names for end in ("", "/low", "/high")]
      names += [
        "reward/mean",
        "response_length/mean",
        "truncated_fraction",
        *["greedy"] * self.greedy,
      ]
      metrics += [f"eval/{name}/{figure}" if name else f"eval/{figure}" for figure in names]
    return metrics
