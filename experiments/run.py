"""Runs an experiment: python -m experiments.run NAME [--scale=pod] [--seeds=0,1] [--dry_run]

NAME is a folder of experiments/, or its beginning, such as e2. Results go into its results.csv and
curves.csv, line by line; then its figures and the tables of its README are updated. The same
command continues: it skips finished runs, and resumes interrupted ones from their checkpoints.
--again repeats all runs, and compares the verdict with the recorded one.
"""

import argparse
import ast
import contextlib
import dataclasses
import fcntl
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo_jax.cli import before_jax

if __name__ == "__main__":
  before_jax.begin_command("experiments")

from experiments import definition, pod, readme, results, runs
from experiments.definition import Experiment
from experiments.results import DONE, FAILED, INTERRUPTED, Store
from experiments.runs import Job
from experiments.workers import Workers, own_cores
from gspo_jax.system import stops

HOME = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "gspo_jax/experiments"
GRACE = 60.0  # Seconds for runs to save.


class Runner:
  """Makes the missing runs of an experiment.

  Args:
    home: directory of runs. All experiments share it and its cold starts.
    retry: repeats failed runs.
    only: regular expression of conditions. Runs of other conditions are not made.
  """

  def __init__(
    self, experiment: Experiment, store: Store, home: Path, retry: bool = False, only: str = ""
  ):
    self.experiment, self.store, self.home, self.retry = experiment, store, home, retry
    self.only = re.compile(only)
    self.tried: set[tuple] = set()  # Jobs of this call.
    self._planned: tuple[Any, list[Job]] = None, []

  def plan(self) -> list[Job]:
    """Returns the planned runs; later ones depend on the first stage's results."""
    table = self.store.runs
    stage = table[table.stage == runs.TUNING]
    pairs = [*zip(stage.run, stage.status)]
    if self._planned[0] != pairs:
      self._planned = pairs, runs.plan(self.experiment, self.store)
    return self._planned[1]

  def missing(self) -> list[Job]:
    """Returns the missing runs in order; reuses those of other experiments."""
    jobs, missing_jobs = self.plan(), []
    for job in jobs:
      status = self.store.status(job)
      if job.key in self.tried or status in results.SETTLED or job.stage == runs.START:
        continue
      if (status == FAILED and not self.retry) or not self.only.search(job.condition):
        continue
      missing_jobs.append(job)
    starts: dict[tuple, Job] = {}
    for job in missing_jobs:
      chain, start = [], job.start
      while start and not self.finished(start) and start.key not in self.tried:
        chain.append(start)
        start = start.start
      starts |= {start.key: start for start in reversed(chain)}
    return [*starts.values(), *missing_jobs]

  def finished(self, job: Job) -> bool:
    """Whether a run is settled, with checkpoints to start others from."""
    finished_start = (job.workdir(self.home) / "checkpoints").is_dir()
    return finished_start and self.store.status(job) in results.SETTLED

  def take_over(self) -> None:
    """Copies lines of the same runs from other experiments."""
    stores = results.others(self.store.folder)
    for job in self.plan():
      if not self.store.status(job) and (ready := results.reusable(job, stores, self.home)):
        row, curve = ready
        self.store.add_row(row | self.names(job), curve)

  def ready(self, under_way: list[Job]) -> Job | None:
    """Returns the next run with a finished start, or None."""
    busy = {job.key for job in under_way}
    for job in self.missing():
      if job.key not in busy and (job.start is None or self.finished(job.start)):
        return job
    return None

  def names(self, job: Job) -> dict[str, Any]:
    """Returns the identifying columns of a run."""
    return dict(
      experiment=self.store.folder.name,
      stage=job.stage,
      condition=job.condition,
      seed=job.seed,
      run=job.run,
      start="" if job.start is None else job.start.run,
      changes=runs.format_changes(job.changes),
    )

  def begin(self, job: Job) -> dict[str, Any]:
    """Records the run as interrupted; returns its configuration for a worker."""
    workdir = job.workdir(self.home)
    if self.store.status(job) == FAILED:
      shutil.rmtree(workdir, ignore_errors=True)
    if job.stage == runs.START and job.start and not workdir.exists():  # Continues a shorter one.
      copied = shutil.copytree(
        job.start.workdir(self.home), workdir.with_suffix(".part"), dirs_exist_ok=True
      )
      Path(copied).rename(workdir)
    row = dict(status=INTERRUPTED, reason="under way, or the runner was killed")
    self.store.add_row(self.names(job) | row | dict(seconds=self.seconds(job)))
    return dict(job.values) | dict(weights=job.weights(self.home))

  def seconds(self, job: Job) -> float:
    """Returns the seconds of an interrupted run so far."""
    row = self.store.row(job) or {}
    so_far = row.get("seconds", 0.0) if row.get("status") == INTERRUPTED else 0.0
    return 0.0 if math.isnan(so_far) else so_far

  def end(self, job: Job, answer: dict[str, Any]) -> None:
    """Records the result of a run."""
    workdir = job.workdir(self.home)
    phase = "sft" if job.stage == runs.START else "rl"
    try:
      row, curve = results.collect(workdir, phase, self.experiment.columns)
    except (OSError, ValueError, KeyError) as error:
      row, curve = {}, None
      if answer["status"] == DONE:
        answer |= dict(status=FAILED, reason=f"its results cannot be read: {error}")
    answer["seconds"] += self.seconds(job)
    self.store.add_row(self.names(job) | answer | row, curve)
    self.tried.add(job.key)
    if answer["status"] == FAILED:
      for other in self.plan():
        if other.start is not None and other.start.key == job.key:
          reason = f"its {job.condition} of seed {job.seed} failed"
          self.end(other, dict(status=FAILED, reason=reason, seconds=0.0))
    if answer["status"] in results.SETTLED and job.stage != runs.START:
      results.archive(workdir)

  def run(self, count: int) -> None:
    """Makes the missing runs, `count` at a time. Ctrl-C and SIGTERM save and end."""
    self.take_over()
    workers, progress = Workers(count), Progress(self)
    with stop_signals() as signals, contextlib.closing(workers):
      while not signals:
        for worker in workers.idle:
          job = self.ready([other.job for other in workers.busy])
          if job is None:
            break
          worker.begin(job, self.begin(job), job.workdir(self.home))
        if not workers.busy:
          return
        for job, answer in workers.answers(1.0):
          self.end(job, answer)
          progress(job)
      sys.stderr.write("saving; the same command continues\n")
      for job, answer in workers.stop(GRACE):
        self.end(job, answer)
        progress(job)
      raise KeyboardInterrupt


class Progress:
  """Prints a line per finished run, with the remaining time."""

  def __init__(self, runner: Runner):
    self.runner, self.started, self.count = runner, time.monotonic(), 0

  def __call__(self, job: Job) -> None:
    runner = self.runner
    row = runner.store.row(job)
    self.count += job.stage != runs.START
    planned = [j for j in runner.plan() if j.stage != runs.START]
    statuses = [runner.store.status(j) for j in planned if runner.only.search(j.condition)]
    settled = sum(status in results.SETTLED for status in statuses)
    # The first stage decides on the settings of later ones.
    later = runs.number(runner.experiment) - len(planned)
    remaining = sum(status not in (*results.SETTLED, FAILED) for status in statuses) + later
    total = len(statuses) + later
    each = (time.monotonic() - self.started) / self.count if self.count else None
    time_left = "?" if each is None else f"{each * remaining / 60:.0f} min"
    start, ended = (row.get(name, math.nan) for name in ("eval/start", "eval/final"))
    shown = "" if math.isnan(start) else f", accuracy {start:.3f} -> {ended:.3f}"
    because = f" ({row['reason']})" if row["reason"] else ""
    sys.stderr.write(
      f"{settled}/{total}  {job.condition} seed {job.seed}: {row['status']}{because}{shown}, "
      f"{row['seconds']:.0f} s  left {time_left}\n"
    )


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
  """Collects stop signals; a second one exits at once."""
  signals: list[int] = []

  def collect(number: int) -> None:
    signals.append(number)
    if len(signals) > 1:
      stops.end(number, "ended at once; the runs save and end by themselves")

  with stops.answered(collect):
    yield signals


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
  """Holds an experiment's lock; raises ValueError if another process does."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(path, "a") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      raise ValueError(f"{path.stem} is being run by another process") from error
    yield


def dry_run(runner: Runner, jobs: int) -> str:
  """Returns commands of the missing runs, and their total minutes."""
  e, lines, missing = runner.experiment, [], runner.missing()
  for job in missing:
    lines.append(f"# {job.stage}: {job.condition}, seed {job.seed}")
    lines.append(job.command(runner.home))
  starts = sum(job.stage == runs.START for job in missing)
  planned = len([job for job in runner.plan() if job.stage != runs.START])
  later = runs.number(e) - planned
  if later:
    lines.append(f"# and {later} runs whose settings the first stage decides on")
  minutes = (starts * e.start_minutes + (len(missing) - starts + later) * e.minutes) / jobs
  lines.append(f"# {len(missing) + later} runs, about {minutes:.0f} minutes, {jobs} at a time")
  return "\n".join(lines)


def override(text: str) -> tuple[str, Any]:
  """Returns key and value of --config.KEY=VALUE."""
  key, _, value = text.removeprefix("--config.").partition("=")
  try:
    return key, ast.literal_eval(value)
  except (ValueError, SyntaxError):
    return key, value


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    prog="python -m experiments.run", description=__doc__.splitlines()[0]
  )
  parser.add_argument("name", help=f"{', '.join(definition.names())}; or all, with --report")
  parser.add_argument("--scale", choices=("laptop", "pod"), default="laptop")
  parser.add_argument("--seeds", help="declared seeds or others, e.g. 0,1,2")
  parser.add_argument("--only", default="", help="conditions: a regular expression, e.g. grpo")
  parser.add_argument("--dry_run", action="store_true", help="show the commands, run nothing")
  parser.add_argument("--report", action="store_true", help="only figures and READMEs, from CSVs")
  parser.add_argument("--again", action="store_true", help="make all runs, in WORKDIR/again")
  parser.add_argument("--retry", action="store_true", help="make failed runs again")
  parser.add_argument("--workdir", type=Path, default=HOME, help=f"where runs go: {HOME}")
  most = min(2, len(own_cores()))
  parser.add_argument("--jobs", type=int, default=most, help="runs at the same time")
  args, rest = parser.parse_known_args(argv)
  if wrong := [text for text in rest if not text.startswith("--config.") or "=" not in text]:
    parser.error(f"{wrong[0]!r} is no flag; keys of the configuration are --config.KEY=VALUE")
  if args.jobs < 1:
    parser.error(f"--jobs={args.jobs}: at least one run at a time")
  try:
    re.compile(args.only)
  except re.error as error:
    parser.error(f"--only={args.only}: {error}")
  try:
    if args.name == "all" and args.report:
      readme.write_all()
      return 0
    folder = definition.find(args.name)
    declared, module = definition.load(folder)
    experiment, place = declared, definition.HERE / folder
    home = args.workdir.absolute()
    if args.again:
      home /= "again"
      place = home / folder
    if rest:
      changes = dict(map(override, rest))
      experiment = dataclasses.replace(experiment, common={**experiment.common, **changes})
      if {*changes} - {"weights"}:  # another experiment: its results go elsewhere
        place = home / "others" / folder
    reported = experiment
    if args.seeds:
      seeds = tuple(map(int, args.seeds.split(",")))
      experiment = dataclasses.replace(experiment, seeds=seeds)
      if not {*seeds} <= {*reported.seeds}:
        reported, place = experiment, home / "others" / folder
    if args.scale == "pod":
      print(pod.commands(experiment, Store(place)))
      return 0
    runner = Runner(experiment, Store(place), home, args.retry, args.only)
    if args.dry_run:
      print(dry_run(runner, args.jobs))
      return 0
    if not args.report:
      if not (args.again or runner.missing()):
        sys.stderr.write(f"{place}/results.csv has all runs; --again makes them anew\n")
      with locked(home / f"{folder}.lock"):
        runner.run(args.jobs)
    verdict = readme.write(place, reported, module.report)
    if place.parent == definition.HERE:
      readme.write_overview()
    print(f"{folder}: {verdict.outcome}: {verdict.because}")
    if args.again:
      before, _ = readme.assess(definition.HERE / folder, declared, module.report)
      same = "the same" if before.outcome == verdict.outcome else "another one"
      print(f"on file is {same}: {before.outcome}: {before.because}")
    return 0
  except ValueError as error:
    sys.stderr.write(f"experiments: {error}\n")
    return 2
  except KeyboardInterrupt:
    return 130


if __name__ == "__main__":
  sys.exit(main())
