"""Detects NaN and infinity in metrics, writes a dump of the failing step, and ends the run.

The dump `failures/<phase>_<step>/` has the training state, the mini-batches and the configuration.
It is in `checkpoint.directory` if this key is set, and else in the workdir. `python -m
gspo_jax.replay DUMP` repeats the updates and locates the cause.
"""

import collections
import dataclasses
import json
import math
import numbers
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from gspo_jax import sharding
from gspo_jax.runs import checkpoint
from gspo_jax.structs import (
  AdvantageInputs,
  CriticTargets,
  MetricInputs,
  ModelInputs,
  Places,
  TrainBatch,
  TrainState,
)
from gspo_jax.system import hosts, jsons

ABOUT = "failure.json"
LIMIT = 8  # Number of consecutive skipped updates that ends a run.


class NonFiniteError(ArithmeticError):
  """Metrics are NaN or infinite, or updates were skipped. `names` lists the metrics."""

  def __init__(self, message: str, names: tuple[str, ...]):
    super().__init__(message)
    self.names = names


class Guard:
  """Checks metrics rows, and keeps the mini-batches of the newest steps for a dump.

  Metrics arrive one report late (`Phase.report`), when further updates have been dispatched. So the
  update function itself skips an update with a non-finite loss or gradient (`learner.step`). If
  `on_nonfinite` is "stop", all later updates are skipped too, so the state remains the one before
  the offending mini-batch.

  Args:
    home: directory for `failures/`.
    config: the run's configuration, as JSON.
    on_nonfinite: "stop" ends the run at the first non-finite update, and "skip" continues without
      the update.
    updates: gradient updates per step of the phase.
    keep: number of newest steps whose mini-batches are kept.
    limit: if `on_nonfinite` is "skip", this many consecutive skipped updates end the run.
  """

  def __init__(
    self,
    home: epath.Path,
    config: Mapping[str, Any],
    on_nonfinite: str,
    *,
    updates: int,
    keep: int,
    limit: int = LIMIT,
  ):
    self._home, self._config, self._on_nonfinite = home, config, on_nonfinite
    self._updates, self._skipped = updates, 0
    self._limit, self._in_a_row = limit, 0
    self._checked = 0  # Step of the newest checked row with `updates_skipped`.
    self._batches: collections.deque[tuple[int, Sequence[TrainBatch]]] = collections.deque(
      maxlen=keep
    )

  def start(self, state: TrainState, rows: Sequence[Mapping[str, Any]] = ()) -> TrainState:
    """Accepts a new or restored state; returns the state to train on. Collective.

    If `on_nonfinite` is "stop", the state's count of skipped updates is reset, because the update
    function would skip every update if the count were positive.

    Args:
      state: new or restored training state.
      rows: the phase's metrics rows before the restart. Only the first host needs them.
    """
    for row in rows:
      earlier, self._skipped = self._skipped, int(row.get("updates_skipped", self._skipped))
      self._count_in_a_row(row, self._skipped - earlier)
    counts = self._skipped, self._in_a_row, self._checked
    self._skipped, self._in_a_row, self._checked = hosts.broadcast(counts)
    if self._on_nonfinite == "stop":
      state, self._skipped = state.replace(skipped=state.skipped * 0), 0
    return state

  def keep_batches(self, step: int, batches: Sequence[TrainBatch]) -> None:
    """Keeps a step's mini-batches, in case its metrics row is bad."""
    self._batches.append((step, batches))

  def check(self, row: Mapping[str, Any], state: TrainState) -> None:
    """Raises `NonFiniteError`, after writing a dump, for a bad metrics row.

    If `on_nonfinite` is "stop", a row is bad if a metric is non-finite or an update was skipped. If
    `on_nonfinite` is "skip", a skipped update only causes a warning. A row is then bad if a metric
    is non-finite although no update of the row was skipped, or if `limit` consecutive updates were
    skipped.
    """
    names, skipped = nonfinite(row), int(row.get("updates_skipped", self._skipped))
    added, self._skipped = skipped - self._skipped, skipped
    point, skips = f"{row['phase']} step {row['step']}", ""
    if self._on_nonfinite == "skip":
      if added > 0:
        counts = f"{added} not finite ({', '.join(names)}) and skipped; {skipped} skipped in all"
        sys.stderr.write(f"warning at {point}: updates: {counts}\n")
      in_a_row = self._count_in_a_row(row, added)
      if in_a_row >= self._limit:
        skips = f"; {in_a_row} updates in a row were skipped"
      elif added > 0 or not names:
        return
    if not names and not skipped:
      return
    step, index = row["step"], 0
    if skipped and self._on_nonfinite == "stop":
      # The offending update and all later updates are skipped, so the number of skipped updates
      # locates the offending one. `state.step` would not, since it does not count updates with a
      # gradient of 0.
      tried = step * self._updates - skipped
      step, index = tried // self._updates + 1, tried % self._updates
    batches = dict(self._batches).get(step, ())[index:]
    values = ", ".join(f"{name} is {float(row[name])}" for name in names)
    reason = values or "its update was skipped"
    why = f"not finite at {row['phase']} step {step}: {reason}{skips}"
    try:
      directory = dump(self._home, self._config, dict(row) | dict(step=step), why, state, batches)
    except Exception as error:  # Orbax, TensorStore and file systems raise various types.
      failure = checkpoint.reason(error)
      raise NonFiniteError(f"{why}; its dump cannot be written: {failure}", names) from error
    raise NonFiniteError(f"{why}. To reproduce it: python -m gspo_jax.replay {directory}", names)

  def _count_in_a_row(self, row: Mapping[str, Any], added: int) -> int:
    """Counts consecutive skipped updates up to this metrics row.

    The count becomes 0 after each step with at least one applied update.
    """
    if "updates_skipped" in row:
      all_skipped = added >= (row["step"] - self._checked) * self._updates
      self._in_a_row = self._in_a_row + added if all_skipped else 0
      self._checked = row["step"]
    return self._in_a_row

  def check_saved(self, phase: str, step: int, state: TrainState) -> None:
    """Raises `NonFiniteError` before a save if updates were skipped and `on_nonfinite` is "stop".

    The metrics rows of these updates may not have been checked yet. If the checkpoint were saved, a
    resumed run would lack the updates, and no message would report that.
    """
    if self._on_nonfinite == "stop":
      skipped = int(jax.device_get(state.skipped))
      self.check(dict(phase=phase, step=step, updates_skipped=skipped), state)


def nonfinite(row: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns the names of NaN or infinite metrics."""
  return tuple(k for k, v in row.items() if isinstance(v, numbers.Real) and not math.isfinite(v))


def dump(
  home: epath.Path,
  config: Mapping[str, Any],
  row: Mapping[str, Any],
  why: str,
  state: TrainState,
  batches: Sequence[TrainBatch],
) -> epath.Path:
  """Writes a dump and returns its directory. Collective: call it on all hosts.

  Args:
    home: directory for `failures/`.
    config: the run's configuration, as JSON.
    row: metrics row of the failing step.
    why: description of the failure.
    state: training state. If the failing update was skipped, it is the state before this update.
    batches: mini-batches to repeat. If the failing update was skipped, its mini-batch is the first.
  """
  directory = home / "failures" / f"{row['phase']}_{row['step']:06d}"
  checkpoint.save_state(directory / "state", state)
  fetched = [sharding.fetch(batch) for batch in batches]
  if hosts.is_first():
    for earlier in directory.glob("batch_*.npz"):  # Of an earlier failure at this step.
      earlier.unlink()
    for i, batch in enumerate(fetched):
      leaves = jax.tree_util.tree_leaves_with_path(batch)
      arrays = {path[-1].name: np.asarray(leaf) for path, leaf in leaves}
      with (directory / f"batch_{i}.npz").open("wb") as file:
        np.savez(file, **arrays)
    values = {k: str(v) for k, v in row.items()}  # JSON has no NaN.
    about = dict(phase=row["phase"], step=row["step"], why=why, row=values, config=config)
    (directory / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
  return directory


def load(directory: str | Path) -> tuple[dict[str, Any], list[TrainBatch]]:
  """Reads failure.json and the mini-batches of a dump.

  Raises:
    ValueError: a file is missing or invalid; the message names it.
  """
  directory = epath.Path(directory)
  path = directory / ABOUT
  if not path.exists():
    raise ValueError(f"{directory} is not the dump of a failure: it has no {ABOUT}")
  about = jsons.read_object(path)
  if about.get("phase") not in ("sft", "rl") or not isinstance(about.get("config"), dict):
    raise ValueError(f"{path} lacks the configuration, or its phase is neither sft nor rl")
  paths = sorted(directory.glob("batch_*.npz"), key=lambda path: (len(path.name), path.name))
  return about, [_batch(path) for path in paths]  # In numerical order: 9 before 10.


def _batch(path: epath.Path) -> TrainBatch:
  try:
    with path.open("rb") as file, np.load(file) as archive:
      arrays = dict(archive)

    def struct(kind: type, **fields: Any) -> Any:
      names = {field.name for field in dataclasses.fields(kind)} & arrays.keys()
      return kind(**{name: arrays.pop(name) for name in names}, **fields)

    places = struct(Places) if "row_B" in arrays else None
    inputs = struct(ModelInputs, places=places)
    parts = dict(
      critic_targets=CriticTargets, advantage_inputs=AdvantageInputs, metric_inputs=MetricInputs
    )
    return TrainBatch(inputs, **{name: struct(kind) for name, kind in parts.items()}, **arrays)
  except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
    raise ValueError(f"{path} is not a mini-batch of a run: {error}") from error
