"""Reads data rows of files and of TFDS data sets, one at a time.

Reading a file does not decode its rows. So after a bad row, the other rows can still be read.
"""

import contextlib
import functools
import gzip
import logging
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from gspo_jax.settings.data import DataError
from gspo_jax.system import jsons
from gspo_jax.system.files import located
from gspo_jax.system.text import near_path

# A row's place (file and line, for messages), default id, and a function to decode the row.
Row = tuple[str, str, Callable[[], Any]]
Numbered = Iterator[tuple[int, Callable[[], Any]]]  # Each row's number in the file, and decoder.
_MAGIC = r"[*?\[]"  # Characters that make a path a pattern.


class BadRow(ValueError):
  """A data row cannot be used; the message says how to correct it."""


class Skipped:
  """Handles bad data rows: raises an error for the first, or skips and counts all.

  Args:
    on_error: `data.on_error`, "raise" or "skip".

  Attributes:
    count: number of bad rows.
    first: place and error of the first bad row, to append to a message; "" if none.
  """

  def __init__(self, on_error: str):
    self.count, self.first, self._raises = 0, "", on_error == "raise"

  @contextlib.contextmanager
  def row(self, place: str) -> Iterator[None]:
    """Handles the error of a bad row, raised inside this context.

    Args:
      place: file and line of the row.

    Raises:
      DataError: the row is bad, and `on_error` is "raise".
    """
    try:
      yield
    # Deeply nested JSON raises RecursionError, and half a surrogate pair UnicodeError.
    except (BadRow, RecursionError, UnicodeError) as error:
      if self._raises:
        hint = "or set data.on_error=skip to exclude such rows"
        raise DataError(f"{place}: {error}, {hint}") from error
      self.count += 1
      self.first = self.first or f"; {place}: {error}"

  def warn(self, title: str) -> None:
    """Logs a warning if there were bad rows. `title` names the data set."""
    if self.count:
      logging.warning("%s: number of excluded bad rows: %d%s", title, self.count, self.first)


def read(spec: str, key: str) -> Iterator[Row]:
  """Yields the rows of a data set.

  Args:
    spec: path, pattern of paths, or `tfds:name/split`.
    key: configuration key of `spec`, for messages.

  Raises:
    DataError: there is no such data set, or a file cannot be read or has an unknown ending.
  """
  if spec.startswith("tfds:"):
    examples = _tfds(spec, key)
    for i in range(len(examples)):
      decode = functools.partial(examples.__getitem__, i)
      yield f"{spec}, example {i + 1}", f"{spec.removeprefix('tfds:')}:{i + 1}", decode
    return
  for file in named(spec, key):
    unit, read = next(r for suffix, r in _READERS.items() if file.name.endswith(suffix))
    # Files of a pattern may have equal names in different directories, so ids have full paths. A
    # single match has such ids too, since more files may match at a later start.
    name = str(file) if is_pattern(spec) else file.name
    try:
      for number, decode in read(file):
        yield f"{file}, {unit} {number}", f"{name}:{number}", decode
    except (OSError, EOFError, RuntimeError, ValueError, zlib.error) as error:
      raise DataError(f"{key}: {file} cannot be read: {error}") from error


def is_pattern(spec: str) -> bool:
  """Whether a path has `*`, `?` or `[`, and is thus a pattern."""
  return bool(re.search(_MAGIC, spec))


def named(spec: str, key: str) -> list[epath.Path]:
  """Returns the files of a path or pattern, in alphabetical order.

  Raises:
    DataError: there is no such file, a file's ending is not in _READERS, or the bucket cannot be
      reached.
  """
  magic = re.search(_MAGIC, spec)
  try:
    if magic:
      root, _, _ = spec[: magic.start()].rpartition("/")
      pattern = spec[len(root) :].lstrip("/")
      root = root or ("/" if spec.startswith("/") else ".")
      files = sorted(located(root, key).glob(pattern))
    else:
      files = [located(spec, key)]
    exists = bool(files) and files[0].exists()
  except ValueError as error:
    raise DataError(str(error)) from error
  except (NotImplementedError, OSError) as error:  # Errors of remote file systems.
    raise DataError(f"{key}={spec}: {type(error).__name__}: {error}. Set --config.{key}") from error
  if not exists:
    none = "no file matches" if magic else "there is no file"
    hint = ("" if magic else near_path(spec)) or "."
    raise DataError(
      f"{key}: {none} {spec}{hint} Set --config.{key} to files ({', '.join(_READERS)}), "
      "tfds:name/split or a task of this package such as arithmetic:heldout"
    )
  for file in files:
    if file.name.endswith(tuple(_READERS)):
      continue
    if file.is_dir():
      patterns = [f"{depth}*{ending}" for depth in ("", "*/") for ending in _READERS]
      pattern = next((pattern for pattern in patterns if any(file.glob(pattern))), "*.jsonl")
      raise DataError(
        f"{key}: {file} is a directory: name its files, such as --config.{key}='{file}/{pattern}'"
      )
    raise DataError(f"{key}: {file} ends in none of {', '.join(_READERS)}")
  return files


def _json_row(line: bytes) -> Any:
  """Decodes a row of JSON. Raises BadRow if the JSON is malformed."""
  try:
    return jsons.parse(line)
  except ValueError as error:
    raise BadRow(f"{error}. Correct the row") from error


def json_lines(lines: Iterable[bytes]) -> Numbered:
  """Yields the rows of JSON lines, and skips empty lines."""
  for number, line in enumerate(lines, 1):
    if line.strip():
      yield number, functools.partial(_json_row, line)


# Readers, one for each type of file. A reader yields a file's rows.


def _json_lines(file: epath.Path) -> Numbered:
  with file.open("rb") as stream:
    yield from json_lines(gzip.GzipFile(fileobj=stream) if file.suffix == ".gz" else stream)


def _parquet(file: epath.Path) -> Numbered:
  import pyarrow as pa  # Slow to import, and seldom needed.
  from pyarrow import parquet

  def value(scalar: pa.Scalar) -> Any:
    """Converts a value to Python.

    Floats of 16 or 32 bits become their shortest decimals: 0.1, and not 0.10000000149.
    """
    if isinstance(scalar, pa.FloatScalar | pa.HalfFloatScalar) and scalar.is_valid:
      kind = np.float32 if isinstance(scalar, pa.FloatScalar) else np.float16
      return float(str(kind(scalar.as_py())))
    if isinstance(scalar, pa.StructScalar) and scalar.is_valid:
      return {name: value(part) for name, part in scalar.items()}
    if type(scalar) in (pa.ListScalar, pa.LargeListScalar) and scalar.is_valid:
      return [value(part) for part in scalar]
    return scalar.as_py()

  def decode(batch, i):
    try:
      return {name: value(batch.column(name)[i]) for name in batch.schema.names}
    except UnicodeError as error:
      raise BadRow(f"it is not UTF-8: {error}. Correct the row") from error
    except (ArithmeticError, ValueError) as error:  # For example, a date after the year 9999.
      raise BadRow(f"{error}. Correct the row") from error

  with file.open("rb") as stream:
    table = parquet.ParquetFile(stream)
    names = table.schema_arrow.names
    if twice := {name for name in names if names.count(name) > 1}:
      raise ValueError(f"two columns have the name {min(twice)!r}")
    batches = table.iter_batches()
    rows = ((batch, i) for batch in batches for i in range(batch.num_rows))
    for number, (batch, i) in enumerate(rows, 1):
      yield number, functools.partial(decode, batch, i)


def _array_record(file: epath.Path) -> Numbered:
  from array_record.python import array_record_module

  with tempfile.TemporaryDirectory() as folder:
    local = file
    if "://" in str(file):  # The reader opens local files only.
      local = file.copy(epath.Path(folder) / file.name)
    reader = array_record_module.ArrayRecordReader(str(local))
    count = reader.num_records()
    for start in range(0, count, 1024):
      for i, record in enumerate(reader.read(start, min(start + 1024, count)), start + 1):
        yield i, functools.partial(_json_row, record)
    reader.close()


_READERS = {
  ".jsonl": ("line", _json_lines),
  ".jsonl.gz": ("line", _json_lines),
  ".parquet": ("row", _parquet),
  ".array_record": ("record", _array_record),
}


def _tfds(spec: str, key: str) -> Sequence[Mapping[str, Any]]:
  """Opens a split of a TFDS data set, for random access.

  If `spec` names no split, the split is train for the key data.train, and test for other keys.
  """
  import tensorflow_datasets as tfds  # Slow to import, and seldom needed.

  name, _, split = spec.removeprefix("tfds:").rpartition("/")
  if not name:
    name, split = split, "train" if key == "data.train" else "test"
  try:
    if (epath.Path(name) / "dataset_info.json").exists():
      return tfds.builder_from_directory(name).as_data_source(split=split)
    return tfds.data_source(name, split=split)  # Downloads and prepares missing data.
  except Exception as error:  # Data sets raise errors of any type.
    raise DataError(
      f"{key}={spec}: TFDS cannot provide it: {str(error).partition(chr(10))[0]} Set --config.{key}"
      " to tfds:name/split, or to tfds:DIR/split with the directory of a prepared data set"
    ) from error
