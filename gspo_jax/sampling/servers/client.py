"""HTTP client for vLLM servers (0.32), with checks of their answers.

A server needs `--enable-scale-out` for token ids in requests and answers, `VLLM_SERVER_DEV_MODE=1`
for new weights, and `--logprobs-mode processed_logprobs` for log-probs.
"""

import asyncio
import base64
import contextlib
import dataclasses
import io
import json
import math
import os
import resource
from collections.abc import Iterator, Mapping
from typing import Any

import httpx2
import numpy as np
from absl import logging

from gspo_jax.models.experts import routing
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.sampling import SamplingConfig, ServerConfig

# Kinds of failures, in the order of docs/engines.md.
KINDS = ("connection", "timeout", "health", "status", "body", "tokens", "version")
SLACK = 1e-3  # Maximum log-prob in nats, above 0 by rounding.
CONNECT_S = 10.0  # Time limit to connect, and for short requests.
IDLE_S = 2.0  # Servers close idle connections after 5 s, and would drop a request sent then.
OTHER_CONNECTIONS = 16  # Connections per server, in addition to those for calls.
SPARE_DESCRIPTORS = 1024  # File descriptors for the rest of the process.
HEALTH_CHECKS = 3  # Failed checks of a hung server; a compiling server may miss some.
ANSWER_BYTES = 2**22  # Maximum size of an answer without tokens.
TOKEN_BYTES, EXPERT_BYTES = 1024, 16  # Maximum sizes of a token's log-prob and of one expert.
PROCESSED = "start it with --logprobs-mode processed_logprobs"
PREFIX = "generate-tokens-"  # Prefix that vLLM adds to ids of calls.
_NPY_HEADERS = {  # Readers by .npy version; version 3 is only for field names.
  (1, 0): np.lib.format.read_array_header_1_0,
  (2, 0): np.lib.format.read_array_header_2_0,
}


class Failed(Exception):
  """A request failed; a retry may succeed, at another server or later.

  Attributes:
    kind: one of KINDS; or "busy" (the server is overloaded), "refused" (the server's start options
      do not allow the request), or "removed" (the server was removed during the call). The last
      three do not count as failures of the call.
  """

  def __init__(self, kind: str, text: str):
    super().__init__(text)
    self.kind = kind


@dataclasses.dataclass(frozen=True)
class Call:
  """A request for one continuation of some tokens."""

  id: str
  tokens: tuple[int, ...]
  max_new_tokens: int
  sampling: SamplingConfig  # Its `max_new_tokens` is not used.
  stop_ids: tuple[int, ...]
  seed: int
  routing: bool = False  # Whether to request the experts of every token.


@dataclasses.dataclass(frozen=True)
class Part:
  """One continuation: a whole response or a part of a response."""

  tokens: np.ndarray  # New tokens, the stop token included, int32 [n].
  logp: np.ndarray  # Log-probs after temperature and truncation, float32 [n].
  version: np.ndarray  # Weight version of each token, int32 [n].
  stopped: bool  # Whether a stop token ended the continuation.
  aborted: bool  # Whether an abort request ended the continuation.
  # Experts of every input token, [tokens of the call + n - 1, l, k]; None if not sent.
  experts: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class HttpRequest:
  """One HTTP request, with required values of the answer."""

  path: str
  body: Mapping[str, Any] | None = None  # JSON of a POST request; None for GET.
  expected: Mapping[str, Any] = dataclasses.field(default_factory=dict)


RESUME = HttpRequest("/resume", {})  # Ends the server's pause.
HEALTH = HttpRequest("/health")


class Client:
  """Connections to servers, for use on one event loop.

  Attributes:
    in_flight: maximum calls in flight at one server.

  Raises:
    ValueError: the token has characters that are not allowed in an HTTP header.
  """

  def __init__(self, config: ServerConfig, servers: int):
    self._variable = config.token_variable
    token = os.environ.get(self._variable, "").strip()
    if not (token.isascii() and token.isprintable()):  # The message must not show the token.
      raise ValueError(f"the token of {self._variable} must be of printable ASCII characters")
    connections = raise_descriptors(servers * (config.in_flight + OTHER_CONNECTIONS))
    self.in_flight = min(config.in_flight, max(1, connections // servers - OTHER_CONNECTIONS))
    if self.in_flight < config.in_flight:
      logging.warning(
        "engine.server.in_flight=%d is %d here: the process may have no more connections "
        "(ulimit -Hn)", config.in_flight, self.in_flight,
      )  # fmt: skip
    self._http = httpx2.AsyncClient(
      headers=dict(Authorization=f"Bearer {token}") if token else {},
      timeout=httpx2.Timeout(None, connect=CONNECT_S),  # `_send` limits the whole request
      limits=httpx2.Limits(
        max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=IDLE_S
      ),
      trust_env=False,  # No proxy: servers are on the same network.
    )

  async def close(self) -> None:
    await self._http.aclose()

  async def check_health(self, url: str, checks: int = HEALTH_CHECKS) -> None:
    """Requests a server's health. Raises Failed if all checks fail."""
    for remaining in reversed(range(checks)):
      try:
        await self.request(url, HEALTH, CONNECT_S)
        return
      except Failed as error:
        if not remaining or error.kind == "refused":
          raise

  async def request(
    self, url: str, request: HttpRequest, seconds: float, limit: int = ANSWER_BYTES
  ) -> Any:
    """Sends a request and returns the answer's JSON.

    Returns None for an empty answer, and for an answer to GET without JSON.

    Raises:
      Failed: there is no answer in time, or the answer cannot be used.
    """
    path = request.path
    status, body = await self._send(url, request, seconds, limit)
    if status in (401, 403):
      raise Failed(
        "refused", f"HTTP {status} for {path}: set {self._variable} to the token that it was given"
      )
    if status == 404 and request.body is not None:
      raise Failed(
        "refused", f"it has no {path}: vLLM needs VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
      )
    if not 200 <= status < 300:
      text = body[:200].decode(errors="replace")
      raise Failed("busy" if status == 429 else "status", f"HTTP {status} for {path}: {text}")
    try:
      answer = json.loads(body) if body.strip() else None
    except (ValueError, RecursionError) as error:
      if request.body is None:
        return None
      raise Failed("body", f"the answer to {path} is no JSON: {error!s:.80}") from error
    for key, value in request.expected.items():
      if not isinstance(answer, dict) or answer.get(key) != value:
        raise Failed("body", f"the answer to {path} has not {key}={value}: {answer!r:.200}")
    return answer

  async def _send(
    self, url: str, request: HttpRequest, seconds: float, limit: int
  ) -> tuple[int, bytes]:
    """Returns status and body. Raises Failed without an answer in time or if it is too long."""
    path, method = request.path, "GET" if request.body is None else "POST"
    try:
      async with (
        asyncio.timeout(seconds),
        self._http.stream(method, url + path, json=request.body) as response,
      ):
        body = bytearray()
        async for piece in response.aiter_bytes():
          body += piece
          if len(body) > limit:
            raise Failed("body", f"the answer to {path} has more than {limit:,} bytes")
        return response.status_code, bytes(body)
    except TimeoutError as error:
      raise Failed("timeout", f"no answer to {path} within {seconds:g} s") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
      kind = "timeout" if isinstance(error, httpx2.TimeoutException) else "connection"
      raise Failed(kind, f"{path}: {type(error).__name__} {error}") from error


def raise_descriptors(connections: int) -> int:
  """Raises the limit of open files, and returns the number of connections within it."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  unlimited = hard == resource.RLIM_INFINITY
  files = connections + SPARE_DESCRIPTORS
  files = files if unlimited else min(hard, files)
  if soft != resource.RLIM_INFINITY and soft < files:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
  return connections if unlimited else min(connections, max(hard - SPARE_DESCRIPTORS, hard // 2))


def generate_request(call: Call) -> HttpRequest:
  """Returns the request for a call, with all sampling parameters.

  Explicit parameters override defaults from generation_config.json. Only `stop_ids` end a response,
  not the server's end-of-sequence token.
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
  body = dict(request_id=call.id, token_ids=list(call.tokens), sampling_params=parameters)
  return HttpRequest("/inference/v1/generate", body)


def answer_limit(call: Call, model: ModelConfig) -> int:
  """Returns the maximum size of an answer to a call, in bytes."""
  experts = model.num_layers * model.experts_per_token if call.routing else 0
  tokens = len(call.tokens) + call.max_new_tokens
  return ANSWER_BYTES + TOKEN_BYTES * call.max_new_tokens + EXPERT_BYTES * experts * tokens


def publish_requests(directory: str, version: int) -> list[HttpRequest]:
  """Returns the requests, in order, to load the weights of a directory."""
  reload = dict(method="reload_weights", kwargs=dict(weights_path=directory))
  return [
    HttpRequest("/pause?mode=keep", {}),  # Responses in flight resume with the new weights.
    HttpRequest("/collective_rpc", reload),
    # Drops keys and values of the old weights, including those of responses in flight.
    HttpRequest("/reset_prefix_cache?reset_running_requests=true", {}, dict(success=True)),
    HttpRequest("/update_weight_version", dict(new_version=str(version))),
    RESUME,
  ]


def abort_request(ids: list[str]) -> HttpRequest:
  """Returns the request to abort calls. Their answers then have the tokens so far."""
  body = dict(request_ids=[PREFIX + id_ for id_ in ids])
  return HttpRequest("/inference/v1/abort_requests", body)


def read_answer(answer: Any, call: Call, model: ModelConfig, oldest: int, newest: int) -> Part:
  """Reads and checks the answer to a call.

  Args:
    oldest, newest: minimum and maximum valid weight versions.

  Raises:
    Failed: the answer is not a valid continuation of the call.
  """
  with fail_on_error("its answer cannot be used"):
    choices = answer["choices"]
    if len(choices) != 1:
      raise Failed("tokens", f"{len(choices)} responses came for one")
    part = _read_choice(choices[0])
    check_part(part, call, model, oldest, newest)
    experts = _experts(part, call, model) if call.routing else None
    return dataclasses.replace(part, experts=experts)


@contextlib.contextmanager
def fail_on_error(text: str) -> Iterator[None]:
  """Converts any exception in the block to Failed, of kind "body"."""
  try:
    yield
  except Failed:
    raise
  except Exception as error:  # Readers of .npy headers parse Python and may raise anything.
    raise Failed("body", f"{text}: {error!r:.80}") from error


def _read_choice(choice: Mapping[str, Any]) -> Part:
  with fail_on_error("a choice is not as it should be"):
    tokens = column(choice["token_ids"] or [], np.int32)
    content = (choice["logprobs"] or {}).get("content") or []
    logp_tokens = column([entry["token_id"] for entry in content], np.int32)
    logp = column([entry["logprob"] for entry in content], np.float32)
    reason, experts = choice["finish_reason"], choice.get("routed_experts")
  if not np.array_equal(logp_tokens, tokens):
    raise Failed("tokens", "the log-probs are not of the tokens that came")
  version = np.full(len(tokens), -1, np.int32)  # Remains -1 outside all spans.
  with fail_on_error("its weight_versions are no spans"):
    for span in choice.get("weight_versions") or []:
      version[int(span["start"]) : int(span["end"])] = version_number(span["version"])
  experts = None if experts is None else array_of_base64(experts)
  return Part(tokens, logp, version, reason == "stop", reason == "abort", experts)


def check_part(part: Part, call: Call, model: ModelConfig, oldest: int, newest: int) -> None:
  """Raises Failed unless the part is a valid continuation of the call."""
  n, tokens, version = len(part.tokens), part.tokens, part.version
  if n > call.max_new_tokens or (n == 0 and not part.aborted):
    raise Failed("tokens", f"{n} tokens came where 1 to {call.max_new_tokens} were asked for")
  if n and not 0 <= tokens.min() <= tokens.max() < model.vocab_size:
    raise Failed(
      "tokens", f"token ids reach {tokens.max()}, the model has 0 to {model.vocab_size - 1}"
    )
  if not (np.isfinite(part.logp).all() and (part.logp <= SLACK).all()):
    raise Failed("tokens", "a log-prob is above 0 or not finite")
  ends = np.isin(tokens, call.stop_ids)
  if ends[:-1].any() or (n and bool(ends[-1]) != part.stopped):
    raise Failed("tokens", "a response does not end where its stop token is")
  if not (part.stopped or part.aborted or n == call.max_new_tokens):
    raise Failed("tokens", f"a response ended after {n} tokens, without a stop token")
  if n and not oldest <= version.min() <= version.max() <= newest:
    raise Failed(
      "version", f"weights {version.min()} to {version.max()} answered, not {oldest} to {newest}"
    )


def _experts(part: Part, call: Call, model: ModelConfig) -> np.ndarray | None:
  """Returns experts [input tokens, l, k] of MoE layers, in the storage dtype."""
  experts, fed = part.experts, len(call.tokens) + len(part.tokens) - 1
  if not len(part.tokens):
    return None
  if experts is None:
    raise Failed("refused", "no routed experts came: start it with --enable-return-routed-experts")
  moe_layers = list(filter(model.is_moe, range(model.num_layers)))
  for count in (len(moe_layers), model.num_layers):  # Some servers send all layers.
    if experts.size == fed * count * model.experts_per_token and experts.dtype.kind in "iu":
      experts = experts.reshape(fed, count, model.experts_per_token)
      experts = experts if count == len(moe_layers) else experts[:, moe_layers]
      if 0 <= experts.min() <= experts.max() < model.num_experts:
        return experts.astype(routing.storage_dtype(model.num_experts))
  raise Failed("body", f"experts of shape {part.experts.shape} came for {fed} tokens")


def column(values: Any, dtype: type) -> np.ndarray:
  """Converts numbers to an array [n] of int32 (integers only) or float32. Raises Failed if this
  is impossible."""
  with contextlib.suppress(TypeError, ValueError, OverflowError):
    array = np.asarray(values, None if dtype is np.int32 else np.float64)
    right = dtype is np.float32 or not array.size
    if array.ndim == 1 and (right or (array.dtype.kind == "i" and abs(array).max() < 2**31)):
      with np.errstate(over="ignore"):  # Overflow gives infinity; `check_part` rejects it.
        return array.astype(dtype)
  expected = "integers" if dtype is np.int32 else "numbers"
  raise Failed("body", f"it holds {values!r:.60} where {expected} belong")


def version_number(label: Any) -> int:
  """Returns the version in a label; -1 for a label not set by a publication."""
  text = str(label)
  return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1


def array_of_base64(text: Any, most_bytes: int = 2**30) -> np.ndarray:
  """Decodes a .npy file from base64. Raises Failed for other data."""
  with fail_on_error("its routed experts are no array in base64"):
    raw = base64.b64decode(text, validate=True)
    file = io.BytesIO(raw)
    version = np.lib.format.read_magic(file)
    shape, fortran, dtype = _NPY_HEADERS[version](file)
    size = math.prod(shape) * dtype.itemsize
    # `np.load` would allocate any size claimed in a header.
    if dtype.kind not in "iu" or not size == len(raw) - file.tell() <= most_bytes:
      raise ValueError(f"{len(raw)} bytes for {shape} of {dtype}")
    array = np.frombuffer(raw, dtype, offset=file.tell())
    return array.reshape(shape, order="F" if fortran else "C")
