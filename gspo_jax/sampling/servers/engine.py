"""The engine whose samplers are servers of others, reached over HTTP. docs/engines.md.

Nothing of a server is trusted: answers are checked, new weights probed, and what fails is tried
again elsewhere. With several processes the first one talks to servers and tells the others what
came, so that all go on alike.
"""

import asyncio
import dataclasses
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import logging
from etils import epath

from gspo_jax import sharding
from gspo_jax.models import flops
from gspo_jax.sampling.engine import ServersGone
from gspo_jax.sampling.requests import Request, Response, Usage, Workload
from gspo_jax.sampling.servers import published
from gspo_jax.sampling.servers.calls import KINDS, Failed, Part
from gspo_jax.sampling.servers.fleet import Fleet, Server
from gspo_jax.sampling.servers.pending import MOST_ABORTED, Pending, call_for
from gspo_jax.sampling.servers.probe import Probe, Verdict
from gspo_jax.sampling.servers.vllm import PROCESSED
from gspo_jax.settings.model import ComputeConfig, ModelConfig
from gspo_jax.settings.sampling import EngineConfig
from gspo_jax.system import hosts, preemption

PIECE = 4096  # tokens of a call with several samples: a failure costs no more, a long one is alone
ABORT_S = 20.0  # that `stop` waits for what servers have of responses
AGAIN_S = 5.0  # between two attempts to find a server that can be used


class ServerEngine:
  """Sampling by servers (`Engine`); a context manager, which ends its connections.

  Args:
    publish: from the trainer's parameters to those that sampling reads, as `LocalEngine` has it.
    detokenize: from tokens to text, for stop strings.
    workdir: for weights where the configuration names no directory.
    window: positions of the longest response with its prompt.
    temperature: of training.
    routing: whether experts are to be recorded.
    tokenizer: a directory whose files go with published weights.
  """

  def __init__(
    self,
    model: ModelConfig,
    config: EngineConfig,
    compute: ComputeConfig,
    publish: Callable[[Any], Any] = lambda params: params,
    detokenize: Callable[[list[int]], str] | None = None,
    *,
    workdir: Path,
    window: int,
    temperature: float = 1.0,
    routing: bool = False,
    tokenizer: epath.Path | None = None,
  ):
    self._model, self._server = model, config.server
    self._publish, self._detokenize, self._tokenizer = publish, detokenize, tokenizer
    self._directory = Path(self._server.directory or workdir.absolute() / "published")
    compute = config.compute(compute)
    self._tolerance = self._server.tolerance or (0.1 if compute.dtype == "bfloat16" else 0.005)
    self._probe = Probe(model, compute, window, temperature, routing and model.num_experts > 0)
    self._fleet: Fleet | None = None  # of the first process

    def connect() -> None:
      self._fleet = Fleet(config.urls, self._server, model)

    hosts.run_on_first_host(connect, ServersGone)
    self._weights: Path | None = None  # the directory of the last ones
    self._version = -1
    # Loading may be another thread's than stepping. It is the one that has the devices.
    self._loads, self._loading = 0, False
    self._worst, self._disagreed = 0.0, 0  # of the probe
    self._workload: Workload | None = None
    self._numbers, self._calls = itertools.count(), itertools.count()
    # Of requests by their number: how many of their responses are not handed out yet.
    self._open: dict[int, tuple[Request, set[int]]] = {}
    # Of the first process alone: what is under way, by the id of its call. Others than we may have
    # calls at the same servers.
    self._pending: dict[str, list[Pending]] = {}
    self._run, self._stopping = f"{os.getpid():x}-{time.time_ns():x}", False
    self._sampled = 0  # tokens that came since the last `start`, of unfinished responses too
    self.usage = Usage()

  def __enter__(self) -> "ServerEngine":
    return self

  def __exit__(self, *_: object) -> None:
    if self._fleet is not None:
      self._fleet.close()

  # Weights.

  def load(self, params: Any, version: int) -> None:
    """Publishes weights and has every server take them, those that were left out before too.

    Responses that are under way go on under them; another thread than that which steps may call it.

    Raises:
      ServersGone: none can be used; says why of each.
    """
    self._loads = threading.get_ident()
    params, self._version = self._publish(params), version
    directory = self._directory / f"weights_{version:06d}"
    try:
      self._weights = published.write(directory, params, self._model, self._tokenizer)
    except OSError as error:
      where = error.filename or self._directory
      raise ServersGone(f"{where} cannot be written: {error.strerror or error}") from error
    self._loading = True
    try:
      self._find_servers(params)
    finally:
      self._loading = False

  @property
  def loads_beside_steps(self) -> bool:
    """Several processes would have to agree on what each of two threads tells the others."""
    return jax.process_count() == 1

  def revive(self) -> None:
    """Finds servers again if none is left.

    Raises:
      ServersGone: there is none, and there was none for a while.
    """
    if not (self._fleet.usable or self._loading):
      self._find_servers(self._read())

  def release(self) -> None:
    """Gives up nothing: servers have the weights."""

  def _find_servers(self, params: Any) -> None:
    """Brings up as many servers as can be; waits a while for the first.

    Raises:
      ServersGone: there is none.
    """
    end = time.monotonic() + self._server.wait_s

    def wait() -> None:
      servers = self._fleet.servers
      reasons = "; ".join(f"{server.url}: {server.why}" for server in servers)
      if all(server.refused for server in servers) or time.monotonic() > end:
        raise ServersGone(f"engine.name='server': no server can be used. {reasons}")
      logging.warning("waiting for a server: %s", reasons)
      self._fleet.run(asyncio.sleep(AGAIN_S), preemption.check_alone)

    while not self._bring_up(params):
      hosts.run_on_first_host(wait, ServersGone)
      preemption.check()

  def _bring_up(self, params: Any) -> bool:
    """One round over all servers: weights and the probe. Whether there is one that can be used."""
    self._worst = 0.0

    def renewed() -> list[list[Part] | None]:
      calls = self._probe.calls(f"v{self._version}-{next(self._calls)}")
      work = self._fleet.renew(str(self._weights), self._version, calls)
      return self._fleet.run(work, preemption.check_alone)

    answers = hosts.run_on_first_host(renewed, ServersGone)
    verdicts = [None if x is None else self._probe.verdict(params, x) for x in answers]
    if self._fleet is not None:
      for server, verdict in zip(self._fleet.servers, verdicts, strict=True):
        if verdict is not None:
          self._fleet.run(self._judged(server, verdict))
    return hosts.broadcast(self._fleet is not None and bool(self._fleet.usable))

  async def _judged(self, server: Server, verdict: Verdict) -> None:
    """Uses a server from now on if its verdict is within the tolerance."""
    if verdict.mean <= self._tolerance:  # of NaN, this is false
      self._worst = max(self._worst, verdict.mean)
      self._fleet.admit(server)
    else:
      self._disagreed += 1
      if verdict.raw <= self._tolerance:
        why = f"its log-probs are those before the temperature: {PROCESSED}"
        self._fleet.leave_out(server, why, refused=True)
        return
      self._fleet.leave_out(
        server,
        f"its log-probs of version {self._version} are off the trainer's by {verdict.mean:.3g} in "
        f"the mean and {verdict.max:.3g} at most, and engine.server.tolerance is "
        f"{self._tolerance:g}: start it again with these weights",
      )

  # Requests.

  def start(self, workload: Workload) -> None:
    if self._version < 0:
      raise RuntimeError("the engine has no weights: load them before it starts")
    if self._open:
      self.stop()
    self._workload, self.usage, self._sampled = workload, Usage(), 0
    self._count()

  def submit(self, request: Request) -> None:
    window, length = self._workload.window, request.prefix_length
    request.check(window - 1, window, self._model.vocab_size, self._detokenize)
    number = next(self._numbers)
    samples = range(request.first_sample, request.first_sample + request.samples)
    self._open[number] = request, set(samples)
    work = flops.work(self._model, 1, length - 1, length - 1)
    self.usage.prefilled += length - 1
    self.usage.flops += float(work.forward() - work.head)
    if self._fleet is None:
      return
    most = min(self._server.in_flight, max(1, PIECE // request.max_new_tokens))
    for start in range(0, request.samples, most):
      numbers = samples[start : start + most]
      self._send([Pending(request, number, sample) for sample in numbers])

  def _send(self, together: list[Pending]) -> None:
    id_ = f"{self._version}-{next(self._calls)}-{self._run}"
    routing = self._workload.record_routing and self._model.num_experts > 0
    call = call_for(together, id_, self._workload.sampling, routing, self._workload.piece)
    self._pending[id_] = together
    self._fleet.submit(call)

  @property
  def busy(self) -> bool:
    return bool(self._open)

  def step(self) -> list[Response]:
    """Waits for what comes next, for half a second at most. Where no server is left, a thread that
    has not loaded waits for the one that has.

    Raises:
      Preempted: in a run that was told to go.
      ServersGone: no server is left, or a request was tried as often as it may be.
    """
    preemption.check()
    started = time.perf_counter()

    def look() -> tuple[list, int, bool]:
      try:
        arrived = self._arrived(0.5)
        return arrived, self._sampled, not self._fleet.usable and not self._loading
      except Failed as error:
        raise ServersGone(
          f"engine.name='server': a response could not be sampled: {error}"
        ) from error

    arrived, self.usage.tokens, lost = hosts.run_on_first_host(look, ServersGone)
    if lost and self._loads == threading.get_ident():
      self._find_servers(self._read())
    self.usage.decode_seconds += time.perf_counter() - started
    return self._handed_out(arrived)

  def _read(self) -> Any:
    """The last weights, from their directory: since they were published the trainer has needed the
    memory."""
    from gspo_jax.models import hf  # safetensors is only needed here

    mesh = None if sharding.without_mesh() else jax.sharding.get_mesh()
    return hf.load(self._weights, mesh=mesh)[0]

  def stop(self) -> list[Response]:
    left = hosts.run_on_first_host(lambda: (self._left(), self._sampled), ServersGone)
    arrived, self.usage.tokens = left
    return self._handed_out(arrived)

  def _left(self) -> list[tuple]:
    """Has servers leave what they are at, and takes what they have of it."""
    if not self._pending:
      return []
    arrived = []
    self._stopping = True
    try:
      unsent = self._fleet.run(self._fleet.abort(list(self._pending)))
      end = time.monotonic() + ABORT_S
      while self._pending.keys() - unsent and time.monotonic() < end:
        arrived += self._arrived(0.5)
      self._fleet.run(self._fleet.cancel(list(self._pending)))
      arrived += self._arrived(0.0)
    finally:
      self._stopping = False
    for together in self._pending.values():
      arrived += [self._told_of(pending, False) for pending in together]
    self._pending.clear()
    return arrived

  def _arrived(self, seconds: float) -> list[tuple]:
    """What has come, of finished responses; others are gone on with.

    Raises:
      Failed: a call was tried as often as it may be.
    """
    arrived = []
    while True:
      try:
        id_, answer = self._fleet.answers.get(timeout=seconds)
      except queue.Empty:
        return arrived
      seconds = 0.0  # whoever asks may have had enough
      if id_ not in self._pending:  # of a workload that has ended
        continue
      failed = isinstance(answer, Exception)
      if failed and not self._stopping:
        raise answer
      together = self._pending.pop(id_)
      for pending, part in zip(together, itertools.repeat(None) if failed else answer):
        before = len(pending.tokens)
        finished = part is not None and pending.add(part, self._detokenize)
        self._sampled += len(pending.tokens) - before
        if finished or self._stopping:
          arrived.append(self._told_of(pending, finished))
        elif pending.aborted > MOST_ABORTED:
          raise Failed("body", f"servers left it {pending.aborted} times without a token")
        else:
          self._send([pending])

  def _told_of(self, pending: Pending, finished: bool) -> tuple[int, Response]:
    response = pending.response(self._workload.sampling.whole, finished)
    # Without its request, whose tag is of this process.
    return pending.number, dataclasses.replace(response, request=None)

  def _handed_out(self, arrived: list[tuple[int, Response]]) -> list[Response]:
    """The responses; of processes that were told of them, with their own requests."""
    responses = []
    for number, response in arrived:
      request, left = self._open[number]
      left.remove(response.sample)
      if not left:
        del self._open[number]
      new = len(response.tokens)
      if new:
        end = request.prefix_length + new - 1
        self.usage.flops += float(flops.work(self._model, 1, new, end).forward())
      responses.append(dataclasses.replace(response, request=request))
    self._count()
    return responses

  def _count(self) -> None:
    """Puts how the servers stand into `usage`."""
    if self._fleet is None:
      return
    usable = len(self._fleet.usable)
    self.usage.servers = {
      "servers": float(usable),
      "left_out": float(len(self._fleet.servers) - usable),
      "probe/mean": self._worst,
      "probe/disagreed": float(self._disagreed),
      **{f"failed/{kind}": float(self._fleet.failures[kind]) for kind in KINDS},
    }
