"""Threads for calls of user code, with time limits.

A thread cannot be killed. If a call exceeds its limit, the call fails with TooLong, and a new
thread runs the next calls. In the old thread, `GivenUp` is raised as soon as the thread runs Python
code again. So `GivenUp` ends a loop of Python code, but not a wait for a socket or in `time.sleep`.
All threads are daemons, so running threads do not keep the process alive. If MOST_HANGING old
threads are still running, further calls fail at once. `Workers.wait` also checks whether the run
is preempted.
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from gspo_jax.system import preemption

POLL_S = 0.1  # Seconds between checks for preemption and time limits during a wait.
MOST_HANGING = 1000  # Maximum number of running threads whose calls exceeded their limits.


class GivenUp(SystemExit):
  """Raised in the thread of a call that exceeded its limit. Ends the thread without a message."""


class TooLong(TimeoutError):
  """A call took longer than its limit, or MOST_HANGING earlier calls still run."""


class Call(concurrent.futures.Future):
  """A call, and the future of its result.

  Attributes:
    limit_s: time limit in seconds, without the time in the queue.
    deadline: end of the time limit, by `time.monotonic`; None before the call starts.
  """

  def __init__(self, function: Callable, arguments: tuple, limit_s: float):
    super().__init__()
    self.limit_s, self.deadline = limit_s, None
    self._function, self._arguments = function, arguments

  def compute(self) -> tuple[Any, BaseException | None]:
    """Returns (value, None), or (None, exception) if the function raises."""
    try:
      return self._function(*self._arguments), None
    except BaseException as error:  # User code may raise SystemExit or KeyboardInterrupt.
      return None, error


class Workers:
  """Runs calls in `count` threads, in the order of `submit`."""

  def __init__(self, count: int):
    self._missing = count  # Threads to start before the next call.
    self._queue: queue.SimpleQueue[Call] = queue.SimpleQueue()
    # Either the thread of a running call or `expire` removes the call, and then sets its result.
    self._running: dict[Call, threading.Thread] = {}
    self._hanging: list[threading.Thread] = []

  def submit(self, function: Callable, *arguments: Any, limit_s: float) -> Call:
    """Queues a call with `limit_s` seconds. The call fails at once if MOST_HANGING calls hang."""
    call = Call(function, arguments, limit_s)
    self._hanging = [thread for thread in self._hanging if thread.is_alive()]
    if len(self._hanging) >= MOST_HANGING:
      call.set_exception(TooLong(f"{len(self._hanging)} earlier calls still hang"))
      return call
    try:
      self._start_missing()
    except RuntimeError as error:  # The system cannot start another thread.
      call.set_exception(error)
      return call
    self._queue.put(call)
    return call

  def run(self, function: Callable, *arguments: Any, limit_s: float) -> Call:
    """Runs a call and waits for it. Raises Preempted as `wait` does."""
    call = self.submit(function, *arguments, limit_s=limit_s)
    self.wait([call])
    return call

  def wait(
    self,
    calls: Iterable[concurrent.futures.Future],
    return_when: str = concurrent.futures.ALL_COMPLETED,
  ) -> None:
    """Waits for all calls, or for the first of them if `return_when` is FIRST_COMPLETED.

    Raises:
      Preempted: the run received a signal. Calls that have not started are cancelled.
    """
    calls = list(calls)
    while True:
      done, remaining = concurrent.futures.wait(calls, POLL_S, return_when)
      if not remaining or (done and return_when == concurrent.futures.FIRST_COMPLETED):
        return
      self.expire()
      try:
        preemption.check_alone()
      except preemption.Preempted:
        for call in remaining:
          call.cancel()
        raise

  def expire(self) -> None:
    """Fails calls that exceeded their limits, and replaces their threads."""
    clock = time.monotonic()
    for call, thread in list(self._running.items()):
      if clock > call.deadline and self._running.pop(call, None):
        self._hanging.append(thread)
        self._missing += 1
        call.set_exception(TooLong(f"took longer than {call.limit_s:g} s"))
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
          ctypes.c_ulong(thread.ident), ctypes.py_object(GivenUp)
        )
    if not self._queue.empty():
      with contextlib.suppress(RuntimeError):  # The next call of `expire` or `submit` tries again.
        self._start_missing()

  def _start_missing(self) -> None:
    while self._missing:
      threading.Thread(target=self._serve, name="user code", daemon=True).start()
      self._missing -= 1

  def _serve(self) -> None:
    with contextlib.suppress(GivenUp):
      while True:
        call = self._queue.get()
        if not call.set_running_or_notify_cancel():
          continue
        call.deadline = time.monotonic() + call.limit_s
        self._running[call] = threading.current_thread()
        value, error = call.compute()
        if self._running.pop(call, None) is None:
          return
        if error is None:
          call.set_result(value)
        else:
          call.set_exception(error)
        del call, value, error  # An idle thread keeps no objects of the user alive.


@functools.cache
def shared(count: int, name: str = "") -> Workers:
  """Returns the process-wide workers of this name and number of threads."""
  return Workers(count)


def interruptible(function: Callable, *arguments: Any) -> Any:
  """Calls a function, and checks for preemption during the call.

  There is no time limit. Raises the function's exception, or Preempted as `Workers.wait` does.
  """
  return shared(1, "interruptible").run(function, *arguments, limit_s=math.inf).result()
