"""One run at a time in a directory."""

import contextlib
import errno
import fcntl
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from gspo_jax.system.files import writing

FILE = "lock"
REFUSED, HELD = np.int32(0), np.int32(1)


@contextlib.contextmanager
def alone_in(*directories: str | os.PathLike) -> Iterator[None]:
  """Holds directories for this run; they are made where they are not there.

  The first process takes the locks for all of the run. The kernel gives a lock back when the
  process ends, however it ends. On NFS the server keeps it, across machines. A file system without
  locks gets a warning, and gs:// has none, without one: there nothing keeps a second run out.

  Raises:
    ValueError: another run is there; on all processes.
    WriteError: a directory cannot be made or written.
  """
  local = [Path(d).absolute() for d in directories if d and "://" not in str(d)]
  with contextlib.ExitStack() as stack:
    holder = _take(local, stack) if jax.process_index() == 0 else ""
    verdict = REFUSED if holder else HELD
    if multihost_utils.broadcast_one_to_all(verdict) == REFUSED:
      raise ValueError(
        f"{holder or 'another run is in this directory'}: wait for its end, or use another "
        "--workdir and checkpoint.directory"
      )
    yield


def _take(directories: Sequence[Path], stack: contextlib.ExitStack) -> str:
  """Locks all directories until the stack is closed; who has one of them already, or ""."""
  for directory in dict.fromkeys(directories):
    path = directory / FILE
    with writing(path):
      directory.mkdir(parents=True, exist_ok=True)
      file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (no child inherits it)
    stack.enter_context(file)
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
        file.seek(0)
        return f"another run is in {directory} ({file.read(200).strip() or 'unknown'})"
      sys.stderr.write(
        f"warning: {path} cannot be locked ({error.strerror}); nothing keeps a second run out\n"
      )
    with writing(path):
      file.truncate(0)
      file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
      file.flush()
  return ""
