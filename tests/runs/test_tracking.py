"""TensorBoard and Weights & Biases beside metrics.jsonl."""

import math
import sys
import threading
import types

import numpy as np
import pytest
from support.command_line import called, modules_in
from tensorboardX.proto import event_pb2

from gspo_jax.runs import metrics


def row(step, phase="rl", **extra):
  return {"phase": phase, "step": step, "reward/mean": step / 8, **extra}


def read_scalars(directory):
  """Returns (tag, step, value) of all TensorBoard events, and steps of restarts."""
  scalars, restarts = [], []
  for path in sorted(directory.glob("**/events*"), key=lambda p: p.stat().st_mtime_ns):
    data, offset = path.read_bytes(), 0
    while offset < len(data):
      (size,) = np.frombuffer(data[offset : offset + 8], "<u8")  # length, crc, record, crc
      event = event_pb2.Event.FromString(data[offset + 12 : offset + 12 + int(size)])
      offset += 16 + int(size)
      scalars += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
      if event.session_log.status == event_pb2.SessionLog.START:
        restarts.append(event.step)
  return scalars, restarts


def test_tensorboard_gets_phase_and_key_at_step(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    writer.write({"phase": "sft", "step": 7, "loss": 2.0})
    writer.write({"phase": "eval", "step": 8, "eval/accuracy": 0.5})
    writer.write(row(8, loss=math.inf))
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


def test_missing_weights_and_biases_says_how_to_install_it(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)
  with pytest.raises(ValueError, match=r"wandb=project.*pip install '\.\[wandb\]'"):
    metrics.Writer(tmp_path, wandb="project")


def test_a_missing_key_of_weights_and_biases_is_one_line(tmp_path, monkeypatch):
  stub = types.ModuleType("wandb")
  stub.init = lambda **_: (_ for _ in ()).throw(RuntimeError("No API key configured"))
  monkeypatch.setitem(sys.modules, "wandb", stub)
  with pytest.raises(ValueError, match=r"wandb=project: No API key configured; correct it"):
    metrics.Writer(tmp_path, wandb="project")


WRITES_A_ROW = """
import sys
from gspo_jax.runs import metrics
with metrics.Writer(sys.argv[1]) as writer:
  writer.write(dict(phase="rl", step=1, x=2.0))
import torch
"""


def test_pytorch_is_not_loaded_for_tensorboard(tmp_path):
  (tmp_path / "torch.py").write_text("print('loaded')")
  argv = [sys.executable, "-v", "-c", WRITES_A_ROW, str(tmp_path)]
  done = called(argv, **modules_in(tmp_path))
  assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stderr[-2000:]
  imports = [line.split("'")[1] for line in done.stderr.split("\n") if line.startswith("import '")]
  assert imports.index("tensorboardX") < imports.index("torch")


def test_tensorboard_has_a_row_before_the_file_is_closed_and_no_thread_writes_it(tmp_path):
  threads = threading.active_count()
  writer = metrics.Writer(tmp_path)
  writer.write(row(8, loss=2.0))
  scalars, _ = read_scalars(tmp_path / "tensorboard")
  assert scalars == [("rl/loss", 8, 2.0), ("rl/reward/mean", 8, 1.0)]
  assert threading.active_count() == threads  # an interrupted hand-over to one never ended
  writer.close()


def test_truncate_hides_dropped_steps_from_tensorboard(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    for phase, steps in ("sft", 5), ("rl", 8):
      for step in range(1, steps + 1):
        writer.write(row(step, phase))
  with metrics.Writer(tmp_path) as writer:
    writer.truncate("rl", 4)  # Its process may end before the first row.
  _, restarts = read_scalars(tmp_path / "tensorboard" / "rl")
  assert restarts == [5]  # TensorBoard purges what an earlier session wrote at or above it
  assert read_scalars(tmp_path / "tensorboard" / "sft")[1] == []
