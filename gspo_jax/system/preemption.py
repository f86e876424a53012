"""Preemption: a run that receives a signal saves its state and ends.

TPU VMs, Kubernetes, Slurm and most other platforms send SIGTERM, the *notice*, before they take a
machine away. A run also saves and ends after Ctrl-C. The same command resumes the run. If there are
several hosts, JAX passes the notice from one host to the rest, and all hosts stop at the same call
of `check`.
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
# 30 s after SIGTERM. The run must end before SIGKILL, with the exit code that causes a restart.
PLATFORM_S = 28.0
BOARD = Path("/sys/class/dmi/id/product_name")  # File with the name of the machine (Linux).


class Preempted(Exception):
  """Raised by `check` after a signal to this process, or to another process of the run.

  Attributes:
    code: exit code of the process.
    saved: description of the saved state; "" if nothing was saved.
  """

  def __init__(self, code: int = EXIT_CODE):
    super().__init__()
    self.code, self.saved = code, ""


def grace(seconds: float | None) -> float | None:
  """Returns the grace period: `seconds`, or the platform's if `seconds` is None.

  The grace period of an unknown platform is None: the process has no time limit.
  """
  if seconds is not None:
    return seconds
  google = BOARD.is_file() and BOARD.read_text(errors="replace").startswith("Google")
  scheduled = {"KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID"} & os.environ.keys()
  return PLATFORM_S if scheduled or google else None


class _Watch:
  """State of `watch` over this process's signals. At most one state exists at a time."""

  def __init__(self, grace_s: float | None):
    self.grace_s = grace_s
    self.describe: Callable[[], str] = lambda: "its files on disk"
    self.first: int | None = None  # First signal.
    self.due = False  # Whether the next `check` raises Preempted.
    self.timer: threading.Timer | None = None  # Ends the process after the grace period.
    # Time of the last `check`, and longest time between two checks, in seconds.
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
        stops.say(
          f"{stops.name(number)}: the run saves and ends soon; press Ctrl-C to end it at once"
        )
    if number == signal.SIGTERM:
      self.start_grace_period()

  def start_grace_period(self) -> None:
    """Starts the grace period. After it, a timer ends this process without saving."""
    self.due = True
    if self.timer is not None:
      return
    limit = "" if self.grace_s is None else f", for at most {self.grace_s:g} s"
    stops.say(f"preempted: saving{limit}")
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
_checks = itertools.count()  # Number of checks. All hosts stop at the check of the same number.
_thread_check = threading.local()


@contextlib.contextmanager
def watch(grace_s: float | None) -> Iterator[None]:
  """Makes signals raise `Preempted` at the next `check`.

  If a signal comes after the last check, `Preempted` is raised at the end of the context. Ctrl-C
  after an earlier signal ends the process at once. If the context has not ended `grace_s` seconds
  after `watch` sees the notice, the process ends without saving. None means the platform's grace
  period. A watch inside another watch has no effect. If `jax.distributed` is initialized, JAX
  handles SIGTERM.
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
  if current.due:  # The signal came after the last check, or the exception was caught.
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
  """Returns a warning if checks were further apart than the grace period; else "".

  Only the checks since the previous call of this function count.
  """
  if _watch is None or _watch.grace_s is None:
    return ""
  longest, _watch.longest = _watch.longest, 0.0
  if longest <= _watch.grace_s:
    return ""
  return (
    f"warning: the run could not have stopped for {longest:.0f} s. A platform that ends it "
    f"{_watch.grace_s:g} s after a notice (SIGTERM) would have lost all work since the last "
    "checkpoint. Set checkpoint.every_minutes to an affordable loss, and checkpoint.grace_s to the "
    "grace period of your platform (docs/running.md)"
  )


def describe_resume(describe: Callable[[], str]) -> None:
  """Sets the description of the resume point. A process ending without saving prints it."""
  if _watch is not None:
    _watch.describe = describe


def check_alone() -> None:
  """Calls `check` if this process can call it alone.

  This is possible if the run has one process, or if this thread has its own check (`checked_by`).
  """
  if jax.process_count() == 1 or getattr(_thread_check, "check", None):
    check()


@contextlib.contextmanager
def checked_by(replacement: Callable[[], None]) -> Iterator[None]:
  """Replaces `check` in this thread within the context.

  A thread whose work is needed to save the state must continue after a notice. `replacement` must
  not raise `Preempted`, and the code that started the thread ends the thread.
  """
  _thread_check.check = replacement
  try:
    yield
  finally:
    del _thread_check.check
