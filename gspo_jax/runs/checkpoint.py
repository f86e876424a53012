"""Checkpoints with Orbax: the training state, the position in the data, what the host counts.

Orbax writes beside the final place and renames, so that a process that is killed leaves a whole
checkpoint or none. Each one also lists its files with checksums (integrity.py): one that a broken
disk or an interrupted copy has changed is set aside, and the one before it is used.
"""

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as policies

from gspo_jax.runs import integrity
from gspo_jax.runs.mirror import Mirror
from gspo_jax.settings.training import CheckpointConfig
from gspo_jax.system import preemption
from gspo_jax.system.files import WriteError, writing


class _Manager(ocp.CheckpointManager):
  def reached_preemption(self, step: int) -> bool:
    # The run asks, between steps (preemption.py). Hosts agree by the number of times they have
    # asked, and Orbax would ask with numbers of its own.
    return False


class Checkpointer:
  """One phase's checkpoints, written while training goes on."""

  def __init__(self, workdir: str | Path, phase: str, config: CheckpointConfig):
    """Raises ValueError if there are checkpoints, and all of them are damaged."""
    self.directory = config.of(workdir, phase)
    self._best = config.best
    self._mirror = Mirror(workdir, config.directory)
    self._failure: BaseException | None = None  # of what is written in the background
    self._replacing = False  # whether the checkpoint that was there before has been put by
    if jax.process_index() == 0:
      integrity.settle(self.directory)
      integrity.set_aside_short(self.directory)
    multihost_utils.sync_global_devices("damaged checkpoints are set aside")
    integrity.require_one(self.directory)
    kept = [policies.LatestN(config.keep)]
    if config.keep_every:
      kept.append(policies.EveryNSteps(config.keep_every))
    if config.best:
      metric = lambda metrics: metrics.get(config.best, -math.inf)  # noqa: E731
      kept.append(policies.BestN(get_metric_fn=metric, n=1))
    handler = ocp.StandardCheckpointHandler()
    handler.async_save = self._watched(handler.async_save)
    with writing(self.directory):
      self._manager = _Manager(
        self.directory,
        options=ocp.CheckpointManagerOptions(
          preservation_policy=policies.AnyPreservationPolicy(kept),
          best_fn=metric if config.best else None,
          cleanup_tmp_directories=True,
          async_options=ocp.AsyncOptions(
            post_finalization_callback=self._written,
            # Threads would wait twenty minutes for a directory that cannot be made.
            create_directories_asynchronously=False,
          ),
        ),
        item_handlers=dict(state=handler, host=ocp.JsonCheckpointHandler()),
      )
    self._saving: tuple[int, float] | None = None  # step, when it was begun
    self._seconds: float | None = None

  def latest(self) -> int | None:
    """Step of the newest complete checkpoint."""
    return self._manager.latest_step()

  def latest_whole(self) -> int | None:
    """Step of the newest checkpoint whose files are what was written; newer ones are set aside.

    Raises:
      ValueError: all of them are damaged; says what to do.
    """
    while (step := self.latest()) is not None:
      path = self.directory / str(step)
      wrong = integrity.damage(path)
      if wrong is None:
        break
      if jax.process_index() == 0:
        integrity.set_aside(path, wrong)
      multihost_utils.sync_global_devices("a damaged checkpoint is set aside")
      self._manager.reload()
    integrity.require_one(self.directory)
    return step

  def save(
    self, step: int, state: Any, host: dict[str, Any], metrics: dict[str, float] | None = None
  ) -> None:
    """Starts saving; values are copied before it returns. What is there for this step is replaced,
    and stays until this is complete.

    Args:
      host: JSON: where the data stands, and the like.
      metrics: of this step, among them the one that decides which checkpoint is the best.

    Raises:
      WriteError: this checkpoint cannot be written, or the one before it could not.
    """
    self._wait()
    value = (metrics or {}).get(self._best, -math.inf)  # not measured: the worst
    if self._best and jax.process_count() > 1:
      # Hosts that measured different things would keep different checkpoints.
      value = multihost_utils.broadcast_one_to_all(np.float64(value))
    with self._told(self.directory / str(step)):
      if step in self._manager.all_steps():
        self._put_by(step)
      self._saving = step, time.perf_counter()
      with (
        preemption.interrupts_wait()
      ):  # Orbax's threads would wait for a save half begun, forever
        self._manager.save(
          step,
          args=ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host)),
          metrics={self._best: float(value)} if self._best else None,
          force=True,
        )

  def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """The state, laid out as the abstract state `like` says, and the host's part. Of a step that
    `latest_whole` gave: files are not compared again.

    Raises:
      ValueError: the checkpoint holds other arrays than `like`; the message names one, with shapes.
    """
    self._check(step, like)
    restored = self._manager.restore(
      step,
      args=ocp.args.Composite(state=ocp.args.StandardRestore(like), host=ocp.args.JsonRestore()),
    )
    return restored["state"], restored["host"]

  def host(self, step: int) -> dict[str, Any]:
    """The host's part alone."""
    return self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]

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
    if self._saving and jax.process_index() == 0:
      with self._told(self._mirror.target):
        self._mirror.copy()  # with the last report

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
      if self._replacing and jax.process_index() == 0:
        integrity.settle(self.directory)
      self._replacing = False

  def _put_by(self, step: int) -> None:
    """Keeps a checkpoint where Orbax does not see it, for a process that ends in the meantime."""
    if jax.process_index() == 0:
      integrity.put_by(self.directory / str(step))
    multihost_utils.sync_global_devices("a checkpoint is put by")
    self._manager.reload()
    self._replacing = True

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
    """Orbax's `async_save` of arrays, whose end each process awaits by itself, and then lists what
    it has written."""

    async def save(directory: epath.Path, *args: Any, **kwargs: Any) -> list["_Commit"]:
      futures = await async_save(directory, *args, **kwargs)
      return [_Commit(futures or [], lambda: integrity.write_own(directory), self._failed)]

    return save

  def _failed(self, error: BaseException) -> None:
    self._failure = error

  def _written(self) -> None:
    """All files of a checkpoint are there; next comes the rename that makes it one."""
    step, begun = self._saving
    try:
      if jax.process_index() == 0:
        self._mirror.copy()
        for path in self.directory.iterdir():
          if _begins(path.name, step):
            integrity.write_list(path)
    except BaseException as error:
      self._failed(error)
      raise
    self._seconds = time.perf_counter() - begun

  def _check(self, step: int, like: Any) -> None:
    stored = shapes(self._manager.item_metadata(step)["state"])
    wanted = shapes(like)
    for name in sorted(wanted.keys() | stored.keys()):
      if wanted.get(name) != stored.get(name):
        raise ValueError(
          f"checkpoint {self.directory / str(step)}: {name} has shape {stored.get(name)}, the "
          f"configured model wants {wanted.get(name)}; use another --workdir or the config that "
          "wrote it"
        )


@dataclasses.dataclass(frozen=True)
class _Commit:
  """What Orbax waits for: its own futures, then `after`. An error is told to `failed` at once;
  Orbax keeps it to itself until all hosts have come."""

  futures: Sequence[Any]
  after: Callable[[], None]
  failed: Callable[[BaseException], None]

  def result(self, timeout: float | None = None) -> None:
    try:
      for future in self.futures:
        future.result(timeout=timeout)
      self.after()
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


def _begins(name: str, step: int) -> bool:
  """Tells an unfinished checkpoint by its directory's name: another one where a rename will finish
  it, the final one on gs://, where a file will."""
  return name == str(step) or name.startswith(f"{step}.orbax-checkpoint-tmp")


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  """Shapes by name, of arrays or of what Orbax knows about stored ones."""
  leaves = jax.tree_util.tree_leaves_with_path(getattr(tree, "tree", tree))
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")  # noqa: E731
  return {name(path): tuple(leaf.shape) for path, leaf in leaves if hasattr(leaf, "shape")}


def save_state(directory: str | Path, state: Any) -> None:
  """Writes one state by itself, for `restore_state`."""
  options = ocp.AsyncOptions(create_directories_asynchronously=False)  # as above
  with ocp.StandardCheckpointer(async_options=options) as writer:
    writer.save(epath.Path(directory), state, force=True)


def restore_state(directory: str | Path, like: Any) -> Any:
  """Reads what `save_state` wrote, laid out as the abstract state `like` says."""
  with ocp.StandardCheckpointer() as reader:
    return reader.restore(epath.Path(directory).absolute(), like)
