"""Metrics, from the device to `metrics.jsonl` and TensorBoard.

A metric is a plain scalar or a *reduction*, any pytree with `.compute()`. (The reduction of a mean
has a numerator and a denominator, so merging never takes a mean of means.) Metrics stay on the
device until the next row is reported (`phase.Phase.report`). Then `compute` fetches them together.
"""

import collections
import contextlib
import dataclasses
import errno
import json
import math
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from gspo_jax.runs import tracking
from gspo_jax.runs.goodput import compile_seconds
from gspo_jax.system.files import write_whole, writing

Row = dict[str, Any]

PHASES = ("sft", "rl", "eval")  # In the order of training; "eval" is a separate job.


def compute(metrics: Mapping[str, Any]) -> Row:
  """Fetches all metrics together, as Python values.

  Reductions and arrays become floats. Strings and integers are unchanged, and None is dropped.
  """
  host = jax.device_get(dict(metrics))
  # A reduction computes jnp arrays from its fetched parts, so a second fetch follows.
  values = jax.device_get({k: v.compute() if hasattr(v, "compute") else v for k, v in host.items()})
  return {
    k: v if isinstance(v, str | int) else float(v) for k, v in values.items() if v is not None
  }


class Stopwatch:
  """Measures seconds per stage of a step.

  The time of a nested stage counts for the nested stage only. Compilation counts as such a stage,
  named `compile`. Times are those of the host. Work of the devices counts if a stage waits for it.
  """

  def __init__(
    self,
    clock: Callable[[], float] = time.perf_counter,
    compiled: Callable[[], float] = compile_seconds,
  ):
    self._clock, self._compiled = clock, compiled
    self._since, self._compiled_before = clock(), compiled()
    self._stack: list[str] = []
    self._seconds: dict[str, float] = collections.defaultdict(float)

  @contextlib.contextmanager
  def __call__(self, stage: str) -> Iterator[None]:
    self._charge()
    self._stack.append(stage)
    try:
      yield
    finally:
      self._charge()
      self._stack.pop()

  def lap(self) -> dict[str, float]:
    """Returns `{'time/<stage>': seconds}` since the last lap, and resets the seconds."""
    self._charge()
    seconds, self._seconds = self._seconds, collections.defaultdict(float)
    return {f"time/{stage}": value for stage, value in seconds.items()}

  def _charge(self) -> None:
    clock, compiled = self._clock(), self._compiled()
    compiling = min(compiled - self._compiled_before, clock - self._since)
    if self._stack:
      self._seconds[self._stack[-1]] += clock - self._since - compiling
    if compiling > 0:
      self._seconds["compile"] += compiling
    self._since, self._compiled_before = clock, compiled


@dataclasses.dataclass(frozen=True)
class Totals:
  """Costs of a run since its first iteration.

  Checkpoints contain these sums, so a resumed run counts each iteration once.
  """

  tokens: int = 0  # Sampled tokens, including discarded tokens.
  flops: float = 0.0  # Model FLOPs of sampling, passes without gradient, and updates.

  def plus(self, tokens: int, flops: float) -> "Totals":
    """Returns the sums with another iteration's costs."""
    return Totals(self.tokens + tokens, self.flops + flops)

  def metrics(self) -> dict[str, float]:
    """Returns the sums by their names in metrics.jsonl."""
    return {f"total/{name}": float(value) for name, value in vars(self).items()}


def memory() -> dict[str, float]:
  """Returns peak memory, in GiB, of the process and the fullest local device.

  The device's peak is absent if a local device does not report memory.
  """
  memory = {"memory/host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
  peaks = [(d.memory_stats() or {}).get("peak_bytes_in_use") for d in jax.local_devices()]
  if None not in peaks:
    memory["memory/device_peak_gib"] = max(peaks) / 2**30
  return memory


class Writer(contextlib.AbstractContextManager):
  """Appends metrics rows to `metrics.jsonl` and TensorBoard, and writes samples to `rollouts/`.

  In a run on several hosts, only the first process writes. The other processes pass `active=False`.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    *,
    active: bool = True,
    wandb: str = "",
    config: Mapping[str, Any] | None = None,
  ):
    """Opens the files.

    Args:
      workdir: directory of the files.
      active: whether this process writes.
      wandb: Weights & Biases project for the metrics rows; "" for none.
      config: configuration to show in Weights & Biases; None for none.

    Raises:
      ValueError: a line of metrics.jsonl is damaged.
      WriteError: metrics.jsonl cannot be written.
    """
    self._workdir = Path(workdir)
    self._path = self._workdir / "metrics.jsonl"
    self._active = active
    self.notes: dict[str, float] = {}  # Constant metrics of the run, added to every row.
    self.count = 0  # Number of rows in metrics.jsonl, apart from rows of phase "eval".
    self._purge: dict[str, int] = {}  # First step to hide in TensorBoard, by phase.
    self._boards: dict[str, tracking.EventFile] = {}
    if active:
      with writing(self._path):
        self._workdir.mkdir(parents=True, exist_ok=True)
        _cut_half_written_line(self._path)
      self.count = _training_rows(read_rows(self._path))  # Raises ValueError for a damaged row.
      self._open()
    self._wandb = None
    if active and wandb:
      self._wandb = tracking.open_wandb(wandb, self._workdir, config or {})

  def write(self, row: Mapping[str, Any]) -> None:
    """Appends one metrics row. In metrics.jsonl, NaN and infinity become null.

    Args:
      row: `phase`, `step`, and numbers by name.

    Raises:
      TypeError: a value is not a number.
      WriteError: the row cannot be written, or metrics.jsonl was removed or replaced.
    """
    if not self._active:
      return
    row = {**self.notes, **row}
    phase, step = str(row["phase"]), int(row["step"])
    values = {name: _number(name, row[name]) for name in sorted(row.keys() - {"phase", "step"})}
    finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
    line = json.dumps({"phase": phase, "step": step, **finite}, allow_nan=False) + "\n"
    self._append(line.encode())
    self.count += phase != "eval"
    shown = {
      name if name.startswith(f"{phase}/") else f"{phase}/{name}": value
      for name, value in values.items()
      if math.isfinite(value)
    }
    self._board(phase).write(step, shown)
    if self._wandb is not None:
      self._wandb.log({f"{phase}/step": step} | shown)

  def rows(self, *phases: str) -> list[Row]:
    """Returns the rows of these phases in metrics.jsonl. [] if this process does not write."""
    rows = read_rows(self._path) if self._active else []
    return [row for row in rows if row.get("phase") in phases]

  def count_covered(self, phase: str, step: int) -> int:
    """Counts the training rows up to a step of a phase. Call it on the first host only."""
    return _training_rows(self._split(phase, step)[0])

  def truncate(self, phase: str, step: int) -> int:
    """Drops metrics rows of `phase` after `step`, and all rows of later training phases.

    Call it in a resumed run before the first `write`. A run writes all rows of a step before the
    step's checkpoint, so a resumed run ends with the rows of an uninterrupted run.

    Returns:
      The number of dropped rows.
    """
    if not self._active:
      return 0
    covered, dropped = self._split(phase, step)
    # The next event file of a phase tells TensorBoard to hide steps at or above the purge step.
    self._purge = dict.fromkeys((row.get("phase") for row in dropped), 0)
    for row in covered:
      if row["phase"] in self._purge:
        self._purge[row["phase"]] = max(self._purge[row["phase"]], row["step"] + 1)
    if dropped:
      for phase in self._purge:
        self._board(phase)  # Event files come first: a crash must not leave stale curves.
      self._file.close()
      write_whole(self._path, (json.dumps(row) + "\n" for row in covered))
      self._open()
    self.count = _training_rows(covered)
    return len(dropped)

  def _split(self, phase: str, step: int) -> tuple[list[Row], list[Row]]:
    """Returns the rows up to a step of a phase, and the later rows."""
    covering = (*PHASES[: PHASES.index(phase)], "eval")
    limits = dict.fromkeys(covering, math.inf) | {phase: step}
    covered, dropped = [], []
    for row in read_rows(self._path):
      is_covered = row["step"] <= limits.get(row.get("phase"), -math.inf)
      (covered if is_covered else dropped).append(row)
    return covered, dropped

  def sync(self) -> None:
    """Waits until the metrics rows are safe from a loss of power.

    Raises:
      WriteError: the rows cannot be written.
    """
    if not self._active:
      return
    with writing(self._path):
      os.fsync(self._file.fileno())
      folder = os.open(self._workdir, os.O_RDONLY)
      try:
        os.fsync(folder)  # Syncs the file's name too.
      finally:
        os.close(folder)

  def dump_rollouts(
    self, phase: str, step: int, records: Iterable[Mapping[str, Any]], folder: str = "rollouts"
  ) -> None:
    """Writes `<folder>/<phase>_<step>.jsonl`, with a line per record. An existing file is replaced.

    Raises:
      WriteError: the file cannot be written.
    """
    if not self._active:
      return
    path = self._workdir / folder / f"{phase}_{step:06d}.jsonl"
    with writing(path):
      path.parent.mkdir(exist_ok=True)
    stamped = ({"step": step} | dict(record) for record in records)
    lines = (json.dumps(r, ensure_ascii=False, default=lambda x: x.tolist()) for r in stamped)
    write_whole(path, (line + "\n" for line in lines))

  def close(self) -> None:
    """Closes metrics.jsonl and the event files. `__exit__` also ends the W&B run."""
    if not self._active:
      return
    self._file.close()
    for board in self._boards.values():
      board.close()
    self._boards = {}

  def __exit__(self, *_: object) -> None:
    self.close()
    if self._wandb is not None:
      self._wandb.finish()

  def _open(self) -> None:
    with writing(self._path):  # Unbuffered, so `close` does not retry a failed write.
      self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (lives as long as the run)

  def _append(self, line: bytes) -> None:
    """Hands a line to the operating system. The line then survives `kill -9`."""
    with writing(self._path):
      if not os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
        raise OSError(errno.ESTALE, "it was replaced during the run")
      while line:
        line = line[self._file.write(line) :]

  def _board(self, phase: str) -> tracking.EventFile:
    """Returns a phase's event file. Each phase has a separate directory and purge step."""
    if phase not in self._boards:
      directory = self._workdir / "tensorboard" / phase
      self._boards[phase] = tracking.EventFile(directory, self._purge.get(phase))
    return self._boards[phase]


def graded_reward(row: Row, prefix: str) -> float | None:
  """Returns an evaluation's mean reward; None if it is missing, or follows from the accuracy.

  prefix: first part of the names of the evaluation's metrics.
  """
  accuracy, reward = (row.get(prefix + name) for name in ("accuracy", "reward/mean"))
  if accuracy is None or reward is None:
    return None
  # Responses without a verdict count as wrong in the accuracy. The mean reward excludes them.
  judged = 1 - (row.get(f"{prefix}verifier/unknown") or 0)
  return reward if abs(reward * judged - accuracy) >= 1e-3 else None


def read_rows(path: str | os.PathLike, counted: bool = True) -> list[Row]:
  """Reads metrics rows; [] if the file does not exist.

  An incomplete last line is ignored, since `kill -9` may leave such a line.

  Args:
    path: path of the file.
    counted: whether checkpoints count the rows, so that a damaged line must not be removed.

  Raises:
    ValueError: a line is not a JSON object with a step; the message names the line.
  """
  path = Path(path)
  if not path.exists():
    return []
  rows = []
  lines = path.read_bytes().split(b"\n")
  for number, line in enumerate(lines[:-1], start=1):  # The last item has no newline.
    try:
      row = json.loads(line)
      if not isinstance(row["step"], int):
        raise TypeError(f"step is {row['step']!r}")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
      remedy = f"restore the line, or replace it by {_placeholder(rows)}"
      raise ValueError(
        f"{path}:{number} is not a JSON object with a step ({error or type(error).__name__}): "
        f"{remedy if counted else 'remove the line'}"
      ) from error
    rows.append(row)
  return rows


def _placeholder(rows: Sequence[Row]) -> str:
  """Returns a metrics row without values, as JSON. Checkpoints count it like the row after `rows`.

  rows: all earlier rows.
  """
  trained = [row for row in rows if row.get("phase") in ("sft", "rl")]
  previous = trained[-1] if trained else dict(phase="sft", step=0)
  return json.dumps(dict(phase=previous["phase"], step=previous["step"] + 1))


def _training_rows(rows: Iterable[Row]) -> int:
  """Counts rows of training. Rows of a separate evaluation (job=eval) belong to no checkpoint."""
  return sum(row.get("phase") != "eval" for row in rows)


def _number(name: str, value: Any) -> float:
  try:
    return float(value)
  except (TypeError, ValueError) as error:
    raise TypeError(f"metric {name!r} is not a number: {value!r}") from error


def _cut_half_written_line(path: Path) -> None:
  if path.exists():
    data = path.read_bytes()
    if not data.endswith(b"\n"):
      os.truncate(path, data.rfind(b"\n") + 1)
