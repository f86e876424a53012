"""The host's side of continuous batching: requests in, responses out as they are finished.

Everything here is decided from what was sampled, never from how long it took: two runs do the same
in the same order, and so do the processes of one run, without a word between them.
"""

import collections
import dataclasses
import functools
import itertools
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from gspo_jax import sharding
from gspo_jax.models import cache as kv_cache
from gspo_jax.models import transformer
from gspo_jax.models.sizes import REFERENCE, ComputeConfig, ModelConfig
from gspo_jax.runs import preemption
from gspo_jax.sampling.requests import (
  EngineConfig,
  Request,
  Response,
  Usage,
  Workload,
  bucket,
  sizes,
)
from gspo_jax.sampling.slots import Rows, Sampled, decode, new_state, prefill
from gspo_jax.sharding import P


@dataclasses.dataclass
class _Live:
  """A response that has a place on the devices."""

  request: Request
  sample: int
  shard: int
  prefix_routing: list[np.ndarray]  # filled when it has been fetched
  parts: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)
  count: int = 0

  def response(
    self, version: int, count: int | None = None, stopped: bool = False, finished: bool = False
  ) -> Response:
    """Returns the first `count` tokens; all of them by default."""
    nothing = [np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32)]
    columns = [np.concatenate([x, *xs]) for x, xs in zip(nothing, zip(*self.parts))] or nothing
    experts = None
    if self.prefix_routing:
      experts = np.concatenate([*self.prefix_routing, *(part[3] for part in self.parts)])
      experts = experts[: len(self.prefix_routing[0]) + (self.count if count is None else count)]
    columns = [column[:count] for column in columns]
    versions = np.full(len(columns[0]), version, np.int32)
    return Response(self.request, self.sample, *columns, versions, stopped, finished, experts)


class Scheduler:
  """Keeps the slots of the devices busy with requests for one workload and one set of weights.

  Args:
    params: in the rollout layout; on CPU unstacked, or every decode step copies them.
    version: of these weights.
    detokenize: from tokens to text, where the workload has stop strings.

  Raises:
    ValueError: the workload's window exceeds the model's positions.
  """

  def __init__(
    self,
    params: transformer.Params,
    version: int,
    model: ModelConfig,
    workload: Workload,
    config: EngineConfig,
    compute: ComputeConfig = REFERENCE,
    detokenize: Callable[[list[int]], str] | None = None,
  ):
    window = workload.window
    if window > model.max_position_embeddings:
      raise ValueError(
        f"a window of {window} tokens exceeds the model's max_position_embeddings="
        f"{model.max_position_embeddings}"
      )
    self._params, self._version = params, version
    self._config, self._workload = config, workload
    self._stop_width = max(1, len(workload.stop_ids))
    self._detokenize = detokenize
    self._shards = 1
    if not sharding.without_mesh():
      self._shards = sharding.batch_shards(jax.sharding.get_mesh())
    shape = sizes(workload, config, self._shards)
    self._slots, self._rows, self._entries = shape.slots, shape.rows, shape.entries
    common = dict(model=model, compute=compute, record_routing=workload.record_routing)
    self._prefill = functools.partial(prefill, piece=config.prefill_tokens, **common)
    self._decode = functools.partial(
      decode, steps=config.steps, sampling=workload.sampling, **common
    )
    dtype, rows = config.cache_dtype, self._shards * self._entries
    self._state = new_state(
      model,
      tuple(len(block.attention_norm) for block in self._params.blocks),
      slots=self._slots,
      window=shape.window,
      queue=rows,
      queue_window=shape.prefix,
      stop_ids=self._stop_width,
      dtype=dtype,
    )
    size = functools.partial(kv_cache.size, model, dtype=dtype)
    cache_bytes = size(self._slots, shape.window) + size(rows, shape.prefix)
    self.usage = Usage(cache_bytes=cache_bytes)

    self._requests: collections.deque[Request] = collections.deque()
    self._live: dict[int, _Live] = {}
    self._ids = 0
    self._cancelled: list[int] = []
    self._free = [list(range(self._entries)) for _ in range(self._shards)]
    self._load = [0] * self._shards  # responses that a device has still to finish
    self._queued: dict[int, tuple[int, int]] = {}  # entry: (call that first reports it, waiting)
    self._calls, self._in_flight, self._prefills = 0, collections.deque(), []
    self._clock = 0.0

  def submit(self, request: Request) -> None:
    """ValueError if it does not fit the window, or has more stop ids than were announced."""
    length = request.prefix_length
    if not request.prompt:
      raise ValueError("a prompt is empty: it has at least one token")
    longest, window = self._workload.prefix_length, self._workload.window
    if length > longest or length + request.max_new_tokens > window:
      raise ValueError(
        f"a prefix of {length} tokens with max_new_tokens={request.max_new_tokens} does not fit "
        f"prefixes of {longest} tokens in a window of {window}"
      )
    if len(request.stop_ids) > self._stop_width:
      raise ValueError(
        f"{len(request.stop_ids)} stop ids, more than the {self._stop_width} announced"
      )
    if request.stop_strings and self._detokenize is None:
      raise ValueError(f"stop_strings={list(request.stop_strings)} need detokenize")
    if request.max_new_tokens < 1 or request.samples < 1:
      raise ValueError(f"{request.samples} samples of {request.max_new_tokens} tokens: nothing")
    self._requests.append(request)

  @property
  def busy(self) -> bool:
    """Whether there is anything left to sample."""
    return bool(self._live or self._requests)

  def run(self) -> Iterator[Response]:
    """Responses in the order in which they are finished, until nothing is left to do."""
    while self.busy:
      yield from self.step()

  def step(self) -> list[Response]:
    """Has the devices go on, and returns what was finished meanwhile.

    Raises:
      Preempted: in a run that was told to go (preemption.py); nothing of it is lost but tokens.
    """
    preemption.check()
    if not self._in_flight:
      self._clock = time.perf_counter()
    self._fill_queue()
    self._dispatch()
    if len(self._in_flight) == 1:  # the devices always have the next steps at hand
      return []
    finished = self._collect()
    if not self.busy:
      self._in_flight.clear()  # there is nothing in what was started on the off chance
    return finished

  def stop(self) -> list[Response]:
    """Ends a run early. What is not finished comes back with the tokens that it has, so that it may
    be gone on with later; what nobody has begun comes back empty."""
    finished = []
    while self._in_flight:
      finished += self._collect()
    rest = [live.response(self._version) for live in self._live.values()]
    for request in self._requests:
      for sample in range(request.samples):
        live = _Live(request, request.first_sample + sample, 0, [])
        rest.append(live.response(self._version))
    self._live.clear()
    self._requests.clear()
    return finished + rest

  # To the devices.

  def _bucket(self, prefix: int) -> int:
    return bucket(prefix, self._workload.prefix_length, self._config.prefill_tokens)

  def _fill_queue(self) -> None:
    """Prefills what fits, in batches of one length; small ones only when slots would run dry."""
    while self._requests:
      length = self._bucket(self._requests[0].prefix_length)
      rows = min(self._rows, max(1, self._config.prefill_tokens // length))
      room = sum(min(rows, len(free)) for free in self._free)
      waiting = sum(count for _, count in self._queued.values())
      enough = min(rows * self._shards, len(self._requests))
      if not room or (room < enough and waiting > self._slots // 2):
        return
      chosen, others = [], collections.deque()
      for request in self._requests:
        fits = len(chosen) < room and self._bucket(request.prefix_length) == length
        (chosen if fits else others).append(request)
      self._requests = others
      self._prefill_batch(chosen, length, rows)

  def _prefill_batch(self, requests: list[Request], length: int, rows: int) -> None:
    """One call: `rows` prefixes of each device, padded to `length`."""
    total = rows * self._shards
    tokens = np.zeros((total, length), np.int32)
    field = {f.name: np.zeros(total, np.int32) for f in dataclasses.fields(Rows)}
    field |= {name: np.zeros(total, np.uint32) for name in ("seed_B", "prompt_B")}
    field["stop_BX"] = np.full((total, self._stop_width), -1, np.int32)
    waiting, entries = np.zeros(total, np.int32), np.full(total, self._entries, np.int32)
    used, placed = [0] * self._shards, []
    for request in requests:
      open_to = [s for s in range(self._shards) if self._free[s] and used[s] < rows]
      shard = min(open_to, key=self._load.__getitem__)
      row, prefix = shard * rows + used[shard], request.prefix
      used[shard] += 1
      entry = self._free[shard].pop(0)
      entries[row], waiting[row] = entry, request.samples
      tokens[row, : len(prefix) - 1] = prefix[:-1]
      field["token_B"][row] = prefix[-1]
      field["position_B"][row] = len(prefix) - 1
      field["start_B"][row] = len(request.prompt)
      field["left_B"][row] = request.max_new_tokens
      field["seed_B"][row] = request.seed
      field["prompt_B"][row] = zlib.crc32(np.asarray(request.prompt, "<i4").tobytes())
      field["sample_B"][row] = request.first_sample
      field["stop_BX"][row, : len(request.stop_ids)] = request.stop_ids
      field["id_B"][row] = self._ids
      routing: list[np.ndarray] = []
      for sample in range(request.samples):
        index = request.first_sample + sample
        self._live[self._ids + sample] = _Live(request, index, shard, routing)
      self._ids += request.samples
      self._load[shard] += request.samples
      self._queued[shard * self._entries + entry] = (self._calls, request.samples)
      placed.append((row, len(prefix) - 1, routing))
      self.usage.prefilled += len(prefix) - 1
    self.usage.padded += total * length
    arrays = (tokens, Rows(**field), waiting, entries)
    self._state, experts = self._prefill(self._params, self._state, *_put(arrays))
    self._prefills.append((experts, placed))

  def _dispatch(self) -> None:
    cancelled = np.full(self._slots, -1, np.int32)
    cancelled[: len(self._cancelled)] = self._cancelled
    self._cancelled = []
    marker = self._state.waiting_R.sum() if self._prefills else None
    self._state, out = self._decode(self._params, self._state, _replicate(cancelled))
    for x in jax.tree.leaves(out):
      x.copy_to_host_async()
    self._in_flight.append((self._calls, self._prefills, marker, out))
    self._calls, self._prefills = self._calls + 1, []

  # From the devices.

  def _collect(self) -> list[Response]:
    """Fetches what the oldest call sampled."""
    call, prefills, marker, out = self._in_flight.popleft()
    if prefills:
      jax.block_until_ready(marker)
      self.usage.prefill_seconds += self._lap()
    for experts, placed in prefills:
      if experts is not None:
        experts = np.asarray(experts)
        for row, length, routing in placed:
          routing.append(experts[row, :length])
    out = jax.tree.map(np.asarray, out)
    self.usage.decode_seconds += self._lap()
    self.usage.steps += int(out.steps)
    self.usage.slot_steps += int(out.steps) * self._slots
    for entry, (first, _) in list(self._queued.items()):
      if first <= call:
        self._queued[entry] = (first, int(out.waiting_R[entry]))
        if not out.waiting_R[entry]:
          del self._queued[entry]
          self._free[entry // self._entries].append(entry % self._entries)

    finished = []
    for id_, *part in _by_response(out):
      live = self._live.get(id_)
      if live is None:
        continue  # it ended with a stop string, and its slot did not know yet
      before = live.count
      live.parts.append(tuple(part))
      live.count += len(part[0])
      count, stopped = live.count, bool(part[0][-1] in live.request.stop_ids)
      ended = stopped or count == live.request.max_new_tokens
      cut = self._stop_string(live, before) if live.request.stop_strings else None
      if cut is not None:
        if not ended:
          self._cancelled.append(id_)  # its slot goes on, and is told with the next call
        count, stopped, ended = cut, True, True
      self.usage.tokens += count - before
      if ended:
        finished.append(live.response(self._version, count, stopped, finished=True))
        self._load[live.shard] -= 1
        del self._live[id_]
    return finished

  def _stop_string(self, live: _Live, before: int) -> int | None:
    """Number of sampled tokens that complete a stop string, if one from `before` on does."""
    request, new = live.request, live.count - before
    # No token is shorter than a byte: what completes now began within so many tokens.
    longest = max(len(s.encode()) for s in request.stop_strings)
    begun = request.begun[len(request.begun) - min(request.unfinished, longest) :]
    tokens: list[int] = []  # the last ones, so that a long response costs no more than a short one
    for piece in itertools.chain((part[0].tolist() for part in reversed(live.parts)), [begun]):
      tokens[:0] = piece
      if len(tokens) >= longest + new:
        break
    tokens = tokens[-(longest + new) :]
    old = len(tokens) - new

    def complete(end: int) -> bool:
      text = self._detokenize(tokens[:end])
      return any(s in text for s in request.stop_strings)

    if not complete(len(tokens)):
      return None
    return before + next(n for n in range(1, new + 1) if complete(old + n))

  def _lap(self) -> float:
    now = time.perf_counter()
    seconds, self._clock = now - self._clock, now
    return seconds


def _by_response(out: Sampled) -> Iterator[tuple]:
  """(id, tokens, logp, full_logp[, experts]) of each response with tokens in `out`."""
  steps = int(out.steps)
  fields = [out.token_nW, out.logp_nW, out.full_logp_nW]
  fields += [] if out.route_nWlk is None else [out.route_nWlk]
  id_Z = out.id_nW[:steps].T.ravel()  # slot by slot, in the order of time
  used_Z = np.flatnonzero(id_Z >= 0)
  if not len(used_Z):
    return
  ids = id_Z[used_Z]
  cuts = np.flatnonzero(np.diff(ids)) + 1
  columns = []
  for x in fields:
    x = np.swapaxes(x[:steps], 0, 1)
    columns.append(np.split(x.reshape(-1, *x.shape[2:])[used_Z], cuts))
  starts = [0, *cuts.tolist()]
  yield from zip(ids[starts].tolist(), *columns)


def _put(tree: Any) -> Any:
  if sharding.without_mesh():
    return tree
  return sharding.put_batch(tree, jax.sharding.get_mesh())


def _replicate(x: np.ndarray) -> Any:
  if sharding.without_mesh():
    return x
  return sharding.put_batch(x, jax.sharding.get_mesh(), P())
