"""Engine with vLLM servers as samplers, over HTTP (docs/engines.md).

A response is sampled by one or several *calls* to servers; the answer to a call is a `Part` of the
response. All answers are checked, and after each publication of weights, log-probs of every server
are compared with the trainer's (probe.py). A failed call is sent again, to another server if
possible. After too many failed calls in a row, the response ends as a failure. Only the first host
talks to servers; it broadcasts the responses.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath

from gspo_jax.models import flops
from gspo_jax.sampling import stop_strings
from gspo_jax.sampling.engine import ServersGone
from gspo_jax.sampling.requests import Request, Response, Usage, Workload
from gspo_jax.sampling.servers import probe
from gspo_jax.sampling.servers.client import ServerPool
from gspo_jax.sampling.servers.probe import Call, Failed, Part
from gspo_jax.settings.model import ComputeConfig, ModelConfig
from gspo_jax.settings.sampling import EngineConfig
from gspo_jax.system import hosts, preemption

# New tokens of a call with stop strings: at most this number, or an eighth of the response.
STOP_PIECE = 64
MAX_FAILURES = 6  # Consecutive failed calls of a response before the response fails.
ABORT_S = 20.0  # Maximum seconds to wait for the answers to aborted calls.
RETRY_S = 5.0  # Seconds between two attempts to find a usable server.


class ServerEngine(contextlib.AbstractContextManager):
  """Sampling by servers (an `Engine`). As a context manager, it closes the connections at exit.

  Args:
    model: configuration of the model.
    config: section `engine` of the configuration.
    compute: the trainer's compute settings; `config.dtype`, if set, overrides their dtype.
    publish: function from the trainer's parameters to parameters in the sampler's layout and dtype.
    text_bytes: bytes of each token id's text, for stop strings; None if there are none.
    workdir: directory of the run. By default, weights are published in its folder `published`.
    window: maximum number of tokens of a prompt with its response.
    temperature: temperature of the run's sampling.
    routing: whether to record the chosen experts.
    tokenizer: directory of tokenizer files to publish with the weights; None for no files.
  """

  def __init__(
    self,
    model: ModelConfig,
    config: EngineConfig,
    compute: ComputeConfig,
    publish: Callable[[Any], Any] = lambda params: params,
    text_bytes: Sequence[bytes] | None = None,
    *,
    workdir: Path,
    window: int,
    temperature: float = 1.0,
    routing: bool = False,
    tokenizer: epath.Path | None = None,
  ):
    from gspo_jax.models.hf.config import to_hf  # Needs safetensors.

    to_hf(model, "float32")  # Raises ValueError if no Hugging Face model fits.
    self._model, self._server = model, config.server
    self._publish, self._text_bytes, self._tokenizer = publish, text_bytes, tokenizer
    compute = config.compute(compute)
    self._tolerance = self._server.tolerance or (0.1 if compute.dtype == "bfloat16" else 0.005)
    routing = routing and model.num_experts > 0
    self._probe = probe.Probe(model, compute, window, temperature, routing)
    self._pool: ServerPool | None = None  # None on all hosts but the first.

    def connect() -> Path:
      self._pool = ServerPool(config.urls, self._server, model)
      return probe.publication_directory(self._server, workdir)

    self._directory = hosts.run_on_first_host(connect, ServersGone)
    self._weights: Path | None = None  # Directory of the newest weights.
    self._version = -1
    # One thread may load weights while another steps. Only the loading thread uses the devices.
    self._loading_thread, self._loading = 0, False
    self._probe_mean, self._disagreed = 0.0, 0
    self._workload: Workload | None = None
    self._numbers, self._calls = itertools.count(), itertools.count()
    # Requests by number, each with the sample numbers of responses not yet returned.
    self._requests: dict[int, tuple[Request, set[int]]] = {}
    # Responses in flight, by id of their current call; {} on all hosts but the first.
    self._pending: dict[str, Pending] = {}
    self._run, self._stopping = f"{os.getpid():x}-{time.time_ns():x}", False
    self._sampled = 0  # Tokens since the last `start`, including those of unfinished responses.
    self.usage = Usage()

  def __exit__(self, *_: object) -> None:
    if self._pool is not None:
      self._pool.close()

  # Weights.

  def load(self, params: Any, version: int) -> None:
    """Publishes weights to all servers, and probes them.

    Responses in flight continue with the new weights. Another thread may be in `step`.

    Raises:
      ServersGone: no server was usable within `engine.server.wait_s`, or weights cannot be written.
    """
    self._loading_thread = threading.get_ident()
    params, self._version = self._publish(params), version
    directory = self._directory / f"weights_{version:06d}"
    self._weights = probe.write_weights(directory, params, self._model, self._tokenizer)
    self._loading = True
    try:
      self._find_servers(params)
    finally:
      self._loading = False

  @property
  def loads_beside_steps(self) -> bool:
    """Whether the run has one process.

    If there were several, threads of different processes could broadcast in different orders.
    """
    return jax.process_count() == 1

  def revive(self) -> None:
    """Publishes the newest weights again if no server is usable. Raises ServersGone as `load`."""
    if not (self._pool.usable or self._loading):
      self._find_servers(probe.read_weights(self._weights))

  def release(self) -> None:
    """Does nothing: the weights are on servers."""

  def _find_servers(self, params: Any) -> None:
    """Publishes weights to all servers, repeatedly until one is usable.

    Raises:
      ServersGone: no server was usable within `engine.server.wait_s`.
    """
    end = time.monotonic() + self._server.wait_s

    def wait() -> None:
      reasons = "; ".join(f"{server.url}: {server.reason}" for server in self._pool.servers)
      if time.monotonic() > end:
        raise ServersGone(f"engine.name='server': no server can be used. {reasons}")
      logging.warning("waiting for a server: %s", reasons)
      self._pool.run(asyncio.sleep(RETRY_S), preemption.check_alone)

    while not self._publish_and_probe(params):
      hosts.run_on_first_host(wait, ServersGone)
      preemption.check()

  def _publish_and_probe(self, params: Any) -> bool:
    """Publishes weights to all servers once; returns whether a server is usable."""
    self._probe_mean = 0.0

    def publish() -> list[list[Part] | None]:
      calls = self._probe.calls(f"v{self._version}-{next(self._calls)}")
      work = self._pool.publish(str(self._weights), self._version, calls)
      return self._pool.run(work, preemption.check_alone)

    answers = hosts.run_on_first_host(publish, ServersGone)
    for index, parts in enumerate(answers):
      size = None if parts is None else self._probe.differences(params, parts)
      if self._pool is not None and size is not None:
        reason = self._disagreement(float(size.mean()), float(size.max()))
        self._pool.run(self._pool.end_publication(self._pool.servers[index], reason))
    return hosts.broadcast(self._pool is not None and bool(self._pool.usable))

  def _disagreement(self, mean: float, largest: float) -> str:
    """Returns the reason to exclude a server; "" if its log-probs agree with the trainer's."""
    if mean <= self._tolerance:  # False for NaN.
      self._probe_mean = max(self._probe_mean, mean)
      return ""
    self._disagreed += 1
    return (
      f"its log-probs of version {self._version} differ from the trainer's by {mean:.3g} in the "
      f"mean, above engine.server.tolerance={self._tolerance:g}, and by {largest:.3g} at most: "
      "start it with --logprobs-mode processed_logprobs, and with this model"
    )

  # Requests.

  def start(self, workload: Workload) -> None:
    if self._version < 0:
      raise RuntimeError("the engine has no weights: call load() before start()")
    if self._requests:
      self.stop()
    self._workload, self.usage, self._sampled = workload, Usage(), 0
    self._count_servers()

  def submit(self, request: Request) -> None:
    window, length = self._workload.window, request.prefix_length
    request.check(window - 1, window, self._model.vocab_size, self._text_bytes)
    number = next(self._numbers)
    samples = range(request.first_sample, request.first_sample + request.samples)
    self._requests[number] = request, set(samples)
    work = flops.work(self._model, 1, length - 1, length - 1)
    self.usage.prefilled += length - 1
    self.usage.flops += float(work.forward() - work.head)
    if self._pool is not None:
      for sample in samples:
        self._send(Pending(request, number, sample))

  def _send(self, pending: "Pending") -> None:
    """Sends the next call of a response."""
    id_ = f"{self._version}-{next(self._calls)}-{self._run}"  # Unique on shared servers too.
    routing = self._workload.record_routing and self._model.num_experts > 0
    self._pending[id_] = pending
    self._pool.submit(pending.next_call(id_, self._workload, routing), pending.failed_at)

  @property
  def busy(self) -> bool:
    return bool(self._requests)

  def step(self) -> list[Response]:
    """Waits at most half a second for answers, and returns newly finished responses.

    If no server is usable, and this thread has called `load`, `step` publishes the weights again.

    Raises:
      Preempted: the run was asked to stop (system/preemption.py).
      ServersGone: no server was usable within `engine.server.wait_s`.
    """
    preemption.check()
    started = time.perf_counter()

    def receive() -> tuple[list, int, bool]:
      answers = self._receive(0.5)
      return answers, self._sampled, not self._pool.usable and not self._loading

    answers, self.usage.tokens, lost = hosts.run_on_first_host(receive, ServersGone)
    if lost and self._loading_thread == threading.get_ident():
      self._find_servers(probe.read_weights(self._weights))
    self.usage.decode_seconds += time.perf_counter() - started
    return self._close_responses(answers)

  def stop(self) -> list[Response]:
    answers, self.usage.tokens = hosts.run_on_first_host(
      lambda: (self._abort(), self._sampled), ServersGone
    )
    return self._close_responses(answers)

  def _abort(self) -> list[tuple[int, Response]]:
    """Aborts all calls; returns their responses with the tokens so far."""
    if not self._pending:
      return []
    answers = []
    self._stopping = True
    try:
      # Servers answer an abort with the tokens so far. Calls without an answer are then cancelled.
      for end_calls in (self._pool.abort, self._pool.cancel):
        self._pool.run(end_calls(list(self._pending)))
        end = time.monotonic() + ABORT_S
        while self._pending and time.monotonic() < end:
          answers += self._receive(0.5)
          if self._loading:  # Answers wait until the publication ends.
            preemption.check_alone()
            end = time.monotonic() + ABORT_S
    finally:
      self._stopping = False
    return answers

  def _receive(self, seconds: float) -> list[tuple[int, Response]]:
    """Receives answers; returns finished responses, each with its request's number.

    While the engine stops, returns unfinished responses too; otherwise sends their next calls.
    """
    answers = []
    while True:
      try:
        id_, url, answer = self._pool.answers.get(timeout=seconds)
      except queue.Empty:
        return answers
      seconds = 0.0  # Further answers are taken only if they have already arrived.
      if id_ not in self._pending:  # A call of an ended workload.
        continue
      pending = self._pending.pop(id_)
      if isinstance(answer, Part) and len(answer.tokens):
        self._sampled += pending.add(answer, self._text_bytes)
      elif not self._stopping:
        pending.fail(url, answer)
      if self._stopping or pending.finished:
        answers.append((pending.number, pending.response(self._workload.sampling.untruncated)))
      else:
        self._send(pending)

  def _close_responses(self, answers: list[tuple[int, Response]]) -> list[Response]:
    """Adds this host's requests to broadcast responses, and counts FLOPs in `usage`."""
    responses = []
    for number, response in answers:
      request, samples = self._requests[number]
      samples.remove(response.sample)
      if not samples:
        del self._requests[number]
      if new := len(response.tokens):
        end = request.prefix_length + new - 1
        self.usage.flops += float(flops.work(self._model, 1, new, end).forward())
      responses.append(dataclasses.replace(response, request=request))
    self._count_servers()
    return responses

  def _count_servers(self) -> None:
    """Sets the metrics of servers in `usage`."""
    if self._pool is None:
      return
    usable = len(self._pool.usable)
    self.usage.servers = {
      "servers": float(usable),
      "left_out": float(len(self._pool.servers) - usable),
      "probe/mean": self._probe_mean,
      "probe/disagreed": float(self._disagreed),
      **{f"failed/{kind}": float(self._pool.failures[kind]) for kind in probe.KINDS},
    }


class Pending:
  """A response in flight. Its arrays grow with every part."""

  def __init__(self, request: Request, number: int, sample: int):
    self.request, self.number, self.sample = request, number, sample
    self.tokens, self.version = np.zeros(0, np.int32), np.zeros(0, np.int32)
    self.logp = np.zeros(0, np.float32)
    self.experts: np.ndarray | None = None
    self.stopped = False
    self.failed_at: list[str] = []  # URL for each failed call since the last part.
    self.failure = ""  # Description of the last failure, if MAX_FAILURES calls in a row failed.
    self._tail: bytes | None = None  # State of the search for stop strings.

  @property
  def remaining(self) -> int:
    return self.request.max_new_tokens - len(self.tokens)

  @property
  def finished(self) -> bool:
    return bool(self.stopped or self.failure or not self.remaining)

  def add(self, part: Part, text_bytes: Sequence[bytes] | None) -> int:
    """Appends a part, up to a stop string's end; returns the number of new tokens."""
    end, self._tail = stop_strings.end(self.request, self._tail, part.tokens.tolist(), text_bytes)
    self.stopped, self.failed_at = part.stopped or end is not None, []
    self.tokens = np.concatenate([self.tokens, part.tokens[:end]])
    self.logp = np.concatenate([self.logp, part.logp[:end]])
    self.version = np.concatenate([self.version, part.version[:end]])
    if part.experts is not None:
      # Every call prefills the prefix again; only the experts of a token's first pass are recorded.
      filled = 0 if self.experts is None else len(self.experts)
      new = part.experts[filled : self.request.prefix_length + len(self.tokens) - 1]
      self.experts = np.concatenate([self.experts, new]) if filled else new
    return len(part.tokens[:end])

  def fail(self, url: str, answer: Part | Exception) -> None:
    """Counts a call that failed or was aborted without a token; raises unexpected exceptions."""
    if not isinstance(answer, Part | Failed):
      raise answer
    if isinstance(answer, Failed) and not answer.kind:  # Its server was excluded for other calls.
      return
    self.failed_at.append(url)
    if (count := len(self.failed_at)) >= MAX_FAILURES:
      reason = answer if isinstance(answer, Failed) else "it was aborted"
      self.failure = f"{count} calls failed, the last at {url}: {reason}"

  def next_call(self, id_: str, workload: Workload, routing: bool) -> Call:
    """Returns the next call. Its seed is a hash of seed, prompt, sample number and position."""
    request, tokens = self.request, (*self.request.prefix, *self.tokens.tolist())
    count = min(self.remaining, workload.piece or self.remaining)
    count = min(count, max(STOP_PIECE, len(self.tokens) // 8)) if request.stop_strings else count
    position = len(tokens) - len(request.prompt)
    noise = np.array([request.seed, self.sample, position, *request.prompt], "<i8").tobytes()
    seed = zlib.crc32(noise) & 0x7FFFFFFF
    return Call(id_, tokens, count, workload.sampling, request.stop_ids, seed, routing)

  def response(self, untruncated: bool) -> Response:
    """Returns the response so far. `untruncated`: sampling has no top-k, top-p or min-p."""
    return Response(
      None,  # Not broadcast: on each host, `_close_responses` sets that host's request.
      self.sample,
      self.tokens,
      self.logp,
      # Servers return only the log-prob after truncation.
      self.logp if untruncated else np.full_like(self.logp, np.nan),
      self.version,
      stopped=self.stopped,
      finished=self.finished,
      experts=self.experts,
      failure=self.failure,
    )
