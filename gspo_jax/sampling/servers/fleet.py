"""Servers of a run: which can be used, calls sent to them and tried again, weights told to them.

All of it runs in one thread with an event loop, which `Fleet` starts; the host loop puts calls in
and takes answers out.
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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from absl import logging

from gspo_jax.sampling.servers import vllm
from gspo_jax.sampling.servers.calls import Busy, Call, Failed, Part, Refused, checked, failing
from gspo_jax.sampling.servers.wire import CONNECT_S, JSON, Wire
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.server import ServerConfig

HEALTH_S = 5.0  # between two looks at a server that has something to do
BUSY_S = 0.5  # until a server that was busy is asked again
AGAIN_S, MOST_AGAIN_S = 0.1, 5.0  # until a call is tried again: at first, doubled, and at most
STRIKES = 3  # failures in a row, of calls or of looks, after which a server is left out
TOKEN, EXPERT = 1024, 16  # bytes of an answer for a token's log-prob, and for one expert of it

T = TypeVar("T")


class Moved(Exception):
  """What a server had of a call is lost, since it was left out meanwhile, which is no failure of
  the call."""


class Post(NamedTuple):
  """A call on its way to a server."""

  call: str  # its id
  sent: str  # the id of this attempt
  samples: int


@dataclasses.dataclass(eq=False)
class Server:
  """One server and what is known of it."""

  url: str
  usable: bool = False
  why: str = "it has not been asked yet"  # it is not usable
  refused: bool = False  # and will not be, as it was started
  version: int = -1  # of its weights
  failures: int = 0  # in a row
  resting: bool = False  # since it was busy a moment ago
  busy_since: float | None = None  # and has answered no call; on the monotonic clock
  posts: dict[asyncio.Task, Post] = dataclasses.field(default_factory=dict)
  # Not set while it has new weights and nobody knows yet whether they are right.
  settled: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

  @property
  def load(self) -> int:
    """Responses that it is asked for."""
    return sum(post.samples for post in self.posts.values())


class Fleet:
  """The servers of `urls`, which sample from `model`.

  Attributes:
    answers: what came of calls, in the order in which it came: their ids, with their parts or an
      exception.
    failures: by kind, since the process started.
    version: of the newest weights that a server may have.
  """

  def __init__(self, urls: Sequence[str], config: ServerConfig, model: ModelConfig):
    self.servers = [Server(url.rstrip("/")) for url in urls]
    self._config, self._model = config, model
    self._wire = Wire(config, len(self.servers))
    self.answers: queue.SimpleQueue[tuple[str, list[Part] | Exception]] = queue.SimpleQueue()
    self.failures: collections.Counter[str] = collections.Counter()
    self.version = -1
    self._tasks: dict[str, asyncio.Task] = {}
    self._unsent: set[str] = set()  # that wait for a server
    self._attempts = itertools.count()
    self._change = asyncio.Event()  # set for a moment when a server may have got room
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
    self._thread.start()
    self._watches = [
      asyncio.run_coroutine_threadsafe(self._watch(server), self._loop) for server in self.servers
    ]

  def run(self, work: Awaitable[T], every: Callable[[], None] = lambda: None) -> T:
    """The result of something on the loop; meanwhile `every` is called twice a second."""
    future = asyncio.run_coroutine_threadsafe(work, self._loop)
    try:
      while not concurrent.futures.wait([future], 0.5).done:
        every()
      return future.result()
    except BaseException:
      future.cancel()
      raise

  def close(self) -> None:
    """Ends the thread and its connections; more than once it does nothing."""
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
    await self._wire.close()

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
      answer: list[Part] | Exception = await self._tried(call)
    except asyncio.CancelledError:
      return
    except Exception as error:  # a mistake of ours, too, must not leave the host loop waiting
      answer = error
    self.answers.put((call.id, answer))

  async def _tried(self, call: Call) -> list[Part]:
    """Asks one server after the other. Failed: as often as the configuration allows."""
    tried: list[Server] = []
    wait = 0.0
    while True:
      self._unsent.add(call.id)
      try:
        await asyncio.sleep(wait)
        server = await self._with_room(call, tried)
      finally:
        self._unsent.discard(call.id)
      wait = 0.0
      try:
        parts = await self._post(server, call)
      except Moved:
        continue
      except Busy as error:
        self._rest(server, error)
        continue
      except Refused as error:
        if server.usable:  # or it has new weights, and whoever sees to that is told the same
          self.leave_out(server, str(error), refused=True)
        continue
      except Failed as error:
        self._blame(server, error)
        tried.append(server)
        if len(tried) > self._config.retries:
          raise Failed(
            error.kind, f"{len(tried)} attempts failed, the last at {server.url}: {error}"
          ) from error
        wait = min(AGAIN_S * 2 ** (len(tried) - 1), MOST_AGAIN_S)
        continue
      server.failures, server.busy_since = 0, None
      return parts

  async def _with_room(self, call: Call, tried: Sequence[Server]) -> Server:
    """The server that has least to do, rather one that has not failed on this call; waits until
    there is one. Those that were busy a moment ago are not asked."""
    most = max(1, self._wire.in_flight - call.samples + 1)
    while True:
      usable = self.usable
      open_to = [server for server in usable if server.load < most and not server.resting]
      fresh = [server for server in open_to if server not in tried]
      if fresh or (open_to and all(server in tried for server in usable)):
        return min(fresh or open_to, key=lambda server: server.load)
      await self._change.wait()

  async def _post(self, server: Server, call: Call, probes: bool = False) -> list[Part]:
    """One attempt at one server. What comes under new weights waits until it is known that they
    are right, but for the probe that says so."""
    oldest = server.version
    # A server may still be at the attempt before, by the id of that one.
    attempt = dataclasses.replace(call, id=f"{call.id}-{next(self._attempts)}")
    seconds = self._publish_s if probes else self._config.timeout_s
    work = self._loop.create_task(self._generated(server, attempt, seconds))
    server.posts[work] = Post(call.id, attempt.id, call.samples)
    try:
      answer = await work
      if not probes:
        await server.settled.wait()
        if not server.usable:
          raise Moved("it was left out meanwhile")
    except asyncio.CancelledError:
      if asyncio.current_task().cancelling():  # of the call itself
        raise
      raise Moved("it was left out meanwhile") from None
    finally:
      work.cancel()
      del server.posts[work]
      self._changed()
    with failing("its answer cannot be used"):
      parts = vllm.read(answer, call)
      return checked(parts, call, self._model, oldest, max(oldest, self.version))

  def _generated(self, server: Server, call: Call, seconds: float) -> Coroutine[Any, Any, Any]:
    """Has a server answer, with no more bytes than what was asked for may take."""
    new, each = call.samples * call.max_new_tokens, 0
    if call.routing:
      each = EXPERT * self._model.num_layers * self._model.experts_per_token
    most = JSON + TOKEN * new + each * (new + len(call.tokens) * call.samples)
    return self._wire.ask(server.url, vllm.generate(call), seconds, most)

  def _changed(self) -> None:
    """Has all that wait for room look for it again."""
    self._change.set()
    self._change.clear()

  def _rest(self, server: Server, error: Busy) -> None:
    """Asks a server that is busy for nothing for a while, and leaves out one that always is."""
    now = time.monotonic()
    since = server.busy_since = now if server.busy_since is None else server.busy_since
    if server.usable and now - since > self._config.timeout_s:
      self.leave_out(server, f"it is busy all the time: {error}")
    elif not server.resting:
      server.resting = True
      self._loop.call_later(BUSY_S, self._rested, server)

  def _rested(self, server: Server) -> None:
    server.resting = False
    self._changed()

  def _blame(self, server: Server, error: Failed) -> None:
    self.failures[error.kind] += 1
    if not server.usable:
      return
    server.failures += 1
    if error.kind == "version":  # all that it says now is of the wrong weights
      self.leave_out(server, str(error))
    elif server.failures >= STRIKES:
      self.leave_out(server, f"{server.failures} failures in a row, the last: {error}")
    else:
      logging.warning("%s: %s: %s; tried again", server.url, error.kind, error)

  async def cancel(self, ids: Sequence[str]) -> None:
    """Forgets calls, whatever comes of them."""
    tasks = [self._tasks[id_] for id_ in ids if id_ in self._tasks]
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

  async def abort(self, ids: Sequence[str]) -> set[str]:
    """Has all servers leave calls, whose answers then come with what they have. Returns those that
    no server had yet, of which nothing will come."""
    asked = set(ids)
    unsent = self._unsent & asked
    await self.cancel([*unsent])

    async def leave(server: Server) -> None:
      sent = [post.sent for post in server.posts.values() if post.call in asked]
      if sent:
        with contextlib.suppress(Failed, Refused):
          await self._wire.ask(server.url, vllm.abort(sent), CONNECT_S)

    await asyncio.gather(*(leave(server) for server in self.usable))
    return unsent

  # Servers.

  @property
  def _publish_s(self) -> float:
    return min(self._config.publish_s, self._config.timeout_s)

  async def renew(self, weights: str, version: int, probe: list[Call]) -> list[list[Part] | None]:
    """Has all servers take weights, and returns what each answers to a probe; none is usable yet.
    None of one that did not come so far, which is left out."""

    async def renewed(server: Server) -> list[Part] | None:
      try:
        return await self._renewed(server, weights, version, probe)
      except (Failed, Refused, Moved) as error:
        self.leave_out(server, str(error), isinstance(error, Refused))
        return None

    return await asyncio.gather(*(renewed(server) for server in self.servers))

  async def _renewed(
    self, server: Server, weights: str, version: int, probe: list[Call]
  ) -> list[Part]:
    server.usable = False
    server.settled.clear()
    # One that hangs would keep the others waiting for as long as weights may take.
    await self._wire.look(server.url)
    settings = None
    with contextlib.suppress(Failed, Refused):  # it need not say
      settings = await self._wire.ask(server.url, vllm.SETTINGS, CONNECT_S)
    if unfit := vllm.unfit(settings, any(call.routing for call in probe)):
      raise Refused(unfit)
    self.version = max(self.version, version)
    try:
      for ask in vllm.publish(weights, version):
        await self._wire.ask(server.url, ask, self._publish_s)
        server.version = version  # since the first one stopped it
    except (Failed, Refused):
      with contextlib.suppress(Failed, Refused):
        await self._wire.ask(server.url, vllm.RESUME, CONNECT_S)
      raise
    answers = await asyncio.gather(*(self._post(server, call, probes=True) for call in probe))
    parts = [part for answer in answers for part in answer]
    if any(part.aborted for part in parts):
      raise Failed("body", "it left the probe before its end")
    return parts

  def admit(self, server: Server) -> None:
    """Uses a server from now on. To be called on the loop."""
    server.usable, server.why, server.refused = True, "", False
    server.failures, server.busy_since = 0, None
    server.settled.set()
    self._changed()

  def leave_out(self, server: Server, why: str, refused: bool = False) -> None:
    """Stops using a server; what it was asked for goes to others. To be called on the loop."""
    server.usable, server.why, server.refused = False, why, refused
    server.busy_since = None  # another one may come in its place
    server.settled.set()
    left = sum(s.usable or not s.settled.is_set() for s in self.servers)  # or about to be
    logging.warning("server %s is left out: %s; %d left", server.url, why, left)
    for post in server.posts:
      post.cancel()
    self._changed()

  async def _watch(self, server: Server) -> None:
    """Leaves a server out that has something to do and does not answer at all."""
    missed = 0
    while True:
      await asyncio.sleep(HEALTH_S)
      if not (server.usable and server.posts):
        missed = 0
        continue
      try:
        await self._wire.look(server.url, looks=1)
        missed = 0
      except (Failed, Refused):
        missed += 1
      if missed >= STRIKES and server.usable:
        self.failures["health"] += 1
        self.leave_out(server, f"it has not answered /health {missed} times")
