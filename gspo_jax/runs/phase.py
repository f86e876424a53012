"""One phase of a run, "sft" or "rl": where it resumes, what it reports and what it saves."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gspo_jax.runs.alarms import Alarms
from gspo_jax.runs.checkpoint import Checkpointer
from gspo_jax.runs.goodput import Goodput
from gspo_jax.runs.metrics import Row, Stopwatch, Writer, compute
from gspo_jax.runs.nonfinite import Guard
from gspo_jax.runs.progress import Progress
from gspo_jax.settings.training import AlarmConfig
from gspo_jax.structs import TrainState
from gspo_jax.system import hosts, preemption


class Phase:
  """The part that the loops of the cold start and of RL have in common.

    phase = Phase("rl", iterations, ...)
    step, state, host = phase.resume(...)
    with phase:  # being told to stop is answered by saving where the phase stands
      phase.stand(step, state, position)
      for step in phase.steps():
        state, row = ...
        phase.stand(step, state, position)
        phase.report(row)
        phase.save(row)

  Args:
    total: steps of the phase.
    alarms: warnings that rows may give rise to; None: none.
    goodput: of the run.
    at_most: it may end sooner.
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
    self._held: Row | None = None  # the newest row, on the device
    self._opened = contextlib.ExitStack()
    self.stages = Stopwatch()

  def resume(
    self, like: Callable[[], TrainState], start: Callable[[], TrainState]
  ) -> tuple[int, TrainState, Row | None]:
    """Returns the last step that a checkpoint covers, the state after it, and the `position` and
    `pending` that were saved with it; 0, `start()` and None where there is none. Rows that it does
    not cover are dropped.

    Raises:
      ValueError: rows that it covers are not there; says what to do.
    """
    if restored := self._checkpoints.restore_newest(like):
      step, state, host = restored
      reported = step if host["pending"] is None else step - 1
    else:
      step, state, host, reported = 0, start(), None, -1
    dropped = self._writer.truncate(self._name, reported)
    covered = host["rows"] if host else 0
    hosts.run_on_first_host(lambda: self._require_rows(step, covered))
    if dropped and host is None:
      sys.stderr.write(
        f"{self._name} begins anew: there is no checkpoint of it, and {dropped} rows of "
        "metrics.jsonl go\n"
      )
    self._goodput.resume(next(iter(self._writer.rows("sft", "rl")[-1:]), {}))
    state = self._guard.start(state, reported=reported == step, step=step)
    if self._alarm_config:
      self._alarms = Alarms(self._alarm_config, self._writer.rows(self._name))
    self._done = step
    self._progress = Progress(
      self._name, self._total, start=step, active=hosts.is_first(), at_most=self._at_most
    )
    self._progress.wait()
    return step, state, host

  def steps(self) -> Iterator[int]:
    """Yields the numbers of the steps that are left. Raises `Preempted` between them. Warns, once,
    where a step has taken so long that a notice would come too late."""
    warned = not hosts.is_first()
    for step in range(self._done + 1, self._total + 1):
      self._pending = None  # an interruption of this step goes back to the end of the last one
      preemption.check()
      warning = preemption.too_long()
      if warning and not warned and step > self._done + 2:  # the first one compiles
        sys.stderr.write(f"{warning}\n")
        warned = True
      yield step

  def hold(self, step: int, batches: Any) -> None:
    """Keeps the mini-batches of a step until its metrics are known to be finite."""
    self._guard.hold(step, batches)

  def stand(
    self,
    step: int,
    state: TrainState,
    position: Callable[[], Mapping[str, Any]],
    pending: Row | None = None,
  ) -> None:
    """Says where the phase stands: what to save should the machine go.

    Args:
      position: makes JSON of where the data and the like stood after `step`.
      pending: the row of a step that is still to be evaluated and reported.
    """
    self._step, self._state, self._position, self._pending = step, state, position, pending

  def check(self, row: Row) -> None:
    """Raises `NonFiniteError`, after a dump, if the row holds NaN or infinity."""
    self._guard.check(dict(phase=self._name) | row, self._state)

  def report(self, row: Row) -> None:
    """Writes the row of the step before, now that the devices are busy with another one: they would
    have to wait for the host if values were fetched that have just been dispatched."""
    self.flush()
    lap = self.stages.lap()
    row = row | lap | self._goodput.metrics(lap)
    self._held = dict(phase=self._name) | row | self._checkpoints.metrics()
    self._pending = None  # whatever saves from here on puts the row on file first

  def flush(self) -> None:
    """Writes the row that is still held back."""
    held, self._held = self._held, None
    if held is None:
      return
    row = compute(held)
    self._guard.check(row, self._state)
    warnings, begun = self._alarms(row) if self._alarms else ({}, [])
    self._writer.write(row | warnings)
    self._progress.update(row["step"], row, begun)

  def is_time(self) -> bool:
    """Whether it is long enough since the last checkpoint. All hosts call it."""
    return self._checkpoints.is_time()

  def save(self, row: Row | None = None) -> None:
    """Saves where the phase stands; `row` has the metric that decides which checkpoint is best."""
    self.flush()  # no checkpoint may cover a step whose row is not on file
    self._guard.check_saved(self._name, self._step, self._state)
    pending = None if self._pending is None else compute(self._pending)
    self._writer.sync()  # nor one that a crash of the machine would take back
    host = dict(position=self._position(), pending=pending, rows=self._writer.count)
    self._checkpoints.save(self._step, self._state, host, None if row is None else compute(row))

  def _require_rows(self, step: int, covered: int) -> None:
    if self._writer.count < covered:
      path = self._checkpoints.directory / str(step)
      raise ValueError(
        f"metrics.jsonl has {self._writer.count} of the {covered} rows that checkpoint {path} "
        "covers: put it back whole, or remove that checkpoint to go on from the one before"
      )

  def __enter__(self) -> "Phase":
    self._opened.enter_context(preemption.watch(self._checkpoints.config.grace_s))
    preemption.goes_on_from(self._checkpoints.newest)
    self._opened.enter_context(contextlib.closing(self._progress))
    self._opened.enter_context(contextlib.closing(self._checkpoints))
    self._opened.push(self._save_where_it_stands)  # the first thing at the end
    return self

  def __exit__(self, *raised: Any) -> None:
    self._opened.__exit__(*raised)

  def _save_where_it_stands(self, kind: object, error: object, trace: object) -> None:
    if isinstance(error, preemption.Preempted):  # what is being saved is finished in any case
      self.flush()
      if self._step != self._checkpoints.latest():
        self.save()
      error.saved = f"step {self._step} of {self._name}"
