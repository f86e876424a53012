"""Servers of a run: which can be used, calls sent to them and tried again, weights told to them.

All of it runs in one thread with an event loop, which `Fleet` starts; the host loop puts calls in
and takes answers out.
"""

import asyncio
import collections
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import logging

from gspo_jax.sampling.servers.calls import (
  Busy,
  Call,
  Failed,
  Limits,
  Part,
  Refused,
  checked,
  dated,
)
from gspo_jax.sampling.servers.config import ServerConfig
from gspo_jax.sampling.servers.dialects import Ask, Dialect
from gspo_jax.sampling.servers.launch import Process, filled
from gspo_jax.sampling.servers.sglang import SGLANG
from gspo_jax.sampling.servers.vllm import COMPLETIONS, VLLM
from gspo_jax.sampling.servers.wire import CONNECT_S, JSON, Wire

DIALECTS = {one.name: one for one in (VLLM, SGLANG, COMPLETIONS)}
HEALTH_S = 5.0  # between two looks at a server that has something to do
BUSY_S = 0.5  # until a server that was busy is asked again
STRIKES = 3  # failures in a row, of calls or of looks, after which a server is left out
TOKEN, EXPERT = 1024, 16  # bytes of an answer for a token's log-prob, and for one expert of it

T = TypeVar("T")


class Moved(Exception):
  """The server was left out while it had a call, which is not the call's failure."""


@dataclasses.dataclass(eq=False)
class Server:
  """One server and what is known of it."""

  url: str
  index: int
  dialect: Dialect | None = None  # once it has been found out
  usable: bool = False
  why: str = "it has not been asked yet"  # it is not usable
  refused: bool = False  # and will not be, as it was started
  version: int = -1  # of its weights
  failures: int = 0  # in a row
  disagreed: bool = False  # with the probe, after it took new weights in place
  reloads: bool = True  # False: and a restart helped
  process: Process | None = None
  posts: dict[asyncio.Task, int] = dataclasses.field(default_factory=dict)  # and their samples
  # Not set while it has new weights and nobody knows yet whether they are right.
  settled: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

  @property
  def load(self) -> int:
    """Responses that it is asked for."""
    return sum(self.posts.values())


class Fleet:
  """The servers of `urls`.

  Attributes:
    answers: what came of calls, in the order in which it came: their ids, with their parts or an
      exception.
    counts: failures by kind, and restarts, since the process started.
    version: of the newest weights that a server may have.
  """

  def __init__(self, urls: Sequence[str], config: ServerConfig, limits: Limits, logs: Path):
    self.servers = [Server(url.rstrip("/"), index) for index, url in enumerate(urls)]
    self._config, self._limits, self._logs = config, limits, logs
    self.answers: queue.SimpleQueue[tuple[str, list[Part] | Exception]] = queue.SimpleQueue()
    self.counts: collections.Counter[str] = collections.Counter()
    self.version = -1
    self._tasks: dict[str, asyncio.Task] = {}
    self._unsent: set[str] = set()  # that wait for a server
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
    self._thread.start()
    self.run(self._open())

  def run(self, work: Awaitable[T], every: Callable[[], None] = lambda: None) -> T:
    """The result of something on the loop; meanwhile `every` is called twice a second."""
    future = asyncio.run_coroutine_threadsafe(work, self._loop)
    try:
      while True:
        with contextlib.suppress(TimeoutError):
          return future.result(0.5)
        if future.done():  # or what it raised is a TimeoutError
          return future.result()
        every()
    except BaseException:
      future.cancel()
      raise

  def close(self) -> None:
    """Ends what was started here and the thread; more than once it does nothing."""
    if not self._thread.is_alive():
      return
    self.run(self._close())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    for server in self.servers:
      if server.process is not None:
        server.process.stop()

  @property
  def usable(self) -> list[Server]:
    return [server for server in self.servers if server.usable]

  # Calls.

  def submit(self, call: Call) -> None:
    """Sends a call as soon as a server has room for it."""
    self._loop.call_soon_threadsafe(self._begin, call)

  def _begin(self, call: Call) -> None:
    self._tasks[call.id] = task = self._loop.create_task(self._answered(call))
    task.add_done_callback(lambda _: self._tasks.pop(call.id, None))

  async def _answered(self, call: Call) -> None:
    try:
      found: list[Part] | Exception = await self._tried(call)
    except Failed as error:
      found = error
    except asyncio.CancelledError:
      return
    except Exception as error:  # a mistake of ours must not leave the host loop waiting
      found = error
    self.answers.put((call.id, found))

  async def _tried(self, call: Call) -> list[Part]:
    """Asks one server after the other. Failed: as often as the configuration allows."""
    tried: list[Server] = []
    end = time.monotonic() + self._config.timeout_s
    while True:
      self._unsent.add(call.id)
      try:
        server = await self._with_room(call, tried)
      finally:
        self._unsent.discard(call.id)
      try:
        parts = await self._post(server, call)
      except Moved:
        continue
      except Busy as error:
        if time.monotonic() > end:
          raise Failed(error.kind, f"{server.url} is busy all the time: {error}") from error
        await asyncio.sleep(BUSY_S)
        continue
      except Refused as error:
        self.leave_out(server, str(error), refused=True)
        continue
      except Failed as error:
        self._blame(server, error)
        tried.append(server)
        if len(tried) > self._config.retries:
          raise Failed(
            error.kind, f"{len(tried)} attempts failed, the last at {server.url}: {error}"
          ) from error
        await asyncio.sleep(min(0.05 * 2 ** len(tried), 5.0))
        continue
      server.failures = 0
      return parts

  async def _with_room(self, call: Call, tried: Sequence[Server]) -> Server:
    """The server that has least to do, rather one that has not failed on this call; waits until
    there is one."""
    async with self._change:
      while True:
        most = max(1, self._config.in_flight - call.samples + 1)
        open_to = [server for server in self.usable if server.load < most]
        fresh = [server for server in open_to if server not in tried]
        if fresh or (open_to and all(server in tried for server in self.usable)):
          return min(fresh or open_to, key=lambda server: server.load)
        await self._change.wait()

  async def _post(self, server: Server, call: Call, probes: bool = False) -> list[Part]:
    """One attempt at one server. What comes under new weights waits until it is known that they
    are right, but for the probe that says so."""
    oldest = server.version
    work = self._loop.create_task(self._generated(server, call))
    server.posts[work] = call.samples
    try:
      parts = await work
      if not probes:
        await server.settled.wait()
      if not (probes or server.usable):
        raise Moved
    except asyncio.CancelledError:
      if asyncio.current_task().cancelling():  # of the call itself
        raise
      raise Moved from None
    finally:
      work.cancel()
      del server.posts[work]
      async with self._change:
        self._change.notify_all()
    parts = [dated(part, oldest, server.version) for part in parts]
    return checked(parts, call, self._limits, oldest, max(oldest, self.version))

  async def _generated(self, server: Server, call: Call) -> list[Part]:
    fed = len(call.tokens) * call.samples
    new, each = call.samples * call.max_new_tokens, 0
    if call.routing:
      each = EXPERT * self._limits.num_layers * self._limits.experts_per_token
    most = JSON + TOKEN * new + each * (new + fed)
    answer = await self._wire.ask(
      server.url, server.dialect.generate(call), self._config.timeout_s, most
    )
    return server.dialect.read(answer, call)

  def _blame(self, server: Server, error: Failed) -> None:
    self.counts[error.kind] += 1
    if not server.usable:
      return
    server.failures += 1
    text = f"{server.url}: {error.kind}: {error}"
    if error.kind == "version":  # all that it says now is of the wrong weights
      self.leave_out(server, str(error))
    elif server.failures >= STRIKES:
      self.leave_out(server, f"{server.failures} failures in a row, the last: {error}")
    else:
      logging.warning("%s; tried again", text)

  async def exclude(self, server: Server, why: str, refused: bool = False) -> None:
    """Stops using a server. What it was asked for goes to others."""
    self.leave_out(server, why, refused)

  def leave_out(self, server: Server, why: str, refused: bool = False) -> None:
    """The same, on the loop."""
    server.usable, server.why, server.refused = False, why, refused
    logging.warning("server %s is left out: %s; %d left", server.url, why, len(self.usable))
    server.settled.set()
    for post in server.posts:
      post.cancel()
    self._loop.create_task(self._notify())

  async def _notify(self) -> None:
    async with self._change:
      self._change.notify_all()

  async def cancel(self, ids: Sequence[str]) -> None:
    """Forgets calls, whatever comes of them."""
    tasks = [self._tasks[id_] for id_ in ids if id_ in self._tasks]
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

  async def abort(self, ids: Sequence[str]) -> set[str]:
    """Has all servers leave calls, whose answers then come with what they have. Returns those that
    no server had yet, of which nothing will come."""
    unsent = self._unsent & set(ids)
    await self.cancel([*unsent])

    async def one(server: Server) -> None:
      for ask in server.dialect.abort(list(ids)):
        with contextlib.suppress(Failed, Refused):
          await self._wire.ask(server.url, ask, CONNECT_S)

    await asyncio.gather(*(one(server) for server in self.usable if server.posts))
    return unsent

  # Servers.

  async def renew(
    self, server: Server, weights: str, version: int, probe: list[Call], restart: bool = False
  ) -> list[Part]:
    """Has a server take weights, and returns what it answers to a probe; it is not usable yet.

    Args:
      restart: start it anew instead of having it take them in place.

    Raises:
      Failed, Refused: it did not come so far.
    """
    ours = bool(self._config.command)
    running = server.process is not None and server.process.alive
    if ours and not (running or await self._wire.answers(server.url)):
      restart = True
    server.usable = False
    server.settled.clear()
    if restart:
      await self._start(server, weights)
    if server.dialect is None:
      server.dialect = await self._dialect(server)
      settings = await self._settings(server)
      if unfit := server.dialect.unfit(settings, any(call.routing for call in probe)):
        raise Refused(unfit)
    asks = server.dialect.publish(weights, version)
    if restart:
      asks = [server.dialect.label(version)]
    self.version = max(self.version, version)
    try:
      for ask in asks:
        await self._wire.ask(server.url, ask, self._config.timeout_s)
        server.version = version  # since the first one stopped it
    except (Failed, Refused):
      with contextlib.suppress(Failed, Refused):
        await self._wire.ask(server.url, server.dialect.release, CONNECT_S)
      raise
    answers = await asyncio.gather(*(self._post(server, call, probes=True) for call in probe))
    found = [part for parts in answers for part in parts]
    if any(part.aborted for part in found):
      raise Failed("body", "it left the probe before its end")
    return found

  async def admit(self, server: Server) -> None:
    """Uses a server from now on."""
    server.usable, server.why, server.refused, server.failures = True, "", False, 0
    server.settled.set()
    async with self._change:
      self._change.notify_all()

  async def _start(self, server: Server, weights: str) -> None:
    """Starts the server of a URL here, after the end of the one before, and waits for it."""
    if server.process is not None:
      self.counts["restarts"] += 1
      await asyncio.to_thread(server.process.stop)
    elif await self._wire.answers(server.url):
      raise Failed("connection", "it was not started by this run: start it again, or stop it")
    command = filled(self._config.command, server.url, server.index, weights)
    server.dialect = None
    server.process = process = Process(command, self._logs / f"server_{server.index}.log")
    end = time.monotonic() + self._config.start_s
    while not await self._wire.answers(server.url):
      if not process.alive:
        raise Failed("connection", f"it ended before it answered; {process.log} says why")
      if time.monotonic() > end:
        await asyncio.to_thread(process.stop)
        raise Failed(
          "timeout",
          f"it did not answer within engine.server.start_s={self._config.start_s:g}; {process.log}",
        )
      await asyncio.sleep(0.5)

  async def _dialect(self, server: Server) -> Dialect:
    """The configured one, or the first whose way of sampling the server has."""
    if self._config.dialect != "auto":
      return DIALECTS[self._config.dialect]
    paths = {"/inference/v1/generate": VLLM, "/generate": SGLANG, "/v1/completions": COMPLETIONS}
    for path, dialect in paths.items():
      status, _ = await self._wire.sent(server.url, Ask(path, {}), CONNECT_S)
      if status not in (404, 405):
        return dialect
    raise Refused(f"it has none of {', '.join(paths)}: vLLM has the first with --enable-scale-out")

  async def _settings(self, server: Server) -> Mapping[str, Any]:
    """What the server says of itself; nothing where it does not."""
    with contextlib.suppress(Failed, Refused):
      found = await self._wire.ask(server.url, server.dialect.settings, CONNECT_S)
      return found if isinstance(found, dict) else {}
    return {}

  async def _watch(self, server: Server) -> None:
    """Leaves a server out that has something to do and does not answer at all."""
    missed = 0
    while True:
      await asyncio.sleep(HEALTH_S)
      if not (server.usable and server.posts):
        missed = 0
        continue
      missed = 0 if await self._wire.answers(server.url) else missed + 1
      if missed >= STRIKES and server.usable:
        self.counts["health"] += 1
        self.leave_out(server, f"it has not answered /health {missed} times")

  async def _open(self) -> None:
    self._wire = Wire(self._config, len(self.servers))
    self._change = asyncio.Condition()
    self._watches = [self._loop.create_task(self._watch(server)) for server in self.servers]

  async def _close(self) -> None:
    tasks = (*self._watches, *self._tasks.values())
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await self._wire.close()
