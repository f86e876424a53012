"""Worker processes that can be killed, for verifiers that may hang or die. Imports no jax.

A worker is a fresh interpreter (`python -m gspo_jax.verifiers.pool`). A fork of this process would
copy JAX's locks in any state. Spawn of multiprocessing would import the trainer's main module, and
jax with it. The caller measures an item's time from its start in a worker, without queueing, and
enforces the limit by SIGKILL. A handler of SIGALRM works in main threads only, and neither it nor a
thread stops a computation with the interpreter lock.
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

START_LIMIT_S = 120.0  # limit of a worker's imports on a busy machine
GRACE_S = 2.0  # a worker ends itself this long after its time limit, if the pool has not killed it
START_ATTEMPTS = 3  # maximum failed starts of a worker in a row in one call
WARM_UP = -1  # index of the warm-up item of a new worker


class Failure(str):
  """Failed result, "timeout" or "crash", with a reason of one line.

  On a crash, the function raised, its process died twice on this item, or none could be started.
  """

  def __new__(cls, name: str, reason: str = ""):
    self = super().__new__(cls, name)
    self.reason = " ".join(reason.split())[:300]
    return self


class Pool(contextlib.AbstractContextManager):
  """Runs one function over JSON values in `workers` killable processes.

  Args:
    function: `"package.module:name"` of a function from one JSON value to another.
    workers: processes.
    time_limit_s: wall-clock seconds that one item may run; queueing is not counted.
    warm_up: item that every new worker runs once before all others (imports, caches).
    memory_bytes: address space of a worker; beyond it, an item fails with MemoryError, a crash.
      None for no limit.

  Raises:
    RuntimeError: the workers cannot be started; the message is the worker's traceback.
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
      raise ValueError(f"need workers >= 1 and time_limit_s > 0, got {workers} and {time_limit_s}")
    self._time_limit_s = time_limit_s
    self._lock, self._closed = threading.Lock(), False  # map may be called from several threads
    self._workers = [_Worker(function, warm_up, memory_bytes) for _ in range(workers)]
    try:
      self._run([])
      if lost := [worker for worker in self._workers if not worker.alive]:
        raise RuntimeError(f"a verifier process does not start: {lost[0].reason}")
    except BaseException:
      self.close()
      raise

  def map(self, items: Sequence[Any]) -> list[Any]:
    """Maps the items to values or `Failure`s, in order. Safe from any thread.

    Failures of workers raise nothing. If no worker starts, all items fail, and the next call tries
    again.
    """
    with self._lock:
      if not self._workers:
        raise RuntimeError("the pool is closed")
      try:
        return self._run(items) if items else []
      except BaseException:  # An interrupt. No late result may reach the next call.
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
    self._closed = True  # A call of `map` in another thread ends, and starts no process.
    for worker in self._workers:
      worker.kill()
    self._workers = []

  def __exit__(self, *_):
    self.close()

  def _run(self, items: Sequence[Any]) -> list[Any]:
    """Returns the items' results. Without items, waits until all workers started or cannot."""
    results, died = [None] * len(items), set()
    waiting = collections.deque(range(len(items)))
    for worker in self._workers:
      worker.failed_starts = 0
    while True:
      if self._closed:
        raise RuntimeError("the pool is closed")
      for worker in self._workers:
        while not worker.alive and worker.failed_starts < START_ATTEMPTS:
          worker.start()
        if waiting and worker.alive and worker.item is None:
          worker.send(waiting[0], items[waiting.popleft()], self._time_limit_s)
      busy = [worker for worker in self._workers if worker.item is not None]
      if not waiting and all(worker.item == WARM_UP and items for worker in busy):
        return results
      if not busy:  # There are items, but no worker.
        reason = f"no verifier process starts: {last_line(self._workers[0].reason)}"
        for index in waiting:
          results[index] = Failure("crash", reason)
        return results
      time_s = time.monotonic()
      connection.wait([w.pipe for w in busy], max(0.0, min(w.deadline for w in busy) - time_s))
      time_s = time.monotonic()  # Before reading the pipes: a result that has arrived is not late.
      for worker in busy:
        message = worker.receive()
        if message is None and time_s < worker.deadline:
          continue
        index, worker.item = worker.item, None
        if index == WARM_UP:
          worker.started(message)
          continue
        if message is None:
          results[index] = Failure("timeout", f"it took longer than {self._time_limit_s:g} s")
        elif "value" in message:
          results[index] = message["value"]
        elif message or index in died:
          text = message.get("error", "its process died twice")
          results[index] = Failure("crash", last_line(text))
        else:  # The machine may have killed it (out of memory), so the item gets a second try.
          died.add(index)
          waiting.appendleft(index)
        if not message or message.get("last"):
          worker.kill()  # A new one replaces it.


def last_line(text: str) -> str:
  """Returns the last line of a traceback."""
  return text.strip().rpartition("\n")[2]


class _Worker:
  """One process, its pipe, and the index of the running item; None for an idle worker."""

  def __init__(self, function: str, warm_up: Any, memory_bytes: int | None):
    self._arguments, self._warm_up = [function, str(memory_bytes or 0)], warm_up
    self.process, self.pipe, self.item, self.deadline = None, None, None, 0.0
    self.failed_starts, self.reason = 0, ""  # Failures in a row, and the reason of the last one.

  @property
  def alive(self) -> bool:
    """Whether a process was started. `receive` detects its death."""
    return self.process is not None

  def start(self) -> None:
    """Starts the process and its warm-up, and counts a failure."""
    root = str(pathlib.Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    # A separate session: Ctrl-C reaches the trainer alone, which then closes the pipe. A fixed hash
    # seed makes SymPy deterministic across workers and runs. BLAS would reserve memory for one
    # thread per core, but workers do not use it.
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
          stderr=subprocess.DEVNULL,  # Warnings of parsers. Errors come through the pipe.
          start_new_session=True,
        )
        children.process_groups.add(self.process.pid)
        self.pipe = connection.Connection(ours.detach())
    except OSError as error:  # too many processes or files, or too little memory
      self._count_failure(str(error))
      return
    self.send(WARM_UP, self._warm_up, START_LIMIT_S)

  def started(self, message: dict[str, Any] | None) -> None:
    """Handles the answer to the warm-up. Kills the worker if the answer is missing or an error."""
    if message is None:
      self._count_failure(f"it was not ready after {START_LIMIT_S:.0f} s")
    elif "value" not in message:
      self._count_failure(message.get("error", "it died without a message"))
    else:
      self.failed_starts = 0

  def _count_failure(self, reason: str) -> None:
    self.failed_starts, self.reason = self.failed_starts + 1, reason
    self.kill()

  def send(self, index: int, item: Any, time_limit_s: float) -> None:
    """Sends an item, and starts its time."""
    self.item, self.deadline = index, time.monotonic() + time_limit_s
    with contextlib.suppress(OSError):  # `receive` will detect that the process is gone.
      self.pipe.send_bytes(json.dumps([time_limit_s, item]).encode())

  def receive(self) -> dict[str, Any] | None:
    """Returns the next message, None if there is none yet, or {} if the process is gone."""
    try:
      return json.loads(self.pipe.recv_bytes()) if self.pipe.poll() else None
    except (EOFError, OSError, ValueError):
      return {}

  def kill(self) -> None:
    process, pipe = self.process, self.pipe
    self.process, self.pipe, self.item = None, None, None
    if process is not None:
      # It leads a session, which includes the processes that its function started.
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
      process.kill()
      process.wait()
      children.process_groups.discard(process.pid)
    if pipe is not None:
      pipe.close()


def _serve(descriptor: int, function: str, memory_bytes: int) -> None:
  """Reads `[time limit, item]` in a worker, and answers with a value or an error."""
  pipe = connection.Connection(descriptor)
  _limit(resource.RLIMIT_CORE, 0)
  if memory_bytes:
    _limit(resource.RLIMIT_AS, memory_bytes)
  module, name = function.split(":")
  with contextlib.suppress(EOFError, OSError):  # The pool is closed, or its process is gone.
    while True:
      time_limit_s, item = json.loads(pipe.recv_bytes())
      # If the pool's process dies, the kernel ends this one by SIGALRM, which has no handler.
      # RLIMIT_CPU would count the seconds of all threads, and child processes of an item would
      # inherit it, for example a prover for later items.
      signal.setitimer(signal.ITIMER_REAL, time_limit_s + GRACE_S)
      try:
        message = {"value": getattr(importlib.import_module(module), name)(item)}
      except MemoryError as error:  # Caches may be full, so a fresh process replaces this one.
        message = {"error": repr(error), "last": True}
      except BaseException:
        message = {"error": traceback.format_exc()[-10_000:]}
      signal.setitimer(signal.ITIMER_REAL, 0)
      pipe.send_bytes(json.dumps(message).encode())


def _limit(kind: int, soft: int) -> None:
  """Sets a soft limit, at most the hard one."""
  hard = resource.getrlimit(kind)[1]
  resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


if __name__ == "__main__":
  _serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
