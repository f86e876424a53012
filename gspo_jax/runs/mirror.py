"""Copy of a workdir beside checkpoints with a directory of their own.

A preemptible machine loses its workdir with the disk. So the workdir, without checkpoints and the
files of one machine, is copied before a checkpoint is completed. A run that is started with this
`checkpoint.directory` and an empty workdir continues from the copy.
"""

from collections.abc import Iterator
from pathlib import Path

from etils import epath

from gspo_jax.runs.provenance import FILE
from gspo_jax.system.files import WriteError, writing

FOLDER = "workdir"  # Within checkpoint.directory.
LEFT_OUT = ("checkpoints", "failures", "profile", "published", "wandb", "lock")


class Mirror:
  """Copies new and changed files of a workdir."""

  def __init__(self, workdir: str | Path, directory: str):
    self._workdir = epath.Path(workdir)
    self.target = epath.Path(directory) / FOLDER if directory else None
    self._copied: dict[str, tuple[int, float]] = {}

  def can_fill(self) -> bool:
    """Whether there is a copy of a run for a workdir without one."""
    has_copy = self.target is not None and (self.target / FILE).exists()
    return has_copy and not (self._workdir / FILE).exists()

  def fill(self) -> bool:
    """Fills a workdir without a run from the copy; False if there is nothing to do."""
    if not self.can_fill():
      return False
    # config.json, the sign of a run, comes last.
    for name in sorted(_files(self.target), key=lambda name: name == FILE):
      _copy(self.target / name, self._workdir / name)
    return True

  def copy(self) -> None:
    """Copies changed files. WriteError: one cannot be copied."""
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
  """Yields paths of files, without `LEFT_OUT` and half-written ones. (On gs://, `epath.Path.walk`
  loses the scheme.)"""
  for path in sorted((folder / within).iterdir()):
    name = f"{within}{path.name}"
    if name not in LEFT_OUT and path.is_dir():
      yield from _files(folder, f"{name}/")
    elif name not in LEFT_OUT and path.suffix != ".tmp":
      yield name


def _copy(source: epath.Path, target: epath.Path) -> None:
  """Copies a file whole or not at all."""
  with writing(target):
    target.parent.mkdir(parents=True, exist_ok=True)
    if "://" in str(target):  # A bucket shows an object only when it is whole.
      source.copy(target, overwrite=True)
      return
    beside = target.with_name(f"{target.name}.tmp")
    source.copy(beside, overwrite=True)
    beside.replace(target)
