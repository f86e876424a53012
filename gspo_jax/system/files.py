"""Paths and files of a run: atomic writes, checksums against damage, errors of one line."""

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from etils import epath


class WriteError(Exception):
  """A file of the run cannot be written; the message names the file."""


def place(name: str) -> epath.Path:
  """Returns the path of a name: local, `~` included, or in a bucket.

  Raises ValueError for other schemes.
  """
  scheme, separator, _ = name.partition("://")
  if separator and scheme != "gs":
    raise ValueError(
      f"{name}: no file system is known by {scheme}://; use a path, gs://BUCKET/... or, for a"
      " model, OWNER/NAME[@REVISION] of the Hugging Face hub"
    )
  return epath.Path(name).expanduser()


def located(name: str, key: str) -> epath.Path:
  """Returns the path named by a key.

  Raises:
    ValueError: there is no such file system, or it does not answer; the message names the key.
  """
  try:
    path = place(name)
  except ValueError as error:
    raise ValueError(f"{key}={error}") from error
  try:
    if "://" in name:
      path.exists()
  except Exception as error:  # a bucket library is missing, or raises its own errors
    raise ValueError(f"{key}={name}: {type(error).__name__}: {error}") from error
  return path


def check_writable(key: str, directory: str | os.PathLike) -> None:
  """Raises ValueError, beginning with `key`, if the directory cannot be made or written to."""
  path = Path(directory)
  try:
    existing = next(p for p in (path, *path.absolute().parents) if _exists(p))
  except OSError as error:
    raise ValueError(f"{key}: {error.strerror}; give another name") from error
  if not existing.is_dir():
    raise ValueError(f"{key}: {existing} is no directory; give one, or a new name")
  if existing.absolute() == path.absolute() == Path("/"):
    raise ValueError(f"{key}: that is the root of all files; give a directory of its own")
  if not os.access(existing, os.W_OK | os.X_OK):
    raise ValueError(f"{key}: {existing} is not writable; give another one")


def _exists(path: Path) -> bool:
  """Whether a path exists, broken links included. Raises OSError for an impossible path."""
  try:
    path.lstat()
  except (FileNotFoundError, NotADirectoryError):
    return False
  return True


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
  """Converts an OSError to a `WriteError` with the file's name."""
  try:
    yield
  except OSError as error:
    name, reason = error.filename or path, error.strerror or str(error)
    raise WriteError(f"{name} cannot be written: {reason}") from error


def write_whole(path: str | os.PathLike, texts: Iterable[str]) -> None:
  """Writes texts to a temporary file, and renames it to `path`.

  So readers see the whole old file or the whole new one. Lone surrogates are escaped, since UTF-8
  excludes them.

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
  """Returns one line of JSON with a checksum. `unseal` detects any change."""
  text = json.dumps(value)
  return json.dumps(dict(crc32=zlib.crc32(text.encode()), value=value))


def unseal(text: str | bytes) -> Any:
  """Returns the sealed value. Raises ValueError if it has changed."""
  try:
    sealed = json.loads(text)
    value = sealed["value"]
    if sealed["crc32"] == zlib.crc32(json.dumps(value).encode()):
      return value
  except (ValueError, TypeError, KeyError, RecursionError):
    pass
  raise ValueError("its checksum does not fit")
