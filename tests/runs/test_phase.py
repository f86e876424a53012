"""What the cold start and the policy's training have in common; test_main.py has whole runs."""

import signal
import time
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from etils import epath

from gspo_jax.objectives.reductions import Mean
from gspo_jax.runs import phase
from gspo_jax.runs.metrics import Stopwatch
from gspo_jax.settings.training import CheckpointConfig
from gspo_jax.system import preemption


class Nothing:
  """Goodput of which no row tells."""

  def resume(self, last):
    assert last == {}

  def metrics(self, lap):
    return {}


def phase_with(**parts):
  """Makes a phase at its start; its checkpoints, writer and guard only have these methods."""
  part = SimpleNamespace(
    directory=epath.Path("checkpoints/rl"), count=0, count_covered=lambda *_: 0, sync=bool,
    restore_newest=lambda like: None, latest=lambda: None, metrics=dict, close=bool,
    truncate=lambda *_: 0, rows=lambda *_: [],
    start=lambda state, *_, **__: state, check=lambda *_: None, check_saved=lambda *_: None,
    config=CheckpointConfig(grace_s=0.05), newest=str, is_time=bool,
  )  # fmt: skip
  vars(part).update(parts)
  running = phase.Phase("rl", 2, part, part, part, Nothing())
  running.stages = Stopwatch(compiled=float)
  running.resume(like=None, start=dict)
  running.set_resume_point(0, None, dict)
  return running


def test_a_row_is_written_when_the_next_one_is_there():
  rows = []
  running = phase_with(write=rows.append)
  running.flush()
  running.report(dict(step=1, loss=Mean(jnp.float32(3), jnp.float32(2))))
  assert rows == []
  running.report(dict(step=2, loss=Mean(jnp.float32(5), jnp.float32(2))))
  assert rows == [dict(phase="rl", step=1, loss=1.5)]
  running.flush()
  running.flush()
  assert rows[1:] == [dict(phase="rl", step=2, loss=2.5)]


def test_a_checkpoint_has_the_metrics_of_an_unreported_step():
  rows, saved = [], []

  def save(step, state, host, _):
    saved.append((step, host["pending"], len(rows)))

  running = phase_with(write=rows.append, save=save)
  row = dict(step=1, loss=2.0)
  with pytest.raises(preemption.Preempted), running:  # while it is evaluated
    running.set_resume_point(1, None, dict, row)
    raise preemption.Preempted
  running.report(row)
  running.save(row)  # The row is on file: the step is done.
  assert saved == [(1, row, 0), (1, None, 1)]


def test_a_step_with_a_row_is_not_pending():
  """Its evaluation ended after the save, so the same command need not repeat it."""
  host, calls = dict(position={}, pending=dict(step=1), rows=0), []
  for rows in [], [dict(phase="rl", step=1)]:
    running = phase_with(
      restore_newest=lambda like: (1, {}, host),
      rows=lambda *phases, rows=rows: rows if phases == ("rl",) else [],
      truncate=lambda *arguments: calls.append(arguments) or 0,
    )
    assert (running.resume(None, dict)[2]["pending"] is None) == bool(rows)
  assert calls == [("rl", 0)] * 2 + [("rl", 1)] * 2


def test_rows_are_on_disk_before_their_checkpoint():
  events = []
  running = phase_with(
    write=lambda row: events.append("row"),
    sync=lambda: events.append("disk"),
    save=lambda step, state, host, _: events.append(("checkpoint", host["rows"])),
    count=3,
  )
  running.report(dict(step=1, loss=2.0))
  running.save()
  assert events == ["row", "disk", ("checkpoint", 3)]


@pytest.mark.parametrize(
  "directory, count, remedy",
  [
    ("", 2, r'restore the missing lines, or insert a line like {"phase": "rl", "step": 1} in'),
    ("/bucket", 2, r"copy /bucket/workdir/metrics\.jsonl to the workdir$"),
    ("/bucket", 0, r"copy .* to the workdir, or set another checkpoint\.directory if"),
  ],
)
def test_a_checkpoint_without_its_rows_is_refused_and_no_row_is_dropped(directory, count, remedy):
  host, calls = dict(position={}, pending=None, rows=3), []
  parts = dict(
    restore_newest=lambda like: (1, {}, host),
    config=CheckpointConfig(directory=directory),
    truncate=lambda *arguments: calls.append(arguments) or 0,
    count=count,
  )
  message = f"only {count} of the 3 rows written before checkpoint checkpoints/rl/1: {remedy}"
  with pytest.raises(ValueError, match=message):
    phase_with(count_covered=lambda *_: count, **parts)
  assert not calls
  phase_with(count_covered=lambda *_: 3, **parts)
  assert calls == [("rl", 1)]


def test_a_step_longer_than_the_grace_warns_once(capsys):
  """The first step compiles, and does not warn."""
  running = phase_with()
  running._total = 5
  with running:
    for step in running.steps():
      assert capsys.readouterr().err.count("checkpoint.every_minutes") == (step == 3), step
      time.sleep(0.1)


def test_a_stop_names_the_saved_step():
  running = phase_with(write=list, save=lambda *_: None)
  with pytest.raises(preemption.Preempted) as stop, running:
    running.set_resume_point(1, None, dict)
    signal.raise_signal(signal.SIGINT)
    preemption.check()
  assert stop.value.saved == "step 1 of rl" and stop.value.code == 130
