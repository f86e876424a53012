"""The cells of notebooks/experiment_figures run, with and without results."""

from pathlib import Path

import jupytext
import pandas as pd
import pytest

from experiments import definition, runs
from experiments.definition import HERE
from experiments.results import Store

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "experiment_figures.py"


@pytest.mark.parametrize("results", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_notebook(results, tmp_path, monkeypatch):
  folder = tmp_path / definition.find("e2")
  folder.mkdir()
  if results:
    experiment, _ = definition.load(folder.name)
    job = next(job for job in runs.plan(experiment, Store(folder)) if job.stage == runs.FINAL)
    key = dict(stage=job.stage, condition=job.condition, seed=job.seed)
    texts = dict(status="done", run=job.run, commit="", versions="")
    about = key | texts | {"seconds": 1.0, "tokens": 1e4, "clip_fraction/token": 0.1}
    pd.DataFrame([about]).to_csv(folder / "results.csv")
    points = [key | {"step": s, "reward/mean": 0.5, "clip_fraction/token": 0.1} for s in (1, 2)]
    pd.DataFrame(points).to_csv(folder / "curves.csv")
  monkeypatch.chdir(HERE)
  monkeypatch.setattr(definition, "HERE", tmp_path)
  monkeypatch.setattr(definition, "find", lambda name: folder.name)
  shown = []
  monkeypatch.setattr("IPython.display.display", shown.append)
  scope = {}
  for cell in jupytext.read(NOTEBOOK).cells:
    if cell.cell_type == "code":
      exec(cell.source, scope)
  assert len(scope["axes"].lines) == results
  assert len(shown) == results and all("</svg>" in x._repr_svg_() for x in shown)
  assert scope["verdict"].outcome == "cannot be told"
