"""Preemption: a run that receives a signal saves its state and ends.

TPU VMs, Kubernetes, Slurm and most other platforms send SIGTERM, the *notice*, before they take a
machine away. A run also saves and ends after Ctrl-C and SIGHUP. The same command resumes the run.
If there are several hosts, JAX passes the notice from one host to all others, and all hosts stop at
the same call of `check`.
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
# Grace period in seconds on Kubernetes, Slurm and machines of Google, which usually send SIGKILL
# 30 s after SIGTERM. The run must end before SIGKILL, since only EXIT_CODE causes a restart.
PLATFORM_S = 28.0
BOARD = Path("/sys/class/dmi/id/product_name")  # File with the name of the machine (Linux).


class Preempted(Exception):
  """Raised by `check` or `watch` after a signal to any process of the run.

  Attributes:
    code: exit code of the process.
    saved: description of the saved state; "" if nothing was saved.
  """

  def __init__(self, code: int = EXIT_CODE):
    super().__init__()
    self.code, self.saved = code, ""


def grace(seconds: float | None) -> float | None:
  """Returns the grace period in seconds: `seconds`, or the platform's if `seconds` is None.

  Returns None if the platform is unknown too. Saving then has no time limit.
  """
  if seconds is not None:
    return seconds
  google = BOARD.is_file() and BOARD.read_text(errors="replace").startswith("Google")
  scheduled = {"KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID"} & os.environ.keys()
  return PLATFORM_S if scheduled or google else None


class _Watch:
  """State of the outermost `watch`: the signals so far, and the times of checks."""

  def __init__(self, grace_s: float | None):
    self.grace_s = grace_s
    self.describe: Callable[[], str] = lambda: "its files on disk"
    self.first: int | None = None  # Number of the first signal; None if there was no signal.
    self.due = False  # Whether the next `check` raises Preempted.
    self.timer: threading.Timer | None = None  # Ends the process after the grace period.
    # Time of the last `check`, and longest time between two successive checks, in seconds. Calls of
    # `too_long` reset the longest time.
    self.checked, self.longest = time.monotonic(), 0.0

  @property
  def code(self) -> int:
    return stops.code(self.first or signal.SIGTERM)

  def handle(self, number: int) -> None:
    """Handles a signal. Ctrl-C after an earlier signal ends the process at once."""
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
    """Starts the grace period, unless it has started.

    A timer ends this process without saving after the grace period. There is no timer if `grace_s`
    is None.
    """
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
    late = f"the grace period of {self.grace_s:g} s is over, so unsaved work is lost"
    self.end(signal.SIGTERM, late)

  def end(self, number: int, reason: str) -> NoReturn:
    stops.end(number, f"{reason}; the same command continues from {self.describe()}")


_watch: _Watch | None = None
_checks = itertools.count()  # Numbers the checks of a run on several hosts.
_thread_check = threading.local()


@contextlib.contextmanager
def watch(grace_s: float | None) -> Iterator[None]:
  """Makes signals raise `Preempted` at the next `check`.

  If no check follows a signal, the end of the context raises `Preempted`. Ctrl-C after an earlier
  signal ends the process at once. The grace period begins with the notice. If the context has not
  ended after the grace period, the process ends without saving.

  If `jax.distributed` is initialized, JAX handles the notice, and all hosts stop at the same
  `check`. The grace period then begins at this `check`. If no check follows, the end of the context
  raises nothing. A watch inside another watch has no effect.

  grace_s: grace period in seconds. None means the platform's grace period.
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
  """Raises `Preempted` after a signal.

  All hosts must call this function equally often. They stop at the same call, counted from the
  start of the process.
  """
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
  """Returns a warning if successive checks were further apart than the grace period, else "".

  Only checks since the previous call of this function count.
  """
  if _watch is None or _watch.grace_s is None:
    return ""
  longest, _watch.longest = _watch.longest, 0.0
  if longest <= _watch.grace_s:
    return ""
  return (
    f"warning: the run checks for a notice (SIGTERM) too rarely: {longest:.0f} s passed between "
    f"two checks, but the grace period is {_watch.grace_s:g} s. After a notice, the work since the "
    "last checkpoint may be lost. Set checkpoint.every_minutes to the minutes of work that you can "
    "afford to lose, and checkpoint.grace_s to a little less than the grace period of your "
    "platform (docs/running.md)"
  )


def describe_resume(describe: Callable[[], str]) -> None:
  """Sets the description of the resume point, to print if the process ends without saving."""
  if _watch is not None:
    _watch.describe = describe


def check_alone() -> None:
  """Calls `check` if no other process must call it too.

  This is true of a single process, and of a thread with a separate check (`checked_by`).
  """
  if jax.process_count() == 1 or getattr(_thread_check, "check", None):
    check()


@contextlib.contextmanager
def checked_by(replacement: Callable[[], None]) -> Iterator[None]:
  """Replaces `check` in this thread within the context.

  A thread whose work is needed to save the state must continue after a notice. So `replacement`
  must ignore the notice. It may raise `Preempted` only if the creator of the thread wants the
  thread to end.
  """
  _thread_check.check = replacement
  try:
    yield
  finally:
    del _thread_check.check
