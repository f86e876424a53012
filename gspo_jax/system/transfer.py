"""Progress of a transfer of bytes, on a terminal or in a log."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from gspo_jax.system.text import clock_text

GB = 1e9


class Transfer(contextlib.AbstractContextManager):
  """Counts bytes, and shows their number, speed and remaining time. Thread-safe.

  On a terminal, one line is overwritten. In a log, a new line is written at most every `interval`
  seconds. Nothing is shown in the first second.

  Args:
    title: beginning of the line.
    total: number of bytes to transfer, including bytes that are already present.
    active: whether to show anything.
    interval: minimum seconds between lines of a log.
    stream: output; None for stderr.
    clock: function that returns the time in seconds.
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
    self._lock, self._start = threading.Lock(), clock()
    self._due, self._shown = self._start + 1.0, False
    self._present = self._received = 0  # Bytes present so far, and bytes received by this transfer.
    self._closed = False

  def add(self, count: int, *, before: bool = False) -> None:
    """Counts bytes.

    Args:
      count: number of bytes.
      before: whether the bytes were present before the transfer. If so, the speed excludes them.

    Raises:
      RuntimeError: the transfer is closed. This error ends threads that still receive bytes.
    """
    with self._lock:
      if self._closed:
        raise RuntimeError("the transfer is closed")
      self._present += count
      self._received += 0 if before else count
      if self._active and self._received and self._clock() >= self._due:
        self._show()
        self._due = self._clock() + self._interval

  def close(self) -> None:
    """Ends the line on a terminal, or writes a log's last line.

    Does nothing if no line was shown.
    """
    self._closed = True
    if self._shown and self._terminal:
      self._stream.write("\n")
    elif self._shown:
      self._show()

  def __exit__(self, *_: object) -> None:
    self.close()

  def _show(self) -> None:
    rate = self._received / max(self._clock() - self._start, 1e-9)
    remaining = clock_text(max(self._total - self._present, 0) / rate) if rate else "?"
    progress = f"{self._present / GB:.2f} of {self._total / GB:.2f} GB"
    line = f"{self._title}: {progress}  {rate / 1e6:,.0f} MB/s  left {remaining}"
    self._stream.write(f"\r{line}\x1b[K" if self._terminal else f"{line}\n")
    self._stream.flush()
    self._shown = True
