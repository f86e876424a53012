"""The notice that this machine is about to be taken away, and what is left of the time.

SIGTERM is how TPU VMs, Kubernetes, Slurm and most others say it. A run then saves where it stands
and ends with `EXIT_CODE`; the same command goes on from there. On several hosts JAX's own service
carries the notice from the one that got it to all others, and they stop at the same check.
"""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator

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
    self.noticed = False
    self.timer = threading.Timer(grace_s, _give_up, [grace_s])
    self.timer.daemon = True

  def notice(self, *_: object) -> None:
    if not self.noticed:
      self.noticed = True
      _say(f"told to go; saving, for at most {self.grace_s:g} s")
      self.timer.start()


_watch: _Watch | None = None


@contextlib.contextmanager
def watch(grace_s: float) -> Iterator[None]:
  """Lets `check` raise within. `grace_s` seconds after the notice the process ends in any case,
  with the same exit code: what could not be saved by then would be lost anyway."""
  global _watch
  _watch = current = _Watch(grace_s)
  ours = not _distributed() and threading.current_thread() is threading.main_thread()
  before = signal.signal(signal.SIGTERM, current.notice) if ours else None
  try:
    yield
  finally:
    _watch = None
    current.timer.cancel()
    if ours:
      signal.signal(signal.SIGTERM, before)


def check() -> None:
  """Raises `Preempted` after a notice. All hosts call it equally often: it is how they agree."""
  if _watch is None:
    return
  if _distributed() and multihost_utils.reached_preemption_sync_point(next(_watch.checks)):
    _watch.notice()
  if _watch.noticed:
    raise Preempted


def _distributed() -> bool:
  return jax.distributed.is_initialized()


def _give_up(grace_s: float) -> None:
  _say(f"{grace_s:g} s after the notice: what is not saved is left behind")
  os._exit(EXIT_CODE)


def _say(text: str) -> None:
  """Past Python's buffers, which the signal may have come in the middle of."""
  os.write(2, f"gspo_jax: {text}\n".encode())
