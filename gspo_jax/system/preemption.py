"""Signals: the notice that this machine is about to be taken away, and Ctrl-C at a bad moment.

SIGTERM is how TPU VMs, Kubernetes, Slurm and most others say it. A run then saves where it stands
and ends with `EXIT_CODE`; the same command goes on from there. On several hosts JAX's own service
carries the notice from the one that got it to all others, and they stop at the same check.
"""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again


class Preempted(Exception):
  """Raised by `check` once this process, or another one of the run, was told to go."""


class _Watch:
  """A notice belongs to the process, and so does this; there is one of them at most."""

  def __init__(self, grace_s: float):
    self.grace_s = grace_s
    self.checks = itertools.count()
    self.noticed = self.interrupted = False
    self.timer = threading.Timer(grace_s, _give_up, [grace_s])
    self.timer.daemon = True

  def notice(self, *_: object) -> None:
    if not self.noticed:
      self.noticed = True
      _say(f"told to go; saving, for at most {self.grace_s:g} s")
      self.timer.start()

  def interrupt(self, *_: object) -> None:
    self.interrupted = True
    raise KeyboardInterrupt  # lost where Python ignores exceptions, as in JAX's callbacks of the gc


_watch: _Watch | None = None
_of_thread = threading.local()


@contextlib.contextmanager
def watch(grace_s: float) -> Iterator[None]:
  """Lets `check` raise within. `grace_s` seconds after the notice the process ends in any case,
  with the same exit code: what could not be saved by then would be lost anyway.

  SIGTERM is JAX's where there are several hosts. Ctrl-C stays ignored where it was (nohup).
  """
  global _watch
  _watch = current = _Watch(grace_s)
  before = {}
  if threading.current_thread() is threading.main_thread():
    if not jax.distributed.is_initialized():
      before[signal.SIGTERM] = signal.signal(signal.SIGTERM, current.notice)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
      before[signal.SIGINT] = signal.signal(signal.SIGINT, current.interrupt)
  try:
    yield
  finally:
    _watch = None
    current.timer.cancel()
    for number, handler in before.items():
      signal.signal(number, handler)


def check() -> None:
  """Raises `Preempted` after a notice. All hosts call it equally often: it is how they agree.
  Raises `KeyboardInterrupt` after one that did not get through."""
  if of_thread := getattr(_of_thread, "check", None):
    return of_thread()
  if _watch is None:
    return
  if _watch.interrupted:
    raise KeyboardInterrupt
  if jax.distributed.is_initialized() and multihost_utils.reached_preemption_sync_point(
    next(_watch.checks)
  ):
    _watch.notice()
  if _watch.noticed:
    raise Preempted


def check_alone() -> None:
  """`check` where there is one process; of several, all would have to call it."""
  if jax.process_count() == 1:
    check()


@contextlib.contextmanager
def checked_by(instead: Callable[[], None]) -> Iterator[None]:
  """In this thread `check` is `instead` within. For a thread whose work is still needed after a
  notice, by what is saved then; whoever started it ends it."""
  _of_thread.check = instead
  try:
    yield
  finally:
    del _of_thread.check


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
  """Ctrl-C takes effect at the end of the block, which is one that must not be left half done."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  came = []
  before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, before)
    if came:
      signal.raise_signal(signal.SIGINT)


def _give_up(grace_s: float) -> None:
  _say(f"{grace_s:g} s after the notice: what is not saved is left behind")
  os._exit(EXIT_CODE)


def _say(text: str) -> None:
  """Past Python's buffers, which the signal may have come in the middle of."""
  os.write(2, f"gspo_jax: {text}\n".encode())
