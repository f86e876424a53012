"""Checkpoints with Orbax: the training state (arrays) and the host state (JSON).

The host state is a dict with three keys. `position` has the position in the data and, in RL,
unfinished responses, batches in flight and totals. `pending` is a metrics row that is not reported
yet; None if all rows are. `rows` is the number of training rows in metrics.jsonl.

Orbax writes to a temporary path, and renames it at the end. So a killed process leaves either a
whole checkpoint or none. Orbax does not detect a flipped bit in an array. So the JSON of the host
state also has checksums of all arrays (integrity.py), and one of itself (`system.files.seal`).
"""

import contextlib
import dataclasses
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as policies

from gspo_jax.runs import integrity
from gspo_jax.runs.mirror import Mirror
from gspo_jax.settings.training import CheckpointConfig
from gspo_jax.system import hosts
from gspo_jax.system.files import WriteError, seal, unseal, writing


class DamagedError(ValueError):
  """A checkpoint cannot be read, or differs from its checksums."""

  def __init__(self, path: epath.Path, why: str):
    super().__init__(
      f"checkpoint {path} is damaged: {why}; remove it to resume from the previous one"
    )
    self.path, self.why = path, why


class _Manager(ocp.CheckpointManager):
  def reached_preemption(self, step: int) -> bool:
    return False  # The run counts its checks on all hosts; Orbax's would disturb the count.


class Checkpointer:
  """Checkpoints of one phase, written in the background."""

  def __init__(self, workdir: str | Path, phase: str, config: CheckpointConfig):
    """Opens the directory. Raises WriteError, or DamagedError for unreadable metadata."""
    self.directory, self.config = config.phase_directory(workdir, phase), config
    # The best checkpoint has the largest product of `_sign` and the metric named `_best`.
    self._best, self._sign = config.best, 1 if config.best_is == "largest" else -1
    self._last = time.monotonic()  # Time of the last save; at first, of opening.
    self._mirror = Mirror(workdir, config.directory)
    self._failure: BaseException | None = None  # Error of a failed save.
    rules = [policies.LatestN(config.keep)]
    if config.keep_every:
      rules.append(policies.EveryNSteps(config.keep_every))
    if config.best:
      rules.append(policies.BestN(get_metric_fn=self._score, n=1))
    handler = ocp.StandardCheckpointHandler()
    handler.async_save = self._report_errors(handler.async_save)
    for path in self.directory.glob("*/metrics/metrics"):  # Orbax reads all of these files.
      with readable(path.parent.parent):
        json.loads(path.read_bytes())
    options = ocp.CheckpointManagerOptions(
      preservation_policy=policies.AnyPreservationPolicy(rules),
      best_fn=self._score if config.best else None,
      cleanup_tmp_directories=True,
      async_options=ocp.AsyncOptions(
        post_finalization_callback=self._complete,
        # With True, Orbax would wait 20 minutes before it reports a failure to create a directory.
        create_directories_asynchronously=False,
      ),
    )
    handlers = dict(state=handler, host=ocp.JsonCheckpointHandler())
    try:
      with writing(self.directory):
        self._manager = _Manager(self.directory, options=options, item_handlers=handlers)
    except RecursionError as error:  # Orbax tolerates all other damage of metadata files.
      path = self.directory / "*" / "_CHECKPOINT_METADATA"
      raise DamagedError(path, "nested too deeply") from error
    self._saving: tuple[int, float] | None = None  # Step and start time of the last save.
    self._seconds: float | None = None  # Duration of a completed save, until `metrics` returns it.

  def latest(self) -> int | None:
    """Returns the newest checkpoint's step; None if there is none. A running save counts too."""
    return self._manager.latest_step()

  def newest(self) -> str:
    """Describes the newest checkpoint, for messages."""
    if "://" in str(self.directory):  # Listing a bucket takes too long.
      return f"the newest checkpoint in {self.directory}"
    steps = finished(self.directory)
    return f"checkpoint {self.directory / str(steps[-1])}" if steps else "the start of this phase"

  def is_time(self) -> bool:
    """Whether `checkpoint.every_minutes` have passed since the last save, by the first host's
    clock. Always False if this key is 0. Collective: call it on all hosts."""
    minutes = self.config.every_minutes
    return minutes > 0 and hosts.broadcast(time.monotonic() - self._last >= 60 * minutes)

  def restore_newest(self, like: Callable[[], Any]) -> tuple[int, Any, dict[str, Any]] | None:
    """Restores (step, state, host_state) of the newest undamaged checkpoint.

    Returns None if there is no checkpoint. Damaged checkpoints of later steps are renamed to
    `damaged_<step>`. Collective: call it on all hosts.

    Args:
      like: returns the abstract state, for the layout of the restored arrays.

    Raises:
      ValueError: all checkpoints are damaged, or the arrays of one do not match `like`.
      DamagedError: there are several hosts, and this host cannot read a checkpoint.
    """
    damaged: list[epath.Path] = []
    for step in sorted(self._manager.all_steps(), reverse=True):
      try:
        state, host = self.restore(step, like())
      except DamagedError as error:
        if jax.process_count() > 1 and error.__cause__:
          raise  # Other hosts may be able to read their shards.
        if hosts.is_first():
          sys.stderr.write(f"checkpoint {error.path} is damaged and skipped: {error.why}\n")
        damaged.append(error.path)
        continue
      self._set_aside(damaged)
      return step, state, host
    if damaged:
      raise ValueError(
        f"{self.directory} has no undamaged checkpoint: restore one from a copy, or remove "
        f"{self.directory} to restart this phase"
      )
    return None

  def save(
    self, step: int, state: Any, host: dict[str, Any], metrics: dict[str, float] | None = None
  ) -> None:
    """Starts a save in the background. The arrays are copied before this method returns.

    An existing checkpoint of this step stays, unless `checkpoint.best` needs its metrics.

    Args:
      step: number of finished steps.
      state: training state.
      host: host state, a dict that JSON can represent.
      metrics: metrics row with the metric named by `checkpoint.best`; None if it was not measured.

    Raises:
      WriteError: this checkpoint or the previous one cannot be written.
    """
    self._wait()
    if self._best:  # All hosts must choose the same checkpoints to keep.
      metrics = {self._best: self._sign * float(hosts.broadcast(self._score(metrics or {})))}
    self._saving = step, time.perf_counter()
    with self._write_errors(self.directory / str(step)):
      if step in self._manager.all_steps():
        if not self._best:  # A kill during a new save would leave none.
          return
        self._manager.delete(step)
      content = dict(phase=self.directory.name, step=step, host=host, sums=integrity.sums(state))
      sealed = dict(sealed=seal(content))
      self._manager.save(
        step,
        args=ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(sealed)),
        metrics=metrics if self._best else None,
        force=True,
      )
    self._last = time.monotonic()

  def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """Restores (state, host_state), in the layout of the abstract state `like`.

    Raises:
      DamagedError: the checkpoint cannot be read, or differs from its checksums.
      ValueError: names or shapes of arrays differ from `like`; the message names one array.
    """
    path = self.directory / str(step)
    host_of(path)  # Rejects a checkpoint of another phase, whose arrays may differ.
    with readable(path):
      stored = shapes(self._manager.item_metadata(step)["state"])
    if not stored:
      raise DamagedError(path, f"{path / 'state' / '_METADATA'} is missing")
    hint = "; use another --workdir, or the configuration that wrote the checkpoint"
    require_shapes(f"checkpoint {path}", stored, shapes(like), hint)
    with readable(path):
      arguments = ocp.args.Composite(state=ocp.args.StandardRestore(like))
      state = self._manager.restore(step, args=arguments)["state"]
    return state, host_of(path, state)

  def host(self, step: int) -> dict[str, Any]:
    """Reads the host state alone. Raises DamagedError."""
    return host_of(self.directory / str(step))

  def metrics(self) -> dict[str, float]:
    """Returns the metric `checkpoint/seconds` of a newly completed save; {} if there is none.

    Raises:
      WriteError: the checkpoint could not be written.
    """
    if self._failure is not None:
      self._wait()
    seconds, self._seconds = self._seconds, None
    return {} if seconds is None else {"checkpoint/seconds": seconds}

  def close(self) -> None:
    """Waits until the last checkpoint is on disk. Raises WriteError if a file cannot be written.

    If this process has saved a checkpoint, also updates the workdir's copy (mirror.py).
    """
    self._wait()
    self._manager.close()
    if self._saving and hosts.is_first():
      with self._write_errors(self._mirror.target):
        self._mirror.copy()  # Includes rows written since the last save.

  def _score(self, metrics: Mapping[str, float]) -> float:
    """Returns `_sign` times the ranking metric; -inf if it was not measured, or is not finite."""
    score = self._sign * metrics.get(self._best, math.nan)
    return score if math.isfinite(score) else -math.inf

  def _wait(self) -> None:
    """Waits for the save in the background.

    Raises WriteError as soon as the save fails, since Orbax might wait forever for other hosts.
    """
    step, _ = self._saving or (None, None)
    with self._write_errors(self.directory / str(step)):
      while self._manager.is_saving_in_progress() and self._failure is None:
        time.sleep(0.005)
      if self._failure is not None:
        raise self._failure
      self._manager.wait_until_finished()

  def _set_aside(self, damaged: Sequence[epath.Path]) -> None:
    """Renames damaged checkpoints to `damaged_<step>`. Collective."""
    for path in damaged if hosts.is_first() else ():
      aside = path.parent / f"damaged_{path.name}"
      with writing(aside):
        if aside.exists():
          aside.rmtree()
        path.rename(aside)
    if damaged:
      multihost_utils.sync_global_devices("damaged checkpoints are set aside")
      self._manager.reload()

  @contextlib.contextmanager
  def _write_errors(self, path: epath.Path | None) -> Iterator[None]:
    """Records any error in the block, and converts it to a one-line WriteError."""
    try:
      yield
    except WriteError as error:
      self._failure = error
      raise
    except Exception as error:
      self._failure = error
      raise WriteError(f"{path} cannot be written: {reason(error)}") from error

  def _report_errors(self, async_save: Callable) -> Callable:
    """Wraps Orbax's `async_save` of arrays, to record errors at once."""

    async def save(*args: Any, **kwargs: Any) -> list["_Commit"]:
      return [_Commit(await async_save(*args, **kwargs) or [], self._fail)]

    return save

  def _fail(self, error: BaseException) -> None:
    self._failure = error

  def _complete(self) -> None:
    """Copies the workdir after a checkpoint's files are written, before the final rename."""
    try:
      if hosts.is_first():
        self._mirror.copy()
    except BaseException as error:
      self._fail(error)
      raise
    self._seconds = time.perf_counter() - self._saving[1]


@dataclasses.dataclass(frozen=True)
class _Commit:
  """Futures of a save in Orbax, which pass an error to `fail` at once.

  Orbax alone would withhold an error until all hosts are done.
  """

  futures: Sequence[Any]
  fail: Callable[[BaseException], None]

  def result(self, timeout: float | None = None) -> None:
    try:
      for future in self.futures:
        future.result(timeout=timeout)
    except BaseException as error:
      self.fail(error)
      raise

  def cancel(self) -> None:
    for future in self.futures:
      future.cancel()


def reason(error: BaseException) -> str:
  """Shortens the message of an Orbax or TensorStore error."""
  if isinstance(error, OSError) and error.strerror:
    return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
  # Example: `...: File too large [tensorstore_spec='...'] [os_error_code='27']`.
  system_error = re.search(r': ([^:"[]+) \[\w+=', str(error))
  lines = str(error).splitlines() or [""]
  return system_error[1] if system_error else f"{type(error).__name__}: {lines[0][:300]}"


def finished(directory: epath.Path) -> list[int]:
  """Returns the steps of a phase's complete checkpoints, in rising order; [] if none."""
  numbered = [p for p in directory.iterdir() if p.name.isdigit()] if directory.is_dir() else []
  return sorted(int(p.name) for p in numbered if ocp.utils.is_checkpoint_finalized(p))


def host_of(path: epath.Path, state: Any = None) -> dict[str, Any]:
  """Reads a checkpoint's host state, and verifies checksums.

  Args:
    path: directory of the checkpoint.
    state: restored arrays to verify; None to verify the host state alone.

  Raises:
    DamagedError: the host state cannot be read, or belongs to another phase or step; or the host
      state or an array differs from its checksum.
  """
  with readable(path):
    stored = unseal(json.loads((path / "host" / "metadata").read_bytes())["sealed"])
    host, written = stored["host"], stored["sums"]
    origin = f"step {stored['step']} of {stored['phase']}"
  if origin != f"step {path.name} of {path.parent.name}":
    raise DamagedError(path, f"it was written as {origin}")
  if state is not None and (wrong := integrity.changed(written, integrity.sums(state))):
    raise DamagedError(path, wrong)
  return host


@contextlib.contextmanager
def readable(path: epath.Path) -> Iterator[None]:
  """Converts errors in the block to DamagedError, except MemoryError and errors of JAX."""
  try:
    yield
  except (MemoryError, jax.errors.JaxRuntimeError):
    raise
  except Exception as error:  # Orbax, TensorStore and json raise various types.
    raise DamagedError(path, reason(error)) from error


def require_shapes(
  named: str, stored: Mapping[str, Any], expected: Mapping[str, Any], hint: str = ""
) -> None:
  """Raises ValueError for the first missing, unexpected or differently shaped array.

  Args:
    named: description of the checkpoint, which begins the error message.
    stored: shape of each stored array.
    expected: shape of each expected array.
    hint: end of the error message, such as a remedy.
  """
  for name in sorted(expected.keys() | stored.keys()):
    if expected.get(name) != stored.get(name):
      actual = f"has shape {stored[name]}" if name in stored else "is missing"
      target = f"expects {expected[name]}" if name in expected else "has no such array"
      raise ValueError(f"{named}: {name} {actual}, and the configured model {target}{hint}")


def stored_shapes(path: epath.Path) -> dict[str, tuple[int, ...]]:
  """Returns shapes of the arrays in a checkpoint, by name. Raises DamagedError."""
  with readable(path):
    return shapes(ocp.PyTreeCheckpointHandler().metadata(path / "state"))


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  """Returns shapes by name, from arrays or from Orbax's metadata."""
  leaves = integrity.named(getattr(tree, "tree", tree)).items()
  return {name: tuple(leaf.shape) for name, leaf in leaves if hasattr(leaf, "shape")}


def save_state(directory: str | Path, state: Any) -> None:
  """Writes arrays without host state and checksums, for `restore_state`."""
  options = ocp.AsyncOptions(create_directories_asynchronously=False)
  with ocp.StandardCheckpointer(async_options=options) as writer:
    writer.save(epath.Path(directory), state, force=True)


def restore_state(directory: str | Path, like: Any) -> Any:
  """Reads a state written by `save_state`, in the layout of the abstract state `like`."""
  path = epath.Path(directory)
  with ocp.StandardCheckpointer() as reader:
    return reader.restore(path if "://" in str(path) else path.absolute(), like)
