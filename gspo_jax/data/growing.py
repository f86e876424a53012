"""Problems in JSON lines files that grow during a run.

Host 0 reads the files and broadcasts new lines. A look is one read of all files. A journal records
each file's length at each look, so a resumed or restarted run repeats the same looks first. Known
lines must not change: each look reads whole files and compares checksums.
"""

import json
import logging
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from gspo_jax import structs
from gspo_jax.data import files, overlap, sources, tokenizer
from gspo_jax.data.embedded import TASKS
from gspo_jax.data.rows import Check, Reader
from gspo_jax.settings.data import DataConfig, DataError
from gspo_jax.system import hosts, jsons
from gspo_jax.system.files import write_whole

JOURNAL = "refreshes.json"  # file in the workdir with the looks of each source
Look = dict[str, list[int]]  # number of bytes and their CRC-32, by file


def load(
  config: DataConfig, tok: tokenizer.Tokenizer, split: str, check: Check | None = None
) -> "Growing":
  """Reads the prompts of a split from growing files.

  Raises:
    DataError: as in `sources.load`, and if the source is not one path or pattern of .jsonl files.
  """
  key, spec = f"data.{split}", getattr(config, split)
  part, *others = sources.parts_of(spec, key)
  path = part["path"]
  fixed = path.partition(":")[0] in (*TASKS, "tfds")
  if others or fixed or not path.endswith(".jsonl"):
    raise DataError(
      f"{key}={spec}: schedule.refresh_every reads one .jsonl file, or a pattern of them, to which "
      "lines are appended; name such a one, or set schedule.refresh_every=0"
    )
  source = Growing(path, key, lambda: sources.reader_of(config, tok, part, key, "", check))
  source.look()
  if not len(source):
    raise DataError(f"{key}={path}: the data set is empty ({source.reader.left_out})")
  return source


class Growing:
  """Rows of files that grow, in the order in which they were read (`sources.Source`).

  Attributes:
    looks: number of looks so far.
    shared: number of held-out problems that also occur in the rows.
  """

  def __init__(self, path: str, key: str, make_reader: Callable[[], Reader]):
    self.path, self._key, self._make_reader = path, key, make_reader
    self._journal: Path | None = None
    self._looks: list[Look] = []  # looks of the journal, possibly more than `looks`
    self._held_out = sources.Prompts(())
    self.go_to(0)

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> structs.Prompt:
    return self._rows[index]

  @property
  def skipped(self) -> int:
    return self.reader.skipped.count

  @property
  def contents(self) -> str:
    """Fingerprints the rows and their order."""
    looks = json.dumps(self._looks[: self.looks])
    return f"{self.path} grows: {len(self)} rows {zlib.crc32(looks.encode()):08x}"

  @property
  def rendered(self) -> str:
    """Returns a checksum as `sources.rendered`."""
    return f"{self._rendered:08x}"

  def watch(self, held_out: Sequence[structs.Prompt]) -> None:
    """Sets the held-out problems counted in `shared`."""
    self._held_out = sources.Prompts(held_out)
    self._count_shared()

  def keep(self, journal: Path) -> None:
    """Starts writing a journal, and repeats its recorded looks.

    Raises:
      ValueError: the journal is damaged.
      DataError: a row of the first look has changed.
      WriteError: the journal cannot be written.
    """
    self._journal, looks = journal, self._looks
    self._looks = hosts.run_on_first_host(lambda: _read(journal).get(self.path, looks))
    if self._looks[:1] != looks[:1]:
      self.go_to(1)
    self._write()

  def go_to(self, looks: int) -> None:
    """Reads the rows of the first `looks` looks, in the same order. Raises DataError."""
    self.reader, self._rows = self._make_reader(), []
    self.looks = self.shared = self._rendered = 0
    while self.looks < looks:
      self.look()

  def look(self) -> int:
    """Reads new lines, or the journal's next look, and counts new rows.

    Raises:
      DataError: a new row is bad and `data.on_error` is "raise"; or known lines of a file changed.
    """
    before, skipped = len(self), self.skipped
    try:
      look, texts = hosts.run_on_first_host(self._read_new)
    except ValueError as error:
      raise DataError(str(error)) from error
    for name, number, text in texts:
      id_ = name if files.is_pattern(self.path) else epath.Path(name).name
      rows = files.json_lines(text.split(b"\n"), number)
      self._rows += self.reader((f"{name}, line {i}", f"{id_}:{i}", row) for i, row in rows)
    if self.skipped > skipped:
      self.reader.skipped.warn(f"{self._key}={self.path}")
    self._rendered = sources.add_rendered(self._rendered, self._rows[before:])
    if len(self) > before:
      self._count_shared()
    self.looks += 1
    if self.looks > len(self._looks):
      self._looks = [*self._looks, look]
      self._write()
    return len(self) - before

  def _read_new(self) -> tuple[Look, list[tuple[str, int, bytes]]]:
    """Returns the next look and its new text.

    New text is a list of (file, number of the first new line, bytes).
    """
    before = self._looks[self.looks - 1] if self.looks else {}
    journal = self._looks[self.looks] if self.looks < len(self._looks) else {}
    names = journal or [str(file) for file in files.named(self.path, self._key)]
    if missing := before.keys() - set(names):
      raise DataError(f"{self._key}: {min(missing)} is gone, and its rows are in use. Put it back")
    look, texts = {}, []
    for name in names:
      try:
        text = epath.Path(name).read_bytes()
      except OSError as error:
        raise DataError(f"{self._key}: {name} cannot be read: {error}") from error
      text = text[: journal[name][0] if journal else text.rfind(b"\n") + 1]
      look[name], old = _measure(text), before.get(name, _measure(b""))
      if _measure(text[: old[0]]) != old or (journal and look[name] != journal[name]):
        raise DataError(
          f"{self._key}: {name} is not what it was: rows that are in use were edited or cut off. "
          "Append to it only, or put back what it was"
        )
      texts.append((name, text.count(b"\n", 0, old[0]) + 1, text[old[0] :]))
    return look, texts

  def _count_shared(self) -> None:
    before = self.shared
    self.shared = overlap.shared_prompts(self, self._held_out, self._held_out)
    if self.shared > before:
      logging.warning("%s: %d held-out problems are among the rows", self.path, self.shared)

  def _write(self) -> None:
    if self._journal and hosts.is_first():
      looks = _read(self._journal) | {self.path: self._looks}
      write_whole(self._journal, [json.dumps(looks, indent=1) + "\n"])


def _measure(text: bytes) -> list[int]:
  return [len(text), zlib.crc32(text)]


def _read(journal: Path) -> dict[str, Any]:
  return jsons.read_object(journal) if journal.exists() else {}
