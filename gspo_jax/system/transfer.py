"""Progress of bytes that are on their way: one line."""

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from gspo_jax.system.text import clock_text

GB = 1e9


class Transfer:
  """Counts bytes and says how many there are, how fast they come and how long it will take.

  On a terminal the line is written over; in a log there is a new one every `interval` seconds.
  Nothing is said in the first second, nor if not `active`. Threads may count at the same time.

  Args:
    title: begins the line.
    total: bytes.
  """

  def __init__(
    self,
    title: str,
    total: int,
    *,
    active: bool = True,
    interval: float = 10.0,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._title, self._total, self._active, self._clock = title, total, active, clock
    self._stream = sys.stderr if stream is None else stream
    self._terminal = self._stream.isatty()
    self._interval = min(interval, 0.5) if self._terminal else interval
    self._lock, self._begun = threading.Lock(), clock()
    self._due, self._said = self._begun + 1.0, False
    self._there = self._come = 0
    self._closed = False

  def add(self, count: int, *, before: bool = False) -> None:
    """Counts arrived bytes, or those there `before`, which do not count for the speed.

    Raises RuntimeError once it is closed, to end threads.
    """
    with self._lock:
      if self._closed:
        raise RuntimeError("the transfer was broken off")
      self._there += count
      self._come += 0 if before else count
      if self._active and self._come and self._clock() >= self._due:
        self._say()
        self._due = self._clock() + self._interval

  def close(self) -> None:
    """Ends the line on a terminal, or writes a log's last line."""
    self._closed = True
    if self._said and self._terminal:
      self._stream.write("\n")
    elif self._said:
      self._say()

  def __enter__(self) -> "Transfer":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _say(self) -> None:
    rate = self._come / max(self._clock() - self._begun, 1e-9)
    remaining = clock_text(max(self._total - self._there, 0) / rate) if rate else "?"
    progress = f"{self._there / GB:.2f} of {self._total / GB:.2f} GB"
    line = f"{self._title}: {progress}  {rate / 1e6:,.0f} MB/s  left {remaining}"
    self._stream.write(f"\r{line}\x1b[K" if self._terminal else f"{line}\n")
    self._stream.flush()
    self._said = True
