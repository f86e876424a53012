"""Benchmarks: average Pass@1 over k samples, pass@k, greedy accuracy, rating.

An evaluation runs over chunks of problems and writes each finished chunk down. One that was
interrupted goes on behind the last of them, provided that everything it depends on is the same: the
weights (by a checksum), the problems, the verifier and the settings.
"""

import dataclasses
import functools
import hashlib
import json
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gspo_jax import elo, metrics
from gspo_jax.models.sizes import ComputeConfig, ModelConfig
from gspo_jax.rewards import Scorer
from gspo_jax.sampling import generate
from gspo_jax.structs import Prompt, Rollout
from gspo_jax.tokenizer import Tokenizer
from gspo_jax.unfinished import Unfinished, checksums, write

Row = dict[str, Any]
SHOWN = 1000  # characters of a gold answer in records: the tests of a program take megabytes


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
  """One benchmark beside `data.eval`; its metrics are eval/<name>/..."""

  data: str  # a source, as data.eval; "": the benchmark is left out
  reward: str  # verifier, as reward.name; "": the one of the run
  problems: int  # to use, evenly spread over the set; 0: all
  samples: int  # k, per problem
  pass_at: tuple[int, ...]  # pass@k as well, for k up to `samples`
  rating: bool  # a rating against the problems' own, their field `rating`
  standings: str  # file of contests, for a rating against those who took part (elo.read_standings)

  def __post_init__(self):
    if self.samples < 1 or self.problems < 0:
      raise ValueError(f"a benchmark with samples={self.samples}, problems={self.problems}")
    if not all(1 <= k <= self.samples for k in self.pass_at):
      raise ValueError(f"pass_at={self.pass_at} must lie between 1 and samples={self.samples}")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  every: int  # iterations between evaluations while training
  problems: int  # held-out problems to use, evenly spread over the set; 0: all
  samples: int  # k, per problem
  temperature: float
  top_k: int  # 0: all tokens
  top_p: float  # 1: all tokens
  max_new_tokens: int
  greedy: bool  # one greedy response per problem as well
  batch: int  # problems sampled at once; what an interruption can lose
  benchmarks: dict[str, BenchmarkConfig]  # further ones, by name


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """A benchmark with its problems and verifier; the one without a name is `data.eval`."""

  name: str
  config: BenchmarkConfig
  problems: Sequence[Prompt]
  score: Scorer

  def __post_init__(self):
    without = [p.id for p in self.problems if self.config.rating and "rating" not in dict(p.info)]
    if without:
      raise ValueError(
        f"eval.benchmarks.{self.name}: the problem {without[0]} has no rating, and"
        f" {len(without) - 1} more; filter them out (`where rating>0`) or set rating=False"
      )
    unknown = sorted({dict(p.info).get("contest_id", "") for p in self.problems} - {*self.contests})
    if self.config.standings and unknown:
      raise ValueError(
        f"eval.benchmarks.{self.name}: problems of the contests {', '.join(unknown)}, which"
        f" {self.config.standings} does not have"
      )

  @functools.cached_property
  def contests(self) -> dict[str, elo.Contest]:
    return elo.read_standings(self.config.standings) if self.config.standings else {}


@dataclasses.dataclass(frozen=True)
class Evaluator:
  """What an evaluation needs besides parameters."""

  config: EvalConfig
  model: ModelConfig
  compute: ComputeConfig
  benchmarks: Sequence[Benchmark]
  tokenizer: Tokenizer
  prompt_length: int
  seed: int
  directory: Path | None = None  # of results and of unfinished evaluations; None: neither
  identity: str = ""  # what else the responses and their scores depend on

  def __call__(self, params: Any, step: int = 0) -> tuple[Row, list[Row]]:
    """Metrics by the names of metrics.jsonl, and a record of every sampled response.

    The same problems and the same random numbers at every call, so that what differs between two
    evaluations is the policy. `step` names the files of results. `time/eval/...` are seconds.
    """
    c, row, records = self.config, {}, []
    log = Unfinished(self.directory, self._key(params))
    passes = [(b, b.config.samples, c.temperature) for b in self.benchmarks]
    passes += [(b, 1, 0.0) for b in self.benchmarks if c.greedy]
    with _Bar(sum(-(-len(b.problems) // c.batch) for b, _, _ in passes)) as bar:
      results = [self._pass(params, *args, log, bar) for args in passes]
    for benchmark, sampled in zip(self.benchmarks, results):
      prefix = f"eval/{benchmark.name}/" if benchmark.name else "eval/"
      row |= {prefix + name: value for name, value in summary(benchmark, sampled).items()}
      for stage in ("sample", "score"):
        seconds = sum(chunk["seconds"][stage] for chunk in sampled)
        row[f"time/{prefix}{stage}"] = seconds
      records += [record for chunk in sampled for record in chunk["records"]]
    for benchmark, greedy in zip(self.benchmarks, results[len(self.benchmarks) :]):
      prefix = f"eval/{benchmark.name}/" if benchmark.name else "eval/"
      row[f"{prefix}greedy"] = float(_right(benchmark, greedy).mean())
    self._write_problems(results, step)
    return row, records

  def _pass(
    self,
    params: Any,
    benchmark: Benchmark,
    samples: int,
    temperature: float,
    log: "Unfinished",
    bar: "_Bar",
  ) -> list[Row]:
    """`samples` responses to each problem, scored, chunk by chunk."""
    chunks = []
    for start in range(0, len(benchmark.problems), self.config.batch):
      name = f"{benchmark.name}/{'samples' if temperature else 'greedy'}/{samples}/{start}"
      chunk = log.find(name)
      if chunk is None:
        problems = benchmark.problems[start : start + self.config.batch]
        chunk = dict(chunk=name) | self._chunk(params, benchmark, problems, samples, temperature)
        log.add(chunk)
      chunks.append(chunk)
      bar.advance()
    return chunks

  def _chunk(self, params, benchmark, problems, samples, temperature) -> Row:
    c, problems = self.config, list(problems)
    # The last chunk is filled up, so that every chunk has the shape that is already compiled.
    size = min(c.batch, len(benchmark.problems))
    full = problems + [problems[-1]] * (size - len(problems))
    started = time.perf_counter()
    rollout = generate(
      params,
      self.model,
      [p.tokens for p in full],
      group_size=samples,
      max_new_tokens=c.max_new_tokens,
      temperature=temperature,
      top_k=c.top_k,
      top_p=c.top_p,
      stop_ids=self.tokenizer.stop_ids,
      seed=self.seed,
      pad_id=self.tokenizer.pad_id,
      prompt_length=self.prompt_length,
      compute=self.compute,
    )
    sampled = time.perf_counter()
    rows = range(len(problems) * samples)
    responses = [self.tokenizer.decode(rollout.response(row)) for row in rows]
    scores = benchmark.score(responses, [p.answer for p in problems for _ in range(samples)])
    records = list(self._records(benchmark, problems, rollout, responses, scores.correct))
    seconds = dict(sample=sampled - started, score=time.perf_counter() - sampled)
    return dict(records=records, outcomes=dict(scores.outcomes), seconds=seconds)

  def _records(
    self,
    benchmark: Benchmark,
    problems: list[Prompt],
    rollout: Rollout,
    responses: list[str],
    right_B: np.ndarray,
  ) -> Iterator[Row]:
    samples = len(responses) // len(problems)
    for row, response in enumerate(responses):
      problem = problems[row // samples]
      record = dict(
        prompt_id=problem.id,
        sample=row % samples,
        prompt=problem.question,
        response=response,
        answer=problem.answer[:SHOWN],
        reward=float(right_B[row]),
        length=int(rollout.lengths[row]),
        truncated=not bool(rollout.stopped[row]),
        eval=True,
      )
      yield record | (dict(benchmark=benchmark.name) if benchmark.name else {})

  def _key(self, params: Any) -> str:
    """Changes with everything that a response or its score depends on."""
    settings = dataclasses.asdict(self.config) | dict(every=0, benchmarks={})
    sets = [
      (b.name, b.config, [(p.id, p.tokens, zlib.crc32(p.answer.encode())) for p in b.problems])
      for b in self.benchmarks
    ]
    rest = (self.model, self.compute, self.prompt_length, self.seed, self.tokenizer.stop_ids)
    weights = [int(x) for x in jax.device_get(checksums(params))]
    text = repr((settings, sets, rest, self.identity, weights))
    return hashlib.sha256(text.encode()).hexdigest()

  def _write_problems(self, results: Sequence[Sequence[Row]], step: int) -> None:
    """`<benchmark>_<step>.jsonl`: one line per problem."""
    if self.directory is None or jax.process_index():
      return
    for benchmark, sampled in zip(self.benchmarks, results):
      rows = problem_rows(benchmark, sampled)
      name = f"{benchmark.name or 'eval'}_{step:06d}.jsonl"
      write(self.directory / name, "".join(json.dumps(row) + "\n" for row in rows))


def summary(benchmark: Benchmark, chunks: Sequence[Row]) -> dict[str, float]:
  """What a benchmark comes to, by name."""
  right_PG, records = _right(benchmark, chunks), [r for chunk in chunks for r in chunk["records"]]
  accuracy_P = right_PG.mean(1)
  row = _interval("accuracy", accuracy_P)
  for k in benchmark.config.pass_at:
    row |= _interval(f"pass@{k}", pass_at_k(right_PG.shape[1], right_PG.sum(1), k))
  if benchmark.config.rating:
    rating_P = np.array([float(dict(p.info)["rating"]) for p in benchmark.problems])
    picks = _resamples(len(rating_P))
    low, high = np.percentile(elo.rating(accuracy_P[picks], rating_P[picks]), [2.5, 97.5])
    row |= {"rating": float(elo.rating(accuracy_P, rating_P))}
    row |= {"rating/low": float(low), "rating/high": float(high)}
  if benchmark.config.standings:
    values = elo.virtual_rating(*_participations(benchmark, right_PG))
    row |= dict(zip(("contest_rating", "contest_rating/low", "contest_rating/high"), values))
  row["response_length/mean"] = float(np.mean([r["length"] for r in records]))
  row["truncated_fraction"] = float(np.mean([r["truncated"] for r in records]))
  for name in sorted({name for chunk in chunks for name in chunk["outcomes"]}):
    count = sum(chunk["outcomes"].get(name, 0) for chunk in chunks)
    row[f"verifier/{name}"] = count / len(records)
  return row


def _participations(
  benchmark: Benchmark, right_PG: np.ndarray
) -> tuple[list[np.ndarray], list[elo.Contest]]:
  """Points of each virtual participation, by contest: in sample g, the problems that it solved."""
  points: dict[str, np.ndarray] = {}
  for problem, right_G in zip(benchmark.problems, right_PG):
    info = dict(problem.info)
    gained_G = right_G * float(info.get("points", 1))
    points[info["contest_id"]] = points.get(info["contest_id"], 0) + gained_G
  return list(points.values()), [benchmark.contests[name] for name in points]


def problem_rows(benchmark: Benchmark, chunks: Sequence[Row]) -> Iterator[Row]:
  """One row per problem: how many of its samples were right, how long they were."""
  records = [record for chunk in chunks for record in chunk["records"]]
  k = benchmark.config.samples
  for i, problem in enumerate(benchmark.problems):
    mine = records[i * k : (i + 1) * k]
    right = sum(record["reward"] > 0 for record in mine)
    yield dict(
      id=problem.id,
      benchmark=benchmark.name or "eval",
      samples=k,
      right=right,
      accuracy=right / k,
      response_length=sum(record["length"] for record in mine) / k,
      truncated=sum(record["truncated"] for record in mine),
      **dict(problem.info),
    )


def pass_at_k(samples: int, right_P: np.ndarray, k: int) -> np.ndarray:
  """The probability that k samples hold a right one, by problem, without bias: of n samples, c of
  them right, 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv:2107.03374, eq. 1)."""
  total = math.comb(samples, k)
  return np.array([1 - math.comb(samples - int(c), k) / total for c in right_P])


def choose(source: Sequence[Prompt], problems: int) -> list[Prompt]:
  """`problems` of the held-out set, evenly spread over it; all of them for 0."""
  count = len(source) if problems == 0 else min(problems, len(source))
  return [source[i * len(source) // count] for i in range(count)]


def bootstrap(value_P: np.ndarray, resamples: int = 1000) -> tuple[float, float]:
  """95 % interval of the mean by resampling problems (not samples: they share their problem)."""
  low, high = np.percentile(value_P[_resamples(len(value_P), resamples)].mean(1), [2.5, 97.5])
  return float(low), float(high)


def _resamples(problems: int, resamples: int = 1000) -> np.ndarray:
  rng = np.random.default_rng(zlib.crc32(b"bootstrap"))
  return rng.integers(0, problems, (resamples, problems))


def _interval(name: str, value_P: np.ndarray) -> dict[str, float]:
  low, high = bootstrap(value_P)
  return {name: float(value_P.mean()), f"{name}/low": low, f"{name}/high": high}


def _right(benchmark: Benchmark, chunks: Sequence[Row]) -> np.ndarray:
  """1 where a sample was right, [problems, samples]."""
  right = [record["reward"] for chunk in chunks for record in chunk["records"]]
  return np.array(right, np.float32).reshape(len(benchmark.problems), -1)


class _Bar:
  """Progress over chunks, for evaluations that take longer than a few seconds."""

  PATIENCE_S = 5.0

  def __init__(self, chunks: int, progress: Callable[..., Any] = metrics.Progress):
    self._chunks, self._done, self._started = chunks, 0, time.monotonic()
    self._make = functools.partial(progress, "eval", chunks)
    self._progress = None

  def advance(self) -> None:
    self._done += 1
    if self._progress is None and time.monotonic() - self._started > self.PATIENCE_S:
      self._progress = self._make(start=self._done - 1)
    if self._progress is not None and jax.process_index() == 0:
      self._progress.update(self._done, {})

  def __enter__(self) -> "_Bar":
    return self

  def __exit__(self, *_: object) -> None:
    if self._progress is not None:
      self._progress.close()
