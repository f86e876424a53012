"""Files that a run can trust: never half written, sealed where damage would do harm, and one line
about those that cannot be written."""

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class WriteError(Exception):
  """Something that a run has to keep cannot be written; the message names the file."""


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
  """Turns an OSError within the block into a `WriteError` that names its file, or else `path`."""
  try:
    yield
  except OSError as error:
    name, why = error.filename or path, error.strerror or str(error)
    raise WriteError(f"{name} cannot be written: {why}") from error


def check_writable(what: str, directory: str | os.PathLike) -> None:
  """ValueError, which begins with `what`, if nothing can be written in a directory, which need not
  be there; nothing is made yet."""
  path = Path(directory)
  above = next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))
  if not above.is_dir():
    raise ValueError(f"{what}: {above} is no directory; give one, or a new name")
  if not os.access(above, os.W_OK | os.X_OK):
    raise ValueError(f"{what}: {above} is not writable; give another one")


def write_whole(path: str | os.PathLike, texts: Iterable[str]) -> None:
  """Writes texts, one after another, beside `path` and moves the file there: a reader finds the old
  file or the new one. What UTF-8 cannot hold (lone surrogates) is escaped.

  Raises:
    WriteError: the directory is gone or read-only, the disk is full, or the like.
  """
  path = Path(path)
  temporary = path.with_name(path.name + ".tmp")
  with writing(path):
    if path.is_dir():
      raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with open(temporary, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
      file.writelines(texts)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)


def seal(value: Any) -> str:
  """One line of JSON with a checksum, so that any change of it is found out (`unseal`)."""
  text = json.dumps(value)
  return json.dumps(dict(crc32=zlib.crc32(text.encode()), value=value))


def unseal(text: str | bytes) -> Any:
  """The value that was sealed. Raises ValueError where it is not what it was."""
  try:
    sealed = json.loads(text)
    value = sealed["value"]
    if sealed["crc32"] == zlib.crc32(json.dumps(value).encode()):
      return value
  except (ValueError, TypeError, KeyError, RecursionError):
    pass
  raise ValueError("its checksum does not fit")
