"""The runner with workers that train nothing: every run has its line, and the command continues."""

import collections
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from experiments import definition, readme, run, runs, workers
from experiments.definition import Condition, Experiment, Tuning
from experiments.report import HOLDS, OPEN, Report, Verdict
from experiments.results import Store

# Speaks for a worker: what becomes of a run the next time is in a file, done where there is none.
STANDS_IN = """
import json, os, pathlib, signal, sys, time
home = pathlib.Path(sys.argv[1])
for line in sys.stdin:
  job = json.loads(line)
  v, workdir = job["values"], pathlib.Path(job["workdir"])
  what = f"{v['job']} {v['objective']['name']} {v['seed']}"
  with open(home / "calls.txt", "a") as calls:
    calls.write(f"{what} {v['weights']} {os.getpid()}\\n")
  workdir.mkdir(parents=True, exist_ok=True)
  (workdir / "checkpoints").mkdir(exist_ok=True)
  made_with = dict(commit="abc", dirty=False, versions=dict(python="3", jax="0"))
  (workdir / "config.json").write_text(json.dumps(dict(provenance=made_with)))
  fate = home / what.replace(" ", "_")
  fate, _ = (fate.read_text(), fate.unlink()) if fate.exists() else ("done", None)
  good = dict(gspo=0.8, grpo=0.6)[v["objective"]["name"]] + v["rl_optimizer"]["learning_rate"]
  rows = [dict(phase="sft", step=9, held_out_loss=0.1)] if v["job"] == "sft" else []
  for step in range(0 if v["job"] == "rl" else 4, 4):
    rows.append({"phase": "rl", "step": step, "reward/mean": 0.1 * step, "kl/k3": 1e-3,
                 "total/tokens": 100.0 * step, "total/flops": 1e9 * step,
                 "eval/accuracy": 0.4 + (good - 0.4) * step / 3 + v["seed"] / 100})
  text = "".join(json.dumps(row) + "\\n" for row in rows[:2 if fate != "done" else None])
  (workdir / "metrics.jsonl").write_text(text)
  if fate == "die":
    os.kill(os.getpid(), signal.SIGKILL)
  if fate == "wait":
    signal.signal(signal.SIGTERM, lambda *_: setattr(sys, "gone", True))
    (home / "waits").touch()
    while not getattr(sys, "gone", False):
      time.sleep(0.02)
    fate = "interrupted"
  print(json.dumps(dict(status=fate, reason="" if fate == "done" else "so it is", seconds=6.0)),
        flush=True)
  if fate != "done":
    break
"""

CONDITIONS = (Condition("gspo"), Condition("grpo", {"objective.name": "grpo"}))
E = Experiment(
  question="Is GSPO better?", claim="it is (§1)", hypothesis="it is", statistic="difference",
  falsified="it is not", conditions=CONDITIONS, seeds=(0, 1), base="configs/tiny.py",
)  # fmt: skip


def report(results):
  difference = results.paired("gspo", "grpo", "eval/final")
  table = results.table(["gspo", "grpo"], {"after": "eval/final"})
  return Report(Verdict(HOLDS, f"{difference.mean():.3f}"), [table], {})


class Home:
  """A place for runs, with workers that stand in."""

  def __init__(self, path):
    self.path, self.store = path, Store(path / "e1_test")

  def fates(self, **counts):
    for name, fate in counts.items():
      (self.path / name).write_text(fate)

  def run(self, experiment=E, jobs=2, **options):
    """Runs missing jobs; returns the workers' calls, such as "rl gspo 0"."""
    calls = self.path / "calls.txt"
    calls.write_text("")
    try:
      run.Runner(experiment, Store(self.store.folder), self.path, **options).run(jobs)
    finally:
      self.calls = [line.split(" ") for line in calls.read_text().splitlines()]
    return collections.Counter(" ".join(call[:3]) for call in self.calls)

  def lines(self):
    """Status by stage, condition and seed."""
    table = Store(self.store.folder).runs
    return {(r.stage, r.condition, r.seed): (r.status, r.reason) for r in table.itertuples()}

  def statuses(self):
    return {f"{c} {s}": status for (stage, c, s), (status, _) in self.lines().items()}


@pytest.fixture
def home(tmp_path, monkeypatch):
  monkeypatch.setattr(
    workers, "command", lambda cores: [sys.executable, "-c", STANDS_IN, str(tmp_path)]
  )
  return Home(tmp_path)


ALL = {"cold start 0", "cold start 1", "gspo 0", "gspo 1", "grpo 0", "grpo 1"}


def test_conditions_begin_with_their_seeds_cold_start_and_a_process_makes_many(home):
  calls = home.run(jobs=1)
  assert set(calls.values()) == {1} and len(calls) == 6
  assert home.statuses() == dict.fromkeys(ALL, "done")
  weights = {" ".join(call[:3]): call[3] for call in home.calls}
  assert weights["sft gspo 0"] == "random"
  assert weights["rl gspo 0"] == weights["rl grpo 0"] != weights["rl gspo 1"]
  assert (home.path / "starts").samefile(os.path.dirname(weights["rl gspo 0"]))
  assert len({call[4] for call in home.calls}) == 1  # compiled programs are kept in a process
  row = Store(home.store.folder).runs.set_index(["condition", "seed"]).loc["gspo", 1]
  assert (row["eval/start"], row["eval/final"]) == (0.41, pytest.approx(0.8102))
  assert row["eval/area"] == pytest.approx((0.41 + 0.8102) / 2)
  assert (row["tokens"], row["flops"], row["seconds"], row["commit"]) == (300, 3e9, 6.0, "abc")
  assert row["path"] == pytest.approx(4e-3) and row["reward/mean"] == pytest.approx(0.2)
  curves = Store(home.store.folder).curves
  assert len(curves) == 4 * 4 and set(curves.step) == {0, 1, 2, 3}


def test_what_a_run_leaves_is_small(home):
  home.run()
  for path in (home.path / "runs").iterdir():
    assert {p.name for p in path.iterdir()} == {"config.json", "metrics.jsonl.gz"}
  for path in (home.path / "starts").iterdir():
    assert (path / "checkpoints").is_dir()  # others may begin with it


def test_every_end_is_a_line_and_the_same_command_goes_on(home):
  home.fates(rl_gspo_0="die", rl_grpo_0="nan", rl_gspo_1="failed")
  home.run()
  assert home.statuses() == dict.fromkeys(ALL, "done") | {
    "gspo 0": "interrupted", "grpo 0": "nan", "gspo 1": "failed",
  }  # fmt: skip
  assert home.lines()["final", "gspo", 0] == ("interrupted", "its process ended: signal SIGKILL")
  assert home.lines()["final", "gspo", 1] == ("failed", "so it is")
  assert dict(home.run()) == {"rl gspo 0": 1}  # Failed runs wait for --retry.
  assert home.statuses()["gspo 0"] == "done"
  assert dict(home.run(retry=True)) == {"rl gspo 1": 1}
  assert dict(home.run(retry=True)) == {}
  assert home.statuses() == dict.fromkeys(ALL, "done") | {"grpo 0": "nan"}


def test_a_run_that_is_interrupted_keeps_its_checkpoint_and_one_that_failed_begins_anew(home):
  home.fates(rl_gspo_0="die", rl_gspo_1="failed")
  home.run()
  jobs = {j.key: j for j in runs.plan(E, Store(home.store.folder))}
  marks = {seed: jobs["final", "gspo", seed].workdir(home.path) / "checkpoints" for seed in (0, 1)}
  for mark in marks.values():
    (mark / "5").touch()
  messages = []
  begin = run.Runner.begin

  def look(self, job):
    message = begin(self, job)
    messages.append((job.seed, (marks[job.seed] / "5").exists()))
    return message

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(run.Runner, "begin", look)
    home.run(retry=True)
  assert dict(messages) == {0: True, 1: False}


def test_a_signal_saves_what_is_under_way(home):
  home.fates(rl_grpo_0="wait")

  def end():
    while not (home.path / "waits").exists():
      time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)

  threading.Thread(target=end).start()
  with pytest.raises(KeyboardInterrupt):
    home.run(jobs=1)
  assert home.lines()["final", "grpo", 0] == ("interrupted", "so it is")
  calls = home.run()
  assert calls["rl grpo 0"] == 1 and calls["rl gspo 0"] == 0
  assert home.statuses() == dict.fromkeys(ALL, "done")
  seconds = Store(home.store.folder).runs.set_index(["condition", "seed"]).seconds
  assert seconds["grpo", 0] == 12 and seconds["gspo", 0] == 6  # Its earlier seconds count too.


def test_a_line_is_there_as_soon_as_a_run_begins(home):
  """Should the runner itself be killed, it is no hole."""
  runner = run.Runner(E, home.store, home.path)
  runner.begin(runner.ready([]))
  assert home.lines()["start", "cold start", 0][0] == "interrupted"
  assert home.run()["sft gspo 0"] == 1


def test_runs_without_their_cold_start_fail_with_it(home):
  home.fates(sft_gspo_1="failed")
  home.run()
  assert home.lines()["final", "grpo", 1] == (
    "failed", "its cold start of seed 1 failed",
  )  # fmt: skip
  assert home.statuses()["gspo 0"] == "done"
  assert dict(home.run(retry=True)) == {"sft gspo 1": 1, "rl gspo 1": 1, "rl grpo 1": 1}


def test_a_longer_cold_start_begins_with_a_copy_of_the_shorter_one(home):
  conditions = tuple(Condition(f"{steps}", {"sft.steps": steps}) for steps in (40, 80))
  common = {"sft_optimizer.schedule": "constant"}
  e = dataclasses.replace(E, conditions=conditions, seeds=(0,), common=common)
  runner = run.Runner(e, home.store, home.path)
  short, long = (job for job in runner.missing() if job.stage == runs.START)
  assert runner.ready([short]) is None  # The longer one waits.
  home.run(e)
  checkpoint, copy = (job.workdir(home.path) / "checkpoints/40" for job in (short, long))
  checkpoint.touch()
  shutil.rmtree(long.workdir(home.path))
  runner.begin(long)
  assert copy.exists()
  copy.unlink()
  runner.begin(long)  # This continues its run, and does not copy again.
  assert not copy.exists()


@pytest.mark.long
def test_the_second_stage_follows_in_the_same_command(home):
  rate = "rl_optimizer.learning_rate"
  tuning = Tuning({"low": {rate: 0.01}, "high": {rate: 0.05}}, (8, 9), "eval/final")
  e = dataclasses.replace(E, tuning=tuning)
  calls = home.run(e)
  assert sum(calls.values()) == runs.number(e) + 4  # cold starts
  final = Store(home.store.folder).runs.query("stage == 'final'")
  assert set(final.changes[final.condition == "gspo"]) == {f"{rate}=0.05"}
  assert dict(home.run(e)) == {}


def test_another_experiments_runs_are_not_made_again(home):
  home.run()
  other = Home(home.path)
  other.store = Store(home.path / "e2_other")
  same = Condition("the_same", {"objective.name": "grpo"})
  e = dataclasses.replace(E, conditions=(same, Condition("new", {"objective.clip_low": 0.5})))
  assert dict(other.run(e)) == {"rl gspo 0": 1, "rl gspo 1": 1}
  assert other.statuses()["the_same 0"] == "done"
  curves = other.store.curves if len(other.store.curves) else Store(other.store.folder).curves
  assert len(curves[curves.condition == "the_same"]) == 2 * 4


def test_runs_that_began_with_another_cold_start_are_made_again(home):
  """The difference of two runs of a seed is of the same beginning."""
  home.run()
  other = Home(home.path)
  other.store = Store(home.path / "e2_other")
  start = next(j for j in runs.plan(E, home.store) if j.key == ("start", "cold start", 1))
  metrics = start.workdir(home.path) / "metrics.jsonl"
  metrics.write_text(metrics.read_text().replace("0.1", "0.2"))
  assert dict(other.run()) == {"rl gspo 1": 1, "rl grpo 1": 1, "sft gspo 1": 1}


def test_where_processes_cannot_be_bound_to_cores_they_share_them(home, monkeypatch):
  for name in ("sched_getaffinity", "sched_setaffinity"):  # Like macOS.
    monkeypatch.delattr(os, name, raising=False)
  monkeypatch.setattr(os, "cpu_count", lambda: 3)
  assert [worker.cores for worker in workers.Workers(2).all] == [[0, 2], [1]]
  assert len(home.run()) == 6
  program = "os.__dict__.pop('sched_setaffinity', None); worker.main('0,99999')"
  program = f"import os; from experiments import worker; {program}"
  subprocess.run([sys.executable, "-c", program], stdin=subprocess.DEVNULL, check=True)


def test_two_runners_of_an_experiment_are_one_too_many(tmp_path):
  with run.locked(tmp_path / "e1.lock"), pytest.raises(ValueError, match="e1 is being run"):  # noqa: SIM117
    with run.locked(tmp_path / "e1.lock"):
      pass


def test_a_dry_run_lists_what_is_missing(home):
  runner = run.Runner(E, home.store, home.path)
  text = run.dry_run(runner, 2)
  assert len(re.findall(r"^python -m gspo_jax.main ", text, re.M)) == 6
  assert text.endswith("# 6 runs, about 7 minutes, 2 at a time")
  home.run()
  assert run.dry_run(run.Runner(E, Store(home.store.folder), home.path), 2).startswith("# 0 runs")


def test_conditions_that_are_chosen_are_made_alone(home, capsys):
  run.Runner(E, home.store, home.path, only="^gr").run(1)
  progress = capsys.readouterr().err.splitlines()
  assert progress[-1].startswith("2/2  grpo seed 1: done") and progress[-1].endswith("left 0 min")
  done = home.store.runs[home.store.runs.stage != runs.START]
  assert set(done.condition) == {"grpo"} and sorted(done.seed) == [0, 1]
  missing = run.Runner(E, Store(home.store.folder), home.path).missing()
  assert [(job.condition, job.seed) for job in missing] == [("gspo", 0), ("gspo", 1)]


def test_the_readme_says_what_the_files_do(home):
  folder = home.store.folder
  home.fates(rl_gspo_0="nan")
  assert readme.assess(folder, E, report) == (readme.NOTHING, None)
  home.run(dataclasses.replace(E, seeds=(0,)))
  assert readme.write(folder, E, report) == Verdict(OPEN, "2 of 4 runs are done; so far, -0.600")
  home.run()
  assert readme.write(folder, E, report).outcome == HOLDS
  text = (folder / "README.md").read_text()
  assert "**Outcome: holds.**" in text and "- gspo, seed 0: nan, so it is" in text
  assert "4 runs: 3 done, 1 nan. Their run times add up to 0 minutes." in text
  before = text.replace("\n<!-- /outcome", " by hand\n<!-- /outcome") + "by hand\n"
  (folder / "README.md").write_text(before)
  readme.write(folder, E, report)
  assert (folder / "README.md").read_text() == text + "by hand\n"


def test_all_runs_are_made_again_and_the_verdict_is_compared(home, monkeypatch, capsys):
  """Somebody who clones the repository finds its results on file, and makes them for himself."""
  clone, work = home.path / "experiments", home.path / "work"
  home.store = Store(clone / "e1_test")
  home.run()
  monkeypatch.setattr(definition, "HERE", clone)
  monkeypatch.setattr(definition, "find", lambda name: "e1_test")
  monkeypatch.setattr(definition, "load", lambda folder: (E, sys.modules[__name__]))
  monkeypatch.setattr(readme, "write_overview", lambda: None)
  before = (clone / "e1_test/results.csv").read_text()

  def command(*flags):
    (home.path / "calls.txt").write_text("")
    assert run.main(["e1", f"--workdir={work}", *flags]) == 0
    return len((home.path / "calls.txt").read_text().splitlines()), capsys.readouterr()

  calls, output = command()
  assert calls == 0 and "e1_test/results.csv has all runs; --again makes them anew" in output.err
  home.fates(rl_gspo_0="nan")
  calls, output = command("--again")
  assert calls == 6
  assert output.out == "e1_test: holds: -0.200\non file is the same: holds: 0.200\n"
  assert command("--again")[0] == 0  # the same command continues
  assert len(Store(work / "again/e1_test").runs) == 6
  assert (clone / "e1_test/results.csv").read_text() == before


def test_a_verdict_waits_for_what_it_rests_on_alone(home):
  folder = home.store.folder
  e = dataclasses.replace(E, conditions=(*CONDITIONS, Condition("more", {}, secondary=True)))
  home.run(e, only="^g")
  assert readme.assess(folder, e, report)[0].outcome == HOLDS


def test_lines_of_other_seeds_are_no_results(home):
  home.run(dataclasses.replace(E, seeds=(0, 1, 2)))
  verdict, _ = readme.assess(home.store.folder, E, report_of_seeds)
  assert verdict.because == "0 1"


def report_of_seeds(results):
  seeds = results.values("gspo", "eval/final").index
  return Report(Verdict(HOLDS, " ".join(map(str, seeds))), [], {})


def test_names_of_experiments():
  assert definition.find("e2") == "e2_clipped_fractions"
  with pytest.raises(ValueError, match="no experiment 'e99'; there are e1_gspo_or_grpo"):
    definition.find("e99")
  assert run.main(["e99"]) == 2
