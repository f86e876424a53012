"""Checkpoints with Orbax: the training state, the position in the data, what the host counts."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  every: int  # iterations (rl) or updates (sft) between checkpoints
  keep: int  # how many of the newest are kept


class Checkpointer:
  """One phase's checkpoints, written while training goes on; a half-written one is never read."""

  def __init__(self, directory: str | Path, config: CheckpointConfig):
    self.directory = epath.Path(directory)
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(max_to_keep=config.keep, cleanup_tmp_directories=True),
      item_handlers=dict(state=ocp.StandardCheckpointHandler(), host=ocp.JsonCheckpointHandler()),
    )

  def latest(self) -> int | None:
    """Step of the newest complete checkpoint."""
    return self._manager.latest_step()

  def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
    """Starts saving; values are copied before it returns. `host` is JSON: where the data stands."""
    self._manager.save(
      step,
      args=ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host)),
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

  def close(self) -> None:
    """Waits until everything is on disk."""
    self._manager.wait_until_finished()
    self._manager.close()

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


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  leaves = jax.tree_util.tree_leaves_with_path(getattr(tree, "tree", tree))
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")  # noqa: E731
  return {name(path): tuple(leaf.shape) for path, leaf in leaves if hasattr(leaf, "shape")}


def abstract(tree: Any, mesh: jax.sharding.Mesh) -> Any:
  """ShapeDtypeStructs on real devices: `jax.eval_shape` leaves them on an abstract mesh."""

  def one(x):
    pspec = getattr(x.sharding, "spec", jax.P())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, pspec))

  return jax.tree.map(one, tree)
