"""A set of problems that grows: JSON lines that somebody appends to while a run goes on.

Only whole lines count, and only what is new is read. All hosts know the same rows: the first one
says how far to read. What was read may not change any more.

A pass goes through all rows that are known, in an order of the seed. Rows that are found meanwhile
join what is left of it, shuffled among the rows that are still to come. So they come up in the pass
that they were found in, and each row comes up once in it.
"""

import functools
import logging
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from gspo_jax import structs
from gspo_jax.data import files, overlap, sources, tokenizer
from gspo_jax.data.embedded import TASKS
from gspo_jax.data.rows import Check, Reader
from gspo_jax.settings.data import DataConfig, DataError
from gspo_jax.system import hosts

TAIL = 4096  # bytes at the end of what was read that are compared before reading on
PATIENCE_S = 60  # for what the first host has seen to be seen by another one


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
  wrong = None
  if others:
    wrong = "a mixture, whose sources have passes and weights of their own"
  elif path.partition(":")[0] in TASKS:
    wrong = "an embedded task, to which nobody appends"
  elif path.startswith("tfds:"):
    wrong = "a TFDS data set, to which nobody appends"
  elif not path.endswith(".jsonl"):
    wrong = "not of a format that lines are appended to"
  if wrong:
    raise DataError(
      f"{key}={spec} is {wrong}: schedule.refresh_every reads one .jsonl file, or a pattern of "
      "them; name such a one, or set schedule.refresh_every=0"
    )
  make = functools.partial(sources.reader_of, config, tok, part, key, "", check)
  source = Growing(path, key, make)
  source.refresh()
  if not len(source):
    raise DataError(f"{key}={path}: the data set is empty ({source.left_out})")
  return source


class Growing:
  """The rows of files that grow, in the order in which they were found (`sources.Source`).

  Args:
    make: makes a reader of rows.
  """

  def __init__(self, path: str, key: str, make: Callable[[], Reader]):
    self.path, self._key, self._make = path, key, make
    self._held_out: Counter[str] = Counter()  # questions
    self._begin()

  def _begin(self) -> None:
    self._reader, self._rows, self._shared = self._make(), [], set()
    self._known: dict[str, tuple[int, int]] = {}  # file: bytes and lines that were read
    self._tails: dict[str, bytes] = {}
    self._parts: list[list[Any]] = []  # file, bytes until, checksum: in the order of the rows
    # JSON: what was read at last; file, from byte, to byte, checksum
    self.pieces: list[list[Any]] = []

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> structs.Prompt:
    return self._rows[index]

  @property
  def skipped(self) -> int:
    return self._reader.skipped.count

  @property
  def left_out(self) -> str:
    return self._reader.left_out

  @property
  def shared(self) -> int:
    """Held-out problems that are among the rows."""
    return sum(self._held_out[question] for question in self._shared)

  def watch(self, held_out: Sequence[structs.Prompt]) -> None:
    """From now on these are counted if they are among the rows."""
    self._held_out = Counter(overlap.normal(prompt.question) for prompt in held_out)
    self._compare(self._rows)

  def refresh(self, pieces: Sequence[Sequence[Any]] | None = None) -> int:
    """Reads on; returns how many rows there are more. With `pieces`, which were once read, no
    further.

    Raises:
      DataError: for a bad row, as at the start, and for a file whose known part has changed.
    """
    before, shared, skipped = len(self), self.shared, self.skipped
    self.pieces = _agreed(lambda: self._look() if pieces is None else pieces)
    for file, start, end, checksum in self.pieces:
      self._read(file, end, (start, checksum))
    if self.skipped > skipped:
      self._reader.skipped.warn(f"{self._key}={self.path}")
    if self.shared > shared:
      logging.warning("%s: %d held-out problems are among the rows", self.path, self.shared)
    return len(self) - before

  def begin_with(self, pieces: Sequence[Sequence[Any]] | None) -> None:
    """Has the rows of the pieces that were once read first, and no others; those that it has
    without `pieces`. Raises DataError as `refresh` does."""
    first = _agreed(lambda: self.pieces if pieces is None else pieces)
    if first != self.pieces:
      self._begin()
      self.refresh(first)

  def get_state(self) -> list[list[Any]]:
    """Returns JSON: which part of which file the rows are from."""
    return [list(part) for part in self._parts]

  def set_state(self, state: Sequence[Sequence[Any]]) -> None:
    """Has the rows that there were then, in the same order, and no others.

    Raises:
      DataError: they are not what they were.
    """
    self._begin()
    for file, end, checksum in state:
      self._read(file, end)
      if self._parts[-1][2] != checksum:
        raise DataError(_changed(self._key, file))

  def _look(self) -> list[list[Any]]:
    """The pieces that the whole lines which were not read are in, as the files are now."""
    found = {str(file): file for file in files.found(self.path, self._key)}
    for name in self._known:
      if name not in found:
        raise DataError(f"{self._key}: {name} is gone, and its rows are in use. Put it back")
    pieces = []
    for name, file in found.items():
      start, _ = self._known.get(name, (0, 0))
      new = _bytes(file, start, None)
      if self._tail_of(file, start) != self._tails.get(name, b""):
        raise DataError(_changed(self._key, name))
      if (lines := new.rfind(b"\n") + 1) > 0:
        pieces.append([name, start, start + lines, zlib.crc32(new[:lines])])
    return pieces

  def _read(self, name: str, end: int, expected: tuple[int, int] | None = None) -> None:
    """Takes in the rows of a file up to a byte. DataError if what comes from the byte that is
    expected has another checksum."""
    start, number = self._known.get(name, (0, 0))
    if end <= start:
      return
    file = epath.Path(name)
    text = _bytes(file, start, end)
    if expected and expected[0] == start and expected[1] != zlib.crc32(text):
      raise DataError(_changed(self._key, name))
    checksum = 0
    if self._parts and self._parts[-1][0] == name:  # the rows follow each other
      checksum = self._parts.pop()[2]
    self._parts.append([name, end, zlib.crc32(text, checksum)])
    self._tails[name] = (self._tails.get(name, b"") + text)[-TAIL:]
    lines = text.split(b"\n")[:-1]
    self._known[name] = end, number + len(lines)
    shown = name if files.is_pattern(self.path) else file.name
    rows = self._reader(_rows(name, shown, number, lines))
    self._rows += rows
    self._compare(rows)

  def _tail_of(self, file: epath.Path, end: int) -> bytes:
    return _bytes(file, max(0, end - TAIL), end) if end else b""

  def _compare(self, rows: Sequence[structs.Prompt]) -> None:
    questions = (overlap.normal(prompt.question) for prompt in rows) if self._held_out else ()
    self._shared.update(question for question in questions if question in self._held_out)


def _rows(file: str, shown: str, number: int, lines: Sequence[bytes]) -> Iterator[files.Row]:
  for i, line in enumerate(lines, number + 1):
    if line.strip():
      yield f"{file}, line {i}", f"{shown}:{i}", functools.partial(files.json_row, line)


class Passes:
  """An endless iterator over prompts of a set that grows, as `sources.Batches` is of others."""

  def __init__(self, source: Growing, seed: int):
    self.source, self._seed = source, seed
    self._begin(0)

  def _begin(self, number: int) -> None:
    self._number, self._next = number, 0
    self._growth: list[tuple[int, int]] = []  # prompts of the pass that were taken, rows from then
    self._order = np.zeros(0, np.int64)
    self._join(0, len(self.source))

  def _join(self, taken: int, rows: int) -> None:
    """Shuffles the new ones of so many rows among what is left of the pass."""
    rest = np.concatenate([self._order[taken:], np.arange(len(self._order), rows)])
    rng = np.random.default_rng([self._seed, self._number, len(self._growth)])
    self._order = np.concatenate([self._order[:taken], rng.permutation(rest)])
    self._growth.append((taken, rows))

  def take(
    self, count: int, wanted: Callable[[structs.Prompt], bool] = lambda _: True
  ) -> list[structs.Prompt]:
    """As `sources.Batches.take`."""
    return sources.wanted_of(iter(self._draw, None), count, wanted, len(self.source))

  def _draw(self) -> structs.Prompt:
    if self._next == len(self._order):
      self._begin(self._number + 1)
    self._next += 1
    return self.source[self._order[self._next - 1]]

  def refresh(self, pieces: Sequence[Sequence[Any]] | None = None) -> int:
    """As `Growing.refresh`; the new rows join the pass."""
    added = self.source.refresh(pieces)
    if added:
      self._join(self._next, len(self.source))
    return added

  def get_state(self) -> dict[str, Any]:
    position = dict(number=self._number, next=self._next, growth=list(map(list, self._growth)))
    # A run that goes on without `refresh_every` finds other contents, and begins a new epoch.
    origin = dict(source=self.source.path, parts=self.source.get_state())
    return origin | dict(contents="grows", restarts=0) | position

  def set_state(self, state: Mapping[str, Any]) -> None:
    if "parts" not in state:
      logging.warning("the checkpoint is of a run whose data did not grow: a new pass starts")
      return
    if state["source"] != self.source.path:
      logging.warning("the checkpoint is of a run on %s: a new pass starts", state["source"])
      return self._begin(state["number"] + 1)
    self.source.set_state(state["parts"])
    rows = state["growth"][-1][1]
    if len(self.source) != rows:
      logging.warning("of %d rows there are %d now: a new pass starts", rows, len(self.source))
      return self._begin(state["number"] + 1)
    self._number, self._growth, self._order = state["number"], [], np.zeros(0, np.int64)
    for taken, rows in state["growth"]:
      self._join(taken, rows)
    self._next = state["next"]


def _bytes(file: epath.Path, start: int, end: int | None) -> bytes:
  """A part of a file. Other hosts than the first wait until they see what that one has seen."""
  left = PATIENCE_S if jax.process_index() else 0
  while True:
    try:
      with file.open("rb") as stream:
        stream.seek(start)
        found = stream.read() if end is None else stream.read(end - start)
      if end is None or len(found) == end - start:
        return found
      wrong = f"ends before byte {end}, and rows up to there are in use. Put them back"
    except OSError as error:
      wrong = f"cannot be read: {error}"
    if left == 0:
      raise DataError(f"{file} {wrong}")
    left -= 1
    time.sleep(1)


def _agreed(look: Callable[[], Sequence[Sequence[Any]]]) -> list[list[Any]]:
  """The pieces that the first host finds, on all of them; what it raises, too."""
  try:
    return list(map(list, hosts.of_first(look)))
  except ValueError as error:
    raise DataError(str(error)) from error


def _changed(key: str, file: str) -> str:
  return (
    f"{key}: {file} is not what it was: rows that are in use were edited or cut off. Append to it "
    "only, or put back what it was"
  )
