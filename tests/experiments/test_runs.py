"""What an experiment plans: which runs are the same, which cold starts there are, what is next."""

import dataclasses

import pytest

from experiments import definition, pod, runs
from experiments.definition import Condition, Experiment, Tuning
from experiments.results import Store

TEXTS = dict(question="q", claim="c", hypothesis="h", statistic="s", falsified="f")
GSPO, GRPO = Condition("gspo"), Condition("grpo", {"objective.name": "grpo"})
RATE = "rl_optimizer.learning_rate"
E = Experiment(conditions=(GSPO, GRPO), seeds=(0, 1), base="configs/tiny.py", **TEXTS)


def plan(tmp_path, **changes):
  return runs.plan(dataclasses.replace(E, **changes), Store(tmp_path))


def settled(job, **values):
  about = dict(experiment="e", stage=job.stage, condition=job.condition, seed=job.seed, run=job.run)
  return (
    about | dict(status="done", reason="", start="", changes="", commit="", versions="") | values
  )


def test_conditions_share_the_cold_start_of_a_seed(tmp_path):
  jobs = plan(tmp_path)
  names = [(job.stage, job.condition, job.seed) for job in jobs]
  assert names == [
    ("start", "cold start", 0), ("final", "gspo", 0), ("final", "grpo", 0),
    ("start", "cold start", 1), ("final", "gspo", 1), ("final", "grpo", 1),
  ]  # fmt: skip
  assert jobs[1].start is jobs[2].start is jobs[0]
  assert len({job.run for job in jobs}) == 6


def test_a_change_of_the_model_has_a_cold_start_of_its_own(tmp_path):
  deep = Condition("deep", {"model.num_layers": 8, "objective.name": "grpo"})
  jobs = plan(tmp_path, conditions=(GSPO, deep), seeds=(0,))
  starts = {job.condition: job for job in jobs if job.stage == runs.START}
  assert [*starts] == ["cold start", "cold start model.num_layers=8"]
  start = starts["cold start model.num_layers=8"]
  assert start.values["model"]["num_layers"] == 8 and start.values["objective"]["name"] == "gspo"
  assert {job.condition: job.start.run for job in jobs if job.start} == {
    "gspo": starts["cold start"].run,
    "deep": start.run,
  }


def test_a_longer_cold_start_continues_a_shorter_one(tmp_path):
  def lengths(schedule):
    changes = [{"sft.steps": steps} for steps in (40, 160, 80)]
    changes.append({"sft.steps": 200, "sft.batch": 64})
    common = {"sft_optimizer.schedule": schedule}
    conditions = tuple(Condition(f"{x}", x) for x in changes)
    jobs = plan(tmp_path, conditions=conditions, seeds=(0,), common=common)
    starts = {j.values["sft"]["steps"]: j for j in jobs if j.stage == runs.START}
    assert all(start.weights(tmp_path) == "random" for start in starts.values())
    return {n: j.start and j.start.values["sft"]["steps"] for n, j in starts.items()}

  assert lengths("constant") == {40: None, 160: 40, 80: 40, 200: None}
  assert {*lengths("linear").values()} == {None}


def test_a_run_is_the_same_whatever_says_so(tmp_path):
  """A default value, the place in the experiment and the interval of saving do not matter."""
  rate = runs.applied(E.base, {})["rl_optimizer"]["learning_rate"]
  named = Condition("named", {RATE: rate, "checkpoint.every": 7})
  *_, gspo, other = plan(tmp_path, conditions=(GSPO, named), seeds=(0,))
  assert gspo.run == other.run and gspo.condition != other.condition
  assert gspo.run != plan(tmp_path, common={RATE: 2 * rate})[1].run


def test_a_new_key_leaves_the_names_as_they_are(tmp_path, monkeypatch):
  before = [job.run for job in plan(tmp_path)]
  for function in (runs._file, runs._defaults):
    values = function(E.base) if function is runs._file else function()
    monkeypatch.setitem(values["rl"], "new_key", 3)
  monkeypatch.setattr(runs, "from_dict", lambda values: None)
  assert [job.run for job in plan(tmp_path)] == before
  monkeypatch.setitem(runs._file(E.base)["rl"], "new_key", 4)
  assert [job.run for job in plan(tmp_path)][1] != before[1]


def test_the_best_setting_of_the_first_stage_makes_the_second(tmp_path):
  tuning = Tuning({"low": {RATE: 1e-5}, "high": {RATE: 1e-3}}, seeds=(8, 9), statistic="eval/final")
  store = Store(tmp_path)
  e = dataclasses.replace(E, tuning=tuning)
  first = [job for job in runs.plan(e, store) if job.stage != runs.START]
  assert {job.stage for job in first} == {runs.TUNING} and len(first) == 8
  assert runs.number(e) == 12
  for job in first[:-1]:
    high = job.condition.endswith("high")
    # GRPO diverges at the high rate with one seed, after it has been the best.
    status = "nan" if (job.condition, job.seed) == ("grpo/high", 8) else "done"
    store.add_row(settled(job, status=status) | {"eval/final": 0.9 if high else 0.5})
  final = [job for job in runs.plan(e, store) if job.stage == runs.FINAL]
  assert {job.condition for job in final} == {"gspo"}, "grpo's last tuning run is missing"
  store.add_row(settled(first[-1]) | {"eval/final": 0.9})
  final = {job.condition: job for job in runs.plan(e, store) if job.stage == runs.FINAL}
  assert final["gspo"].changes[RATE] == 1e-3 and final["grpo"].changes[RATE] == 1e-5


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"objective.nmae": "grpo"}, "unknown config key objective.nmae; did you mean objective.name"),
    ({"objectiv.name": "grpo"}, "'objectiv.name' is no key"),
    ({RATE: -1.0}, RATE),
  ],
)
def test_a_wrong_key_is_named_before_anything_runs(tmp_path, changes, message):
  with pytest.raises(ValueError, match=message):
    plan(tmp_path, conditions=(Condition("wrong", changes),))


def test_seeds_that_were_tuned_on_make_no_claim():
  with pytest.raises(ValueError, match="overlap"):
    dataclasses.replace(E, tuning=Tuning({}, seeds=(1,), statistic="eval/final"))


def test_commands_are_those_of_the_command_line(tmp_path):
  start, _, job, *_ = plan(tmp_path, common={"objective.clip_low": 0.2 / 3, "weights": "DIR"})
  command = job.command(tmp_path)
  assert "--config.weights=DIR " in start.command(tmp_path) and "=DIR" not in command
  assert command.startswith("python -m gspo_jax.main --config=configs/tiny.py --workdir=")
  assert f"--config.weights={tmp_path}/starts/{job.start.run} " in command
  assert (
    "--config.seed=0 " in command and "--config.objective.clip_low=0.06666666666666667" in command
  )


ON_A_POD = ("e3_", "e13_", "e19_")  # one of them is not


@pytest.mark.parametrize(
  "folder",
  [
    folder if folder.startswith(ON_A_POD) else pytest.param(folder, marks=pytest.mark.long)
    for folder in definition.names()
  ],
)
def test_commands_for_a_pod(folder, tmp_path):
  experiment, _ = definition.load(folder)
  lines = pod.commands(experiment, Store(tmp_path)).splitlines()
  commands = [line for line in lines if not line.startswith("#")]
  assert bool(commands) == experiment.pod
  for line in commands:
    assert "--config=configs/moe_aime.py " in line and "recurrence" not in line
