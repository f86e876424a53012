"""Locks of directories, each for one run at a time."""

import contextlib
import errno
import fcntl
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from gspo_jax.system import hosts
from gspo_jax.system.files import WriteError, writing

FILE = "lock"


@contextlib.contextmanager
def alone_in(*directories: str | os.PathLike) -> Iterator[None]:
  """Locks directories for this run, and creates missing directories. Collective.

  The first process takes the locks for all processes. The locks are released at the end of the
  context, or by the kernel if the process is killed. On NFS, locks also exclude runs on other
  machines. If a file system has no locks, a warning is printed. Directories in buckets (gs://) are
  not locked.

  All processes raise the same type of error.

  Raises:
    ValueError: a directory cannot be created, or another run has locked it.
    WriteError: a directory cannot be written.
  """
  local = [Path(d).absolute() for d in directories if d and "://" not in str(d)]
  with contextlib.ExitStack() as stack:
    hosts.run_on_first_host(lambda: _lock_all(local, stack), WriteError)
    yield


def check(*directories: str | os.PathLike) -> None:
  """Raises ValueError if another run has locked one of the directories."""
  for directory in (Path(d).absolute() for d in directories if d and "://" not in str(d)):
    if (directory / FILE).is_file():
      with open(directory / FILE, encoding="utf-8") as file:
        _lock(file, fcntl.LOCK_SH, directory)


def _lock_all(directories: Sequence[Path], stack: contextlib.ExitStack) -> None:
  """Locks all directories until the stack is closed."""
  for directory in dict.fromkeys(directories):
    path = directory / FILE
    try:
      directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise ValueError(
        f"{directory} cannot be created ({error.strerror}): set another --workdir or "
        "checkpoint.directory"
      ) from error
    with writing(path):
      file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (the stack closes it)
    stack.enter_context(file)
    _lock(file, fcntl.LOCK_EX, directory)
    with writing(path):
      file.truncate(0)
      file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
      file.flush()


def _lock(file: TextIO, kind: int, directory: Path) -> None:
  """Locks a directory's open `FILE` without waiting. Raises ValueError if another run locked it."""
  try:
    fcntl.flock(file, kind | fcntl.LOCK_NB)
  except OSError as error:
    if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
      file.seek(0)
      raise ValueError(
        f"another run is in {directory} ({file.read(200).strip() or 'unknown'}): wait until that "
        "run ends, or set another --workdir and checkpoint.directory"
      ) from error
    sys.stderr.write(
      f"warning: {directory / FILE} cannot be locked ({error.strerror}); do not start a second run "
      "in this directory\n"
    )
