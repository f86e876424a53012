"""A set of problems that grows: JSON lines that somebody appends to while a run goes on.

The first host looks, and tells the others which lines are new. What each look has read is written
down: a run that goes on or begins again makes the same looks, and may then make more. What was read
may not change any more.
"""

import functools
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from gspo_jax import structs
from gspo_jax.data import files, sources, tokenizer
from gspo_jax.data.embedded import TASKS
from gspo_jax.data.rows import Check, Reader
from gspo_jax.settings.data import DataConfig, DataError
from gspo_jax.system import hosts, jsons
from gspo_jax.system.files import write_whole

JOURNAL = "refreshes.json"  # of the workdir: by source, what each look has read
TAIL = 4096  # bytes at the end of what was read that are compared before reading on


class Known(NamedTuple):
  """What was read of a file."""

  end: int = 0  # in bytes
  checksum: int = 0  # CRC-32 of these
  lines: int = 0
  tail: bytes = b""

  def plus(self, text: bytes) -> "Known":
    lines, tail = self.lines + text.count(b"\n"), (self.tail + text)[-TAIL:]
    return Known(self.end + len(text), zlib.crc32(text, self.checksum), lines, tail)


def load(
  config: DataConfig, tok: tokenizer.Tokenizer, split: str, check: Check | None = None
) -> "Growing":
  """The prompts of `config.train` as far as they are on file, as `sources.load` has them.

  Raises:
    DataError: for what `sources.load` raises it, and for sources that nobody can append to.
  """
  key, spec = f"data.{split}", getattr(config, split)
  (part, *others) = sources.parts_of(spec, key)
  path = part["path"]
  kept = path.partition(":")[0] in (*TASKS, "tfds")  # where nobody can append to it
  if others or kept or not path.endswith(".jsonl"):
    raise DataError(
      f"{key}={spec}: schedule.refresh_every reads one .jsonl file, or a pattern of them, to which "
      "lines are appended; name such a one, or set schedule.refresh_every=0"
    )
  make = functools.partial(sources.reader_of, config, tok, part, key, "", check)
  source = Growing(path, key, make)
  source.look()
  if not len(source):
    raise DataError(f"{key}={path}: the data set is empty ({source.reader.left_out})")
  return source


class Growing:
  """The rows of files that grow, in the order in which they were found (`sources.Source`)."""

  def __init__(self, path: str, key: str, make: Callable[[], Reader]):
    self.path, self._key, self._make = path, key, make
    self._journal: Path | None = None
    # Of each look the files with new lines, and `end` and `checksum` after it.
    self._looks: list[dict[str, list[int]]] = []
    self._held_out: list[str] = []  # questions
    self._begin()

  def _begin(self) -> None:
    self.reader, self._rows = self._make(), []
    self._known: dict[str, Known] = {}
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
    self._held_out = [_words(prompt) for prompt in held_out]
    self._count()

  def keep(self, journal: Path) -> None:
    """Writes down looks from now on. Those that are written down already are made again.

    Raises:
      ValueError: the file is damaged.
      DataError: a row that was read then has changed.
      WriteError: it cannot be written.
    """
    self._journal, begun = journal, self._looks
    self._looks = hosts.of_first(lambda: _read(journal).get(self.path, begun))
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
      found = hosts.of_first(self._find)
    except ValueError as error:
      raise DataError(str(error)) from error
    for name, text in found.items():
      known = self._known.get(name, Known())
      self._known[name] = known.plus(text)
      id_ = name if files.is_pattern(self.path) else epath.Path(name).name
      self._rows += self.reader(_rows(name, id_, known.lines, text))
    if self.skipped > skipped:
      self.reader.skipped.warn(f"{self._key}={self.path}")
    if len(self) > before:
      self._count()
    self.looks += 1
    if self.looks > len(self._looks):
      self._looks = [*self._looks, {name: list(self._known[name][:2]) for name in found}]
      self._write()
    return len(self) - before

  def draws(self, seed: int) -> "Draws":
    return Draws(self, seed)

  def _find(self) -> dict[str, bytes]:
    """The whole lines of each file that were not read yet; of a look that was made before, those
    that it found."""
    again = self._looks[self.looks] if self.looks < len(self._looks) else None
    names = [str(f) for f in files.found(self.path, self._key)] if again is None else list(again)
    if again is None and (gone := self._known.keys() - set(names)):
      raise DataError(f"{self._key}: {min(gone)} is gone, and its rows are in use. Put it back")
    found = {}
    for name in names:
      known = self._known.get(name, Known())
      try:
        with epath.Path(name).open("rb") as file:
          file.seek(known.end - len(known.tail))
          tail = file.read(len(known.tail))
          text = file.read(again[name][0] - known.end if again else -1)
      except OSError as error:
        raise DataError(f"{self._key}: {name} cannot be read: {error}") from error
      text = text[: text.rfind(b"\n") + 1]
      if tail != known.tail or (again and list(known.plus(text)[:2]) != again[name]):
        raise DataError(
          f"{self._key}: {name} is not what it was: rows that are in use were edited or cut off. "
          "Append to it only, or put back what it was"
        )
      if text:
        found[name] = text
    return found

  def _count(self) -> None:
    before, questions = self.shared, set(map(_words, self._rows)) if self._held_out else set()
    self.shared = sum(question in questions for question in self._held_out)
    if self.shared > before:
      logging.warning("%s: %d held-out problems are among the rows", self.path, self.shared)

  def _write(self) -> None:
    if self._journal and jax.process_index() == 0:
      known = _read(self._journal) | {self.path: self._looks}
      write_whole(self._journal, [json.dumps(known, indent=1) + "\n"])


class Draws:
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
    rest = np.concatenate([self._order[taken:], np.arange(len(self._order), rows)])
    rng = np.random.default_rng([self._seed, self._number, len(self._growth)])
    self._order = np.concatenate([self._order[:taken], rng.permutation(rest)])
    self._growth.append([taken, rows])

  def __iter__(self) -> Iterator[structs.Prompt]:
    return self

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


def _rows(file: str, id_: str, before: int, text: bytes) -> Iterator[files.Row]:
  for i, line in enumerate(text.split(b"\n"), before + 1):
    if line.strip():
      yield f"{file}, line {i}", f"{id_}:{i}", functools.partial(files.json_row, line)


def _words(prompt: structs.Prompt) -> str:
  return " ".join(prompt.question.split())


def _read(journal: Path) -> dict[str, Any]:
  return jsons.read_object(journal) if journal.exists() else {}
