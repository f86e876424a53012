"""A set of problems that grows: JSON lines that somebody appends to while a run goes on.

The first host looks, and tells the others which lines are new. What each look has read is written
down: a run that goes on or begins again makes the same looks, and may then make more. What was read
may not change any more: a look reads the files whole and compares it.
"""

import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from gspo_jax import structs
from gspo_jax.data import files, overlap, sources, tokenizer
from gspo_jax.data.embedded import TASKS
from gspo_jax.data.rows import Check, Reader
from gspo_jax.settings.data import DataConfig, DataError
from gspo_jax.system import hosts, jsons
from gspo_jax.system.files import write_whole

JOURNAL = "refreshes.json"  # of the workdir: by source, what each look has read
Look = dict[str, list[int]]  # of each file the bytes that were read, and their CRC-32


def load(
  config: DataConfig, tok: tokenizer.Tokenizer, split: str, check: Check | None = None
) -> "Growing":
  """The prompts of `config.train` as far as they are on file, as `sources.load` has them.

  Raises:
    DataError: for what `sources.load` raises it, and for sources that nobody can append to.
  """
  key, spec = f"data.{split}", getattr(config, split)
  part, *others = sources.parts_of(spec, key)
  path = part["path"]
  kept = path.partition(":")[0] in (*TASKS, "tfds")  # where nobody can append to it
  if others or kept or not path.endswith(".jsonl"):
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
  """The rows of files that grow, in the order in which they were found (`sources.Source`)."""

  def __init__(self, path: str, key: str, make: Callable[[], Reader]):
    self.path, self._key, self._make = path, key, make
    self._journal: Path | None = None
    self._looks: list[Look] = []
    self._held_out = sources.Prompts(())
    self._begin()

  def _begin(self) -> None:
    self.reader, self._rows = self._make(), []
    self.looks = self.shared = 0  # looks so far; held-out problems among the rows

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> structs.Prompt:
    return self._rows[index]

  @property
  def skipped(self) -> int:
    return self.reader.skipped.count

  @property
  def contents(self) -> str:
    """All that the order depends on."""
    looks = json.dumps(self._looks[: self.looks])
    return f"{self.path} grows: {len(self)} rows {zlib.crc32(looks.encode()):08x}"

  def watch(self, held_out: Sequence[structs.Prompt]) -> None:
    """From now on `shared` counts these."""
    self._held_out = sources.Prompts(held_out)
    self._count()

  def keep(self, journal: Path) -> None:
    """Writes down looks from now on. Those that are written down already are made again.

    Raises:
      ValueError: the file is damaged.
      DataError: a row that was read then has changed.
      WriteError: it cannot be written.
    """
    self._journal, begun = journal, self._looks
    self._looks = hosts.run_on_first_host(lambda: _read(journal).get(self.path, begun))
    if self._looks[:1] != begun[:1]:
      self.go_to(1)
    self._write()

  def go_to(self, looks: int) -> None:
    """Has the rows that there were after so many looks, in the same order. Raises DataError."""
    self._begin()
    while self.looks < looks:
      self.look()

  def look(self) -> int:
    """Reads on; returns how many rows there are more.

    Raises:
      DataError: for a bad row, as at the start, and for a file whose known part has changed.
    """
    before, skipped = len(self), self.skipped
    try:
      look, added = hosts.run_on_first_host(self._find)
    except ValueError as error:
      raise DataError(str(error)) from error
    for name, number, text in added:
      id_ = name if files.is_pattern(self.path) else epath.Path(name).name
      rows = files.json_lines(text.split(b"\n"), number)
      self._rows += self.reader((f"{name}, line {i}", f"{id_}:{i}", row) for i, row in rows)
    if self.skipped > skipped:
      self.reader.skipped.warn(f"{self._key}={self.path}")
    if len(self) > before:
      self._count()
    self.looks += 1
    if self.looks > len(self._looks):
      self._looks = [*self._looks, look]
      self._write()
    return len(self) - before

  def draws(self, seed: int) -> "Draws":
    return Draws(self, seed)

  def _find(self) -> tuple[Look, list[tuple[str, int, bytes]]]:
    """The look to make now, and the lines that are new in it: file, number of the first one, text.
    A look that was made before finds what it found then."""
    known = self._looks[self.looks - 1] if self.looks else {}
    again = self._looks[self.looks] if self.looks < len(self._looks) else {}
    names = again or [str(file) for file in files.named(self.path, self._key)]
    if gone := known.keys() - set(names):
      raise DataError(f"{self._key}: {min(gone)} is gone, and its rows are in use. Put it back")
    look, added = {}, []
    for name in names:
      try:
        text = epath.Path(name).read_bytes()
      except OSError as error:
        raise DataError(f"{self._key}: {name} cannot be read: {error}") from error
      text = text[: again[name][0] if again else text.rfind(b"\n") + 1]
      look[name], before = _measured(text), known.get(name, _measured(b""))
      if _measured(text[: before[0]]) != before or (again and look[name] != again[name]):
        raise DataError(
          f"{self._key}: {name} is not what it was: rows that are in use were edited or cut off. "
          "Append to it only, or put back what it was"
        )
      number = text.count(b"\n", 0, before[0]) + 1
      added.append((name, number, text[before[0] :]))
    return look, added

  def _count(self) -> None:
    before, self.shared = self.shared, overlap.shared_prompts(self, self._held_out, self._held_out)
    if self.shared > before:
      logging.warning("%s: %d held-out problems are among the rows", self.path, self.shared)

  def _write(self) -> None:
    if self._journal and hosts.is_first():
      known = _read(self._journal) | {self.path: self._looks}
      write_whole(self._journal, [json.dumps(known, indent=1) + "\n"])


class Draws(Iterator[structs.Prompt]):
  """An endless iterator over the prompts of a set that grows, with a position as Grain's have.

  A pass goes through all rows that are known, in an order of the seed. Rows that are found
  meanwhile are shuffled among those that are still to come. So they come up in the pass that they
  were found in, and each row comes up once in it.
  """

  def __init__(self, source: Growing, seed: int):
    self._source, self._seed = source, seed
    self._begin(0)

  def _begin(self, number: int) -> None:
    self._number, self._next, self._order = number, 0, np.zeros(0, np.int64)
    self._growth: list[list[int]] = []  # prompts of the pass that were taken, rows from then

  def _join(self, taken: int, rows: int) -> None:
    left = np.concatenate([self._order[taken:], np.arange(len(self._order), rows)])
    rng = np.random.default_rng([self._seed, self._number, len(self._growth)])
    self._order = np.concatenate([self._order[:taken], rng.permutation(left)])
    self._growth.append([taken, rows])

  def __next__(self) -> structs.Prompt:
    if self._next == len(self._source):
      self._begin(self._number + 1)
    if len(self._order) < len(self._source):
      self._join(self._next, len(self._source))
    self._next += 1
    return self._source[self._order[self._next - 1]]

  def get_state(self) -> dict[str, Any]:
    return dict(number=self._number, next=self._next, growth=list(self._growth))

  def set_state(self, state: Mapping[str, Any]) -> None:
    self._begin(state["number"])
    for taken, rows in state["growth"]:
      self._join(taken, rows)
    self._next = state["next"]


def _measured(text: bytes) -> list[int]:
  return [len(text), zlib.crc32(text)]


def _read(journal: Path) -> dict[str, Any]:
  return jsons.read_object(journal) if journal.exists() else {}
