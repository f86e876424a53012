"""Worker processes that can be killed, for verifiers that may hang or die. Imports no jax.

A worker is a fresh interpreter (`python -m gspo_jax.rewards.pool`), neither a fork of this process,
which would copy JAX's locks in whatever state they are, nor multiprocessing's spawn, which would
import the trainer's main module, and jax with it, into every worker. Time is kept by the caller
from the moment an item reaches the head of its worker's queue, so waiting for a worker costs
nothing, and it is enforced by SIGKILL alone: SIGALRM works in main threads only, and neither it nor
a thread stops a computation that holds the interpreter lock.
"""

import collections
import enum
import importlib
import json
import os
import pathlib
import resource
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

START_LIMIT_S = 120.0  # imports on a busy machine; past it the pool gives up
START_ATTEMPTS = 3  # in a row; a broken installation must not be retried for ever
CHUNK = 8  # items sent at once: hides the round trip, small enough to share work evenly


class Failure(enum.Enum):
  """Stands in the place of a result."""

  TIMEOUT = "timeout"
  CRASH = "crash"  # the function raised, or its process died twice on this item


class Pool:
  """Runs one function over JSON values in `workers` killable processes.

  Args:
    function: `"package.module:name"` of a function from one JSON value to another.
    workers: processes.
    time_limit_s: wall-clock seconds that one item may run; queueing is not counted.
    warm_up: an item that every new worker runs once before its first (imports, caches).
    memory_bytes: address space of a worker; past it the item fails with MemoryError, a CRASH.

  Raises:
    RuntimeError: if the workers cannot be started, with the worker's traceback.
  """

  def __init__(
    self,
    function: str,
    workers: int,
    time_limit_s: float,
    *,
    warm_up: Any,
    memory_bytes: int = 2 << 30,
  ):
    if workers < 1 or not time_limit_s > 0:
      raise ValueError(f"need workers >= 1 and time_limit_s > 0, got {workers} and {time_limit_s}")
    self._start = lambda: _Worker(function, warm_up, memory_bytes)
    self._time_limit_s = time_limit_s
    self._failed_starts = 0
    self._lock = threading.Lock()  # map may be called from several threads
    self._workers = [self._start() for _ in range(workers)]
    # The list, not the pool: a finalizer that refers to its object never runs.
    self._finalizer = weakref.finalize(self, _kill_all, self._workers)
    try:
      self._run(collections.deque(), [], [])
    except BaseException:
      self.close()
      raise

  def map(self, items: Sequence[Any]) -> list[Any]:
    """The function's value, or a `Failure`, for every item in order. Safe from any thread."""
    with self._lock:
      if not self._finalizer.alive:
        raise RuntimeError("the pool is closed")
      results = [None] * len(items)
      try:
        self._run(collections.deque(range(len(items))), items, results)
      except BaseException:  # an interrupt: no late result may reach the next call
        for slot, worker in enumerate(self._workers):
          if worker.pending:
            self._replace(slot)
        raise
      return results

  @property
  def pids(self) -> list[int]:
    """Process ids of the workers."""
    return [worker.process.pid for worker in self._workers]

  def close(self) -> None:
    """Kills the workers. The pool cannot be used again."""
    self._finalizer()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  def _run(self, queue: collections.deque[int], items: Sequence[Any], results: list[Any]) -> None:
    """Empties `queue` (indices into `items`) into `results`; with no items, waits for the start."""
    deaths = collections.Counter()
    while True:
      for slot, worker in enumerate(self._workers):
        if queue and worker.ready and not worker.pending:
          fair = -(-len(queue) // (2 * len(self._workers)))
          taken = [queue.popleft() for _ in range(min(CHUNK, fair, len(queue)))]
          if not worker.send([items[i] for i in taken], self._time_limit_s):
            queue.extendleft(reversed(taken))
            self._replace(slot)  # it was killed while idle
            continue
          worker.pending.extend(taken)
      waiting = [w for w in self._workers if w.pending or (not w.ready and not items)]
      if not waiting and not queue:
        return
      now = time.monotonic()
      watched = [w for w in self._workers if w.pending or not w.ready]
      connection.wait([w.pipe for w in watched], max(0.0, min(w.deadline for w in watched) - now))
      for slot, worker in enumerate(self._workers):
        # Read before looking at the clock: a result that has arrived is not late.
        while (message := worker.receive()) is not None:
          self._take(slot, message, queue, results, deaths)
          worker = self._workers[slot]
        if (worker.pending or not worker.ready) and time.monotonic() > worker.deadline:
          self._overdue(slot, queue, results)

  def _take(
    self,
    slot: int,
    message: dict[str, Any],
    queue: collections.deque[int],
    results: list[Any],
    deaths: collections.Counter[int],
  ) -> None:
    """Acts on one message of a worker; `{}` stands for its death."""
    worker = self._workers[slot]
    if not worker.ready:
      if message.get("ready"):
        worker.ready = True
        self._failed_starts = 0
      else:
        self._start_failed(slot, message.get("error", "it died without a message"))
    elif not message:
      if worker.pending:
        head = worker.pending[0]
        deaths[head] += 1
        # Once may be somebody else's doing (the kernel out of memory); twice is the item's.
        if deaths[head] == 2:
          results[head] = Failure.CRASH
          worker.pending.popleft()
      queue.extendleft(reversed(worker.pending))
      self._replace(slot)
    else:
      index = worker.pending.popleft()
      results[index] = message.get("value", Failure.CRASH)
      worker.deadline = time.monotonic() + self._time_limit_s
      if message.get("last"):
        queue.extendleft(reversed(worker.pending))
        self._replace(slot)

  def _overdue(self, slot: int, queue: collections.deque[int], results: list[Any]) -> None:
    """Kills a worker whose head item has run too long; the items behind it go back."""
    worker = self._workers[slot]
    if not worker.ready:
      self._start_failed(slot, f"it was not ready after {START_LIMIT_S:.0f} s")
      return
    results[worker.pending.popleft()] = Failure.TIMEOUT
    queue.extendleft(reversed(worker.pending))
    self._replace(slot)

  def _start_failed(self, slot: int, reason: str) -> None:
    self._failed_starts += 1
    if self._failed_starts >= START_ATTEMPTS:
      raise RuntimeError(f"a verifier process does not start: {reason}")
    self._replace(slot)

  def _replace(self, slot: int) -> None:
    self._workers[slot].kill()
    self._workers[slot] = self._start()


class _Worker:
  """One process, its pipe, and the indices of the items it holds (the first one is running)."""

  def __init__(self, function: str, warm_up: Any, memory_bytes: int):
    ours, theirs = socket.socketpair()
    root = str(pathlib.Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    # Not the terminal's group: Ctrl-C is for the trainer, which then closes the pipe. A fixed hash
    # seed makes SymPy take the same route for the same answer in every worker and every run. BLAS
    # would reserve memory for a thread per core of the machine, and no work here is for it.
    settings = {"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1", "OPENBLAS_NUM_THREADS": "1"}
    arguments = [str(theirs.fileno()), function, str(memory_bytes)]
    self.process = subprocess.Popen(
      [sys.executable, "-m", "gspo_jax.rewards.pool", *arguments],
      env={**os.environ, **settings, "PYTHONPATH": path},
      pass_fds=[theirs.fileno()],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,  # parsers print complaints; our own errors come through the pipe
      start_new_session=True,
    )
    theirs.close()
    self.pipe = connection.Connection(ours.detach())
    self.pending: collections.deque[int] = collections.deque()
    self.ready = False
    self.deadline = time.monotonic() + START_LIMIT_S
    self.send([warm_up], START_LIMIT_S)

  def send(self, items: list[Any], time_limit_s: float) -> bool:
    """Hands over items; the first one starts now. False if the process is gone."""
    try:
      self.pipe.send_bytes(json.dumps([time_limit_s, items]).encode())
    except OSError:
      return False
    self.deadline = time.monotonic() + time_limit_s
    return True

  def receive(self) -> dict[str, Any] | None:
    """The next message, None if there is none yet, {} if the process is gone."""
    try:
      return json.loads(self.pipe.recv_bytes()) if self.pipe.poll() else None
    except (EOFError, OSError):
      return {}

  def kill(self) -> None:
    self.process.kill()
    self.process.wait()
    self.pipe.close()


def _kill_all(workers: list[_Worker]) -> None:
  for worker in workers:
    worker.kill()


def _serve(descriptor: int, function: str, memory_bytes: int) -> None:
  """The worker's side: reads `[time limit, items]`, answers every item with one message."""
  pipe = connection.Connection(descriptor)
  _limit(resource.RLIMIT_CORE, 0)
  _limit(resource.RLIMIT_AS, memory_bytes)
  try:
    module, name = function.split(":")
    call = getattr(importlib.import_module(module), name)
    call(json.loads(pipe.recv_bytes())[1][0])
  except BaseException:
    pipe.send_bytes(json.dumps({"error": traceback.format_exc()}).encode())
    return
  pipe.send_bytes(b'{"ready": true}')
  while True:
    try:
      time_limit_s, items = json.loads(pipe.recv_bytes())
    except (EOFError, OSError):
      return  # the pool is closed, or its process is gone
    # If the pool's process dies nobody is left to kill this one: the kernel ends it then.
    usage = resource.getrusage(resource.RUSAGE_SELF)
    spent_s = usage.ru_utime + usage.ru_stime
    _limit(resource.RLIMIT_CPU, int(spent_s + time_limit_s * len(items)) + 2)
    for item in items:
      try:
        message = {"value": call(item)}
      except MemoryError as error:  # a fresh process instead of one whose caches are full
        message = {"error": repr(error), "last": True}
      except Exception as error:
        message = {"error": repr(error)}
      try:
        pipe.send_bytes(json.dumps(message).encode())
      except OSError:
        return
      if message.get("last"):
        return


def _limit(kind: int, soft: int) -> None:
  """Sets a soft limit; the hard one stays, and may be lower already."""
  hard = resource.getrlimit(kind)[1]
  resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


if __name__ == "__main__":
  _serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
