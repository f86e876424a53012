"""Progress of a run: a bar on a terminal, lines in a log."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from tqdm import tqdm

from gspo_jax.system.text import clock_text

# Work until the first step of a phase has ended.
_FIRST_WORK = dict(
  sft="compilation and first step",
  rl="compilation, first evaluation and first step",
  eval="compilation and first problems",
)


class Progress(contextlib.AbstractContextManager):
  """Shows progress as a bar on a terminal, or as a line about every `interval` seconds in a log.

  Args:
    phase: name of the phase.
    total: number of steps in the phase.
    start: number of steps finished before this process.
    active: whether this process shows progress; True on one process only.
    interval: minimum number of seconds between lines in a log. The last line may come earlier.
    delay: seconds before the bar, or the first line of `update`, appears.
    at_most: whether the phase may end before `total` steps.
    stream: output; None for standard error.
    clock: function for the time in seconds.
  """

  def __init__(
    self,
    phase: str,
    total: int,
    *,
    start: int = 0,
    active: bool = True,
    interval: float = 10.0,
    delay: float = 0.0,
    at_most: bool = False,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._phase, self._total, self._start, self.step = phase, total, start, start
    self._interval, self._clock, self._at_most = interval, clock, at_most
    self._begin, self._stop_beats = clock(), threading.Event()
    self._due, self._printed = clock() + delay, False  # Time of the next line in a log.
    self._stream = sys.stderr if stream is None else stream
    self._accuracy: float | None = None
    self._named = False  # Whether `beat` has named the work before the first step.
    # Step and time of the first call of `update`. Earlier time includes compilation.
    self._first: tuple[int, float] | None = None
    self._active, self._bar = active, None
    if active and self._stream.isatty():
      self._bar = tqdm(
        desc=phase, total=total, initial=start, file=self._stream, delay=delay,
        mininterval=0, miniters=0, dynamic_ncols=True,
        bar_format="{desc} {n_fmt}/{total_fmt} |{bar}| {postfix}",
      )  # fmt: skip

  def update(self, step: int, row: Mapping[str, Any], warnings: Sequence[str] = ()) -> None:
    """Shows warnings, then the number of finished steps and the main metrics.

    Args:
      step: number of finished steps.
      row: metrics row of the step.
      warnings: lines to print.
    """
    self.step = step
    if not self._active:
      return
    for line in warnings:
      tqdm.write(line, file=self._stream)
    clock = self._clock()
    if self._first is None and step > self._start:
      self._first = (step, clock)
      self._stop_beats.set()
    self._accuracy = row.get("eval/accuracy", self._accuracy)
    text = "  ".join([*self._main_metrics(row), f"left {self._remaining(clock)}"])
    if self._bar is not None:
      self._bar.set_postfix_str(text, refresh=False)
      self._bar.update(step - self._bar.n)
    elif clock >= self._due or (self._printed and step >= self._total):
      print(f"{self._phase} {step}/{self._total}  {text}", file=self._stream, flush=True)
      self._due, self._printed = clock + self._interval, True

  def wait(self) -> None:
    """Shows the elapsed time every `interval` seconds until the first step ends.

    A thread does so; this method returns at once. If no steps are left, shows that instead.
    """
    if not self._active:
      return
    if self.step >= self._total:
      self._show("finished before this start")
      return

    def beats() -> None:
      while not self._stop_beats.wait(self._interval):
        self.beat()

    self.beat()
    threading.Thread(target=beats, daemon=True).start()

  def beat(self) -> None:
    """Shows the elapsed time, during the first step. A log names the work in one line only."""
    work = "" if self._named and self._bar is None else f"{_FIRST_WORK[self._phase]}; "
    self._named = True
    self._show(f"{work}{clock_text(self._clock() - self._begin)} so far")

  def _show(self, text: str) -> None:
    """Shows the number of finished steps and a text."""
    if self._bar is not None:
      self._bar.set_postfix_str(text)
    else:
      print(f"{self._phase} {self.step}/{self._total}  {text}", file=self._stream, flush=True)

  def close(self) -> None:
    """Closes the bar, and stops the thread of `wait`."""
    self._stop_beats.set()
    if self._bar is not None:
      self._bar.close()

  def __exit__(self, *_: object) -> None:
    self.close()

  def _main_metrics(self, row: Mapping[str, Any]) -> Iterator[str]:
    """Yields the main metrics of a row as text."""
    if "reward/mean" in row:
      yield f"reward {row['reward/mean']:.3f}"
    elif "loss" in row:
      yield f"loss {row['loss']:.4g}"
    if self._accuracy is not None:
      yield f"accuracy {self._accuracy:.3f}"
    clipped = row.get("clip_fraction/token", row.get("clip_fraction/sequence"))
    if clipped is not None:
      yield f"clipped {clipped:.3f}"
    if "tokens_per_second" in row:
      yield f"{row['tokens_per_second']:,.0f} tokens/s"

  def _remaining(self, clock: float) -> str:
    """Estimates the remaining time; "?" until this process has finished two steps."""
    step, since = self._first or (self.step, clock)
    if self.step == step:
      return "?"
    text = clock_text((clock - since) / (self.step - step) * max(self._total - self.step, 0))
    return f"at most {text}" if self._at_most and self.step < self._total else text
