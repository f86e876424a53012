"""A run that is told to stop, and saves first: the machine is about to be taken away, or Ctrl-C.

SIGTERM is how TPU VMs, Kubernetes, Slurm and most others say it. A run then saves where it stands
and ends; the same command goes on from there. On several hosts JAX's own service carries the notice
from the one that got it to all others, and they stop at the same check.
"""

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import jax
from jax.experimental import multihost_utils

from gspo_jax.system import stops

EXIT_CODE = stops.TRY_AGAIN
# From SIGTERM to SIGKILL 30 are usual: Kubernetes, Slurm, preemptible machines of Google. Less by
# two, since whoever starts runs again goes by the exit code, which SIGKILL would take.
PLATFORM_S = 28.0
BOARD = Path("/sys/class/dmi/id/product_name")  # name of the machine in Linux


class Preempted(Exception):
  """Raised by `check` once this process, or another one of the run, was told to stop.

  Attributes:
    code: the exit code that says so.
    saved: what was saved, in words; "": nothing was.
  """

  def __init__(self, code: int = EXIT_CODE):
    super().__init__()
    self.code, self.saved = code, ""


def grace(seconds: float | None) -> float | None:
  """Returns `checkpoint.grace_s`, or the platform's grace period.

  None: the process is not killed.
  """
  if seconds is not None:
    return seconds
  google = BOARD.is_file() and BOARD.read_text(errors="replace").startswith("Google")
  scheduled = {"KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID"} & os.environ.keys()
  return PLATFORM_S if scheduled or google else None


class _Watch:
  """A notice belongs to the process, and so does this; there is one of them at most."""

  def __init__(self, grace_s: float | None):
    self.grace_s = grace_s
    self.describe: Callable[[], str] = lambda: "what is on disk"
    self.first: int | None = None  # signal
    self.due = False  # `check` raises
    self.timer: threading.Timer | None = None
    self.checked, self.longest = time.monotonic(), 0.0

  @property
  def code(self) -> int:
    return stops.code(self.first or signal.SIGTERM)

  def answer(self, number: int) -> None:
    if self.first is not None and number == signal.SIGINT:
      self.end(number, "ended at once")
    if self.first is None:
      self.first = number
      if jax.distributed.is_initialized() and number != signal.SIGTERM:
        os.kill(os.getpid(), signal.SIGTERM)  # JAX's, which tells the others
      else:
        self.due = True
      if number != signal.SIGTERM:
        stops.say(f"{stops.name(number)}: saves and ends when it can; Ctrl-C ends it at once")
    if number == signal.SIGTERM:
      self.hurry()

  def hurry(self) -> None:
    """Begins the time until this process will be killed."""
    self.due = True
    if self.timer is not None:
      return
    limit = "" if self.grace_s is None else f", for at most {self.grace_s:g} s"
    stops.say(f"told to go; saving{limit}")
    self.timer = threading.Timer(self.grace_s or 0.0, self.give_up)
    self.timer.daemon = True
    if self.grace_s is not None:
      self.timer.start()

  def give_up(self) -> None:
    late = f"{self.grace_s:g} s after the notice: unsaved work is lost"
    self.end(signal.SIGTERM, late)

  def end(self, number: int, why: str) -> NoReturn:
    stops.end(number, f"{why}; the same command continues from {self.describe()}")


_watch: _Watch | None = None
_checks = itertools.count()  # checks of all watches: hosts agree by their count
_thread_check = threading.local()


@contextlib.contextmanager
def watch(grace_s: float | None) -> Iterator[None]:
  """Defers signals to the next `check` within, or to the end.

  A second Ctrl-C does not wait. The process ends `grace_s` after SIGTERM at the latest. A watch
  within another one is the outer one. With several hosts JAX handles SIGTERM.
  """
  global _watch
  if _watch is not None:
    yield
    return
  _watch = current = _Watch(grace(grace_s))
  ours = [n for n in stops.SIGNALS if n != signal.SIGTERM or not jax.distributed.is_initialized()]
  try:
    with stops.answered(current.answer, ours):
      yield
  finally:
    _watch = None
    if current.timer:
      current.timer.cancel()
  if current.due:  # it came after the last check, or whoever made that has not passed it on
    raise Preempted(current.code)


def check() -> None:
  """Raises `Preempted` after a signal. All hosts call it equally often: it is how they agree."""
  if thread_check := getattr(_thread_check, "check", None):
    return thread_check()
  stops.listen()
  if _watch is None:
    return
  clock = time.monotonic()
  _watch.checked, _watch.longest = clock, max(_watch.longest, clock - _watch.checked)
  if jax.distributed.is_initialized() and multihost_utils.reached_preemption_sync_point(
    next(_checks)
  ):
    _watch.hurry()
  if _watch.due:
    raise Preempted(_watch.code)


def too_long() -> str:
  """Returns a warning if two checks lay further apart than the grace period.

  It looks at checks since the last call, and returns "" otherwise.
  """
  if _watch is None or _watch.grace_s is None:
    return ""
  longest, _watch.longest = _watch.longest, 0.0
  if longest <= _watch.grace_s:
    return ""
  return (
    f"warning: for {longest:.0f} s the run could not have been stopped, and {_watch.grace_s:g} s "
    "after a notice (SIGTERM) the machine is taken away: work since the last checkpoint would be "
    "lost. Set checkpoint.every_minutes to an affordable loss, checkpoint.grace_s to the time of "
    "your platform (docs/running.md)"
  )


def describe_resume(describe: Callable[[], str]) -> None:
  """Sets the description of the resume point, for a process ending without saving."""
  if _watch is not None:
    _watch.describe = describe


def check_alone() -> None:
  """Calls `check` with one process, or in a thread with its own check.

  Of several processes, all would have to call `check`.
  """
  if jax.process_count() == 1 or getattr(_thread_check, "check", None):
    check()


@contextlib.contextmanager
def checked_by(instead: Callable[[], None]) -> Iterator[None]:
  """In this thread `check` is `instead` within. For a thread whose work is still needed after a
  notice, by what is saved then; whoever started it ends it."""
  _thread_check.check = instead
  try:
    yield
  finally:
    del _thread_check.check
