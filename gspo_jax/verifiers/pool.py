"""Pool of worker processes for verifiers that may hang or crash. Imports no JAX.

A worker is a new Python interpreter, `python -m gspo_jax.verifiers.pool`. Two common ways to start
a worker do not suit a trainer. A forked process would inherit JAX's locks, which might stay locked
forever. Multiprocessing's "spawn" would import the trainer's main module, and thereby JAX.

The pool kills a worker by SIGKILL if an item takes too long. The time counts from the moment when
the pool sends the item to an idle worker. Limits within the worker would not suffice: a signal
handler or another thread cannot interrupt a computation that holds the interpreter's lock.
"""

import collections
import contextlib
import importlib
import json
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

from gspo_jax.verifiers import children

START_LIMIT_S = 120.0  # Seconds for a worker's start and warm-up; a busy machine is slow.
GRACE_S = 2.0  # Seconds after the time limit until a worker ends itself, if not killed before.
START_ATTEMPTS = 3  # Maximum consecutive failures to start a worker in one call of `map`.
WARM_UP = -1  # Index of a new worker's warm-up item. The caller's items have indices from 0 on.


class Failure(str):
  """Result of an item that failed: "timeout" or "crash", with its `reason` in one line.

  A crash means that the function raised an error, that two workers died on the item, or that no
  worker could be started.
  """

  def __new__(cls, name: str, reason: str = ""):
    self = super().__new__(cls, name)
    self.reason = " ".join(reason.split())[:300]
    return self


class Pool(contextlib.AbstractContextManager):
  """Applies one function to JSON values, in processes that can be killed.

  Args:
    function: "package.module:name" of a function from one JSON value to another.
    workers: number of processes.
    time_limit_s: limit of one item in wall-clock seconds, counted from its start in a worker.
    warm_up: first item of every new worker, which thereby imports modules and fills caches.
      `START_LIMIT_S` limits the worker's start and this item together.
    memory_bytes: limit of a worker's address space. An item that needs more is a crash
      (MemoryError). None sets no limit.

  Raises:
    RuntimeError: a worker cannot be started. The message has the reason, such as a traceback.
    ValueError: `workers` or `time_limit_s` is not positive.
  """

  def __init__(
    self,
    function: str,
    workers: int,
    time_limit_s: float,
    *,
    warm_up: Any,
    memory_bytes: int | None = 2 << 30,
  ):
    if workers < 1 or not time_limit_s > 0:
      raise ValueError(
        f"workers={workers} and time_limit_s={time_limit_s}: workers must be at least 1, and "
        "time_limit_s above 0"
      )
    self._time_limit_s = time_limit_s
    self._lock, self._closed = threading.Lock(), False  # Several threads may call `map`.
    self._workers = [_Worker(function, warm_up, memory_bytes) for _ in range(workers)]
    try:
      self._run([])
      if lost := [worker for worker in self._workers if not worker.alive]:
        raise RuntimeError(f"a verifier process does not start: {lost[0].reason}")
    except BaseException:
      self.close()
      raise

  def map(self, items: Sequence[Any]) -> list[Any]:
    """Returns the function's value for each item, or a `Failure`. Safe from any thread.

    Crashed workers are replaced. If no worker can be started, all remaining items are crashes, and
    the next call of `map` tries again.

    Raises:
      RuntimeError: the pool is closed.
    """
    with self._lock:
      if self._closed:
        raise RuntimeError("the pool is closed")
      try:
        return self._run(items) if items else []
      except BaseException:  # After an interrupt, no old result may reach the next call.
        for worker in self._workers:
          if worker.item is not None:
            worker.kill()
        raise

  @property
  def pids(self) -> list[int]:
    """Process ids of the workers."""
    return [worker.process.pid for worker in self._workers if worker.alive]

  def close(self) -> None:
    """Kills the workers. The pool cannot be used again."""
    self._closed = True
    for worker in self._workers:
      worker.interrupt()  # Ends a call of `map` in another thread, which holds the lock.
    with self._lock:
      for worker in self._workers:
        worker.kill()
      self._workers = []

  def __exit__(self, *_):
    self.close()

  def _run(self, items: Sequence[Any]) -> list[Any]:
    """Returns the items' results, in order.

    If there are no items, waits until each worker is ready or has failed to start.
    """
    results = [None] * len(items)
    died = set()  # Indices of items on which a worker died.
    waiting = collections.deque(range(len(items)))  # Indices of items to run.
    for worker in self._workers:
      worker.failed_starts = 0
    while True:
      for worker in self._workers:
        while not worker.alive and worker.failed_starts < START_ATTEMPTS:
          worker.start()
        if waiting and worker.alive and worker.item is None:
          worker.send(waiting[0], items[waiting.popleft()], self._time_limit_s)
      busy = [worker for worker in self._workers if worker.item is not None]
      if self._closed:  # By another thread, perhaps before a worker was started above.
        raise RuntimeError("the pool is closed")
      if not waiting and all(worker.item == WARM_UP and items for worker in busy):
        return results
      if not busy:  # No worker could be started for the waiting items.
        reason = f"no verifier process starts: {last_line(self._workers[0].reason)}"
        for index in waiting:
          results[index] = Failure("crash", reason)
        return results
      time_s = time.monotonic()
      connection.wait([w.pipe for w in busy], max(0.0, min(w.deadline for w in busy) - time_s))
      # This time is taken before the reads. Otherwise, a result could arrive after its read, but
      # before the deadline, and count as late.
      time_s = time.monotonic()
      for worker in busy:
        message = worker.receive()
        if message is None and time_s < worker.deadline:
          continue
        index, worker.item = worker.item, None
        if index == WARM_UP:
          worker.started(message)
          continue
        if message is None:
          results[index] = Failure(
            "timeout", f"it took longer than time_limit_s={self._time_limit_s:g}"
          )
        elif "value" in message:
          results[index] = message["value"]
        elif message or index in died:
          text = message.get("error", "its process died twice")
          results[index] = Failure("crash", last_line(text))
        else:  # The system may have killed the worker for lack of memory, so the item runs again.
          died.add(index)
          waiting.appendleft(index)
        if not message or message.get("last"):
          worker.kill()  # The next round starts a new process.


def last_line(text: str) -> str:
  """Returns the last line of a traceback: the error without the stack."""
  return text.strip().rpartition("\n")[2]


class _Worker:
  """A worker of the pool: its process, if started, and a pipe to it."""

  def __init__(self, function: str, warm_up: Any, memory_bytes: int | None):
    self._arguments, self._warm_up = [function, str(memory_bytes or 0)], warm_up
    self._lock = threading.Lock()  # `interrupt` must not signal a process id that is free again.
    self.process, self.pipe = None, None  # None if there is no process.
    self.item, self.deadline = None, 0.0  # Index of the running item, None if idle; its deadline.
    self.failed_starts, self.reason = 0, ""  # Consecutive failed starts; the last one's reason.

  @property
  def alive(self) -> bool:
    """Whether the worker has a process. Only `receive` notices that the process died."""
    return self.process is not None

  def start(self) -> None:
    """Starts the process and sends the warm-up item, or counts a failed start."""
    root = str(pathlib.Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    # With a fixed hash seed, SymPy's results are the same in all workers and runs. BLAS is not
    # used, but with its default setting would reserve memory for a thread per core.
    settings = {"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
      ours, theirs = socket.socketpair()
      with ours, theirs:
        self.process = subprocess.Popen(
          [sys.executable, "-m", "gspo_jax.verifiers.pool", str(theirs.fileno()), *self._arguments],
          env={**os.environ, **settings, "PYTHONPATH": path},
          pass_fds=[theirs.fileno()],
          stdin=subprocess.DEVNULL,
          stdout=subprocess.DEVNULL,
          stderr=subprocess.DEVNULL,  # Only warnings of parsers: errors are sent over the pipe.
          start_new_session=True,  # Ctrl-C in the terminal reaches the trainer, but not the worker.
        )
        children.process_groups.add(self.process.pid)
        self.pipe = connection.Connection(ours.detach())
    except OSError as error:  # Too many processes or open files, or too little memory.
      self._count_failure(str(error))
      return
    self.send(WARM_UP, self._warm_up, START_LIMIT_S)

  def started(self, message: dict[str, Any] | None) -> None:
    """Handles the result of the warm-up item; kills the process if the item failed.

    message: a message of `_serve`; None if no result came in time; {} if the process died.
    """
    if message is None:
      self._count_failure(f"it was not ready after {START_LIMIT_S:.0f} s")
    elif "value" not in message:
      self._count_failure(message.get("error", "it died without a message"))
    else:
      self.failed_starts = 0

  def _count_failure(self, reason: str) -> None:
    """Counts a failed start, and kills the process."""
    self.failed_starts, self.reason = self.failed_starts + 1, reason
    self.kill()

  def send(self, index: int, item: Any, time_limit_s: float) -> None:
    """Sends an item to the process, and sets its deadline."""
    self.item, self.deadline = index, time.monotonic() + time_limit_s
    with contextlib.suppress(OSError):  # If the process died, `receive` will notice it.
      self.pipe.send_bytes(json.dumps([time_limit_s, item]).encode())

  def receive(self) -> dict[str, Any] | None:
    """Returns the result of an item, as a message of `_serve`.

    Returns None if no result has arrived yet, and {} if the process died.
    """
    try:
      return json.loads(self.pipe.recv_bytes()) if self.pipe.poll() else None
    except (EOFError, OSError, ValueError):
      return {}

  def interrupt(self) -> None:
    """Sends SIGKILL to the process, if any, and its child processes. Safe from any thread."""
    with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
      if self.process is not None:
        # The process leads a process group, which includes all processes that it started.
        os.killpg(self.process.pid, signal.SIGKILL)

  def kill(self) -> None:
    """Kills the process, if any, and its child processes; waits for its end."""
    self.interrupt()
    with self._lock:
      process, self.process = self.process, None
    pipe, self.pipe, self.item = self.pipe, None, None
    if process is not None:
      process.kill()
      process.wait()
      children.process_groups.discard(process.pid)
    if pipe is not None:
      pipe.close()


def _serve(descriptor: int, function: str, memory_bytes: int) -> None:
  """Runs in a worker: reads items from the pipe, and writes results.

  The pool sends `[time limit, item]`. The worker answers by a message `{"value": ...}` or
  `{"error": ...}`, which has `"last": True` if the pool should replace the process.
  """
  pipe = connection.Connection(descriptor)
  _limit(resource.RLIMIT_CORE, 0)
  if memory_bytes:
    _limit(resource.RLIMIT_AS, memory_bytes)
  module, name = function.split(":")
  with contextlib.suppress(EOFError, OSError):  # Ends if the pool closes the pipe or dies.
    while True:
      time_limit_s, item = json.loads(pipe.recv_bytes())
      # If the pool's process died, it cannot kill this one. SIGALRM then kills this process, since
      # the signal has no handler. RLIMIT_CPU would not do: it counts the seconds of all threads. A
      # child process of a user's function inherits this limit, and could reach it in later items.
      signal.setitimer(signal.ITIMER_REAL, time_limit_s + GRACE_S)
      try:
        message = {"value": getattr(importlib.import_module(module), name)(item)}
      except MemoryError as error:  # Caches may fill the memory, so a new process is better.
        message = {"error": repr(error), "last": True}
      except BaseException:
        message = {"error": traceback.format_exc()[-10_000:]}
      signal.setitimer(signal.ITIMER_REAL, 0)
      pipe.send_bytes(json.dumps(message).encode())


def _limit(kind: int, soft: int) -> None:
  """Sets a soft resource limit, at most the hard one."""
  hard = resource.getrlimit(kind)[1]
  resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


if __name__ == "__main__":
  _serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
