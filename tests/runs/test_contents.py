"""Contents behind the names of a configuration."""

import dataclasses

import pytest
from support import fake_hub
from support.configs import config_of

from configs import tiny
from gspo_jax.runs import contents
from gspo_jax.runs.weight_source import RunCheckpoint, WeightSource
from gspo_jax.structs import Prompt

PROBLEM = Prompt("held.jsonl:1", "1+1", "2", (1, 2), info=(("tolerance", "0.1"),))


def describe(sources=(), problems=(), stop_ids=(2,), **changes):
  c = config_of(tiny.get_config, **changes)
  return contents.describe(c, sources, {"data.eval": problems}, stop_ids)


def write_weights(directory, size=100):
  directory.mkdir(parents=True)
  (directory / "config.json").write_text("{}")
  (directory / "model.safetensors").write_bytes(bytes(size))
  (directory / "README.md").write_text("")
  return [WeightSource("weights", str(directory))]


def edit(path, position):
  content = bytearray(path.read_bytes())
  content[position] ^= 1
  path.write_bytes(content)


@pytest.mark.parametrize("size, position", [(100, 50), (2**25, 0), (2**25, -1), (2**25, 2**16 - 1)])
def test_weights_of_a_directory(size, position, tmp_path):
  source = write_weights(tmp_path / "model", size)
  before = describe(source)["weights"]
  (tmp_path / "model/README.md").write_text("edited")
  (tmp_path / "model/model.safetensors").touch()  # Downloaded again.
  assert describe(source)["weights"] == before
  edit(tmp_path / "model/model.safetensors", position)
  assert describe(source)["weights"] != before


def test_weights_of_a_user_without_a_name(tmp_path, monkeypatch):
  """A container may run as a user and group that have no entry in its files."""
  monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
  monkeypatch.setattr("grp.getgrgid", {}.__getitem__)
  assert describe(write_weights(tmp_path / "model"))["weights"]


def test_weights_elsewhere(tmp_path, monkeypatch):
  write_weights(tmp_path / "bucket/model")
  fake_hub.bucket(monkeypatch, tmp_path)
  source = [WeightSource("weights", "gs://bucket/model")]
  before = describe(source)["weights"]
  edit(tmp_path / "bucket/model/config.json", 0)
  assert describe(source)["weights"] != before
  pinned = WeightSource("weights", "org/model@0123abc")
  assert {"weights", "teacher"}.isdisjoint(describe([pinned, WeightSource("teacher", "random")]))


def test_a_checkpoint_is_described_by_its_checksums(tmp_path):
  path = tmp_path / "checkpoints/rl/3"
  (path / "host").mkdir(parents=True)
  (path / "host/metadata").write_text("sums")
  source = WeightSource("distillation.teacher", "run", RunCheckpoint(path, {}))
  before = describe([source])["distillation.teacher"]
  edit(path / "host/metadata", 1)
  assert describe([source])["distillation.teacher"] != before


def test_adapters_of_a_directory(tmp_path):
  (tmp_path / "adapter_config.json").write_text("{}")
  (tmp_path / "adapter_model.safetensors").write_bytes(b"abc")
  changes = dict(job="rl", lora__rank=2, lora__adapter=str(tmp_path))
  before = describe(**changes)["lora.adapter"]
  edit(tmp_path / "adapter_model.safetensors", 2)
  assert describe(**changes)["lora.adapter"] != before
  assert "lora.adapter" not in describe()


@pytest.mark.parametrize(
  "changes", [dict(question="1+2"), dict(answer="3"), dict(info=()), dict(id="held.jsonl:2")]
)
def test_held_out_problems(changes):
  before = describe(problems=[PROBLEM, PROBLEM])["data.eval"]
  assert before.startswith("2 problems ")
  edited = dataclasses.replace(PROBLEM, **changes)
  assert describe(problems=[PROBLEM, edited])["data.eval"] != before
  assert describe(problems=[PROBLEM])["data.eval"] != before


@pytest.mark.parametrize(
  "key", ["reward.name", "environment.name", "constraints.costs.other.signal"]
)
def test_functions_of_a_user(key, tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "my_contents.py").write_text("def f(): pass")
  change = {key.replace(".", "__"): "my_contents:f", "reward__workers": 1}
  before = describe(**change)[key]
  (tmp_path / "my_contents.py").write_text("def f(): return 1")
  assert describe(**change)[key] != before
  assert key not in describe()
  assert key not in describe(job="sft", **change)


def test_stop_tokens():
  assert describe(stop_ids=(2, 0)) == describe() | {"tokenizer": "stop tokens 2, 0"}
