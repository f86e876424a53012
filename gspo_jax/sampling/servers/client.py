"""Client of a run's servers (vLLM 0.32): calls over HTTP, and publication of weights.

A server needs `--enable-scale-out` for token ids in requests and answers, `VLLM_SERVER_DEV_MODE=1`
for new weights, and `--logprobs-mode processed_logprobs` for log-probs (docs/engines.md).

A *call* requests one continuation of some tokens; an answer is a `Part` of a response. `ServerPool`
runs all requests in the event loop of one thread. The host loop submits calls and takes their
answers from a queue. After three failures in a row a server is excluded: it receives no calls until
the next *publication*. A publication loads weights on all servers. Each server then samples a
probe: responses to fixed prompts, by which the trainer recognizes damaged weights.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import os
import queue
import resource
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, TypeVar

import httpx2
from absl import logging

from gspo_jax.sampling.servers.probe import Call, Failed, Part, read_answer
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.sampling import ServerConfig

MAX_FAILURES = 3  # Consecutive failed calls or health checks before a server is excluded.
HEALTH_S = 5.0  # Pause between two health checks of a server with calls in flight.
CONNECT_S = 10.0  # Time limit to connect, and for short requests.
# Idle time until the client closes a connection. Requests fail if the server does so, after 5 s.
IDLE_S = 2.0
REFUSALS = 400, 413, 422  # HTTP statuses of wrong requests; they are no failure of the server.
OTHER_CONNECTIONS = 16  # Connections per server for requests other than calls.
SPARE_DESCRIPTORS = 1024  # File descriptors for the rest of the process.
TOKEN = "GSPO_ENGINE_TOKEN"  # Environment variable with the servers' bearer token.
GENERATE = "/inference/v1/generate"  # Path of calls.
PREFIX = "generate-tokens-"  # vLLM's request id is this text, followed by the id of the call.

T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class Server:
  """One server and its state."""

  url: str
  usable: bool = False  # Whether it may receive calls.
  reason: str = "no weights were published to it yet"  # Why it is unusable; "" if it is usable.
  version: int = -1  # Version of the server's weights.
  failures: int = 0  # Number of consecutive failures.
  calls: set[str] = dataclasses.field(default_factory=set)  # Ids of calls in flight.
  # Not set before the first publication and during publications; set at all other times.
  verdict: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class ServerPool:
  """Servers of a run, at `urls`, and their connections.

  Attributes:
    servers: the servers, in the order of `urls`.
    answers: queue of (call id, URL, part or exception), in order of arrival.
    failures: number of failures by kind (`probe.KINDS`), except those of publications.
    in_flight: maximum number of calls in flight at one server.
    version: newest version of published weights; -1 before the first publication.

  Raises:
    ValueError: the bearer token has characters that an HTTP header may not have.
  """

  def __init__(self, urls: Sequence[str], config: ServerConfig, model: ModelConfig):
    self.servers = [Server(url.rstrip("/")) for url in urls]
    self._config, self._model = config, model
    self._connect()
    self.answers: queue.SimpleQueue[tuple[str, str, Part | Exception]] = queue.SimpleQueue()
    self.failures: collections.Counter[str] = collections.Counter()
    self.version = -1
    self._calls: dict[str, asyncio.Timeout] = {}  # Timeouts of calls by id; unsent calls included.
    self._change = asyncio.Event()  # Set briefly when a server may take another call.
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
    self._thread.start()
    for server in self.servers:
      asyncio.run_coroutine_threadsafe(self._watch_health(server), self._loop)

  def _connect(self) -> None:
    """Opens the HTTP client. The limit of open files bounds the number of connections."""
    most, servers = self._config.in_flight, len(self.servers)
    token = os.environ.get(TOKEN, "").strip()
    if not (token.isascii() and token.isprintable()):  # The message must not show the token.
      raise ValueError(f"the token of {TOKEN} must be of printable ASCII characters")
    connections = raise_descriptors(servers * (most + OTHER_CONNECTIONS))
    self.in_flight = min(most, max(1, connections // servers - OTHER_CONNECTIONS))
    if self.in_flight < most:
      text = "engine.server.in_flight=%d is lowered to %d, since the process may open no more files"
      logging.warning(text + ": raise its limit (ulimit -Hn)", most, self.in_flight)
    missing = "vLLM needs VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
    self._hints = {404: missing, **dict.fromkeys((401, 403), f"set {TOKEN} to the server's token")}
    self._http = httpx2.AsyncClient(
      headers=dict(Authorization=f"Bearer {token}") if token else {},
      timeout=httpx2.Timeout(None, connect=CONNECT_S),  # `request` limits the total time.
      limits=httpx2.Limits(
        max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=IDLE_S
      ),
      trust_env=False,  # No proxy: servers are on the same network.
    )

  def run(self, work: Awaitable[T], poll: Callable[[], None] = lambda: None) -> T:
    """Runs a coroutine on the event loop, and returns its result.

    Calls `poll` twice a second during the wait. An exception of `poll` cancels the coroutine.
    """
    future = asyncio.run_coroutine_threadsafe(work, self._loop)
    try:
      while not concurrent.futures.wait([future], 0.5).done:
        poll()
      return future.result()
    except BaseException:
      future.cancel()
      raise

  def close(self) -> None:
    """Ends the thread and closes the connections. A second `close` does nothing."""
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
    await self._http.aclose()

  @property
  def usable(self) -> list[Server]:
    return [server for server in self.servers if server.usable]

  async def request(
    self, url: str, path: str, body: Any = None, seconds: float | None = None
  ) -> Any:
    """Sends a request, and returns the answer's JSON value; None for an empty answer.

    Args:
      body: JSON value to POST. None means a GET.
      seconds: time limit; None means CONNECT_S.

    Raises:
      Failed: the connection fails, no answer arrives in time, or the answer is no JSON or reports
        an error.
    """
    seconds = seconds or CONNECT_S
    try:
      async with asyncio.timeout(seconds):
        method = "GET" if body is None else "POST"
        answer = await self._http.request(method, url + path, json=body)
    except (TimeoutError, httpx2.TimeoutException) as error:
      raise Failed("timeout", f"no answer to {path} within {seconds:g} s") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
      raise Failed("connection", f"{path}: {type(error).__name__} {error}") from error
    if not answer.is_success:
      hint = self._hints.get(answer.status_code) or answer.text[:200]
      kind = "request" if answer.status_code in REFUSALS else "status"
      raise Failed(kind, f"HTTP {answer.status_code} for {path}: {hint}")
    try:
      value = answer.json() if answer.content.strip() else None
    except (ValueError, RecursionError) as error:
      raise Failed("body", f"the answer to {path} is not JSON: {error!s:.80}") from error
    if isinstance(value, dict) and value.get("success") is False:
      raise Failed("body", f"the answer to {path} is {value!r:.200}")
    return value

  def submit(self, call: Call, avoid: Collection[str] = ()) -> None:
    """Sends a call to the usable server with the fewest calls.

    `submit` does not wait for a server or an answer. The call's answer or exception is put on
    `answers`. A failed call is not repeated.

    Args:
      avoid: URLs of servers at which earlier calls for the same response failed. Such a server is
        chosen only if no other server is usable.
    """
    asyncio.run_coroutine_threadsafe(self._handle(call, avoid), self._loop)

  async def _handle(self, call: Call, avoid: Collection[str]) -> None:
    """Sends a call, and puts its answer or exception on the queue in any case."""
    answer: Part | Exception = Failed("", "its server was excluded, or the call was cancelled")
    server = None
    try:
      async with asyncio.timeout(None) as self._calls[call.id]:  # `_expire` cancels the call.
        server = await self._choose(avoid)
        server.calls.add(call.id)
        part = await self._generate(server, call, self._config.timeout_s)
        await server.verdict.wait()  # During a publication, waits until it ends.
        if server.usable:
          answer, server.failures = part, 0
    except TimeoutError:
      pass
    except Failed as error:
      answer = error
      self._calls.pop(call.id, None)  # Its timeout has ended, so `_expire` may not change it.
      self._count_failure(server, error)
    except Exception as error:  # A bug. `Pending.fail` raises this exception in the host loop.
      answer = error
    finally:
      self._calls.pop(call.id, None)
      if server:
        server.calls.discard(call.id)
        self._notify()
      self.answers.put((call.id, server.url if server else "", answer))

  async def _choose(self, avoid: Collection[str]) -> Server:
    """Waits for a server with fewer than `in_flight` calls, and returns the least busy one."""
    while True:
      usable = self.usable
      preferred = [server for server in usable if server.url not in avoid] or usable
      if free := [server for server in preferred if len(server.calls) < self.in_flight]:
        return min(free, key=lambda server: len(server.calls))
      await self._change.wait()

  async def _generate(self, server: Server, call: Call, seconds: float) -> Part:
    oldest = server.version  # A publication during the call makes newer versions valid.
    answer = await self.request(server.url, GENERATE, generate_body(call), seconds)
    return read_answer(answer, call, self._model, oldest, max(oldest, self.version))

  def _notify(self) -> None:
    """Wakes all calls in `_choose`."""
    self._change.set()
    self._change.clear()

  def _count_failure(self, server: Server, error: Failed) -> None:
    """Counts a failure; excludes the server after MAX_FAILURES in a row."""
    self.failures[error.kind] += 1
    if not server.usable:
      return
    server.failures += int(error.kind != "request")
    if server.failures >= MAX_FAILURES:
      self.exclude(server, f"{server.failures} failures in a row, the last: {error}")
    else:
      logging.warning("a call to server %s failed (%s): %s", server.url, error.kind, error)

  async def abort(self, ids: Collection[str]) -> None:
    """Aborts calls, so that they are answered with the tokens so far. Cancels unsent calls."""
    sent = {server: server.calls & set(ids) for server in self.servers}
    await self.cancel(set(ids).difference(*sent.values()))

    async def abort_at(server: Server) -> None:
      body = dict(request_ids=[PREFIX + id_ for id_ in sent[server]])
      with contextlib.suppress(Failed):
        await self.request(server.url, "/inference/v1/abort_requests", body)

    await asyncio.gather(*(abort_at(server) for server in self.servers if sent[server]))

  async def cancel(self, ids: Collection[str]) -> None:
    """Cancels calls. The queue `answers` receives a `Failed` for each cancelled call."""
    self._expire(ids)

  def _expire(self, ids: Collection[str]) -> None:
    """Cancels calls, by a time limit in the past."""
    for id_ in ids:
      if timeout := self._calls.pop(id_, None):
        timeout.reschedule(0)

  async def publish(
    self, weights: str, version: int, probe: Sequence[Call]
  ) -> list[list[Part] | None]:
    """Loads weights on all servers, and samples the probe there. Excludes failed servers.

    Each server is unusable until its `end_publication`. Returns the parts of each server's probe,
    or None for a failed server.
    """

    async def publish_to(server: Server) -> list[Part] | None:
      try:
        return await self._publish_to(server, weights, version, probe)
      except Failed as error:
        self.exclude(server, str(error))
        return None

    return await asyncio.gather(*map(publish_to, self.servers))

  async def _publish_to(
    self, server: Server, weights: str, version: int, probe: Sequence[Call]
  ) -> list[Part]:
    server.usable = False
    server.verdict.clear()
    # A short check comes first, since a hanging server would delay the publication by `publish_s`.
    await self._check_health(server)
    seconds = self._config.publish_s
    self.version = max(self.version, version)
    try:
      for path, body in publication_requests(weights, version):
        await self.request(server.url, path, body, seconds)
        server.version = version  # Set once the first request has paused the server.
    except Failed:
      with contextlib.suppress(Failed):
        await self.request(server.url, "/resume", {})
      raise
    tasks = [self._loop.create_task(self._generate(server, call, seconds)) for call in probe]
    try:
      parts = await asyncio.gather(*tasks)
    finally:
      for task in tasks:
        task.cancel()
    if any(part.aborted for part in parts):
      raise Failed("body", "the server aborted the probe")
    return parts

  async def end_publication(self, server: Server, reason: str) -> None:
    """Ends a server's publication. The server is usable if `reason` is "", otherwise excluded."""
    if reason:
      self.exclude(server, reason)
      return
    server.usable, server.reason, server.failures = True, "", 0
    server.verdict.set()
    self._notify()

  def exclude(self, server: Server, reason: str) -> None:
    """Makes a server unusable until the next publication. Its calls fail."""
    server.usable, server.reason = False, reason
    server.verdict.set()
    remaining = sum(s.usable or not s.verdict.is_set() for s in self.servers)  # Now or soon usable.
    logging.warning("server %s is excluded, %d remain: %s", server.url, remaining, reason)
    self._expire(server.calls)

  async def _watch_health(self, server: Server) -> None:
    """Checks a server's health while it has calls; excludes it after MAX_FAILURES failures."""
    while True:
      await asyncio.sleep(HEALTH_S)
      try:
        if server.usable and server.calls:
          await self._check_health(server)
      except Failed as error:
        if server.usable:
          self.failures["health"] += 1
          self.exclude(server, f"{MAX_FAILURES} failures in a row, the last: {error}")

  async def _check_health(self, server: Server) -> None:
    """Requests a server's health, up to MAX_FAILURES times, since compilation may delay answers."""
    for remaining in reversed(range(MAX_FAILURES)):
      try:
        return await self.request(server.url, "/health")
      except Failed:
        if not remaining:
          raise


def raise_descriptors(connections: int) -> int:
  """Raises the limit of open files; returns how many of the connections the limit allows."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  files = connections + SPARE_DESCRIPTORS
  files = files if hard == resource.RLIM_INFINITY else min(hard, files)
  if soft != resource.RLIM_INFINITY and soft < files:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
  return min(connections, max(files - SPARE_DESCRIPTORS, files // 2))


def generate_body(call: Call) -> dict[str, Any]:
  """Returns the body of a call, with all sampling parameters.

  The server would take missing parameters from the model's generation_config.json. Only `stop_ids`
  end a response, not the model's end-of-sequence token (`ignore_eos`).
  """
  sampling = call.sampling
  parameters = dict(
    n=1,
    max_tokens=call.max_new_tokens,
    temperature=sampling.temperature,
    top_k=sampling.top_k,
    top_p=sampling.top_p,
    min_p=sampling.min_p,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    seed=call.seed,
    stop_token_ids=list(call.stop_ids),
    ignore_eos=True,
    logprobs=0,  # Log-prob of the sampled token only.
    detokenize=False,
  )
  return dict(request_id=call.id, token_ids=list(call.tokens), sampling_params=parameters)


def publication_requests(directory: str, version: int) -> list[tuple[str, dict[str, Any]]]:
  """Returns paths and bodies of the requests to load new weights."""
  reload = dict(method="reload_weights", kwargs=dict(weights_path=directory))
  return [
    ("/pause?mode=keep", {}),  # Responses in flight resume with the new weights.
    ("/collective_rpc", reload),
    # Drops keys and values of the old weights, including those of responses in flight.
    ("/reset_prefix_cache?reset_running_requests=true", {}),
    ("/update_weight_version", dict(new_version=str(version))),
    ("/resume", {}),
  ]
