"""Servers of a run: sending of calls with retries, and publication of weights.

`ServerPool` starts one thread with an event loop for all of this. The host loop submits calls and
takes answers from a queue.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from absl import logging

from gspo_jax.sampling.servers import client
from gspo_jax.sampling.servers.client import Call, Client, Failed, Part
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.sampling import ServerConfig

HEALTH_S = 5.0  # Pause between two health checks of a server with calls.
BUSY_S = 0.5  # Pause in sending to a busy server.
RETRY_S, MAX_RETRY_S = 0.1, 5.0  # First and maximum pause before a retry; pauses double.
MAX_FAILURES = 3  # Consecutive failed calls or health checks before a server is removed.

T = TypeVar("T")


class Attempt(NamedTuple):
  """An attempt to send a call to a server."""

  call: str  # Id of the call.
  id: str  # Id of the attempt, since a server may still work on an earlier one.


@dataclasses.dataclass(eq=False)
class Server:
  """One server and its state."""

  url: str
  usable: bool = False
  reason: str = "it has not been asked yet"  # Reason why the server is not usable.
  refused: bool = False  # Whether the server's start options make it unusable.
  version: int = -1  # Version of the server's weights.
  failures: int = 0  # Number of consecutive failures.
  backs_off: bool = False  # Whether sending is paused, after a busy answer.
  busy_since: float | None = None  # Monotonic time; None after a successful call.
  attempts: dict[asyncio.Task, Attempt] = dataclasses.field(default_factory=dict)
  # Cleared from the publication of weights until the probe's verdict.
  verdict: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class ServerPool:
  """Servers of `urls`, sampling from `model`.

  Attributes:
    answers: queue of (call id, part or exception), in order of arrival.
    failures: counts of failures by kind, since the process started.
    version: newest weight version on any server.
  """

  def __init__(self, urls: Sequence[str], config: ServerConfig, model: ModelConfig):
    self.servers = [Server(url.rstrip("/")) for url in urls]
    self._config, self._model = config, model
    self._client = Client(config, len(self.servers))
    self.answers: queue.SimpleQueue[tuple[str, Part | Exception]] = queue.SimpleQueue()
    self.failures: collections.Counter[str] = collections.Counter()
    self.version = -1
    self._tasks: dict[str, asyncio.Task] = {}
    self._attempts = itertools.count()
    self._change = asyncio.Event()  # Set briefly when a server may have room.
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
    self._thread.start()
    for server in self.servers:
      asyncio.run_coroutine_threadsafe(self._watch_health(server), self._loop)

  def run(self, work: Awaitable[T], poll: Callable[[], None] = lambda: None) -> T:
    """Runs a coroutine on the event loop, and calls `poll` twice a second while waiting."""
    future = asyncio.run_coroutine_threadsafe(work, self._loop)
    try:
      while not concurrent.futures.wait([future], 0.5).done:
        poll()
      return future.result()
    except BaseException:
      future.cancel()
      raise

  def close(self) -> None:
    """Ends the thread and closes the connections. Further calls do nothing."""
    if not self._thread.is_alive():
      return
    self.run(self._close())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()

  async def _close(self) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await self._client.close()

  @property
  def usable(self) -> list[Server]:
    return [server for server in self.servers if server.usable]

  # Calls.

  def submit(self, call: Call) -> None:
    """Sends a call as soon as a server has room for it."""
    self._loop.call_soon_threadsafe(self._start, call)

  def _start(self, call: Call) -> None:
    self._tasks[call.id] = task = self._loop.create_task(self._handle(call))
    task.add_done_callback(lambda _: self._tasks.pop(call.id, None))

  async def _handle(self, call: Call) -> None:
    try:
      answer: Part | Exception = await self._send_with_retries(call)
    except Exception as error:  # The host loop waits for an answer, even after a bug.
      answer = error
    self.answers.put((call.id, answer))

  async def _send_with_retries(self, call: Call) -> Part:
    """Sends a call to servers in turn. Raises Failed after more than `retries` failures."""
    failed: list[Server] = []
    while True:
      server = await self._choose(call, failed)
      try:
        part = await self._attempt(server, call, self._config.timeout_s)
      except Failed as error:
        if not self._record_failure(server, error):
          continue
        failed.append(server)
        if len(failed) > self._config.retries:
          text = f"{len(failed)} attempts failed, the last at {server.url}: {error}"
          raise Failed(error.kind, text) from error
        await asyncio.sleep(min(RETRY_S * 2 ** (len(failed) - 1), MAX_RETRY_S))
      else:
        server.failures, server.busy_since = 0, None
        return part

  async def _choose(self, call: Call, failed: Sequence[Server]) -> Server:
    """Waits for a server with room, and returns the one with the least load.

    Servers in `failed`, with earlier failures of this call, come last.
    """
    limit = self._client.in_flight
    while True:
      usable = self.usable
      free = [server for server in usable if len(server.attempts) < limit and not server.backs_off]
      fresh = [server for server in free if server not in failed]
      if fresh or (free and all(server in failed for server in usable)):
        return min(fresh or free, key=lambda server: len(server.attempts))
      await self._change.wait()

  async def _attempt(self, server: Server, call: Call, seconds: float, probe: bool = False) -> Part:
    """Sends a call to one server once.

    During a publication, an answer waits for the probe's verdict on the server.
    """
    oldest = server.version
    attempt = dataclasses.replace(call, id=f"{call.id}-{next(self._attempts)}")
    request, limit = client.generate_request(attempt), client.answer_limit(call, self._model)
    task = self._loop.create_task(self._client.request(server.url, request, seconds, limit))
    server.attempts[task] = Attempt(call.id, attempt.id)
    try:
      answer = await task
      if not probe:
        await server.verdict.wait()
    except asyncio.CancelledError:
      if asyncio.current_task().cancelling():  # The call itself was cancelled, not the server.
        raise
      raise Failed("removed", "the server was removed while it worked on this call") from None
    finally:
      task.cancel()
      del server.attempts[task]
      self._notify()
    if not (probe or server.usable):
      raise Failed("removed", "the server was removed while it worked on this call")
    return client.read_answer(answer, call, self._model, oldest, max(oldest, self.version))

  def _notify(self) -> None:
    """Wakes all calls waiting for room."""
    self._change.set()
    self._change.clear()

  def _record_failure(self, server: Server, error: Failed) -> bool:
    """Counts a failure; removes a server after too many. Returns whether the call has failed."""
    if error.kind == "busy":
      self._back_off(server, error)
    elif error.kind == "refused" and server.usable:  # Else the current publication reports it.
      self.remove(server, str(error), refused=True)
    if error.kind not in client.KINDS:
      return False
    self.failures[error.kind] += 1
    if not server.usable:
      return True
    server.failures += 1
    if server.failures >= MAX_FAILURES:
      self.remove(server, f"{server.failures} failures in a row, the last: {error}")
    else:
      logging.warning("%s: %s: %s; sent again", server.url, error.kind, error)
    return True

  def _back_off(self, server: Server, error: Failed) -> None:
    """Pauses sending to a busy server; removes a server that stays busy."""
    clock = time.monotonic()
    since = server.busy_since = clock if server.busy_since is None else server.busy_since
    if server.usable and clock - since > self._config.timeout_s:
      self.remove(server, f"it is busy all the time: {error}")
    elif not server.backs_off:
      server.backs_off = True
      self._loop.call_later(BUSY_S, self._end_back_off, server)

  def _end_back_off(self, server: Server) -> None:
    server.backs_off = False
    self._notify()

  async def cancel(self, ids: Sequence[str]) -> None:
    """Cancels calls. Cancelled calls get no answer."""
    tasks = [self._tasks[id_] for id_ in ids if id_ in self._tasks]
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

  async def abort(self, ids: Sequence[str]) -> set[str]:
    """Aborts calls. Aborted calls get answers with the tokens so far.

    Returns the ids of calls not yet sent to a server. These calls get no answer.
    """
    calls = set(ids)
    sent = {
      server: [attempt for attempt in server.attempts.values() if attempt.call in calls]
      for server in self.servers
    }
    unsent = calls - {attempt.call for attempts in sent.values() for attempt in attempts}
    await self.cancel([*unsent])

    async def abort_at(server: Server) -> None:
      if sent[server]:
        request = client.abort_request([attempt.id for attempt in sent[server]])
        with contextlib.suppress(Failed):
          await self._client.request(server.url, request, client.CONNECT_S)

    await asyncio.gather(*map(abort_at, self.usable))
    return unsent

  # Weights.

  async def publish(
    self, weights: str, version: int, probe: Sequence[Call]
  ) -> list[list[Part] | None]:
    """Loads weights on all servers and samples a probe. Servers are unusable until `admit`.

    Returns the parts of the probe for each server; None for a failed, removed server.
    """

    async def publish_to(server: Server) -> list[Part] | None:
      try:
        return await self._publish_to(server, weights, version, probe)
      except Failed as error:
        self.remove(server, str(error), error.kind == "refused")
        return None

    return await asyncio.gather(*map(publish_to, self.servers))

  async def _publish_to(
    self, server: Server, weights: str, version: int, probe: Sequence[Call]
  ) -> list[Part]:
    server.usable = False
    server.verdict.clear()
    # Without this check, a hanging server would delay all others by `publish_s`.
    await self._client.check_health(server.url)
    seconds = min(self._config.publish_s, self._config.timeout_s)
    self.version = max(self.version, version)
    try:
      for request in client.publish_requests(weights, version):
        await self._client.request(server.url, request, seconds)
        server.version = version  # Set after the first request, which pauses the server.
    except Failed:
      with contextlib.suppress(Failed):
        await self._client.request(server.url, client.RESUME, client.CONNECT_S)
      raise
    parts = await asyncio.gather(*(self._attempt(server, call, seconds, True) for call in probe))
    if any(part.aborted for part in parts):
      raise Failed("body", "it left the probe before its end")
    return parts

  def admit(self, server: Server) -> None:
    """Makes a server usable. Call `admit` and `remove` on the event loop."""
    server.usable, server.reason, server.refused = True, "", False
    server.failures, server.busy_since = 0, None
    server.verdict.set()
    self._notify()

  def remove(self, server: Server, reason: str, refused: bool = False) -> None:
    """Makes a server unusable until the next publication; its calls go to other servers."""
    server.usable, server.reason, server.refused = False, reason, refused
    server.busy_since = None  # Another process may later serve at this URL.
    server.verdict.set()
    count = sum(s.usable or not s.verdict.is_set() for s in self.servers)  # Usable now or soon.
    logging.warning("server %s is left out: %s; %d left", server.url, reason, count)
    for task in server.attempts:
      task.cancel()
    self._notify()

  async def _watch_health(self, server: Server) -> None:
    """Removes a server with calls after too many failed health checks."""
    failures = 0
    while True:
      await asyncio.sleep(HEALTH_S)
      try:
        if server.usable and server.attempts:
          await self._client.check_health(server.url, checks=1)
        failures = 0
      except Failed:
        failures += 1
      if failures >= MAX_FAILURES and server.usable:
        self.failures["health"] += 1
        self.remove(server, f"it has not answered /health {failures} times")
