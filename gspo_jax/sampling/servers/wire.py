"""HTTP to servers: time-outs, limits of what is read, and in words what is wrong with it."""

import asyncio
import dataclasses
import json
import os
import resource
from collections.abc import Mapping
from typing import Any

import httpx2
from absl import logging

from gspo_jax.sampling.servers.calls import Busy, Failed, Refused
from gspo_jax.settings.server import ServerConfig

CONNECT_S = 10.0  # to a server, and for what it answers at once
# An idle connection is used again within these seconds: servers close one after 5 (uvicorn's
# default), and a request that is on its way then is lost.
IDLE_S = 2.0
JSON = 2**22  # bytes of an answer
OTHERS = 16  # connections to a server besides those of calls
SPARE = 1024  # descriptors that the rest of the process may need
LOOKS = 3  # at a server before it counts as hung: one that compiles may miss some


@dataclasses.dataclass(frozen=True)
class Ask:
  """One HTTP request and what its answer must hold."""

  path: str
  body: Mapping[str, Any] | None = None  # None: GET
  # Keys of the answer with the values that they must have
  holds: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Wire:
  """Connections to some servers, used on one event loop.

  Attributes:
    in_flight: calls that one server can be sent at once.

  Raises:
    ValueError: the token is none that a header can have.
  """

  def __init__(self, config: ServerConfig, servers: int):
    self._variable = config.token_variable
    token = os.environ.get(self._variable, "").strip()
    if not (token.isascii() and token.isprintable()):  # and it is not said which one it is
      raise ValueError(f"the token of {self._variable} must be of printable ASCII characters")
    most = descriptors(servers * (config.in_flight + OTHERS))
    self.in_flight = min(config.in_flight, max(1, most // servers - OTHERS))
    if self.in_flight < config.in_flight:
      logging.warning(
        "engine.server.in_flight=%d is %d here: the process may have no more connections "
        "(ulimit -Hn)", config.in_flight, self.in_flight,
      )  # fmt: skip
    self._client = httpx2.AsyncClient(
      headers=dict(Authorization=f"Bearer {token}") if token else {},
      timeout=httpx2.Timeout(None, connect=CONNECT_S),  # `sent` has one for all of it
      limits=httpx2.Limits(
        max_connections=most, max_keepalive_connections=most, keepalive_expiry=IDLE_S
      ),
      trust_env=False,  # servers are near, and nothing of theirs goes through a proxy
    )

  async def close(self) -> None:
    await self._client.aclose()

  async def look(self, url: str, looks: int = LOOKS) -> None:
    """Has a server say that it is well. Failed, Refused: it does not, whenever it is asked."""
    for left in reversed(range(looks)):
      try:
        await self.ask(url, Ask("/health"), CONNECT_S)
        return
      except Failed:
        if not left:
          raise

  async def ask(self, url: str, ask: Ask, seconds: float, most: int = JSON) -> Any:
    """The JSON that a server answers; None where it is empty, or none was asked for.

    Raises:
      Failed: no answer, or none that can be used.
      Refused: it does not let us.
    """
    status, body = await self.sent(url, ask, seconds, most)
    if status in (401, 403):
      raise Refused(
        f"HTTP {status} for {ask.path}: set {self._variable} to the token that it was given"
      )
    if status == 404 and ask.body is not None:
      raise Refused(
        f"it has no {ask.path}: vLLM needs VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
      )
    if not 200 <= status < 300:
      text = body[:200].decode(errors="replace")
      kind = Busy if status == 429 else Failed
      raise kind("status", f"HTTP {status} for {ask.path}: {text}")
    try:
      answer = json.loads(body) if body.strip() else None
    except (ValueError, RecursionError) as error:
      if ask.body is None:
        return None
      raise Failed("body", f"the answer to {ask.path} is no JSON: {error!s:.80}") from error
    for key, value in ask.holds.items():
      if not isinstance(answer, dict) or answer.get(key) != value:
        raise Failed("body", f"the answer to {ask.path} has not {key}={value}: {answer!r:.200}")
    return answer

  async def sent(self, url: str, ask: Ask, seconds: float, most: int = JSON) -> tuple[int, bytes]:
    """Status and body. Failed: there is none in time, or it is too long."""
    method, content = ("GET", None) if ask.body is None else ("POST", ask.body)
    try:
      async with (
        asyncio.timeout(seconds),
        self._client.stream(method, url + ask.path, json=content) as response,
      ):
        body = bytearray()
        async for piece in response.aiter_bytes():
          body += piece
          if len(body) > most:
            raise Failed("body", f"the answer to {ask.path} has more than {most:,} bytes")
        return response.status_code, bytes(body)
    except TimeoutError as error:
      raise Failed("timeout", f"no answer to {ask.path} within {seconds:g} s") from error
    except httpx2.TimeoutException as error:
      raise Failed("timeout", f"{ask.path}: {type(error).__name__} {error}") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
      raise Failed("connection", f"{ask.path}: {type(error).__name__} {error}") from error


def descriptors(wanted: int) -> int:
  """How many of `wanted` connections the process may have, after its limit was raised if need be;
  beyond it, connections fail as if servers were gone."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  none = resource.RLIM_INFINITY
  need = wanted + SPARE if hard == none else min(hard, wanted + SPARE)
  if soft != none and soft < need:
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
  return wanted if hard == none else min(wanted, max(hard - SPARE, hard // 2))
