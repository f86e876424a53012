"""Evaluation on benchmarks: mean accuracy of samples, pass@k, greedy accuracy, rating, reward.

Problems are scored and logged in chunks of up to `eval.batch` problems, in order of completion. If
an evaluation was interrupted, the next one with the same weights, problems, verifier and settings
evaluates only the missing problems (resume.py).
"""

import collections
import dataclasses
import hashlib
import json
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import logging

from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.evaluation.benchmarks import Benchmark
from gspo_jax.evaluation.resume import UNFINISHED, ResumeLog, checksums
from gspo_jax.evaluation.statistics import problem_rows, right_answers, summary
from gspo_jax.rewards import require_verdicts
from gspo_jax.rewards.signals import Signals
from gspo_jax.runs.metrics import Row
from gspo_jax.runs.progress import Progress
from gspo_jax.sampling import Driver, Engine, Trajectory, Workload
from gspo_jax.sampling.driver import new_groups
from gspo_jax.sampling.trajectory import right, totals
from gspo_jax.sampling.transcript import transcripts
from gspo_jax.settings.evaluation import EvalConfig
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.sampling import EnvironmentConfig, SamplingConfig
from gspo_jax.structs import Prompt
from gspo_jax.system import hosts, workers
from gspo_jax.system.files import write_whole
from gspo_jax.tasks.environments import time_limit
from gspo_jax.verifiers.pool import Failure

# Maximum number of characters of a gold answer in records. Tests of programs may have megabytes.
ANSWER_CHARS = 1000


class Round(NamedTuple):
  """Sampling of all problems of a benchmark at one temperature."""

  benchmark: Benchmark
  role: str  # "samples" or "greedy".
  samples: int  # Number of responses to each problem.
  temperature: float

  @property
  def name(self) -> str:
    return f"{self.benchmark.name}/{self.role}/{self.samples}"


def workload(
  c: EvalConfig, temperature: float, problems: int, samples: int, **requests: Any
) -> Workload:
  """Returns the engine's workload for an evaluation.

  Args:
    c: section `eval`.
    temperature: temperature of the samples.
    problems: number of problems.
    samples: number of responses to each problem.
    requests: further fields of `Workload`.
  """
  sampling = SamplingConfig(temperature, c.top_k, c.top_p, max_new_tokens=c.max_new_tokens)
  size = dict(trajectories=problems * samples, group_size=samples, slots=c.batch * samples)
  return Workload(sampling, **size, **requests)


@dataclasses.dataclass(frozen=True)
class Evaluator:
  """Evaluates an engine's weights on benchmarks."""

  config: EvalConfig
  model: ModelConfig
  benchmarks: Sequence[Benchmark]
  tokenizer: Tokenizer
  prompt_length: int  # Maximum number of tokens of a prompt.
  seed: int
  # Limits of conversations; None if no benchmark has an environment.
  environment: EnvironmentConfig | None = None
  stop_strings: tuple[str, ...] = ()
  directory: Path | None = None  # Directory of results and resume log; None to write no files.
  identity: str = ""  # Text of further settings that change responses or scores, for `key`.
  # Smallest total reward of a right conversation. None means that a conversation is right if its
  # metric `correct` (`Environment.figures`) is 1 or more.
  right_from: float | None = None
  # Measures the signals of section `constraints`, except in conversations. None if there are no
  # constraints.
  signals: Signals | None = None

  def __call__(
    self, engine: Engine, key: str = "", step: int = 0, alone: bool = False
  ) -> tuple[Row, list[Row]]:
    """Evaluates the engine's weights on all benchmarks.

    Problems and PRNG keys are the same in every call, so two evaluations differ only by the policy.

    Args:
      engine: engine with loaded weights.
      key: result of `self.key` for these weights. An interrupted evaluation with this key is
        resumed.
      step: step of the weights, for the names of result files.
      alone: whether the process only evaluates. If so, the elapsed time, compilation included,
        is shown until the first problems are finished.

    Returns:
      Metrics by name, and a record of each response except those of greedy decoding.

    Raises:
      NoVerdictError: none of a round's responses so far has a verdict.
    """
    c, row, records = self.config, {}, []
    rounds = [Round(b, "samples", b.config.samples, c.temperature) for b in self.benchmarks]
    greedy_benchmarks = self.benchmarks if c.greedy else ()
    rounds += [Round(b, "greedy", 1, 0.0) for b in greedy_benchmarks]
    log = ResumeLog(self.directory, key)
    total = sum(len(r.benchmark.problems) for r in rounds)
    logged = sum(len(chunk["problems"]) for r in rounds for chunk in log.find(r.name))
    with Progress("eval", total, start=logged, delay=5.0, active=hosts.is_first()) as progress:
      if alone:
        progress.wait()
      all_results = [self._round(engine, r, log, progress) for r in rounds]
    results, greedy = all_results[: len(self.benchmarks)], all_results[len(self.benchmarks) :]
    for b, result in zip(self.benchmarks, results):
      row |= {b.prefix + name: value for name, value in summary(b, result).items()}
      row |= {f"time/{b.prefix}{stage}": x for stage, x in result["seconds"].items()}
      records += result["records"]
    for b, result in zip(greedy_benchmarks, greedy):
      row[f"{b.prefix}greedy"] = float(right_answers(b, result).mean())
    self._write_problems(results, step)
    unknown = sum("unknown" in record for x in all_results for record in x["records"])
    if unknown and hosts.is_first():
      logging.warning("%d responses of the evaluation have no verdict, and count as wrong", unknown)
    return row, records

  def key(self, params: Any) -> str:
    """Returns a hash of all inputs to responses and scores.

    Args:
      params: parameters to evaluate, in the trainer's layout.
    """
    # `every` and `batch` do not affect responses, and benchmarks are in `problem_sets`.
    settings = dataclasses.asdict(self.config) | dict(every=0, batch=0, benchmarks={})
    problem_sets = [
      (
        b.name,
        b.config,
        [(p.id, p.tokens, zlib.crc32(repr((p.answer, p.info)).encode())) for p in b.problems],
      )
      for b in self.benchmarks
    ]
    ends = self.tokenizer.stop_ids, self.stop_strings
    sampling = (self.model, self.prompt_length, self.seed, *ends)
    weights = checksums(params) if problem_sets else []
    text = repr((settings, problem_sets, sampling, self.identity, weights))
    return hashlib.sha256(text.encode()).hexdigest()

  def remove_log(self) -> None:
    """Removes the resume log."""
    if self.directory is not None and hosts.is_first():
      (self.directory / UNFINISHED).unlink(missing_ok=True)

  def _round(
    self, engine: Engine, sampling_round: Round, log: ResumeLog, progress: Progress
  ) -> Row:
    """Samples and scores a round, except for problems in the log.

    Returns:
      A dict with three entries. `records` has all responses, ordered by problem. `outcomes` has
      counts, and `seconds` the time of each stage.
    """
    chunks = log.find(sampling_round.name)
    done = {index for chunk in chunks for index in chunk["problems"]}
    remaining = [i for i in range(len(sampling_round.benchmark.problems)) if i not in done]
    for indices, responses, seconds in self._sample(engine, sampling_round, remaining):
      chunk = self._score(sampling_round.benchmark, indices, responses) | dict(
        chunk=sampling_round.name, problems=indices
      )
      chunk["seconds"]["sample"] = seconds
      self._require_verdicts([*chunks, chunk])
      log.add(chunk)
      chunks.append(chunk)
      progress.update(progress.step + len(indices), {})

    by_problem, outcomes = {}, collections.Counter()
    for chunk in chunks:
      outcomes.update(chunk["outcomes"])
      for n, i in enumerate(chunk["problems"]):
        by_problem[i] = chunk["records"][n * sampling_round.samples :][: sampling_round.samples]
    seconds = {key: sum(c["seconds"][key] for c in chunks) for key in ("sample", "score")}
    records = [record for i in sorted(by_problem) for record in by_problem[i]]
    return dict(records=records, outcomes=outcomes, seconds=seconds)

  def _require_verdicts(self, chunks: Sequence[Row]) -> None:
    """Raises NoVerdictError if no response has a verdict. Before that, writes the records."""
    records = [record for chunk in chunks for record in chunk["records"]]
    reasons = [record["unknown"] for record in records if "unknown" in record]
    path = (self.directory or Path()) / "unknown.jsonl"
    if len(reasons) == len(records) and self.directory and hosts.is_first():
      self.directory.mkdir(parents=True, exist_ok=True)
      write_whole(path, (json.dumps(record) + "\n" for record in records))
    require_verdicts(reasons, len(records), str(path))

  def _sample(
    self, engine: Engine, sampling_round: Round, indices: list[int]
  ) -> Iterator[tuple[list[int], list[Trajectory], float]]:
    """Yields chunks of up to `eval.batch` finished problems: (indices, trajectories, seconds)."""
    if not indices:
      return
    environment = sampling_round.benchmark.environment
    multi_turn = environment is not None
    workers = self.environment.workers if multi_turn else 0
    load = workload(
      self.config,
      sampling_round.temperature,
      len(sampling_round.benchmark.problems),
      sampling_round.samples,
      prompt_length=self.prompt_length,
      stop_ids=tuple(self.tokenizer.stop_ids),
      stop_strings=self.stop_strings,
      several_turns=multi_turn,
      vocabulary=self.tokenizer.vocab_size,
    )
    driver = Driver(
      engine,
      load,
      vocab_size=self.model.vocab_size,
      max_turns=self.environment.max_turns if multi_turn else 1,
      workers=workers,
      time_limit_s=time_limit(environment),
    )
    batches = self._new_groups(sampling_round, indices[-1] + 1, workers)
    ready, unfinished = [], set(indices)
    groups: dict[int, list[Trajectory]] = {}  # By problem; without problems of earlier chunks.
    active: set[Trajectory] = set()

    def begin() -> None:
      """Begins the next problems while slots are free."""
      while len(active) < load.slots and (batch := next(batches, None)):
        for group in batch:
          if (index := group[0].tag) in unfinished:
            groups[index] = group
            driver.begin(group)
            active.update(x for x in group if not x.finished)

    started, remaining = time.perf_counter(), len(indices)
    begin()
    for trajectory in driver.run():
      index = trajectory.tag
      trajectory.environment = None  # Environments may be large.
      active.discard(trajectory)
      begin()
      if index not in unfinished or not all(sample.finished for sample in groups[index]):
        continue
      unfinished.remove(index)
      ready.append(index)
      if len(ready) == min(self.config.batch, remaining):
        remaining -= len(ready)
        ready.sort()
        seconds = time.perf_counter() - started
        yield ready, [sample for i in ready for sample in groups.pop(i)], seconds
        ready, started = [], time.perf_counter()

  def _new_groups(
    self, sampling_round: Round, count: int, workers: int
  ) -> Iterator[list[list[Trajectory]]]:
    """Yields groups of the first `count` problems, batch by batch.

    Problems with environments are in batches of `eval.batch`; all others are in one batch.
    PRNG keys depend on sample numbers, and these continue over problems with equal prompts. So
    problems already in the log have groups, too. Otherwise numbers of other samples would change.
    """
    benchmark, numbers = sampling_round.benchmark, collections.Counter()
    environment = benchmark.environment
    size = count if environment is None else self.config.batch
    for start in range(0, count, size):
      batch = benchmark.problems[start : min(start + size, count)]
      yield new_groups(
        batch,
        sampling_round.samples,
        self.seed,
        self.prompt_length,
        environment,
        lambda messages: self.tokenizer.encode(self.tokenizer.chat(messages)),
        tags=range(start, start + len(batch)),
        vocab_size=self.tokenizer.vocab_size,
        workers=workers,
        numbers=numbers,
      )

  def _score(self, benchmark: Benchmark, indices: list[int], trajectories: list[Trajectory]) -> Row:
    """Scores responses to some problems; returns a dict like `_round`."""
    problems = [benchmark.problems[i] for i in indices]
    samples = len(trajectories) // len(problems)
    responses = [self.tokenizer.decode(trajectory.tokens.tolist()) for trajectory in trajectories]
    started = time.perf_counter()
    prompts = [problem for problem in problems for _ in range(samples)]
    outcomes, verdicts = hosts.run_on_first_host(
      lambda: workers.interruptible(self._verdicts, benchmark, prompts, responses, trajectories)
    )
    name = dict(benchmark=benchmark.name) if benchmark.name else {}
    starts = range(0, len(trajectories), samples)
    groups = [trajectories[start : start + samples] for start in starts]
    conversations = [row for group in groups for row in transcripts(group, self.tokenizer)]
    records = [
      dict(
        prompt_id=problem.id,
        sample=i % samples,
        prompt=problem.question,
        response=responses[i],
        answer=problem.answer[:ANSWER_CHARS],
        length=trajectories[i].length,
        truncated=trajectories[i].truncated,
        eval=True,
      )
      | conversations[i]
      | verdicts[i]
      | name
      for i, problem in enumerate(prompts)
    ]
    seconds = dict(score=time.perf_counter() - started)
    return dict(records=records, outcomes=outcomes, seconds=seconds)

  def _verdicts(
    self,
    benchmark: Benchmark,
    prompts: Sequence[Prompt],
    responses: Sequence[str],
    trajectories: Sequence[Trajectory],
  ) -> tuple[Mapping[str, int], list[Row]]:
    """Scores responses with the verifier or environments. Call it on the first host only.

    Returns:
      Counts of outcomes, and further fields of each response's record.
    """
    if benchmark.environment is not None:
      unknown = {i: f"crash: {x.failure}" for i, x in enumerate(trajectories) if x.failure}
      figures = [{k: x for k, x in t.figures.items() if k != "correct"} for t in trajectories]
      right_B = right(trajectories, self.right_from)
      rows = [
        dict(reward=float(total), correct=bool(is_right), figures=row)
        for total, is_right, row in zip(totals(trajectories), right_B, figures)
      ]
      outcomes = dict(crash=len(unknown)) if unknown else {}
    else:
      stopped = [trajectory.stopped for trajectory in trajectories]
      responses = [
        Failure("crash", x.failure) if x.failure else y for x, y in zip(trajectories, responses)
      ]
      scores = benchmark.score(responses, prompts, finished=stopped)
      outcomes, unknown = dict(scores.outcomes), scores.unknown
      values = scores.correct if scores.values is None else scores.values
      rows = [
        dict(reward=float(value), correct=bool(is_right))
        for value, is_right in zip(values, scores.correct)
      ]
      if self.signals is not None:
        tokens = [trajectory.tokens for trajectory in trajectories]
        measured, unmeasured = self.signals(responses, tokens, stopped, prompts)
        missing = {*unmeasured, *unknown}
        for i, row in enumerate(rows):
          row["signals"] = {n: None if i in missing else float(x[i]) for n, x in measured.items()}
    for i, reason in unknown.items():
      rows[i]["unknown"] = reason
    return outcomes, rows

  def _write_problems(self, results: Sequence[Row], step: int) -> None:
    """Writes `<benchmark>_<step>.jsonl` for each benchmark, one line per problem.

    The file of `data.eval` is `eval_<step>.jsonl`.
    """
    if self.directory is None or not hosts.is_first():
      return
    for benchmark, result in zip(self.benchmarks, results):
      rows = problem_rows(benchmark, result)
      name = f"{benchmark.name or 'eval'}_{step:06d}.jsonl"
      write_whole(self.directory / name, (json.dumps(row) + "\n" for row in rows))
