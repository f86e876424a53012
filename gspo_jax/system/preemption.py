"""Stops of a run by a signal: it saves and ends, on Ctrl-C or before the machine is taken away.

TPU VMs, Kubernetes, Slurm and most others send SIGTERM. A run then saves its state and ends, and
the same command resumes it. On several hosts, JAX's own service sends the notice from one host to
all others, and all stop at the same check.
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
# Grace period in seconds. Kubernetes, Slurm and preemptible machines of Google usually send SIGKILL
# 30 s after SIGTERM. Two less, since SIGKILL would destroy the exit code that restarts a run.
PLATFORM_S = 28.0
BOARD = Path("/sys/class/dmi/id/product_name")  # name of the machine in Linux


class Preempted(Exception):
  """Raised by `check` after a signal to this process, or to another one of the run.

  Attributes:
    code: exit code of the process.
    saved: description of the saved state; "" if nothing was saved.
  """

  def __init__(self, code: int = EXIT_CODE):
    super().__init__()
    self.code, self.saved = code, ""


def grace(seconds: float | None) -> float | None:
  """Returns `checkpoint.grace_s`, or the platform's grace period.

  None means that the process is not killed.
  """
  if seconds is not None:
    return seconds
  google = BOARD.is_file() and BOARD.read_text(errors="replace").startswith("Google")
  scheduled = {"KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID"} & os.environ.keys()
  return PLATFORM_S if scheduled or google else None


class _Watch:
  """Handler of this process's signals, with their state. There is one at most."""

  def __init__(self, grace_s: float | None):
    self.grace_s = grace_s
    self.describe: Callable[[], str] = lambda: "what is on disk"
    self.first: int | None = None  # first signal
    self.due = False  # whether `check` raises
    self.timer: threading.Timer | None = None
    self.checked, self.longest = time.monotonic(), 0.0

  @property
  def code(self) -> int:
    return stops.code(self.first or signal.SIGTERM)

  def handle(self, number: int) -> None:
    if self.first is not None and number == signal.SIGINT:
      self.end(number, "ended at once")
    if self.first is None:
      self.first = number
      if jax.distributed.is_initialized() and number != signal.SIGTERM:
        os.kill(os.getpid(), signal.SIGTERM)  # JAX's handler notifies the other hosts.
      else:
        self.due = True
      if number != signal.SIGTERM:
        stops.say(f"{stops.name(number)}: saves and ends when it can; Ctrl-C ends it at once")
    if number == signal.SIGTERM:
      self.start_grace_period()

  def start_grace_period(self) -> None:
    """Starts the time until this process will be killed."""
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

  def end(self, number: int, reason: str) -> NoReturn:
    stops.end(number, f"{reason}; the same command continues from {self.describe()}")


_watch: _Watch | None = None
_checks = itertools.count()  # number of checks; all hosts stop at the same one
_thread_check = threading.local()


@contextlib.contextmanager
def watch(grace_s: float | None) -> Iterator[None]:
  """Defers signals to the next `check` in the context, or to its end.

  A second Ctrl-C ends the process at once. The process ends `grace_s` after SIGTERM at the latest.
  A watch inside another one has no effect. With several hosts, JAX handles SIGTERM.
  """
  global _watch
  if _watch is not None:
    yield
    return
  _watch = current = _Watch(grace(grace_s))
  ours = [n for n in stops.SIGNALS if n != signal.SIGTERM or not jax.distributed.is_initialized()]
  try:
    with stops.answered(current.handle, ours):
      yield
  finally:
    _watch = None
    if current.timer:
      current.timer.cancel()
  if current.due:  # The signal came after the last check, or that exception was caught.
    raise Preempted(current.code)


def check() -> None:
  """Raises `Preempted` after a signal. All hosts must call it equally often, to stop together."""
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
    _watch.start_grace_period()
  if _watch.due:
    raise Preempted(_watch.code)


def too_long() -> str:
  """Returns a warning if two checks were further apart than the grace period.

  Covers checks since the last call; returns "" otherwise.
  """
  if _watch is None or _watch.grace_s is None:
    return ""
  longest, _watch.longest = _watch.longest, 0.0
  if longest <= _watch.grace_s:
    return ""
  return (
    f"warning: for {longest:.0f} s the run could not have been stopped, and {_watch.grace_s:g} s "
    "after a notice (SIGTERM) the machine is taken away: work since the last checkpoint would be "
    "lost. Set checkpoint.every_minutes to an affordable loss, and checkpoint.grace_s to the grace "
    "period of your platform (docs/running.md)"
  )


def describe_resume(describe: Callable[[], str]) -> None:
  """Sets the description of the resume point, for a process ending without saving."""
  if _watch is not None:
    _watch.describe = describe


def check_alone() -> None:
  """Calls `check` if the run has one process, or the thread has its own check.

  With several processes, all would have to call `check`.
  """
  if jax.process_count() == 1 or getattr(_thread_check, "check", None):
    check()


@contextlib.contextmanager
def checked_by(replacement: Callable[[], None]) -> Iterator[None]:
  """Replaces `check` in this thread.

  For threads with work that a save after a notice still needs. Their owner ends them.
  """
  _thread_check.check = replacement
  try:
    yield
  finally:
    del _thread_check.check
