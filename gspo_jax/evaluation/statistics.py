"""Statistics of a benchmark's scored samples: accuracy, pass@k, ratings, intervals.

Suffixes of arrays: P, problems; G, samples of a problem.
"""

import math
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import special

from gspo_jax.evaluation import elo
from gspo_jax.evaluation.benchmarks import Benchmark
from gspo_jax.runs.metrics import Row, graded_reward
from gspo_jax.sampling.trajectory import means


def summary(benchmark: Benchmark, result: Row) -> dict[str, float]:
  """Returns a benchmark's metrics by name, without the benchmark's prefix.

  Args:
    benchmark: the benchmark.
    result: dictionary with `records` of all samples, problem by problem, and with `outcomes`, the
      number of samples by outcome.
  """
  right_PG, records = right_answers(benchmark, result), result["records"]
  accuracy_P = right_PG.mean(1)
  row = means([record.get("figures", {}) for record in records if "unknown" not in record])
  row |= _bounded("accuracy", accuracy_P.mean(), *bootstrap(accuracy_P))
  for k in benchmark.config.pass_at:
    pass_P = pass_at_k(right_PG.shape[1], right_PG.sum(1), k)
    row |= _bounded(f"pass@{k}", pass_P.mean(), *bootstrap(pass_P))
  if benchmark.config.rating:
    rating_P = np.array([float(dict(p.info)["rating"]) for p in benchmark.problems])
    indices = _resamples(len(rating_P))
    interval = np.percentile(elo.rating(accuracy_P[indices], rating_P[indices]), [2.5, 97.5])
    row |= _bounded("rating", elo.rating(accuracy_P, rating_P), *interval)
  if benchmark.config.standings:
    row |= _bounded("contest_rating", *elo.virtual_rating(*_participations(benchmark, right_PG)))
  rewards = [record["reward"] for record in records if "unknown" not in record]
  row |= {"reward/mean": float(np.mean(rewards))} if rewards else {}
  row["response_length/mean"] = float(np.mean([r["length"] for r in records]))
  for name in records[0].get("signals", {}):
    measured = [r["signals"][name] for r in records if r["signals"][name] is not None]
    row |= {f"constraint/{name}": float(np.mean(measured))} if measured else {}
  row["truncated_fraction"] = float(np.mean([r["truncated"] for r in records]))
  if result["outcomes"]:
    row["verifier/unknown"] = float(np.mean(["unknown" in record for record in records]))
  for name, count in sorted(result["outcomes"].items()):
    row[f"verifier/{name}"] = count / len(records)
  return row


def accuracy_lines(benchmarks: Sequence[Benchmark], row: Row) -> Iterator[str]:
  """Yields a line about each benchmark's accuracy, if measured.

  Args:
    benchmarks: the benchmarks.
    row: metrics of the evaluation.
  """
  for b in benchmarks:
    if f"{b.prefix}accuracy/low" not in row:
      continue
    low, high = (row[f"{b.prefix}accuracy/{end}"] for end in ("low", "high"))
    accuracy, greedy = row[f"{b.prefix}accuracy"], row.get(f"{b.prefix}greedy")
    reward = graded_reward(row, b.prefix)
    yield (
      f"{b.prefix}accuracy {accuracy:.1%}, 95% interval {low:.1%} to {high:.1%}"
      f" (avg@{b.config.samples}, problems: {len(b.problems):,})"
      + ("" if greedy is None else f"; greedy {greedy:.1%}")
      # Graded rewards may rise while no response is right.
      + ("\n" if reward is None else f"; mean reward {reward:.3f}\n")
    )


def _participations(
  benchmark: Benchmark, right_PG: np.ndarray
) -> tuple[list[np.ndarray], list[elo.Contest]]:
  """Returns the points of participations in each contest, and the contests.

  Participation g in a contest consists of sample g of each problem of the contest. A
  participation has the points of all problems that its samples solve. So each contest has an array
  of points [G].
  """
  points: dict[str, np.ndarray] = {}
  for problem, right_G in zip(benchmark.problems, right_PG):
    info = dict(problem.info)
    gained_G = right_G * float(info.get("points", 1))
    points[info["contest_id"]] = points.get(info["contest_id"], 0) + gained_G
  return list(points.values()), [benchmark.contests[name] for name in points]


def problem_rows(benchmark: Benchmark, result: Row) -> Iterator[Row]:
  """Yields a row for each problem, with accuracy, mean length and truncated samples."""
  records = result["records"]
  k = benchmark.config.samples
  for i, problem in enumerate(benchmark.problems):
    samples = records[i * k : (i + 1) * k]
    right = sum(record["correct"] for record in samples)
    yield dict(problem.info) | dict(
      id=problem.id,
      benchmark=benchmark.name or "eval",
      samples=k,
      right=right,
      accuracy=right / k,
      response_length=sum(record["length"] for record in samples) / k,
      truncated=sum(record["truncated"] for record in samples),
    )


def pass_at_k(samples: int, right_P: np.ndarray, k: int) -> np.ndarray:
  """Returns the unbiased estimate of pass@k for each problem.

  Pass@k is the probability that at least one of k samples is right. If c of n samples are right,
  the estimate is 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv:2107.03374, eq. 1).

  Args:
    samples: number of samples n of each problem.
    right_P: number of right samples c of each problem.
    k: number of samples in pass@k.
  """
  total = math.comb(samples, k)
  return np.array([1 - math.comb(samples - int(c), k) / total for c in right_P])


def bootstrap(value_P: np.ndarray) -> tuple[float, float]:
  """Returns the 95 % interval of the mean, from resampled problems.

  If all values are equal, resampling would give an interval of width 0. The interval of Clopper and
  Pearson for as many problems and this mean is used instead.
  """
  P, right = len(value_P), value_P.sum()
  if np.ptp(value_P) > 0:
    low, high = np.percentile(value_P[_resamples(P)].mean(1), [2.5, 97.5])
  else:
    low = special.betaincinv(right, P - right + 1, 0.025) if right else 0.0
    high = special.betaincinv(right + 1, P - right, 0.975) if right < P else 1.0
  return float(low), float(high)


def _resamples(problems: int) -> np.ndarray:
  """Returns 1,000 samples of indices with replacement, equal in every call."""
  rng = np.random.default_rng(zlib.crc32(b"bootstrap"))
  return rng.integers(0, problems, (1000, problems))


def _bounded(name: str, value: float, low: float, high: float) -> dict[str, float]:
  """Returns metrics of a value and its interval."""
  return {name: float(value), f"{name}/low": float(low), f"{name}/high": float(high)}


def right_answers(benchmark: Benchmark, result: Row) -> np.ndarray:
  """Returns 1 for right samples and 0 otherwise, float32 [problems, samples]."""
  right = [record["correct"] for record in result["records"]]
  return np.array(right, np.float32).reshape(len(benchmark.problems), -1)
