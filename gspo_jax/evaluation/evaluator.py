"""Benchmarks: average Pass@1 over k samples, pass@k, greedy accuracy, rating.

Problems are scored and written down in chunks, as their samples are finished. An evaluation that
was interrupted goes on with the problems that are missing, provided that everything it depends on
is the same: the weights (by a checksum), the problems, the verifier and the settings.
"""

import collections
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

from gspo_jax import ranges
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.evaluation import elo
from gspo_jax.evaluation.resume import Unfinished, checksums, write
from gspo_jax.models.sizes import ComputeConfig, ModelConfig
from gspo_jax.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt
from gspo_jax.rewards import Scorer
from gspo_jax.runs import metrics
from gspo_jax.sampling import EngineConfig, Request, Response, SamplingConfig, Scheduler
from gspo_jax.sampling.conversation import Conversation, Conversations, EnvironmentConfig, figures
from gspo_jax.structs import Prompt
from gspo_jax.tasks.environments import Make

Row = dict[str, Any]
SHOWN = 1000  # characters of a gold answer in records: the tests of a program take megabytes


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
  """One benchmark beside `data.eval`; its metrics are eval/<name>/..."""

  data: str  # a source, as data.eval; "": the benchmark is left out
  reward: str  # verifier, as reward.name; "": the one of the run
  problems: NonNegativeInt  # to use, evenly spread over the set; 0: all
  samples: PositiveInt  # k, per problem
  pass_at: tuple[PositiveInt, ...]  # pass@k as well, for k up to `samples`
  rating: bool  # a rating against the problems' own, their field `rating`
  standings: str  # file of contests, for a rating against those who took part (elo.read_standings)

  def __post_init__(self):
    if not all(1 <= k <= self.samples for k in self.pass_at):
      raise ValueError(f"pass_at={self.pass_at} must lie between 1 and samples={self.samples}")
    ranges.check(self, "eval.benchmarks")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  every: PositiveInt  # iterations between evaluations while training
  problems: NonNegativeInt  # to use of the held-out ones, evenly spread over the set; 0: all
  samples: PositiveInt  # k, per problem
  temperature: NonNegativeFloat
  top_k: NonNegativeInt  # 0: all tokens
  top_p: ranges.PositiveFraction  # 1: all tokens
  min_p: ranges.FractionBelowOne  # 0: all tokens
  max_new_tokens: NonNegativeInt  # 0: sampling.max_new_tokens, by `config.derived`
  greedy: bool  # one greedy response per problem as well
  batch: PositiveInt  # problems that are scored and written down together
  benchmarks: dict[str, BenchmarkConfig]  # further ones, by name

  def __post_init__(self):
    ranges.check(self, "eval")


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """A benchmark with its problems and verifier; the one without a name is `data.eval`."""

  name: str
  config: BenchmarkConfig
  problems: Sequence[Prompt]
  score: Scorer
  environment: Make | None = None  # where responses are conversations, which it judges

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
  engine: EngineConfig
  benchmarks: Sequence[Benchmark]
  tokenizer: Tokenizer
  prompt_length: int
  seed: int
  directory: Path | None = None  # of results and of unfinished evaluations; None: neither
  identity: str = ""  # what else the responses and their scores depend on
  environment: EnvironmentConfig | None = None  # for benchmarks that have one

  def __call__(self, params: Any, step: int = 0) -> tuple[Row, list[Row]]:
    """Metrics by the names of metrics.jsonl, and a record of every sampled response.

    The same problems and the same random numbers at every call, so that what differs between two
    evaluations is the policy. `step` names the files of results. `time/eval/...` are seconds.
    """
    c, row, records = self.config, {}, []
    log = Unfinished(self.directory, self._key(params))
    passes = [(b, b.config.samples, c.temperature) for b in self.benchmarks]
    passes += [(b, 1, 0.0) for b in self.benchmarks if c.greedy]
    with _Bar(sum(len(b.problems) for b, _, _ in passes)) as bar:
      results = [self._pass(params, *args, log, bar) for args in passes]
    for benchmark, sampled in zip(self.benchmarks, results):
      prefix = f"eval/{benchmark.name}/" if benchmark.name else "eval/"
      row |= {prefix + name: value for name, value in summary(benchmark, sampled).items()}
      for stage in ("sample", "score"):
        row[f"time/{prefix}{stage}"] = sampled["seconds"][stage]
      records += sampled["records"]
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
    log: Unfinished,
    bar: "_Bar",
  ) -> Row:
    """`samples` responses to each problem, scored: their records, and sums over them."""
    name = f"{benchmark.name}/{'samples' if temperature else 'greedy'}/{samples}"
    chunks = log.find(name)
    done = {index for chunk in chunks for index in chunk["problems"]}
    bar.advance(len(done))
    left = [i for i in range(len(benchmark.problems)) if i not in done]
    for indices, responses, seconds in self._sample(params, benchmark, left, samples, temperature):
      chunk = self._scored(benchmark, indices, responses) | dict(chunk=name, problems=indices)
      chunk["seconds"]["sample"] = seconds
      log.add(chunk)
      chunks.append(chunk)
      bar.advance(len(indices))

    by_problem = {
      i: chunk["records"][n * samples :][:samples]
      for chunk in chunks
      for n, i in enumerate(chunk["problems"])
    }
    outcomes = collections.Counter()
    for chunk in chunks:
      outcomes.update(chunk["outcomes"])
    seconds = {key: sum(c["seconds"][key] for c in chunks) for key in ("sample", "score")}
    records = [record for _, mine in sorted(by_problem.items()) for record in mine]
    return dict(records=records, outcomes=outcomes, seconds=seconds)

  def _sample(
    self, params, benchmark: Benchmark, indices: list[int], samples: int, temperature: float
  ) -> Iterator[tuple[list[int], list[Response | Conversation], float]]:
    """`eval.batch` problems with all their responses, as they are finished, and the seconds."""
    if not indices:
      return
    c, window = self.config, self.prompt_length + self.config.max_new_tokens
    talks = benchmark.environment is not None  # whose turns come back into the queue, one by one
    scheduler = Scheduler(
      params,
      self.model,
      SamplingConfig(temperature, c.top_k, c.top_p, c.min_p, c.max_new_tokens),
      self.engine.for_rows(len(benchmark.problems) * samples),
      window=window,
      context=window - 1 if talks else self.prompt_length,
      group_size=1 if talks else samples,
      stop_ids=len(self.tokenizer.stop_ids),
      compute=self.compute,
      detokenize=self.tokenizer.decode,
    )
    over = self._conversations if talks else self._responses
    found: dict[int, list[Response | Conversation]] = collections.defaultdict(list)
    ready: list[int] = []
    started, left = time.perf_counter(), len(indices)
    for index, response in over(scheduler, benchmark, indices, samples):
      found[index].append(response)
      if len(found[index]) < samples:
        continue
      ready.append(index)
      if len(ready) == min(c.batch, left):
        left, seconds, ready = left - len(ready), time.perf_counter() - started, sorted(ready)
        ordered = [sorted(found.pop(i), key=lambda r: r.sample) for i in ready]
        yield ready, [response for mine in ordered for response in mine], seconds
        ready, started = [], time.perf_counter()

  def _responses(
    self, scheduler: Scheduler, benchmark: Benchmark, indices: list[int], samples: int
  ) -> Iterator[tuple[int, Response]]:
    for index in indices:
      scheduler.submit(
        Request(
          tuple(benchmark.problems[index].tokens),
          self.config.max_new_tokens,
          samples=samples,
          seed=self.seed,
          stop_ids=tuple(self.tokenizer.stop_ids),
          tag=index,
        )
      )
    for response in scheduler.run():
      yield response.request.tag, response

  def _conversations(
    self, scheduler: Scheduler, benchmark: Benchmark, indices: list[int], samples: int
  ) -> Iterator[tuple[int, Conversation]]:
    conversations = Conversations(
      scheduler,
      self.environment,
      vocab_size=self.model.vocab_size,
      max_new_tokens=self.config.max_new_tokens,
      seed=self.seed,
      stop_ids=tuple(self.tokenizer.stop_ids),
      prompt_length=self.prompt_length,
      render=lambda messages: self.tokenizer.encode(self.tokenizer.chat(messages)),
    )
    for index in indices:
      conversations.begin(
        [benchmark.environment(benchmark.problems[index]) for _ in range(samples)]
      )
    for one in conversations.run():
      yield indices[one.index // samples], one

  def _scored(
    self, benchmark: Benchmark, indices: list[int], sampled: list[Response | Conversation]
  ) -> Row:
    problems = [benchmark.problems[i] for i in indices]
    samples = len(sampled) // len(problems)
    responses = [self.tokenizer.decode(response.tokens.tolist()) for response in sampled]
    started = time.perf_counter()
    if benchmark.environment is None:
      scores = benchmark.score(responses, [p.answer for p in problems for _ in range(samples)])
      outcomes, correct, reported = dict(scores.outcomes), scores.correct, [{}] * len(sampled)
    else:
      reported = [figures(one.environment, one.rewards.sum()) for one in sampled]
      outcomes, correct = {}, [one.pop("correct") for one in reported]
    records = []
    for row, response in enumerate(responses):
      problem = problems[row // samples]
      record = dict(
        prompt_id=problem.id,
        sample=row % samples,
        prompt=problem.question,
        response=response,
        answer=problem.answer[:SHOWN],
        reward=float(correct[row]),
        length=sampled[row].length,
        truncated=not sampled[row].stopped,
        eval=True,
      )
      record |= dict(figures=reported[row]) if reported[row] else {}
      records.append(record | (dict(benchmark=benchmark.name) if benchmark.name else {}))
    seconds = dict(score=time.perf_counter() - started)
    return dict(records=records, outcomes=outcomes, seconds=seconds)

  def _key(self, params: Any) -> str:
    """Changes with everything that a response or its score depends on."""
    settings = dataclasses.asdict(self.config) | dict(every=0, batch=0, benchmarks={})
    sets = [
      (b.name, b.config, [(p.id, p.tokens, zlib.crc32(p.answer.encode())) for p in b.problems])
      for b in self.benchmarks
    ]
    rest = (self.model, self.compute, self.prompt_length, self.seed, self.tokenizer.stop_ids)
    weights = [int(x) for x in jax.device_get(checksums(params))]
    text = repr((settings, sets, rest, self.identity, weights))
    return hashlib.sha256(text.encode()).hexdigest()

  def _write_problems(self, results: Sequence[Row], step: int) -> None:
    """`<benchmark>_<step>.jsonl`: one line per problem."""
    if self.directory is None or jax.process_index():
      return
    for benchmark, sampled in zip(self.benchmarks, results):
      rows = problem_rows(benchmark, sampled)
      name = f"{benchmark.name or 'eval'}_{step:06d}.jsonl"
      write(self.directory / name, "".join(json.dumps(row) + "\n" for row in rows))


def summary(benchmark: Benchmark, sampled: Row) -> dict[str, float]:
  """What a benchmark comes to, by name."""
  right_PG, records = _right(benchmark, sampled), sampled["records"]
  accuracy_P = right_PG.mean(1)
  names = records[0].get("figures", {})
  row = {name: float(np.mean([r["figures"][name] for r in records])) for name in names}
  row |= _interval("accuracy", accuracy_P)
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
  for name, count in sorted(sampled["outcomes"].items()):
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


def problem_rows(benchmark: Benchmark, sampled: Row) -> Iterator[Row]:
  """One row per problem: how many of its samples were right, how long they were."""
  records = sampled["records"]
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


def _right(benchmark: Benchmark, sampled: Row) -> np.ndarray:
  """1 where a sample was right, [problems, samples]."""
  right = [record["reward"] for record in sampled["records"]]
  return np.array(right, np.float32).reshape(len(benchmark.problems), -1)


class _Bar:
  """Progress over problems, for evaluations that take longer than a few seconds."""

  PATIENCE_S = 5.0

  def __init__(self, problems: int, progress: Callable[..., Any] = metrics.Progress):
    self._done, self._started = 0, time.monotonic()
    self._make = functools.partial(progress, "eval", problems)
    self._progress = None

  def advance(self, problems: int) -> None:
    self._done += problems
    if self._progress is None and time.monotonic() - self._started > self.PATIENCE_S:
      self._progress = self._make(start=self._done - problems)
    if self._progress is not None and jax.process_index() == 0:
      self._progress.update(self._done, {})

  def __enter__(self) -> "_Bar":
    return self

  def __exit__(self, *_: object) -> None:
    if self._progress is not None:
      self._progress.close()
