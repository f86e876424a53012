"""Checkpoints with Orbax: the training state, the position in the data, what the host counts.

Orbax writes beside the final place and renames, so that a process that is killed leaves a whole
checkpoint or none. It notices damage of what it parses, but not a bit that has flipped in an array:
for that the host's part, which is sealed, has a checksum of each (integrity.py).
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
  """A checkpoint is not what was written."""

  def __init__(self, path: epath.Path, why: str):
    super().__init__(f"checkpoint {path} is damaged: {why}; remove it to go on from the one before")
    self.path, self.why = path, why


class _Manager(ocp.CheckpointManager):
  def reached_preemption(self, step: int) -> bool:
    # The run asks, between steps (preemption.py). Hosts agree by the number of times they have
    # asked, and Orbax would ask with numbers of its own.
    return False


class Checkpointer:
  """One phase's checkpoints, written while training goes on."""

  def __init__(self, workdir: str | Path, phase: str, config: CheckpointConfig):
    """Raises DamagedError where the metrics of a checkpoint cannot be read."""
    self.directory, self.config = config.of(workdir, phase), config
    self._best, self._sign = config.best, 1 if config.best_is == "largest" else -1
    self._last = time.monotonic()  # when the last one was begun
    self._mirror = Mirror(workdir, config.directory)
    self._failure: BaseException | None = None  # of what is written in the background
    kept = [policies.LatestN(config.keep)]
    if config.keep_every:
      kept.append(policies.EveryNSteps(config.keep_every))
    if config.best:
      kept.append(policies.BestN(get_metric_fn=self._measured, n=1))
    handler = ocp.StandardCheckpointHandler()
    handler.async_save = self._watched(handler.async_save)
    for path in self.directory.glob("*/metrics/metrics"):  # Orbax reads those of all checkpoints
      with readable(path.parent.parent):
        json.loads(path.read_bytes())
    options = ocp.CheckpointManagerOptions(
      preservation_policy=policies.AnyPreservationPolicy(kept),
      best_fn=self._measured if config.best else None,
      cleanup_tmp_directories=True,
      async_options=ocp.AsyncOptions(
        post_finalization_callback=self._written,
        # Threads would wait twenty minutes for a directory that cannot be made.
        create_directories_asynchronously=False,
      ),
    )
    handlers = dict(state=handler, host=ocp.JsonCheckpointHandler())
    try:
      with writing(self.directory):
        self._manager = _Manager(self.directory, options=options, item_handlers=handlers)
    except RecursionError as error:  # it gets over all other damage of what it reads here
      path = self.directory / "*" / "_CHECKPOINT_METADATA"
      raise DamagedError(path, "nested too deeply") from error
    self._saving: tuple[int, float] | None = None  # step, when it was begun
    self._seconds: float | None = None

  def latest(self) -> int | None:
    """Step of the newest complete checkpoint."""
    return self._manager.latest_step()

  def newest(self) -> str:
    """What a run would continue from now, in words."""
    if "://" in str(self.directory):  # asking takes a while, and there may be none
      return f"the newest checkpoint in {self.directory}"
    steps = finished(self.directory)
    return f"checkpoint {self.directory / str(steps[-1])}" if steps else "the start of this phase"

  def is_time(self) -> bool:
    """Whether `checkpoint.every_minutes` are over, by the clock of the first host. All call it."""
    minutes = self.config.every_minutes
    return minutes > 0 and hosts.broadcast(time.monotonic() - self._last >= 60 * minutes)

  def restore_newest(self, like: Callable[[], Any]) -> tuple[int, Any, dict[str, Any]] | None:
    """Step, state and the host's part of the newest checkpoint that is whole, as `restore` has
    them; newer ones are renamed to `damaged_<step>`. None if there are no checkpoints.

    Raises:
      ValueError: all of them are damaged; says what to do.
      DamagedError: one of several hosts cannot read its part.
    """
    damaged: list[epath.Path] = []
    for step in sorted(self._manager.all_steps(), reverse=True):
      try:
        state, host = self.restore(step, like())
      except DamagedError as error:
        if jax.process_count() > 1 and error.__cause__:
          raise  # what one host cannot read Orbax may still read on the others
        if hosts.is_first():
          sys.stderr.write(f"checkpoint {error.path} is damaged and set aside: {error.why}\n")
        damaged.append(error.path)
        continue
      self._set_aside(damaged)
      return step, state, host
    if damaged:
      raise ValueError(
        f"{self.directory} has no checkpoint that is whole: put one back, or remove "
        f"{self.directory} to begin this phase again"
      )
    return None

  def save(
    self, step: int, state: Any, host: dict[str, Any], metrics: dict[str, float] | None = None
  ) -> None:
    """Starts saving; values are copied before it returns. What is there for this step is replaced.

    Args:
      host: JSON: where the data stands, and the like.
      metrics: of this step, among them the one that decides which checkpoint is the best.

    Raises:
      WriteError: this checkpoint cannot be written, or the one before it could not.
    """
    self._wait()
    if self._best:  # hosts that measured different things would keep different checkpoints
      metrics = {self._best: self._sign * float(hosts.broadcast(self._measured(metrics or {})))}
    with self._told(self.directory / str(step)):
      if step in self._manager.all_steps():
        self._manager.delete(step)
      self._saving = step, time.perf_counter()
      told = dict(phase=self.directory.name, step=step, host=host, sums=integrity.sums(state))
      sealed = dict(sealed=seal(told))
      self._manager.save(
        step,
        args=ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(sealed)),
        metrics=metrics if self._best else None,
        force=True,
      )
    self._last = time.monotonic()

  def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """The state, laid out as the abstract state `like` says, and the host's part.

    Raises:
      DamagedError: it is not what was written.
      ValueError: the checkpoint holds other arrays than `like`; the message names one, with shapes.
    """
    path = self.directory / str(step)
    host_of(path)  # of another phase the arrays may be others
    with readable(path):
      stored = shapes(self._manager.item_metadata(step)["state"])
    if not stored:
      raise DamagedError(path, f"{path / 'state' / '_METADATA'} is not there")
    hint = "; use another --workdir or the config that wrote it"
    require_shapes(f"checkpoint {path}", stored, shapes(like), hint)
    with readable(path):
      arguments = ocp.args.Composite(state=ocp.args.StandardRestore(like))
      state = self._manager.restore(step, args=arguments)["state"]
    return state, host_of(path, state)

  def host(self, step: int) -> dict[str, Any]:
    """The host's part alone. Raises DamagedError."""
    return host_of(self.directory / str(step))

  def metrics(self) -> dict[str, float]:
    """Seconds from the beginning of the last save to the end of its writing, in the background.

    Raises:
      WriteError: it could not be written.
    """
    if self._failure is not None:
      self._wait()
    seconds, self._seconds = self._seconds, None
    return {} if seconds is None else {"checkpoint/seconds": seconds}

  def close(self) -> None:
    """Waits until everything is on disk. Raises WriteError if it cannot be written."""
    self._wait()
    self._manager.close()
    if self._saving and hosts.is_first():
      with self._told(self._mirror.target):
        self._mirror.copy()  # with the last report

  def _measured(self, metrics: Mapping[str, float]) -> float:
    """What decides on the best checkpoint, which has most of it; where it was not measured, the
    worst."""
    return self._sign * metrics.get(self._best, -self._sign * math.inf)

  def _wait(self) -> None:
    """Waits for the save in the background, but not after a failure: Orbax would wait for the other
    hosts, and these for this one."""
    step, _ = self._saving or (None, None)
    with self._told(self.directory / str(step)):
      while self._manager.is_saving_in_progress() and self._failure is None:
        time.sleep(0.005)
      if self._failure is not None:
        raise self._failure
      self._manager.wait_until_finished()

  def _set_aside(self, damaged: Sequence[epath.Path]) -> None:
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
  def _told(self, path: epath.Path | None) -> Iterator[None]:
    """Makes one line of whatever Orbax raises."""
    try:
      yield
    except WriteError as error:
      self._failure = error
      raise
    except Exception as error:
      self._failure = error
      raise WriteError(f"{path} cannot be written: {reason(error)}") from error

  def _watched(self, async_save: Callable) -> Callable:
    """Orbax's `async_save` of arrays, whose errors are told at once."""

    async def save(*args: Any, **kwargs: Any) -> list["_Commit"]:
      return [_Commit(await async_save(*args, **kwargs) or [], self._failed)]

    return save

  def _failed(self, error: BaseException) -> None:
    self._failure = error

  def _written(self) -> None:
    """All files of a checkpoint are there; next comes the rename that makes it one."""
    _, begun = self._saving
    try:
      if hosts.is_first():
        self._mirror.copy()
    except BaseException as error:
      self._failed(error)
      raise
    self._seconds = time.perf_counter() - begun


@dataclasses.dataclass(frozen=True)
class _Commit:
  """What Orbax waits for: its own futures. An error is told to `failed` at once; Orbax keeps it to
  itself until all hosts have come."""

  futures: Sequence[Any]
  failed: Callable[[BaseException], None]

  def result(self, timeout: float | None = None) -> None:
    try:
      for future in self.futures:
        future.result(timeout=timeout)
    except BaseException as error:
      self.failed(error)
      raise

  def cancel(self) -> None:
    for future in self.futures:
      future.cancel()


def reason(error: BaseException) -> str:
  """Why something could not be written, in a few words: TensorStore tells a long story."""
  if isinstance(error, OSError) and error.strerror:
    return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
  # ...: File too large [tensorstore_spec='...'] [os_error_code='27'], in either order
  of_the_system = re.search(r': ([^:"[]+) \[\w+=', str(error))
  lines = str(error).splitlines() or [""]
  return of_the_system[1] if of_the_system else f"{type(error).__name__}: {lines[0][:300]}"


def finished(directory: epath.Path) -> list[int]:
  """Steps of the complete checkpoints of a phase."""
  numbered = [p for p in directory.iterdir() if p.name.isdigit()] if directory.is_dir() else []
  return sorted(int(p.name) for p in numbered if ocp.utils.is_checkpoint_finalized(p))


def host_of(path: epath.Path, state: Any = None) -> dict[str, Any]:
  """The host's part of a checkpoint. DamagedError where it is not what was written, or `state`, as
  it was read, is not."""
  with readable(path):
    stored = unseal(json.loads((path / "host" / "metadata").read_bytes())["sealed"])
    host, written = stored["host"], stored["sums"]
    is_of = f"step {stored['step']} of {stored['phase']}"
  if is_of != f"step {path.name} of {path.parent.name}":
    raise DamagedError(path, f"it was written as {is_of}")
  if state is not None and (wrong := integrity.changed(written, integrity.sums(state))):
    raise DamagedError(path, wrong)
  return host


@contextlib.contextmanager
def readable(path: epath.Path) -> Iterator[None]:
  """Turns what is raised on reading a checkpoint, but for want of memory, into a DamagedError."""
  try:
    yield
  except (MemoryError, jax.errors.JaxRuntimeError):
    raise
  except Exception as error:  # of Orbax's, TensorStore's or json's kind
    raise DamagedError(path, reason(error)) from error


def require_shapes(
  what: str, stored: Mapping[str, Any], wanted: Mapping[str, Any], hint: str = ""
) -> None:
  """Raises ValueError, with both shapes, for the first array that is not as it is wanted."""
  for name in sorted(wanted.keys() | stored.keys()):
    if wanted.get(name) != stored.get(name):
      raise ValueError(
        f"{what}: {name} has shape {stored.get(name)}, the configured model wants "
        f"{wanted.get(name)}{hint}"
      )


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  """Shapes by name, of arrays or of what Orbax knows about stored ones."""
  leaves = integrity.named(getattr(tree, "tree", tree)).items()
  return {name: tuple(leaf.shape) for name, leaf in leaves if hasattr(leaf, "shape")}


def save_state(directory: str | Path, state: Any) -> None:
  """Writes one state by itself, for `restore_state`."""
  options = ocp.AsyncOptions(create_directories_asynchronously=False)  # as above
  with ocp.StandardCheckpointer(async_options=options) as writer:
    writer.save(epath.Path(directory), state, force=True)


def restore_state(directory: str | Path, like: Any) -> Any:
  """Reads what `save_state` wrote, laid out as the abstract state `like` says."""
  with ocp.StandardCheckpointer() as reader:
    return reader.restore(epath.Path(directory).absolute(), like)
