"""benchmarks/scaling.py and gpu.py at toy size: that they run, and that their figures are right."""

import dataclasses
import json
import re
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

from gspo_jax.settings.mesh import MeshConfig

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu
import gpu_ours
import gpu_programs
import scaling
import scaling_plot
import scaling_points

from gspo_jax import sharding
from gspo_jax.models import flops, transformer
from gspo_jax.settings.sizes import tiny_moe


@pytest.mark.long
def test_scaling_measures_prints_and_draws(tmp_path, capsys):
  files = {name: tmp_path / name for name in ("table", "plot", "save")}
  scaling.main(["--quick", "--series=G", *(f"--{name}={path}" for name, path in files.items())])
  assert re.search(r"dense, decode +G = 4 ", capsys.readouterr().out)
  rows = json.loads(files["save"].read_text())["rows"]
  lines = ("dense, sample", "dense, prefill", "dense, decode")
  assert [(row["at"], row["line"]) for row in rows] == [(G, line) for G in (1, 4) for line in lines]
  assert all(row["seconds"] > 0 and row["memory"] > 0 for row in rows)
  growth = [row["operations_growth"] for row in rows[3:]]
  assert growth[1:] == [1 / 4, 1] and 1 / 4 < growth[0] < 1  # a quarter of the prompts
  table = [line.split(" | ") for line in files["table"].read_text().splitlines() if "|" in line]
  names = ["| tokens/s (excess)", "| ---", *(f"| {line}" for line in lines), "| dense, sample: MB"]
  assert [line[0] for line in table] == names and {len(line) for line in table} == {3}
  drawn = ElementTree.parse(files["plot"]).getroot()
  assert len(drawn.findall(".//{*}polyline")) == 2 * len(lines)


@pytest.mark.long
def test_points_on_several_devices_have_a_process_of_their_own(monkeypatch):
  monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")  # compile quickly
  first, *_ = scaling.quick(list(scaling.devices()))
  (row,) = scaling.run([dataclasses.replace(first, devices=2, x=2)])
  assert (row["line"], row["at"]) == ("dense, update", 2)


def test_excess_is_what_operations_do_not_explain():
  rows = [
    dict(line="a", at=n, seconds=s, tokens=100, operations=o, bytes=b)
    for n, s, o, b in ((1, 2.0, 10, 4), (2, 6.0, 20, 4))
  ]
  scaling.with_growth(rows)
  assert [row["time"] for row in rows] == [1, 3]
  assert [row["excess"] for row in rows] == [1, 1.5]
  assert [row["bytes_growth"] for row in rows] == [1, 1]
  assert [row["ideal"] for row in rows] == [50, 25]  # tokens/s


def test_a_group_needs_one_prefill():
  single, four, *_ = scaling.groups()
  assert (single.x, four.x, single.rows, four.rows) == (1, 4, 64, 64)
  assert (single.prompts, four.prompts) == (64, 16)


def test_an_update_has_as_many_tokens_at_every_length():
  updates = [point for point in scaling.lengths() if point.trains]
  assert {point.rows * point.length for point in updates} == {4096}
  assert [point.length for point in updates] == [128, 256, 512, 1024, 2048, 4096]


def test_more_experts_are_more_bytes_and_hardly_more_operations():
  few, many = (point.config for point in scaling.experts() if point.trains and point.x in (8, 128))
  works = [flops.work(config, 32, 128, 128).training() for config in (few, many)]
  assert 1 < works[1] / works[0] < 1.1  # the router
  assert scaling_points.read_weights(many, 32) > 4 * scaling_points.read_weights(few, 32)


@pytest.mark.long
def test_whole_scores_and_logits_take_more_memory():
  point = scaling.Point("T", 1024, "dense, update", scaling_points.DENSE, True, 1, 1, 256, 768)
  changes = point.changes | scaling.QUICK
  point = dataclasses.replace(point, changes=changes, whole=True, seconds=0.0)
  (row,) = scaling_points.measure(point)
  assert row["whole"] > row["memory"] + 4 * 2 * 1024**2  # the scores of its two heads


def test_the_figure_of_one_point_is_a_figure():
  row = dict(series="G", line="dense, decode", at=4, tokens=8, seconds=2.0, ideal=4.0)
  ElementTree.fromstring(scaling_plot.svg([row]))


def test_experts_that_are_reached():
  config = dataclasses.replace(tiny_moe(64), num_experts=16, experts_per_token=2)
  rng = np.random.default_rng(0)
  draws = [{*np.argsort(rng.random((10, 16)), axis=1)[:, :2].ravel()} for _ in range(500)]
  expected = np.mean([len(draw) for draw in draws])
  assert scaling_points.reached_experts(config, 10) == pytest.approx(expected, rel=0.02)
  total, _ = transformer.count(config)
  every = scaling_points.read_weights(config, 10**6)
  assert every == total - 64 * config.hidden_size  # all but the embedding


def test_gpu_sizes_are_those_it_speaks_of():
  counts = {
    name: gpu_ours.count(dict(of=gpu.make_spec(name, "train", toy=False))) for name in gpu.MODELS
  }
  assert 1e9 < counts["dense"]["parameters"] == counts["dense"]["active"] < 3e9
  assert 3e9 < counts["moe"]["parameters"] < 8e9
  for needed in counts.values():
    attention = needed["operations"] - 6 * needed["active"] * needed["tokens"]
    assert -0.4 < attention / needed["operations"] < 0.4


def test_a_decoding_step_reads_weights_and_cache_once():
  needed = gpu_ours.count(dict(of=gpu.make_spec("dense", "sample", toy=False)))
  cache = 64 * 28 * 2 * 8 * 128 * (1024 + 255.5)
  assert needed["bytes"] == 2 * (needed["parameters"] + cache)


@pytest.mark.parametrize("task", ["train", "sample"])
@pytest.mark.long
def test_gpu_programs_run_at_toy_size(task):
  spec = gpu.make_spec("dense", task, toy=True) | dict(experts="auto")
  single = MeshConfig(data=1, fsdp=1, expert=1, tensor=1)
  with jax.set_mesh(sharding.make_mesh(single, jax.devices()[:1])):
    actual = getattr(gpu_ours, task)(spec)
  assert actual["seconds"] > 0


def test_without_a_gpu_nothing_is_measured(monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  with pytest.raises(SystemExit, match="no GPU"):
    gpu.main(["--systems=ours"])


@pytest.mark.parametrize(
  "model, tried", [("moe", [(7, 8), (6, 8), (5, 8)]), ("dense", [(28, 8), (28, 4), (28, 2)])]
)
def test_sizes_follow_from_the_compilers_count_of_memory(monkeypatch, model, tried):
  class Program:
    def __init__(self, spec):
      self.sizes = spec["model"]["num_layers"], spec["at_once"]

    def as_text(self):  # The second one fits, by computing something again.
      return "%dot.1.remat2 = f32[] dot()" if self.sizes == tried[1] else ""

  compiled = []

  class Step:
    def __init__(self, spec):
      self.function = Program(spec)

    def compile(self):
      compiled.append(self.function)
      return self

  monkeypatch.setattr(gpu_programs, "usable_bytes", lambda: 78e9)
  monkeypatch.setattr(gpu_programs, "update", lambda spec: (Step(spec), ()))
  peaks = dict(zip(tried, (79e9, 77e9, 70e9)))
  monkeypatch.setattr(gpu_programs, "peak_bytes", lambda program: peaks[program.sizes])
  spec, step = gpu_programs.fit(gpu.make_spec(model, "train", toy=False))
  assert [p.sizes for p in compiled] == tried
  assert step.function.sizes == (spec["model"]["num_layers"], spec["at_once"]) == tried[-1]


def test_a_budget_ends_the_process_and_starts_no_other(tmp_path, capsys):
  runner = gpu.Runner(tmp_path, time.monotonic() + 0.5)
  assert runner.attempt("a", "gpu_ours.py", dict(task="probe"), cpu=True) is None  # Imports JAX.
  assert runner.attempt("b", "gpu_ours.py", dict(task="probe"), cpu=True) is None
  assert runner.failures == ["a", "b"]
  assert capsys.readouterr().out.split("\n")[1] == "b: left out, no time left of --budget"


def test_rows_are_saved_one_by_one(monkeypatch, tmp_path):
  saved = tmp_path / "rows.json"

  def compare(runner, options, device):
    for i in range(2):
      yield "compare", dict(name=f"row {i}", dtype="float32", right=i == 0)
      assert len(json.loads(saved.read_text())["compare"]) == i + 1

  device = dict(kind="cpu", platform="cpu", flops=None, bandwidth=None, jax="0")
  monkeypatch.setattr(gpu, "compare", compare)
  monkeypatch.setattr(gpu.Runner, "process", lambda *_, **__: device)
  with pytest.raises(SystemExit, match="wrong results: row 1, float32"):
    gpu.main(["--toy", "--stages=compare", f"--save={saved}"])
