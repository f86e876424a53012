"""The spread over seeds: runs that fail are counted, and those on file are not made again."""

import json
import sys

import pytest

from experiments.tiny_gspo import run as experiment

STANDS_IN = """
import json, pathlib, sys
workdir, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2])
workdir.mkdir(parents=True, exist_ok=True)
(workdir / "config.json").write_text(json.dumps(dict(provenance=dict(commit="abc"))))
rows = [dict(phase="sft", step=200 + seed, held_out_loss=0.135)]
for step in (0, 10, 20, 40):
  accuracy = 0.4 if step == 0 else 0.9 + seed / 100
  rows.append({"phase": "rl", "step": step, "eval/accuracy": accuracy, "eval/greedy": 1.0})
if seed == 2:
  rows[-1]["eval/accuracy"] = 0.7
if seed == 3:
  rows.pop()
(workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
if seed == 3:
  sys.exit("first line" + chr(10) + "gspo_jax: the disk is full")
"""


@pytest.fixture
def runs(monkeypatch, tmp_path):
  """Seeds of the stand-in's calls."""
  calls = []

  def command(workdir, dtype, seed):
    calls.append((dtype, seed))
    return [sys.executable, "-c", STANDS_IN, str(workdir), str(seed)]

  monkeypatch.setattr(experiment, "command", command)
  return calls


def test_runs_that_fail_or_do_not_learn_are_counted(runs, tmp_path):
  results = tmp_path / "results.jsonl"
  experiment.make_all([("float32", seed) for seed in range(4)], tmp_path, 2, results)
  rows = experiment.read(results)
  assert [r["seed"] for r in rows] == [0, 1, 2, 3]
  assert [experiment.good(r) for r in rows] == [True, True, False, False]
  assert rows[3]["returncode"] == 1 and rows[3]["failure"] == "gspo_jax: the disk is full"
  assert experiment.ends(rows[3])[1] == 0.0
  row = experiment.table(rows).splitlines()[-1]
  assert row.startswith("| float32, 4 seeds | 200 · **201** · 203 |") and "| 2 of 4 |" in row
  assert "| 0.00 · **0.70** · 0.91 |" in row  # Last row.


def test_a_run_on_file_is_not_made_again(runs, tmp_path):
  results = tmp_path / "results.jsonl"
  experiment.make_all([("float32", 0)], tmp_path, 1, results)
  experiment.make_all([("float32", 0), ("float32", 1), ("bfloat16", 0)], tmp_path, 1, results)
  assert runs == [("float32", 0), ("float32", 1), ("bfloat16", 0)]
  order = [("float32", 0), ("float32", 1), ("bfloat16", 0)]
  assert [(r["dtype"], r["seed"]) for r in experiment.read(results)] == order


def test_the_table_goes_between_its_marks(runs, tmp_path):
  results, readme = tmp_path / "results.jsonl", tmp_path / "README.md"
  experiment.make_all([("float32", 0)], tmp_path, 1, results)
  readme.write_text("before\n<!-- tiny_gspo -->\nold\n<!-- /tiny_gspo -->\nafter\n")
  for _ in range(2):
    experiment.show(experiment.read(results), readme, tmp_path / "curve.svg")
    before, *table, after = readme.read_text().splitlines()
    assert (before, after) == ("before", "after") and len(table) == 5 and "old" not in table
  assert (tmp_path / "curve.svg").read_text().count("<polyline") == 1
  assert json.loads(results.read_text())["commit"] == "abc"


def test_the_readme_has_the_marks():
  text = (experiment.ROOT / "README.md").read_text()
  assert text.count("<!-- tiny_gspo -->\n") == text.count("\n<!-- /tiny_gspo -->") == 1
