"""Log-probs that a server has of tokens it is sent: `prompt_logprobs` of vLLM's /v1/completions.

These are of the model's own distribution, at temperature 1 and over the whole vocabulary, whatever
else a request asks for. The servers that sample are `fleet.py`'s; this one is asked and told
nothing, so that nothing has to be kept between two calls.
"""

import asyncio
import concurrent.futures
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from absl import logging

from gspo_jax.sampling.engine import ServersGone
from gspo_jax.sampling.servers.calls import SLACK, Busy, Failed, Refused, floats
from gspo_jax.sampling.servers.dialects import Ask
from gspo_jax.sampling.servers.wire import CONNECT_S, JSON, Wire
from gspo_jax.settings.server import ServerConfig
from gspo_jax.system import preemption

KEY = "distillation.teacher"
PATH = "/v1/completions"
TOKEN = 1024  # bytes of an answer for a token's log-prob
AGAIN_S, MOST_AGAIN_S = 0.1, 5.0  # until a request is tried again: at first, doubled, and at most
BUSY_S = 0.5  # until a server that was busy is asked again
NEVER = -9999.0  # what vLLM writes for the logarithm of 0
_VOCABULARY = re.compile(r"vocabulary size: (\d+)", re.IGNORECASE)

T = TypeVar("T")


def score(url: str, config: ServerConfig, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
  """Log-probs of the tokens of sequences, each given those before it: float32 [n] of n tokens, of
  which the first one has 0. Asks for as many sequences at once as `config` says.

  Raises:
    ServersGone: the server failed on one as often as it may, or does not let us.
    Preempted: in a run that was told to go.
  """
  return _run(url, config, lambda wire: _all(wire, url, config, sequences))


def probe(url: str, config: ServerConfig, vocab_size: int, window: int) -> dict[str, Any]:
  """Has a server score `window` tokens, before anything depends on it. Returns what it says of
  itself, as JSON for the provenance of a run.

  Raises:
    ServersGone: it does not answer, does not say log-probs of prompts, has no room for so many
      tokens, or says that it has another vocabulary.
  """
  return _run(url, config, lambda wire: _probed(wire, url, config, vocab_size, window))


def read(answer: Any, tokens: Sequence[int]) -> np.ndarray:
  """float32 [n]: the log-probs in an answer.

  Raises:
    Failed: they are not those of the tokens.
    Refused: the server says none.
  """
  try:
    (choice,) = answer["choices"]
    entries = choice.get("prompt_logprobs")
  except (KeyError, TypeError, ValueError, AttributeError) as error:
    raise Failed("body", f"the answer has not one choice: {error!r:.80}") from error
  if entries is None:
    raise Refused(f"its answers from {PATH} hold no prompt_logprobs, as those of vLLM do")
  if not isinstance(entries, list) or len(entries) != len(tokens):
    count = len(entries) if isinstance(entries, list) else "no"
    raise Failed("tokens", f"{count} log-probs came for {len(tokens)} tokens")
  try:
    said = [entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], entries[1:])]
  except (KeyError, TypeError) as error:
    raise Failed("tokens", "a log-prob is not of the token that was asked for") from error
  logp = floats([0.0, *said])
  if not (np.isfinite(logp).all() and (logp > NEVER).all() and (logp <= SLACK).all()):
    raise Failed("tokens", "a log-prob is above 0 or not finite")
  return logp


def _run(url: str, config: ServerConfig, work: Callable[[Wire], Awaitable[T]]) -> T:
  """What `work` finds, on an event loop in a thread: the caller may be in one of its own, and has
  signals to look after."""
  left = threading.Event()

  async def main() -> T:
    wire = Wire(config, 1)
    task = asyncio.ensure_future(work(wire))
    try:
      while not (task.done() or left.is_set()):
        await asyncio.wait([task], timeout=0.5)
      task.cancel()
      return await task
    finally:
      await wire.close()

  with concurrent.futures.ThreadPoolExecutor(1, "teacher") as pool:
    future = pool.submit(lambda: asyncio.run(main()))
    try:
      while not future.done():
        concurrent.futures.wait([future], 0.5)
        preemption.check_alone()
    finally:
      left.set()
    try:
      return future.result()
    except (Failed, Refused) as error:
      raise ServersGone(f"{KEY}={url}: {error}") from error


async def _all(
  wire: Wire, url: str, config: ServerConfig, sequences: Sequence[Sequence[int]]
) -> list[np.ndarray]:
  room = asyncio.Semaphore(wire.in_flight)

  async def one(tokens: Sequence[int]) -> np.ndarray:
    async with room:
      return await _tried(wire, url, config, tokens)

  tasks = [asyncio.ensure_future(one(tokens)) for tokens in sequences]
  try:
    return await asyncio.gather(*tasks)
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _tried(wire: Wire, url: str, config: ServerConfig, tokens: Sequence[int]) -> np.ndarray:
  """Asks until there is an answer. Failed: as often as the configuration allows."""
  failures, end = 0, time.monotonic() + config.timeout_s
  while True:
    try:
      return await _scored(wire, url, tokens, config.timeout_s)
    except Busy:
      if time.monotonic() > end:
        raise
      await asyncio.sleep(BUSY_S)
    except Failed as error:
      failures += 1
      if failures > config.retries:
        text = f"{failures} attempts failed, the last: {error}"
        raise Failed(error.kind, text) from error
      said = "%s=%s: %s: %s; tried again", KEY, url, error.kind, error
      logging.log_every_n_seconds(logging.WARNING, said[0], 10, *said[1:])
      await asyncio.sleep(min(AGAIN_S * 2 ** (failures - 1), MOST_AGAIN_S))


async def _scored(wire: Wire, url: str, tokens: Sequence[int], seconds: float) -> np.ndarray:
  # One token has to be sampled, and is not looked at.
  body = dict(prompt=list(tokens), prompt_logprobs=0, max_tokens=1, temperature=1.0)
  answer = await wire.ask(url, Ask(PATH, body), seconds, JSON + TOKEN * len(tokens))
  return read(answer, tokens)


async def _probed(
  wire: Wire, url: str, config: ServerConfig, vocab_size: int, window: int
) -> dict[str, Any]:
  seconds = min(config.start_s, config.timeout_s)
  name, longest = _model(await wire.ask(url, Ask("/v1/models"), CONNECT_S))
  if longest is not None and longest <= window:
    raise Refused(
      f"it has room for {longest} tokens, and data.max_prompt_tokens + sampling.max_new_tokens = "
      f"{window} and one more are needed: start it with a larger --max-model-len"
    )
  # First of all: some servers take ids that their model has not, and break.
  await _check_vocabulary(wire, url, vocab_size, seconds)
  tokens = np.random.default_rng(0).integers(0, vocab_size, window).tolist()
  await _scored(wire, url, tokens, seconds)
  return dict(server=url, model=name)


def _model(answer: Any) -> tuple[str | None, int | None]:
  """Name and longest sequence of the model that a server has, as far as it says."""
  try:
    first = answer["data"][0]
    name, longest = first["id"], first.get("max_model_len")
  except (KeyError, TypeError, IndexError, AttributeError):
    return None, None
  return str(name), longest if isinstance(longest, int) else None


async def _check_vocabulary(wire: Wire, url: str, vocab_size: int, seconds: float) -> None:
  """Refused: the server says that it has another one, when it is told of the first id that the
  policy's has not."""
  body = dict(prompt=[0], max_tokens=1, logit_bias={str(vocab_size): 0.0})
  status, content = await wire.sent(url, Ask(PATH, body), seconds)
  if status in (404, 405):
    raise Refused(f"it has no {PATH}, which vLLM has for models that generate")
  if 200 <= status < 300:
    size = "a larger vocabulary than"
  else:
    said = _VOCABULARY.search(_message(content))
    if status != 400 or said is None or int(said[1]) == vocab_size:
      return  # what else is wrong comes with the next request
    size = f"a vocabulary of {int(said[1])} tokens, and the policy one of"
  raise Refused(
    f"it has {size} model.vocab_size={vocab_size}: a teacher scores the policy's tokens, so both "
    "need the same vocabulary"
  )


def _message(content: bytes) -> str:
  try:
    return str(json.loads(content)["error"]["message"])
  except (ValueError, KeyError, TypeError, RecursionError):
    return ""
