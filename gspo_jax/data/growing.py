"""Problems from JSON lines files that grow during a run (`schedule.refresh_every`).

Other programs may append lines to the files, but must not change earlier lines. `Growing.look`
reads all files again. The first host reads them, and broadcasts their texts if a file has grown. A
checkpoint records the length of each file, so a resumed run has the rows of an uninterrupted run.
A collective function must be called on all hosts.
"""

import json
import logging
import zlib
from collections.abc import Callable, Sequence

from etils import epath

from gspo_jax import structs
from gspo_jax.data import files, overlap, sources, tokenizer
from gspo_jax.data.embedded import TASKS
from gspo_jax.data.rows import Check, Reader
from gspo_jax.settings.data import DataConfig, DataError
from gspo_jax.system import hosts

Lengths = dict[str, list[int]]  # Dict from file to [number of bytes in use, their CRC-32].


def load(
  config: DataConfig, tok: tokenizer.Tokenizer, split: str, check: Check | None = None
) -> "Growing":
  """Reads the prompts of `data.train` or `data.eval` from growing files.

  Args:
    config: section `data`.
    tok: tokenizer of the run.
    split: "train" or "eval".
    check: function of each gold answer, which raises ValueError for a bad one; None for no check.

  Raises:
    DataError: as in `sources.load`; or the spec is not a single path or pattern of .jsonl files.
  """
  key, spec = f"data.{split}", getattr(config, split)
  part, *others = sources.parts_of(spec, key)
  path = part["path"]
  fixed = path.partition(":")[0] in (*TASKS, "tfds")
  if others or fixed or not path.endswith(".jsonl"):
    raise DataError(
      f"{key}={spec}: schedule.refresh_every reads one .jsonl file, or a pattern of them, to which "
      "lines are appended; name such files, or set schedule.refresh_every=0"
    )
  source = Growing(path, key, lambda: sources.reader_of(config, tok, part, key, "", check))
  if not len(source):
    raise DataError(f"{key}={path}: the data set is empty ({source.reader.left_out})")
  return source


class Growing:
  """Source of prompts (`sources.Source`) from growing files, in the order of file names.

  Args:
    path: path or pattern of .jsonl files.
    key: configuration key of the path, for messages.
    make_reader: function that returns a new reader. `look` converts all rows by a new reader.

  Attributes:
    path: path or pattern.
    reader: reader of the rows in use, with counts of excluded rows.
    lengths: dict from file to the number of bytes in use and their checksum.
    shared: number of held-out problems that are among the rows.
  """

  def __init__(self, path: str, key: str, make_reader: Callable[[], Reader]):
    self.path, self._key, self._make_reader = path, key, make_reader
    self._held_out = sources.Prompts(())
    self.reader, self.shared = make_reader(), 0
    self.lengths: Lengths = {}
    self._rows: list[structs.Prompt] = []
    self.look()

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> structs.Prompt:
    return self._rows[index]

  @property
  def skipped(self) -> int:
    return self.reader.skipped.count

  @property
  def contents(self) -> str:
    """Identifies the rows and their order, by a checksum."""
    checksum = zlib.crc32(json.dumps(self.lengths).encode())
    return f"{self.path} grows: {len(self)} rows {checksum:08x}"

  def watch(self, held_out: Sequence[structs.Prompt]) -> None:
    """Sets the held-out problems, and counts how many of them are among the rows."""
    self._held_out = sources.Prompts(held_out)
    self._count_shared()

  def look(self, lengths: Lengths | None = None) -> int:
    """Reads the files again. Collective.

    Args:
      lengths: lengths from a checkpoint, up to which files are read; None to read all complete
        lines.

    Returns:
      The number of new rows.

    Raises:
      DataError: a new row is bad and `data.on_error` is "raise"; or lines in use have changed; or a
        file is missing.
    """
    before, skipped = len(self), self.skipped
    try:
      lengths, texts = hosts.run_on_first_host(lambda: self._read(lengths))
    except ValueError as error:
      raise DataError(str(error)) from error
    if not texts:
      return 0
    reader, rows = self._make_reader(), []
    for name, text in texts.items():
      id_ = name if files.is_pattern(self.path) else epath.Path(name).name
      lines = files.json_lines(text.split(b"\n"))
      rows += reader((f"{name}, line {i}", f"{id_}:{i}", row) for i, row in lines)
    self.lengths, self.reader, self._rows = lengths, reader, rows
    if self.skipped > skipped:
      self.reader.skipped.warn(f"{self._key}={self.path}")
    self._count_shared()
    return len(self) - before

  def _read(self, recorded: Lengths | None) -> tuple[Lengths, dict[str, bytes]]:
    """Reads lengths and texts of the files. Texts are {} if no length has changed.

    Args:
      recorded: lengths up to which files are read; None to read all complete lines.
    """
    used = self.lengths if recorded is None else recorded
    names = recorded or [str(file) for file in files.named(self.path, self._key)]
    if missing := used.keys() - set(names):
      raise DataError(
        f"{self._key}: {min(missing)} no longer exists, and its rows are in use. Restore it"
      )
    lengths, texts = {}, {}
    for name in names:
      try:
        text = epath.Path(name).read_bytes()
      except OSError as error:
        raise DataError(f"{self._key}: {name} cannot be read: {error}") from error
      old = used.get(name, _measure(b""))
      if _measure(text[: old[0]]) != old:
        raise DataError(
          f"{self._key}: {name} has changed: rows in use were edited or removed. Restore its former"
          " content, and only append to it"
        )
      texts[name] = text[: old[0] if recorded else text.rfind(b"\n") + 1]
      lengths[name] = _measure(texts[name])
    return lengths, {} if lengths == self.lengths else texts

  def _count_shared(self) -> None:
    before = self.shared
    self.shared = overlap.shared_prompts(self, self._held_out, self._held_out)
    if self.shared > before:
      logging.warning(
        "%s: %d held-out problems are also among the training rows", self.path, self.shared
      )


def _measure(text: bytes) -> list[int]:
  """Returns the number of bytes and their CRC-32."""
  return [len(text), zlib.crc32(text)]
