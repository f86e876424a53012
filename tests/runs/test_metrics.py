"""Metrics keep their weights, a resumed run keeps its rows, and logs stay readable."""

import json
import math
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from gspo_jax.runs import metrics, phase


@flax.struct.dataclass
class Mean:
  """A stand-in for a reduction: sums travel, one division at the end."""

  num: jax.Array
  den: jax.Array

  def merge(self, other):
    return Mean(self.num + other.num, self.den + other.den)

  def compute(self):
    return self.num / self.den


def mean(num, den):
  return Mean(jnp.float32(num), jnp.float32(den))


def rl_row(step, **extra):
  return {"phase": "rl", "step": step, "reward/mean": step / 8, **extra}


def read_lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def read_scalars(directory):
  """(tag, step, value) of all TensorBoard events, and the steps at which sessions restarted."""
  scalars, restarts = [], []
  for path in sorted(directory.glob("**/events*"), key=lambda p: p.stat().st_mtime_ns):
    data, at = path.read_bytes(), 0
    while at < len(data):
      (size,) = np.frombuffer(data[at : at + 8], "<u8")  # length, crc, record, crc
      event = event_pb2.Event.FromString(data[at + 12 : at + 12 + int(size)])
      at += 16 + int(size)
      scalars += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
      if event.session_log.status == event_pb2.SessionLog.START:
        restarts.append(event.step)
  return scalars, restarts


# --- reductions


def test_compute_fetches_everything_at_once(monkeypatch):
  fetched = []
  real = jax.device_get
  monkeypatch.setattr(jax, "device_get", lambda x: fetched.append(jax.tree.leaves(x)) or real(x))
  row = {"phase": "rl", "step": 3, "a": mean(1, 2), "b": jnp.float32(2), "time/save": 0.5}
  with jax.transfer_guard("disallow"):  # explicit transfers only
    computed = metrics.compute(row)
  assert computed == {"phase": "rl", "step": 3, "a": 0.5, "b": 2.0, "time/save": 0.5}
  assert isinstance(computed["step"], int)
  with_device_values = [
    leaves for leaves in fetched if any(isinstance(x, jax.Array) for x in leaves)
  ]
  assert len(with_device_values) == 1


def test_a_row_is_written_when_the_next_one_is_there():
  rows = []
  part = types.SimpleNamespace(
    latest=lambda: None, metrics=dict, truncate=dict, start=bool, check=lambda *_: None,
    write=rows.append,
  )  # fmt: skip
  running = phase.Phase("rl", 2, part, part, part)
  running.resume(like=None, start=dict)
  running.stand(0, None, dict)
  running.flush()
  running.report(dict(step=1, loss=mean(3, 2)))
  assert rows == []
  running.report(dict(step=2, loss=mean(5, 2)))
  assert rows == [dict(phase="rl", step=1, loss=1.5)]
  running.flush()
  running.flush()
  assert rows[1:] == [dict(phase="rl", step=2, loss=2.5)]


# --- the run's directory


def test_write_appends_one_object_per_line_at_once(tmp_path):
  writer = metrics.Writer(tmp_path)
  more = {f"minibatch/{i}/ratio/deviation": 0.0 for i in range(4)}
  writer.write({"step": 1, "loss": np.float32(0.5), "phase": "rl", "kl/k3": 0.25} | more)
  (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close: already there
  assert list(json.loads(line))[:4] == ["phase", "step", "kl/k3", "loss"]
  writer.write(more | {"phase": "rl", "kl/k3": 0.0, "loss": math.nan, "step": 2})
  writer.close()
  first, second = read_lines(tmp_path / "metrics.jsonl")
  assert list(first) == list(second)  # the order does not depend on how the row was built
  assert list(first)[2:] == sorted(list(first)[2:])
  assert second["loss"] is None  # NaN is not JSON


def test_a_value_that_is_not_a_number_is_named(tmp_path):
  with metrics.Writer(tmp_path) as writer, pytest.raises(TypeError, match="'loss'"):
    writer.write(rl_row(1, loss=mean(1, 2)))
  assert read_lines(tmp_path / "metrics.jsonl") == []


def test_tensorboard_gets_phase_and_key_at_step(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    writer.write({"phase": "sft", "step": 7, "loss": 2.0})
    writer.write({"phase": "eval", "step": 8, "eval/accuracy": 0.5})
    writer.write(rl_row(8, loss=math.inf))
  scalars, _ = read_scalars(tmp_path / "tensorboard")
  assert set(scalars) == {
    ("sft/loss", 7, 2.0),
    ("eval/accuracy", 8, 0.5),
    ("rl/reward/mean", 8, 1.0),
  }


class Wandb(types.ModuleType):
  """Stands in for the package: it needs an account, or an hour of patience offline."""

  def __init__(self):
    super().__init__("wandb")
    self.logged, self.settings, self.axes, self.finished = [], {}, {}, 0

  def init(self, **settings):
    self.settings = settings
    return self

  def define_metric(self, name, step_metric):
    self.axes[name] = step_metric

  def log(self, row):
    self.logged.append(row)

  def finish(self):
    self.finished += 1


def test_weights_and_biases_gets_the_rows_with_the_step_of_their_phase(tmp_path, monkeypatch):
  stub = Wandb()
  monkeypatch.setitem(sys.modules, "wandb", stub)
  options = dict(wandb="project", config={"seed": 0})
  with metrics.Writer(tmp_path / "run", **options) as writer:
    writer.write({"phase": "sft", "step": 8, "loss": 1.5})
    writer.write({"phase": "rl", "step": 1, "loss": math.nan, "reward/mean": 0.5})
  assert stub.logged == [{"sft/step": 8, "sft/loss": 1.5}, {"rl/step": 1, "rl/reward/mean": 0.5}]
  assert stub.axes["rl/*"] == "rl/step" and stub.finished == 1
  first = stub.settings
  assert (first["project"], first["config"], first["name"]) == ("project", {"seed": 0}, "run")
  metrics.Writer(tmp_path / "run", **options).close()
  assert stub.settings["id"] == first["id"] and stub.settings["resume"] == "allow"
  metrics.Writer(tmp_path / "other" / "run", **options).close()
  assert stub.settings["id"] != first["id"]


def test_weights_and_biases_that_is_not_installed_says_how(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)
  with pytest.raises(ValueError, match=r"wandb=project.*pip install 'gspo-jax\[wandb\]'"):
    metrics.Writer(tmp_path, wandb="project")


def test_an_inactive_writer_touches_nothing(tmp_path):
  with metrics.Writer(tmp_path / "run", active=False) as writer:
    writer.write(rl_row(1))
    writer.truncate({"rl": 0})
    writer.dump_rollouts("rl", 1, [{"prompt": "?"}])
  assert not (tmp_path / "run").exists()


def whole_run():
  """The rows of an uninterrupted run; an evaluation is part of the row of its step."""
  yield from ({"phase": "sft", "step": i, "loss": 1 / i} for i in range(1, 6))
  yield {"phase": "rl", "step": 0, "eval/accuracy": 0.25}  # before the first step of rl
  for i in range(1, 9):
    yield rl_row(i, loss=0.1 * i) | ({} if i % 4 else {"eval/accuracy": 0.1 * i})


@pytest.mark.parametrize("phase, step", [("sft", 2), ("sft", 5), ("rl", 0), ("rl", 4), ("rl", 8)])
@pytest.mark.parametrize("killed_after", [8, 11, 14])
def test_resumed_rows_equal_uninterrupted_rows(tmp_path, phase, step, killed_after):
  rows = list(whole_run())
  with metrics.Writer(tmp_path / "whole") as writer:
    for row in rows:
      writer.write(row)
  with metrics.Writer(tmp_path / "resumed") as writer:
    for row in rows[:killed_after]:
      writer.write(row)
  with open(tmp_path / "resumed" / "metrics.jsonl", "ab") as file:
    file.write(b'{"phase": "rl", "step": 9, "rew')  # kill -9 in the middle of a line

  done = min(step if phase == "sft" else 6 + step, killed_after)  # what the checkpoint covers
  with metrics.Writer(tmp_path / "resumed") as writer:
    writer.truncate({phase: step})
    assert metrics.read_rows(tmp_path / "resumed" / "metrics.jsonl") == rows[:done]
    for row in rows[done:]:
      writer.write(row)
  paths = [tmp_path / name / "metrics.jsonl" for name in ("whole", "resumed")]
  assert paths[0].read_bytes() == paths[1].read_bytes()


def test_truncate_to_nothing_and_unknown_phase(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    for row in whole_run():
      writer.write(row)
    with pytest.raises(ValueError, match="dpo"):
      writer.truncate({"dpo": 3})
    assert writer.truncate({}) == 14
    assert metrics.read_rows(tmp_path / "metrics.jsonl") == []
    writer.write(rl_row(1))
  assert metrics.read_rows(tmp_path / "metrics.jsonl") == [rl_row(1)]
  assert not list(tmp_path.glob("*.tmp"))


WRITES_A_ROW = """
import sys
from gspo_jax.runs import metrics, phase
with metrics.Writer(sys.argv[1]) as writer:
  writer.write(dict(phase="rl", step=1, x=2.0))
import torch
"""


def test_pytorch_is_not_loaded_for_tensorboard(tmp_path):
  (tmp_path / "torch.py").write_text("print('loaded')")
  path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
  done = subprocess.run(
    [sys.executable, "-v", "-c", WRITES_A_ROW, str(tmp_path)],
    env=os.environ | dict(PYTHONPATH=path), capture_output=True, text=True,
  )  # fmt: skip
  assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stderr[-2000:]
  imports = [line.split("'")[1] for line in done.stderr.split("\n") if line.startswith("import '")]
  assert imports.index("tensorboardX") < imports.index("torch")


def test_tensorboard_has_a_row_before_the_file_is_closed_and_no_thread_writes_it(tmp_path):
  threads = threading.active_count()
  writer = metrics.Writer(tmp_path)
  writer.write(rl_row(8, loss=2.0))
  scalars, _ = read_scalars(tmp_path / "tensorboard")
  assert scalars == [("rl/loss", 8, 2.0), ("rl/reward/mean", 8, 1.0)]
  assert threading.active_count() == threads  # an interrupted hand-over to one never ended
  writer.close()


def test_truncate_hides_dropped_steps_from_tensorboard(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    for row in whole_run():
      writer.write(row)
  with metrics.Writer(tmp_path) as writer:
    writer.truncate({"rl": 4})
    writer.write(rl_row(5))
  _, restarts = read_scalars(tmp_path / "tensorboard" / "rl")
  assert restarts == [5]  # TensorBoard purges what an earlier session wrote at or above it
  assert read_scalars(tmp_path / "tensorboard" / "sft")[1] == []


def test_a_half_written_line_is_cut_even_without_truncate(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(b'{"phase": "rl", "step": 1}\n{"phase": "rl", "st')
  assert metrics.read_rows(path) == [{"phase": "rl", "step": 1}]
  with metrics.Writer(tmp_path) as writer:
    writer.write(rl_row(2))
  assert [row["step"] for row in read_lines(path)] == [1, 2]


def test_a_broken_line_in_the_middle_is_an_error_with_its_place(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"phase": "rl", "step": 1}\n{"phase"\n{"phase": "rl", "step": 3}\n')
  with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
    metrics.read_rows(path)


def test_dumped_rollouts_are_replaced_when_a_step_is_redone(tmp_path):
  record = {
    "prompt": "2+2=\u2028",
    "response": "четыре \udc80",
    "reward": np.float32(1),
    "eval": False,
  }
  with metrics.Writer(tmp_path) as writer:
    writer.dump_rollouts("rl", 12, [record] * 3)
    writer.dump_rollouts("rl", 12, [record])
  path = tmp_path / "rollouts" / "rl_000012.jsonl"
  assert metrics.read_rows(path) == [{"step": 12} | record]
  assert "четыре" in path.read_text(encoding="utf-8")  # readable, and valid UTF-8
  assert [p.name for p in path.parent.iterdir()] == [path.name]


# --- time


def test_stopwatch_charges_each_second_once():
  now = [0.0]
  watch = metrics.Stopwatch(clock=lambda: now[0])

  def spend(seconds):
    now[0] += seconds

  with watch("sample"):
    spend(2)
  spend(10)  # outside every stage
  with watch("evaluate"):
    spend(1)
    with watch("sample"):
      spend(3)
    spend(1)
  with pytest.raises(RuntimeError), watch("save"):
    spend(4)
    raise RuntimeError
  assert watch.lap() == {"time/sample": 5, "time/evaluate": 2, "time/save": 4}
  assert watch.lap() == {}
