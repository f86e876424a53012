"""Paths and files of a run: checks of paths, atomic writes, and checksums of JSON."""

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
  """Returns a name as a path: a local path with `~` expanded, or gs://BUCKET/...

  Raises ValueError for other schemes.
  """
  scheme, separator, _ = name.partition("://")
  if separator and scheme != "gs":
    raise ValueError(
      f"{name}: {scheme}:// is not supported; use a local path, gs://BUCKET/... or, for a model, "
      "OWNER/NAME[@REVISION] of the Hugging Face hub"
    )
  return epath.Path(name).expanduser()


def located(name: str, key: str) -> epath.Path:
  """Returns the path named by a key.

  Args:
    name: value of the key.
    key: name of the key, for error messages.

  Raises:
    ValueError: the scheme is not supported, or the bucket cannot be reached; the message names the
      key.
  """
  try:
    path = place(name)
  except ValueError as error:
    raise ValueError(f"{key}={error}") from error
  try:
    if "://" in name:
      path.exists()
  except ImportError as error:
    remedy = "buckets need the extra gcs: pip install -e '.[gcs]'"
    raise ValueError(f"{key}={name}: {remedy} ({error})") from error
  except Exception as error:  # Libraries for buckets raise errors of any type.
    raise ValueError(f"{key}={name}: {type(error).__name__}: {error}") from error
  return path


def check_writable(key: str, directory: str | os.PathLike) -> None:
  """Raises ValueError unless the directory can be created and written to. Also raises it for "/".

  Args:
    key: key or flag with its value. Error messages begin with this text.
    directory: the directory, which need not exist.
  """
  path = Path(directory)
  try:
    existing = next(p for p in (path, *path.absolute().parents) if _exists(p))
  except OSError as error:
    raise ValueError(f"{key}: {error.strerror}; set another directory") from error
  if not existing.is_dir():
    raise ValueError(f"{key}: {existing} is not a directory; set another path")
  if existing.absolute() == path.absolute() == Path("/"):
    raise ValueError(f"{key}: this is the root of the file system; set a directory below it")
  if not os.access(existing, os.W_OK | os.X_OK):
    raise ValueError(f"{key}: {existing} is not writable; set another directory")


def _exists(path: Path) -> bool:
  """Whether there is a file, a directory or a link. Raises OSError, e.g. if a name is too long."""
  try:
    path.lstat()
  except (FileNotFoundError, NotADirectoryError):
    return False
  return True


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
  """Converts an OSError in the block to a `WriteError` with the file's name."""
  try:
    yield
  except OSError as error:
    name, reason = error.filename or path, error.strerror or str(error)
    raise WriteError(f"{name} cannot be written: {reason}") from error


def write_whole(path: str | os.PathLike, texts: Iterable[str]) -> None:
  """Writes a temporary file, and renames it to `path`.

  So readers see either the whole old file or the whole new file. Lone surrogates are escaped, since
  UTF-8 excludes them.

  Raises:
    WriteError: the file cannot be written, for example on a full disk.
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
  """Returns a value as JSON with a checksum, for `unseal`."""
  text = json.dumps(value)
  return f'{{"crc32": {zlib.crc32(text.encode())}, "value": {text}}}'  # The text is encoded once.


def unseal(text: str | bytes) -> Any:
  """Returns the value in a text from `seal`. Raises ValueError if the text was changed."""
  try:
    sealed = json.loads(text)
    value = sealed["value"]
    if sealed["crc32"] == zlib.crc32(json.dumps(value).encode()):
      return value
  except (ValueError, TypeError, KeyError, RecursionError):
    pass
  raise ValueError("its checksum does not match")
