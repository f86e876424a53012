"""Checkpoints with Orbax: the training state, the position in the data, what the host counts.

Orbax writes beside the final place and renames, so that a process that is killed leaves a whole
checkpoint or none. Each one also lists the sizes of its files: one that a broken disk or an
interrupted copy has shortened is set aside when a run starts, and the one before it is used.
"""

import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as policies

from gspo_jax import ranges
from gspo_jax.ranges import NonNegativeInt, PositiveInt, Seconds
from gspo_jax.runs import preemption
from gspo_jax.runs.mirror import Mirror, files_below

SIZES = "sizes.json"  # within a checkpoint: its files, and their sizes in bytes


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  directory: str  # local or gs://..., seen by all hosts (mirror.py); "": workdir/checkpoints
  every: PositiveInt  # iterations (rl) or updates (sft) between checkpoints
  keep: PositiveInt  # how many of the newest are kept; a run resumes from them
  keep_every: NonNegativeInt  # checkpoints of steps that this divides are kept as well; 0: none
  best: str  # the one where this metric is largest is kept as well, e.g. eval/accuracy; "": none
  grace_s: Seconds  # seconds from SIGTERM to the end of the process, at the latest

  def __post_init__(self):
    ranges.check(self, "checkpoint")

  def of(self, workdir: str | Path, phase: str) -> epath.Path:
    """The directory of the checkpoints of a phase."""
    return epath.Path(self.directory or Path(workdir).absolute() / "checkpoints") / phase


class _Manager(ocp.CheckpointManager):
  def reached_preemption(self, step: int) -> bool:
    # The run asks, between steps (preemption.py). Hosts agree by the number of times they have
    # asked, and Orbax would ask with numbers of its own.
    return False


class Checkpointer:
  """One phase's checkpoints, written while training goes on."""

  def __init__(self, workdir: str | Path, phase: str, config: CheckpointConfig):
    self.directory = config.of(workdir, phase)
    self._best = config.best
    self._mirror = Mirror(workdir, config.directory)
    if jax.process_index() == 0:
      set_aside_damaged(self.directory)
    multihost_utils.sync_global_devices("damaged checkpoints are set aside")
    kept = [policies.LatestN(config.keep)]
    if config.keep_every:
      kept.append(policies.EveryNSteps(config.keep_every))
    if config.best:
      metric = lambda metrics: metrics[config.best]  # noqa: E731
      kept.append(policies.BestN(get_metric_fn=metric, n=1))
    self._manager = _Manager(
      self.directory,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(kept),
        best_fn=metric if config.best else None,
        cleanup_tmp_directories=True,
        async_options=ocp.AsyncOptions(post_finalization_callback=self._written),
      ),
      item_handlers=dict(state=ocp.StandardCheckpointHandler(), host=ocp.JsonCheckpointHandler()),
    )
    self._saving: tuple[int, float] | None = None  # step, when it was begun
    self._seconds: float | None = None

  def latest(self) -> int | None:
    """Step of the newest complete checkpoint."""
    return self._manager.latest_step()

  def save(
    self, step: int, state: Any, host: dict[str, Any], metrics: dict[str, float] | None = None
  ) -> None:
    """Starts saving; values are copied before it returns. What is there for this step is replaced.

    Args:
      host: JSON: where the data stands, and the like.
      metrics: of this step, among them the one that decides which checkpoint is the best.
    """
    if step in self._manager.all_steps():
      self._manager.delete(step)
    self._manager.wait_until_finished()
    self._saving = step, time.perf_counter()
    value = (metrics or {}).get(self._best, -math.inf)  # not measured: the worst
    with preemption.interrupts_wait():  # Orbax's threads would wait for a save half begun, forever
      self._manager.save(
        step,
        args=ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host)),
        metrics={self._best: float(value)} if self._best else None,
        force=True,
      )

  def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """The state, laid out as the abstract state `like` says, and the host's part.

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
    """Seconds from the beginning of the last save to the end of its writing, in the background."""
    seconds, self._seconds = self._seconds, None
    return {} if seconds is None else {"checkpoint/seconds": seconds}

  def close(self) -> None:
    """Waits until everything is on disk."""
    self._manager.wait_until_finished()
    self._manager.close()
    if self._saving and jax.process_index() == 0:
      self._mirror.copy()  # with the last report

  def _written(self) -> None:
    """All files of a checkpoint are there; next comes the rename that makes it one."""
    step, begun = self._saving
    self._seconds = time.perf_counter() - begun
    if jax.process_index() == 0:
      self._mirror.copy()
      unfinished = [path for path in self.directory.iterdir() if _begins(path.name, step)]
      for path in unfinished:
        (path / SIZES).write_text(json.dumps(_sizes(path)))

  def _check(self, step: int, like: Any) -> None:
    stored = _shapes(self._manager.item_metadata(step)["state"])
    wanted = _shapes(like)
    for name in sorted(wanted.keys() | stored.keys()):
      if wanted.get(name) != stored.get(name):
        raise ValueError(
          f"checkpoint {self.directory / str(step)}: {name} has shape {stored.get(name)}, the "
          f"configured model wants {wanted.get(name)}; use another --workdir or the config that "
          "wrote it"
        )


def set_aside_damaged(directory: epath.Path) -> None:
  """Renames checkpoints with files shorter than they were, newest first, until one is whole."""
  if not directory.exists():
    return
  found = [path for path in directory.iterdir() if path.name.isdigit()]
  finished = [path for path in found if ocp.utils.is_checkpoint_finalized(path)]  # a file on gs://
  for path in sorted(finished, key=lambda path: int(path.name), reverse=True):
    wrong = _wrong_file(path)
    if wrong is None:
      return
    sys.stderr.write(f"checkpoint {path} is damaged and set aside: {wrong}\n")
    aside = directory / f"damaged_{path.name}"
    if aside.exists():
      aside.rmtree()
    path.rename(aside)


def _wrong_file(path: epath.Path) -> str | None:
  listed = path / SIZES
  try:
    sizes = json.loads(listed.read_text())
  except (OSError, ValueError) as error:
    return f"{listed}: {error}"
  for name, size in sizes.items():
    file = path / name
    found = file.stat().length if file.exists() else None
    if found != size:
      return f"{file} has {found} bytes instead of {size}" if file.exists() else f"no {file}"
  return None


def _sizes(path: epath.Path) -> dict[str, int]:
  """Sizes of the files of both items; Orbax goes on writing beside them."""
  files = [file for item in ("state", "host") for file in files_below(path / item)]
  return {file.relative_to(path).as_posix(): file.stat().length for file in files}


def _begins(name: str, step: int) -> bool:
  """Tells an unfinished checkpoint by its directory's name: another one where a rename will finish
  it, the final one on gs://, where a file will."""
  return name == str(step) or name.startswith(f"{step}.orbax-checkpoint-tmp")


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  leaves = jax.tree_util.tree_leaves_with_path(getattr(tree, "tree", tree))
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")  # noqa: E731
  return {name(path): tuple(leaf.shape) for path, leaf in leaves if hasattr(leaf, "shape")}


def save_state(directory: str | Path, state: Any) -> None:
  """Writes one state by itself, for `restore_state`."""
  with ocp.StandardCheckpointer() as writer:
    writer.save(epath.Path(directory), state, force=True)


def restore_state(directory: str | Path, like: Any) -> Any:
  """Reads what `save_state` wrote, laid out as the abstract state `like` says."""
  with ocp.StandardCheckpointer() as reader:
    return reader.restore(epath.Path(directory).absolute(), like)
