"""Metrics keep their weights, a resumed run keeps its rows, and logs stay readable."""

import dataclasses
import json
import math
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.runs import metrics


class Mean(NamedTuple):
  """A stand-in for a reduction, without JAX: one division at the end."""

  num: jax.Array
  den: jax.Array

  def compute(self):
    return self.num / self.den


def mean(num, den):
  return Mean(jnp.float32(num), jnp.float32(den))


def rl_row(step, **extra):
  return {"phase": "rl", "step": step, "reward/mean": step / 8, **extra}


def read_lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_compute_fetches_everything_at_once(monkeypatch):
  fetched = []
  real = jax.device_get
  monkeypatch.setattr(jax, "device_get", lambda x: fetched.append(jax.tree.leaves(x)) or real(x))
  row = {"phase": "rl", "step": 3, "a": mean(1, 2), "b": jnp.float32(2), "time/save": 0.5}
  with jax.transfer_guard("disallow"):  # explicit transfers only
    computed = metrics.compute(row)
  assert computed == {"phase": "rl", "step": 3, "a": 0.5, "b": 2.0, "time/save": 0.5}
  assert isinstance(computed["step"], int)
  assert sum(any(isinstance(x, jax.Array) for x in leaves) for leaves in fetched) == 1


def test_notes_are_in_every_row(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    writer.notes |= {"verifier/isolation/namespaces": 1.0}
    for step in (1, 2):
      writer.write(rl_row(step))
  rows = read_lines(tmp_path / "metrics.jsonl")
  assert [row["verifier/isolation/namespaces"] for row in rows] == [1, 1]


def test_write_appends_one_object_per_line_at_once(tmp_path):
  writer = metrics.Writer(tmp_path)
  ratios = {f"minibatch/{i}/ratio/deviation": 0.0 for i in range(4)}
  writer.write({"step": 1, "loss": np.float32(0.5), "phase": "rl", "kl/k3": 0.25} | ratios)
  (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close: already there
  assert list(json.loads(line))[:4] == ["phase", "step", "kl/k3", "loss"]
  writer.write(ratios | {"phase": "rl", "kl/k3": 0.0, "loss": math.nan, "step": 2})
  writer.close()
  first, second = read_lines(tmp_path / "metrics.jsonl")
  assert list(first) == list(second)  # the order does not depend on how the row was built
  assert list(first)[2:] == sorted(list(first)[2:])
  assert second["loss"] is None  # NaN is not JSON


def test_a_value_that_is_not_a_number_is_named(tmp_path):
  with metrics.Writer(tmp_path) as writer, pytest.raises(TypeError, match="'loss'"):
    writer.write(rl_row(1, loss=mean(1, 2)))
  assert read_lines(tmp_path / "metrics.jsonl") == []


def test_an_inactive_writer_touches_nothing(tmp_path):
  with metrics.Writer(tmp_path / "run", active=False) as writer:
    writer.write(rl_row(1))
    writer.truncate("rl", 0)
    writer.dump_rollouts("rl", 1, [{"prompt": "?"}])
  assert not (tmp_path / "run").exists()


def test_the_rows_on_file_are_counted_and_synced(tmp_path, monkeypatch):
  synced = []
  monkeypatch.setattr(metrics.os, "fsync", lambda number: synced.append(os.fstat(number).st_ino))
  with metrics.Writer(tmp_path) as writer:
    for step in (1, 2, 3):
      writer.write(rl_row(step))
    synced.clear()  # Directory of TensorBoard's events.
    writer.sync()
    assert synced == [path.stat().st_ino for path in (tmp_path / "metrics.jsonl", tmp_path)]
    assert writer.count == 3
  with metrics.Writer(tmp_path) as writer:
    assert writer.count == 3
    writer.truncate("rl", 2)
    assert writer.count == 2


def whole_run():
  """Returns the rows of an uninterrupted run. An evaluation is part of its step's row."""
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

  done = min(step if phase == "sft" else 6 + step, killed_after)  # Rows up to the checkpoint.
  with metrics.Writer(tmp_path / "resumed") as writer:
    writer.truncate(phase, step)
    assert metrics.read_rows(tmp_path / "resumed" / "metrics.jsonl") == rows[:done]
    for row in rows[done:]:
      writer.write(row)
  paths = [tmp_path / name / "metrics.jsonl" for name in ("whole", "resumed")]
  assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_separate_evaluation_keeps_its_row_when_training_goes_on(tmp_path):
  """It belongs to no checkpoint; another one takes its place."""
  evaluations = [{"phase": "eval", "step": 0, "eval/accuracy": x} for x in (0.5, 0.75)]
  with metrics.Writer(tmp_path) as writer:
    for row in (*(rl_row(step) for step in (1, 2, 3)), evaluations[0]):
      writer.write(row)
    assert writer.count == 3
  with metrics.Writer(tmp_path) as writer:
    assert writer.count == 3 and writer.truncate("rl", 2) == 1 and writer.count == 2
    writer.write(rl_row(3))
    assert writer.count == 3
    expected = [rl_row(1), rl_row(2), evaluations[0], rl_row(3)]
    assert metrics.read_rows(tmp_path / "metrics.jsonl") == expected
    writer.truncate("sft", 5)
    assert metrics.read_rows(tmp_path / "metrics.jsonl") == evaluations[:1]
    writer.truncate("eval", -1)
    writer.write(evaluations[1])
  assert metrics.read_rows(tmp_path / "metrics.jsonl") == evaluations[1:]


def test_truncate_to_nothing(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    for row in whole_run():
      writer.write(row)
    assert writer.truncate("sft", -1) == 14
    assert metrics.read_rows(tmp_path / "metrics.jsonl") == []
    writer.write(rl_row(1))
  assert metrics.read_rows(tmp_path / "metrics.jsonl") == [rl_row(1)]
  assert not list(tmp_path.glob("*.tmp"))


def test_dumped_rollouts_are_replaced_when_a_step_is_redone(tmp_path):
  record = dict(prompt="2+2=\u2028", response="четыре \udc80", reward=np.float32(1), eval=False)
  with metrics.Writer(tmp_path) as writer:
    writer.dump_rollouts("rl", 12, [record] * 3)
    writer.dump_rollouts("rl", 12, [record])
  path = tmp_path / "rollouts" / "rl_000012.jsonl"
  assert metrics.read_rows(path) == [{"step": 12} | record]
  assert "четыре" in path.read_text(encoding="utf-8")  # readable, and valid UTF-8
  assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_stopwatch_charges_each_second_once():
  clock = [0.0]
  watch = metrics.Stopwatch(clock=lambda: clock[0], compiled=float)

  def spend(seconds):
    clock[0] += seconds

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


def test_totals_continue_from_a_checkpoint():
  saved = metrics.Totals().plus(3, 2.5e20).plus(4, 1 / 3)
  restored = metrics.Totals(**json.loads(json.dumps(dataclasses.asdict(saved))))
  assert restored.plus(1, 0.1) == saved.plus(1, 0.1)
  assert restored.metrics() == {"total/tokens": 7.0, "total/flops": 2.5e20 + 1 / 3}
