"""Servers before they can be used: started, found well, and asked which dialect they speak."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_jax.sampling.servers.calls import Failed, Refused
from gspo_jax.sampling.servers.dialects import Ask, Dialect
from gspo_jax.sampling.servers.launch import Process, filled
from gspo_jax.sampling.servers.sglang import SGLANG
from gspo_jax.sampling.servers.state import Server
from gspo_jax.sampling.servers.vllm import COMPLETIONS, VLLM
from gspo_jax.sampling.servers.wire import CONNECT_S, Wire
from gspo_jax.settings.server import ServerConfig

DIALECTS = {one.name: one for one in (VLLM, SGLANG, COMPLETIONS)}
LOOKS = 3  # at a server before it counts as hung: one that compiles may miss some


async def look(wire: Wire, url: str) -> None:
  """Has a server say that it is well. Failed, Refused: it does not, whenever it is asked."""
  for left in reversed(range(LOOKS)):
    try:
      await wire.ask(url, Ask("/health"), CONNECT_S)
    except Failed:
      if not left:
        raise
    else:
      return


async def start(wire: Wire, server: Server, config: ServerConfig, weights: str, log: Path) -> None:
  """Starts the server of a URL here, after the end of the one before, and waits for it.

  Raises:
    Failed: there is another one, or it does not answer in time.
  """
  if server.process is not None:
    await asyncio.to_thread(server.process.stop)
  elif await wire.answers(server.url):
    raise Failed("connection", "it was not started by this run: start it again, or stop it")
  server.dialect = None
  command = filled(config.command, server.url, server.index, weights)
  server.process = process = Process(command, log)
  end = time.monotonic() + config.start_s
  while not await wire.answers(server.url):
    if not process.alive:
      raise Failed("connection", f"it ended before it answered; {process.log} says why")
    if time.monotonic() > end:
      await asyncio.to_thread(process.stop)
      raise Failed(
        "timeout",
        f"it did not answer within engine.server.start_s={config.start_s:g}; {process.log}",
      )
    await asyncio.sleep(0.5)


async def find_dialect(wire: Wire, url: str, configured: str, routing: bool) -> Dialect:
  """The configured dialect, or the first whose way of sampling a server has.

  Args:
    routing: whether it will be asked for experts.

  Raises:
    Failed: it cannot be found out now.
    Refused: the server has none, or says that it was started with something missing.
  """
  dialect = DIALECTS.get(configured) or await _first(wire, url)
  if unfit := dialect.unfit(await _settings(wire, url, dialect), routing):
    raise Refused(unfit)
  return dialect


async def _first(wire: Wire, url: str) -> Dialect:
  paths = {"/inference/v1/generate": VLLM, "/generate": SGLANG, "/v1/completions": COMPLETIONS}
  for path, dialect in paths.items():
    status, _ = await wire.sent(url, Ask(path, {}), CONNECT_S)
    if status >= 500:  # of a proxy perhaps, which says nothing of the server
      text = f"HTTP {status} for {path}; engine.server.dialect names a dialect without asking"
      raise Failed("status", text)
    if status not in (404, 405):
      return dialect
  raise Refused(f"it has none of {', '.join(paths)}: vLLM has the first with --enable-scale-out")


async def _settings(wire: Wire, url: str, dialect: Dialect) -> Mapping[str, Any]:
  """What a server says of itself; nothing where it does not."""
  with contextlib.suppress(Failed, Refused):
    found = await wire.ask(url, dialect.settings, CONNECT_S)
    return found if isinstance(found, dict) else {}
  return {}
