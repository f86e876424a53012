"""A phase of a run, "sft" or "rl": resuming, reporting metrics, saving checkpoints."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etils import epath

from gspo_jax.runs.alarms import Alarms
from gspo_jax.runs.checkpoint import Checkpointer
from gspo_jax.runs.goodput import Goodput
from gspo_jax.runs.metrics import Row, Stopwatch, Writer, compute
from gspo_jax.runs.mirror import FOLDER
from gspo_jax.runs.nonfinite import Guard
from gspo_jax.runs.progress import Progress
from gspo_jax.settings.training import AlarmConfig
from gspo_jax.structs import TrainState
from gspo_jax.system import hosts, preemption


class Phase:
  """Shared machinery of the cold-start and RL training loops.

    phase = Phase("rl", iterations, ...)
    step, state, host = phase.resume(...)
    with phase:  # A preemption saves the resume point.
      phase.set_resume_point(step, state, position)
      for step in phase.steps():
        state, row = ...
        phase.set_resume_point(step, state, position)
        phase.report(row)
        phase.save(row)

  Args:
    name: "sft" or "rl".
    total: number of steps in the phase.
    checkpoints: checkpoints of the phase.
    writer: writer of metrics.jsonl.
    guard: check for NaN and infinity.
    goodput: wall-time shares of the whole run.
    alarms: thresholds of warnings; None for no warnings.
    at_most: whether the phase may end before `total` steps.
  """

  def __init__(
    self,
    name: str,
    total: int,
    checkpoints: Checkpointer,
    writer: Writer,
    guard: Guard,
    goodput: Goodput,
    alarms: AlarmConfig | None = None,
    at_most: bool = False,
  ):
    self._name, self._total, self._at_most = name, total, at_most
    self._alarm_config, self._alarms = alarms, None
    self._checkpoints, self._writer, self._guard = checkpoints, writer, guard
    self._goodput = goodput
    self._row: Row | None = None  # The newest metrics row, not yet fetched from the device.
    self._stack = contextlib.ExitStack()
    self.stages = Stopwatch()

  def resume(
    self, like: Callable[[], TrainState], start: Callable[[], TrainState]
  ) -> tuple[int, TrainState, Row | None]:
    """Returns (step, state, host_state) of the newest undamaged checkpoint.

    If there is no checkpoint, returns (0, start(), None). `host_state` is the dict that `save`
    stored with the arrays; its keys are `position`, `pending` and `rows`. Rows of steps after the
    checkpoint are removed from metrics.jsonl.

    Args:
      like: returns the abstract state, for the layout of the restored arrays.
      start: returns the initial state.

    Raises:
      ValueError: all checkpoints are damaged, a checkpoint has other arrays than `like`, or metrics
        rows before the checkpoint are missing.
    """
    if restored := self._checkpoints.restore_newest(like):
      step, state, host = restored
      # `checkpoint.best` needs the metrics of a row, and so another save.
      pending = host["pending"] is not None and not self._checkpoints.config.best
      if pending and hosts.run_on_first_host(lambda: self._has_row(step)):
        host = host | dict(pending=None)  # Its evaluation ended after this save.
      reported = step if host["pending"] is None else step - 1
    else:
      step, state, host, reported = 0, start(), None, -1
    if host is not None:  # Before `truncate`, since a refused start must not change the file.
      hosts.run_on_first_host(lambda: self._require_rows(step, reported, host["rows"]))
    dropped = self._writer.truncate(self._name, reported)
    if dropped and host is None:
      sys.stderr.write(
        f"phase {self._name} has no checkpoint and restarts from the beginning; {dropped} of its "
        "rows are removed from metrics.jsonl\n"
      )
    rows = self._writer.rows("sft", "rl")
    self._goodput.resume(rows[-1] if rows else {})
    rows = [row for row in rows if row["phase"] == self._name]
    state = self._guard.start(state, rows)
    if self._alarm_config:
      self._alarms = Alarms(self._alarm_config, rows)
    self._done = step
    self._progress = Progress(
      self._name, self._total, start=step, active=hosts.is_first(), at_most=self._at_most
    )
    self._progress.wait()
    return step, state, host

  def steps(self) -> Iterator[int]:
    """Yields the numbers of the remaining steps. Raises `Preempted` if the run is to stop.

    Warns once if the time between two checks for preemption exceeds the grace period.
    """
    warned = not hosts.is_first()
    for step in range(self._done + 1, self._total + 1):
      self._pending = None  # The resume point is the previous step, whose row has been reported.
      preemption.check()
      warning = preemption.too_long()
      if warning and not warned and step > self._done + 2:  # The first step compiles.
        sys.stderr.write(f"{warning}\n")
        warned = True
      yield step

  def keep_batches(self, step: int, batches: Any) -> None:
    """Keeps a step's mini-batches until the step's metrics are checked."""
    self._guard.keep_batches(step, batches)

  def set_resume_point(
    self,
    step: int,
    state: TrainState,
    position: Callable[[], Mapping[str, Any]],
    pending: Row | None = None,
  ) -> None:
    """Sets the state to save at the next checkpoint or preemption.

    Args:
      step: number of finished steps.
      state: training state after `step`.
      position: returns the host state's `position` after `step` (checkpoint.py), a dict that JSON
        can represent.
      pending: metrics row of `step`, if its evaluation is not finished yet; else None. A resumed
        run finishes the evaluation and reports this row.
    """
    self._step, self._state, self._position, self._pending = step, state, position, pending

  def check(self, row: Row) -> None:
    """Raises `NonFiniteError`, after a dump, for a bad metrics row (`Guard.check`)."""
    self._guard.check(dict(phase=self._name) | row, self._state)

  def report(self, row: Row) -> None:
    """Buffers this row of metrics, and writes the previous row.

    Fetching this row at once would make the devices wait for the host.
    """
    self.flush()
    lap = self.stages.lap()
    row = row | lap | self._goodput.metrics(lap)
    self._row = dict(phase=self._name) | row | self._checkpoints.metrics()
    self._pending = None  # Not needed: `save` writes the buffered row before the checkpoint.

  def flush(self) -> None:
    """Checks and writes the buffered metrics row, if any. Raises errors as `check` does."""
    newest, self._row = self._row, None
    if newest is None:
      return
    row = compute(newest)
    self._guard.check(row, self._state)
    warnings, lines = self._alarms(row) if self._alarms else ({}, [])
    self._writer.write(row | warnings)
    self._progress.update(row["step"], row, lines)

  def is_time(self) -> bool:
    """Whether `checkpoint.every_minutes` have passed since the last save. Collective: call it on
    all hosts."""
    return self._checkpoints.is_time()

  def save(self, row: Row | None = None) -> None:
    """Saves the resume point.

    Args:
      row: metrics row with the metric that `checkpoint.best` names; None if it was not measured.
    """
    self.flush()  # The rows of all steps must be in metrics.jsonl before the checkpoint exists.
    self._guard.check_saved(self._name, self._step, self._state)
    pending = None if self._pending is None else compute(self._pending)
    self._writer.sync()  # Written rows survive a crash of the machine.
    host = dict(position=self._position(), pending=pending, rows=self._writer.count)
    self._checkpoints.save(self._step, self._state, host, None if row is None else compute(row))

  def _has_row(self, step: int) -> bool:
    """Whether metrics.jsonl has a row of this phase's step."""
    return any(row["step"] == step for row in self._writer.rows(self._name))

  def _require_rows(self, step: int, reported: int, covered: int) -> None:
    """Raises ValueError if metrics.jsonl lacks rows before the checkpoint of `step`."""
    count = self._writer.count_covered(self._name, reported)
    if count >= covered:
      return
    if directory := self._checkpoints.config.directory:  # It has a copy of the workdir.
      remedy = f"copy {epath.Path(directory) / FOLDER / 'metrics.jsonl'} to the workdir"
      if not self._writer.count:
        remedy += ", or set another checkpoint.directory if this one belongs to another run"
    else:
      row = json.dumps(dict(phase=self._name, step=reported))
      remedy = f"restore the missing lines, or insert a line like {row} in the place of each"
    raise ValueError(
      f"metrics.jsonl has only {count} of the {covered} rows written before checkpoint "
      f"{self._checkpoints.directory / str(step)}: {remedy}"
    )

  def __enter__(self) -> "Phase":
    self._stack.enter_context(preemption.watch(self._checkpoints.config.grace_s))
    preemption.describe_resume(self._checkpoints.newest)
    self._stack.enter_context(contextlib.closing(self._progress))
    self._stack.enter_context(contextlib.closing(self._checkpoints))
    self._stack.push(self._save_on_preemption)  # The first callback on exit.
    return self

  def __exit__(self, *raised: Any) -> None:
    self._stack.__exit__(*raised)

  def _save_on_preemption(self, kind: object, error: object, trace: object) -> None:
    if isinstance(error, preemption.Preempted):
      self.flush()
      # `latest` includes a save that is still running. `Checkpointer.close` waits for its end.
      if self._step != self._checkpoints.latest():
        self.save()
      error.saved = f"step {self._step} of {self._name}"
