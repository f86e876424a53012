"""Every experiment there is: its first condition trains, its report can be made, its README is that
of its results."""

import dataclasses
import re

import numpy as np
import pandas as pd
import pytest

from experiments import definition, figures, readme, results, runs, workers
from experiments.definition import HERE, Condition
from experiments.report import FAILS, HOLDS, OPEN
from experiments.results import Store

SMALL = {
  "model.hidden_size": 32, "model.num_layers": 1, "model.num_heads": 2, "model.num_kv_heads": 2,
  "model.head_dim": 16, "model.moe_intermediate_size": 16, "model.num_experts": 4,
  "model.experts_per_token": 2, "data.lines": (1, 2), "sampling.max_new_tokens": 12,
  "sft.steps": 2, "sft.batch": 4, "rl.iterations": 2, "rl.prompts": 16,
  "rl.group_size": 2, "engine.steps": 12, "eval.problems": 2, "eval.samples": 2, "eval.every": 1,
  "eval.batch": 2, "checkpoint.every": 100,
}  # fmt: skip
# Random weights take the place of a pretrained model's.
RANDOM = {
  "weights": "random", "tokenizer": "bytes", "data.max_prompt_tokens": 256, "model.vocab_size": 264,
}  # fmt: skip
UNTAUGHT = {
  "configs/smollm2.py": RANDOM,
  "experiments/e24_few_demonstrations/config.py": RANDOM | {"eval.benchmarks.heldout.problems": 2},
}
FOLDERS = definition.names()
LARGEST = tuple(f"e{number}_" for number in (3, 5, 6, 7, 8, 10, 11, 12, 13, 17, 18, 22, 23))


def first(experiment):
  """The experiment with two small iterations of its first condition alone, one seed."""
  condition = experiment.conditions[0]
  setting = next(iter(experiment.tuning.grid.values())) if experiment.tuning else {}
  changes = {**experiment.common, **condition.changes, **setting, **SMALL}
  alone = Condition(condition.name, changes)
  common = UNTAUGHT.get(experiment.base, {})
  return dataclasses.replace(
    experiment, conditions=(alone,), seeds=(0,), tuning=None, common=common
  )


@pytest.fixture(scope="module")
def quick():
  """Its process compiles as these tests do."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    yield


@pytest.fixture(scope="module")
def rows(tmp_path_factory, quick):
  """The lines of the first conditions, and their curves; one process makes their runs."""
  home, cached = tmp_path_factory.mktemp("experiments"), {}
  worker = workers.Workers(1).all[0]

  def folder_rows(folder):
    if folder not in cached:
      experiment, _ = definition.load(folder)
      for job in runs.plan(first(experiment), Store(home / "none")):
        workdir, values = job.workdir(home), {**job.values, "weights": job.weights(home)}
        if not (workdir / "checkpoints").exists():  # experiments share cold starts
          worker.begin(job, values, workdir)
          answer = worker.answer()
          assert answer["status"] == "done", answer | dict(log=(workdir / "log.txt").read_text())
        phase = "sft" if job.stage == runs.START else "rl"
        about, curve = results.collect(workdir, phase, experiment.columns)
      texts = dict(experiment=folder, status="done", reason="", start="x", changes="", seconds=60.0)
      cached[folder] = about | texts, curve
    return cached[folder]

  yield folder_rows
  worker.stop()


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_first_condition_trains(folder, rows):
  row, curve = rows(folder)
  if definition.load(folder)[0].measure:
    columns = definition.load(folder)[0].columns
    assert row["steps"] > 0 and any(re.fullmatch(x, name) for x in columns for name in row)
    return
  assert row["steps"] == 2 and row["tokens"] > 0 and row["flops"] > 0
  assert 0 <= row["eval/start"] <= 1 and {"eval/final", "eval/area", "reward/mean"} <= {*row}
  assert list(curve.step) == [0, 1, 2] and curve["eval/accuracy"].notna().all()


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_reports_of_a_few_runs_and_of_all(folder, rows, tmp_path):
  """With values varying over seeds; every report has a verdict."""
  experiment, module = definition.load(folder)
  row, curve = rows(folder)
  noise = np.random.default_rng(0)
  store, outcomes = Store(tmp_path), []
  planned = []
  while len(planned) < len(jobs := [j for j in runs.plan(experiment, store) if j.start]):
    planned = jobs
    lines, points = [], []
    for job in jobs:
      key = dict(stage=job.stage, condition=job.condition, seed=job.seed, run=job.run)
      scale = np.exp(noise.normal(size=2) / 10)
      numbers = {k: v * scale[0] for k, v in row.items() if isinstance(v, float | np.floating)}
      lines.append(row | numbers | key | dict(seconds=60.0))
      points.append(curve.assign(**{k: key[k] for k in results.KEY}))
    store.runs, store.curves = pd.DataFrame(lines), pd.concat(points, ignore_index=True)
    store.save()
  for part in (store.runs.iloc[:1], store.runs):
    whole, store.runs = store.runs, part
    store.save()
    verdict, report = readme.assess(tmp_path, experiment, module.report)
    outcomes.append(verdict.outcome)
    store.runs = whole
    assert report.tables and verdict.because
  assert outcomes[0] == OPEN and outcomes[1] in (HOLDS, FAILS, OPEN)
  assert "runs are done" not in verdict.because
  assert report.figures
  for name, figure in report.figures.items():
    figures.save(figure, tmp_path / f"{name}.svg")
    text = (tmp_path / f"{name}.svg").read_text()
    again = module.report(store.results(jobs)).figures[name]
    figures.save(again, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == text and "<dc:date>" not in text


@pytest.mark.parametrize(
  "folder",
  [
    pytest.param(folder, marks=pytest.mark.long) if folder.startswith(LARGEST) else folder
    for folder in FOLDERS
  ],
)
def test_every_number_of_a_readme_is_that_of_its_results(folder, tmp_path):
  """Generated parts, tables and verdict included, follow from the files."""
  experiment, module = definition.load(folder)
  verdict, report = readme.assess(HERE / folder, experiment, module.report)
  text = (HERE / folder / "README.md").read_text()
  outcome = readme.outcome(HERE / folder, experiment, verdict, report)
  assert readme.replace_section(text, "outcome", outcome) == text, (
    f"python -m experiments.run {folder} --report"
  )
  for name in report.figures if report else ():
    assert (HERE / folder / f"{name}.svg").exists()


@pytest.mark.long
def test_the_table_of_experiments_is_that_of_their_results():
  text = (HERE / "README.md").read_text()
  table = readme.overview()
  assert readme.replace_section(text, "experiments", table) == text, (
    "python -m experiments.run all --report"
  )
