"""The notebook's cells run, with and without results."""

import json

import pandas as pd
import pytest

from experiments import definition
from experiments.definition import HERE

CELLS = json.loads((HERE / "figures.ipynb").read_text())["cells"]
KEY = dict(stage="final", seed=0)


@pytest.mark.parametrize("there", [False, True])
def test_the_notebook(there, tmp_path, monkeypatch):
  folder = tmp_path / definition.find("e2")
  folder.mkdir()
  if there:
    about = KEY | dict(experiment="e2", status="done", run="r", condition="gspo_one", seconds=1.0)
    pd.DataFrame([about | {"clip_fraction/token": 0.1}]).to_csv(folder / "results.csv")
    points = [KEY | {"condition": "gspo_one", "step": s, "reward/mean": 0.5} for s in (1, 2)]
    pd.DataFrame(points).to_csv(folder / "curves.csv")
  monkeypatch.chdir(HERE)
  monkeypatch.setenv("EXPERIMENT", "e2")
  monkeypatch.setattr(definition, "HERE", tmp_path)
  monkeypatch.setattr(definition, "find", lambda name: folder.name)
  shown = []
  scope = dict(display=shown.append)
  for cell in CELLS:
    if cell["cell_type"] == "code":
      assert cell["outputs"] == []
      exec("".join(cell["source"]), scope)
  assert len(scope["axes"].lines) == there
  assert len(shown) == there and all("</svg>" in x._repr_svg_() for x in shown)
  assert scope["verdict"].outcome == "cannot be told"
