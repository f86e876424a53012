"""The story of a run, kept beside its checkpoints where those have a directory of their own.

On a preemptible machine the workdir is lost with the disk. What is in it, but for checkpoints and
what only that machine needs, is copied before a checkpoint is completed: a run that is started with
the same `checkpoint.directory` and an empty workdir goes on as if it were the old one.
"""

from collections.abc import Iterator
from pathlib import Path

from etils import epath

from gspo_jax.runs.provenance import FILE
from gspo_jax.system.files import WriteError, writing

FOLDER = "workdir"  # of checkpoint.directory
LEFT_OUT = ("checkpoints", "failures", "profile", "published", "wandb", "lock")


class Mirror:
  """Copies what is new or has changed since the last copy."""

  def __init__(self, workdir: str | Path, directory: str):
    self._workdir = epath.Path(workdir)
    self.target = epath.Path(directory) / FOLDER if directory else None
    self._copied: dict[str, tuple[int, float]] = {}

  def fills(self) -> bool:
    """Whether there is a copy of a run, for a workdir that holds none yet."""
    there = self.target is not None and (self.target / FILE).exists()
    return there and not (self._workdir / FILE).exists()

  def back(self) -> bool:
    """Fills a workdir that holds no run yet; whether there was anything to fill it with."""
    if not self.fills():
      return False
    # The one that says that a run is here comes last.
    for name in sorted(_files(self.target), key=lambda name: name == FILE):
      _copy(self.target / name, self._workdir / name)
    return True

  def copy(self) -> None:
    """Raises WriteError where a file cannot be copied, unless the run removes it meanwhile."""
    if self.target is None:
      return
    for name in list(_files(self._workdir)):
      path = self._workdir / name
      try:
        stat = path.stat()
        if self._copied.get(name) != (stat.length, stat.mtime):
          _copy(path, self.target / name)
          self._copied[name] = stat.length, stat.mtime
      except (FileNotFoundError, WriteError):
        if path.exists():
          raise


def _files(folder: epath.Path, within: str = "") -> Iterator[str]:
  """Paths of the files below, without those of `LEFT_OUT` and half-written ones. (On gs://,
  `epath.Path.walk` loses the scheme.)"""
  for path in sorted((folder / within).iterdir()):
    name = f"{within}{path.name}"
    if name not in LEFT_OUT and path.is_dir():
      yield from _files(folder, f"{name}/")
    elif name not in LEFT_OUT and path.suffix != ".tmp":
      yield name


def _copy(source: epath.Path, target: epath.Path) -> None:
  """Copies a file whole or not at all: it may be what the next machine starts with."""
  with writing(target):
    target.parent.mkdir(parents=True, exist_ok=True)
    if "://" in str(target):  # an object of a bucket is there when all of it has come
      source.copy(target, overwrite=True)
      return
    beside = target.with_name(f"{target.name}.tmp")
    source.copy(beside, overwrite=True)
    beside.replace(target)
