"""Copy of a workdir in `checkpoint.directory`.

A preempted machine loses its disk and the workdir on the disk. So each save of a checkpoint also
copies the workdir to `checkpoint.directory`, except the files and folders in EXCLUDED. The
checkpoint becomes complete only after this copy. An evaluation has no checkpoints, and its end
copies the workdir. A run whose workdir has no config.json resumes from the copy in its
`checkpoint.directory`.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from gspo_jax.runs.provenance import FILE
from gspo_jax.system import hosts
from gspo_jax.system.files import WriteError, writing

FOLDER = "workdir"  # Name of the copy in checkpoint.directory.
EXCLUDED = ("checkpoints", "failures", "profile", "published", "wandb", "lock")


class Mirror:
  """Copies new and changed files of a workdir."""

  def __init__(self, workdir: str | Path, directory: str):
    self._workdir = epath.Path(workdir)
    self.target = epath.Path(directory) / FOLDER if directory else None
    self._copied: dict[str, tuple[int, float]] = {}

  def can_fill(self) -> bool:
    """Whether a copy exists, and the workdir has no config.json."""
    has_copy = self.target is not None and (self.target / FILE).exists()
    return has_copy and not (self._workdir / FILE).exists()

  def fill(self) -> bool:
    """Copies the run back to the workdir if `can_fill`. Returns whether files were copied."""
    if not self.can_fill():
      return False
    # config.json is copied last, since a workdir with config.json counts as a run.
    for name in sorted(_files(self.target), key=lambda name: name == FILE):
      _copy(self.target / name, self._workdir / name)
    return True

  def copy(self) -> None:
    """Copies new and changed files to the target. Raises WriteError if a copy cannot be written."""
    if self.target is None:
      return
    for name in list(_files(self._workdir)):
      path = self._workdir / name
      try:
        stat = os.stat(path)  # `epath.Path.stat` fails for users without a name.
        if self._copied.get(name) != (stat.st_size, stat.st_mtime):
          _copy(path, self.target / name)
          self._copied[name] = stat.st_size, stat.st_mtime
      except (FileNotFoundError, WriteError):
        if path.exists():
          raise


@contextlib.contextmanager
def copied_at_end(workdir: Path, directory: str) -> Iterator[None]:
  """Copies a workdir at the end of the context, also after an exception."""
  try:
    yield
  finally:
    if hosts.is_first():
      Mirror(workdir, directory).copy()


def find_record(workdir: Path, directory: str) -> tuple[Path | epath.Path, str]:
  """Returns the directory with the run's config.json, and this directory's flag.

  The directory is the workdir, or the copy if `restore_workdir` will fill the workdir. Collective:
  call it on all hosts.

  Args:
    workdir: directory of the run.
    directory: value of `checkpoint.directory`; "" if unset.
  """
  mirror = Mirror(workdir, directory)
  if hosts.run_on_first_host(mirror.can_fill):
    return mirror.target, "--config.checkpoint.directory"
  return workdir, "--workdir"


def restore_workdir(workdir: Path, directory: str) -> None:
  """Restores a workdir from its copy if `Mirror.can_fill`.

  Collective: call it on all hosts.

  Raises:
    WriteError: a file cannot be written.
  """
  restored = hosts.run_on_first_host(Mirror(workdir, directory).fill, WriteError)
  if restored and hosts.is_first():
    sys.stderr.write(f"{workdir} was restored from its copy in {directory}\n")


def _files(folder: epath.Path, within: str = "") -> Iterator[str]:
  """Yields relative paths of files, except `EXCLUDED` and temporary files.

  (`epath.Path.walk` loses the scheme gs://.)
  """
  for path in sorted((folder / within).iterdir()):
    name = f"{within}{path.name}"
    if name not in EXCLUDED and path.is_dir():
      yield from _files(folder, f"{name}/")
    elif name not in EXCLUDED and path.suffix != ".tmp":
      yield name


def _copy(source: epath.Path, target: epath.Path) -> None:
  """Copies a file atomically."""
  with writing(target):
    target.parent.mkdir(parents=True, exist_ok=True)
    if "://" in str(target):  # Buckets write objects atomically.
      source.copy(target, overwrite=True)
      return
    temporary = target.with_name(f"{target.name}.tmp")
    source.copy(temporary, overwrite=True)
    temporary.replace(target)
