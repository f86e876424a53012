"""Host side of continuous batching: schedules requests and collects finished responses.

All decisions depend on requests and on results from the devices, never on time. So scheduling is
deterministic, and all hosts take the same decisions without communication.

Slots and queue (slots.py) are split into *shards* along the batch axes of the mesh. A shard is on
one device, or on several devices that have copies or slices of the same rows. A *call* is a call of
`slots.decode`. The host dispatches the next call before it reads the results of the previous one.
"""

import collections
import functools
import time
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gspo_jax import sharding
from gspo_jax.models import flops, transformer
from gspo_jax.sampling.local.responses import (
  Entry,
  LiveResponse,
  new_responses,
  restart_requests,
  split_by_response,
)
from gspo_jax.sampling.local.slots import Rows, Sampled, decode, new_state, prefill
from gspo_jax.sampling.requests import Request, Response, Usage, Workload, sizes
from gspo_jax.settings.model import REFERENCE, ComputeConfig, ModelConfig
from gspo_jax.settings.sampling import EngineConfig
from gspo_jax.sharding import P
from gspo_jax.system import preemption


class Scheduler:
  """Schedules one workload's requests on the slots, with fixed weights.

  Args:
    params: parameters in the sampler's layout (`transformer.decoding_params`).
    version: weight version.
    model: configuration of the model.
    workload: limits of the requests.
    config: section `engine` of the configuration.
    compute: compute settings.
    text_bytes: bytes of each token id's text; None if there are no stop strings.

  Raises:
    ValueError: the workload's window exceeds the model's positions or the pages of a shard.
  """

  def __init__(
    self,
    params: transformer.Params,
    version: int,
    model: ModelConfig,
    workload: Workload,
    config: EngineConfig,
    compute: ComputeConfig = REFERENCE,
    text_bytes: Sequence[bytes] | None = None,
  ):
    window = workload.window
    if window > model.max_position_embeddings:
      raise ValueError(
        f"prompt and response may have {window} tokens, beyond the model's max_position_embeddings="
        f"{model.max_position_embeddings}: shorten the longest prompt or response"
      )
    self._params, self._version = params, version
    self._model, self._config, self._workload = model, config, workload
    self._stop_width = max(1, len(workload.stop_ids))
    self._text_bytes = text_bytes
    self._shards = 1
    if not sharding.without_mesh():
      self._shards = sharding.batch_shards(jax.sharding.get_mesh())
    self._size = size = sizes(workload, config, self._shards)
    self._slots, self._entries = size.slots, size.entries
    common = dict(model=model, compute=compute, record_routing=workload.record_routing)
    self._prefill = functools.partial(prefill, piece=config.prefill_tokens, **common)
    self._decode = functools.partial(
      decode,
      steps=config.steps,
      sampling=workload.sampling,
      width=workload.support,
      vocabulary=workload.vocabulary,
      **common,
    )
    stop_ids, dtype = self._stop_width, config.cache_dtype
    self._state = state = new_state(model, params.depths, size, stop_ids=stop_ids, dtype=dtype)
    caches = jax.tree.leaves((state.cache, state.staged, state.staged_states))
    self.usage = Usage(cache_bytes=sum(x.nbytes for x in caches if x.ndim > 4))

    # Requests to prefill, each with its displaced responses (refill.py); [] for a new request.
    self._requests: collections.deque[tuple[Request, list[LiveResponse]]] = collections.deque()
    self._live: dict[int, LiveResponse] = {}  # Prefilled, unfinished responses by id.
    self._ids = 0  # Next id.
    self._cancelled: list[int] = []  # Ids of responses to cancel in the next call.
    self._free_entries = [list(range(self._entries)) for _ in range(self._shards)]
    self._load = [0] * self._shards  # Number of unfinished responses of each shard.
    # By shard: free pages after the last collected call, and pages of later prefills.
    self._free_pages = np.full(self._shards, size.pages)
    self._prefix_pages = np.zeros(self._shards, int)
    # Queue entries in use, by shard · `_entries` + index in the shard.
    self._queued: dict[int, Entry] = {}
    self._calls = 0  # Number of calls so far.
    self._in_flight = collections.deque()  # Dispatched calls with results not yet fetched.
    # Prefills since the last call. Each is a pair: the experts of all rows, on the devices, and a
    # list with (row, length, list to fill with the row's experts) for each prefix.
    self._prefills = []
    self._clock = 0.0  # Time of the last `_lap`, by `time.perf_counter`.

  def submit(self, request: Request) -> None:
    """Queues a request. Raises ValueError if the request does not fit the workload."""
    work, vocab_size = self._workload, self._model.vocab_size
    request.check(work.prefix_length, work.window, vocab_size, self._text_bytes)
    if len(request.stop_ids) > self._stop_width:
      raise ValueError(
        f"a request has {len(request.stop_ids)} stop ids, and the workload allows "
        f"{self._stop_width}: list them all in Workload.stop_ids"
      )
    self._requests.append((request, []))

  @property
  def busy(self) -> bool:
    """Whether any request is unfinished."""
    return bool(self._live or self._requests)

  def step(self) -> list[Response]:
    """Dispatches a call, and returns the responses finished in the previous call.

    Raises:
      Preempted: the run was asked to stop (system/preemption.py).
    """
    preemption.check()
    if not self._in_flight:
      self._clock = time.perf_counter()
    self._fill_queue()
    self._dispatch()
    if len(self._in_flight) == 1:  # The first call: there is no previous call to collect.
      return []
    finished = self._collect()
    if not self.busy:
      self._in_flight.clear()  # The call just dispatched has no response to continue.
    return finished

  def stop(self) -> list[Response]:
    """Ends the workload, and returns its remaining responses.

    Unfinished responses have their tokens so far, possibly none, and can be resumed.
    """
    finished = []
    while self._in_flight:
      finished += self._collect()
    lives = list(self._live.values())
    for request, displaced in self._requests:
      lives += displaced or new_responses(request)
    self._live.clear()
    self._requests.clear()
    return finished + [live.response(self._version) for live in lives]

  # Dispatch to the devices.

  def _fill_queue(self) -> None:
    """Prefills waiting requests in batches of one padded length.

    If more responses wait in the queue than half the number of slots, a prefill is delayed until
    the queue has free entries for a full batch.
    """
    while self._requests:
      length = self._size.bucket(self._requests[0][0].prefix_length)
      rows = self._size.at_once(length)
      capacity = sum(min(rows, len(free)) for free in self._free_entries)
      queued = sum(entry.waiting for entry in self._queued.values())
      full_batch = min(rows * self._shards, len(self._requests))
      if not capacity or (capacity < full_batch and queued > self._slots // 2):
        return
      fitting, waiting = [], collections.deque()
      for entry in self._requests:
        fits = len(fitting) < capacity and self._size.bucket(entry[0].prefix_length) == length
        (fitting if fits else waiting).append(entry)
      placed = self._place(fitting, rows)
      self._requests = waiting
      self._requests.extendleft(reversed(fitting[len(placed) :]))
      if placed:
        self._prefill_batch(placed, length, rows)
      if len(placed) < len(fitting):  # Too few free pages.
        return

  def _place(self, fitting: list, rows: int) -> list[tuple[Request, list[LiveResponse]]]:
    """Assigns requests to the least loaded shards, at most `rows` to each.

    If `engine.cache_tokens` is set, a shard with unfinished responses takes a prefix only if at
    least one free page per slot remains afterwards. Stops at the first request that fits no shard,
    so that requests keep their order.
    """
    used, placed = [0] * self._shards, []
    for request, lives in fitting:
      pages = -(-(request.prefix_length - 1) // self._size.page)
      candidates = [
        d
        for d in range(self._shards)
        if used[d] < min(rows, len(self._free_entries[d]))
        and (
          not (self._config.cache_tokens and self._load[d])
          or self._free_pages[d] - self._prefix_pages[d] - pages >= self._slots // self._shards
        )
      ]
      if not candidates:
        break
      shard = min(candidates, key=self._load.__getitem__)
      lives = lives or new_responses(request)
      for live in lives:
        live.shard, live.call = shard, self._calls
      used[shard] += 1
      self._load[shard] += request.samples
      self._prefix_pages[shard] += pages
      placed.append((request, lives))
    return placed

  def _prefill_batch(self, placed: list, length: int, rows: int) -> None:
    """Dispatches one prefill of up to `rows` prefixes per shard, padded to `length`."""
    total = rows * self._shards
    tokens, prefixes = np.zeros((total, length), np.int32), Rows.zeros(total, self._stop_width, np)
    prefixes.stop_BX[:] = -1
    waiting, entries = np.zeros(total, np.int32), np.full(total, self._entries, np.int32)
    used, fetched = [0] * self._shards, []
    for request, lives in placed:
      shard, prefix = lives[0].shard, request.prefix
      row = shard * rows + used[shard]
      used[shard] += 1
      entry = self._free_entries[shard].pop(0)
      entries[row], waiting[row] = entry, request.samples
      tokens[row, : len(prefix) - 1] = prefix[:-1]
      prefixes.token_B[row] = prefix[-1]
      prefixes.position_B[row] = len(prefix) - 1
      prefixes.start_B[row] = len(request.prompt)
      prefixes.remaining_B[row] = request.max_new_tokens
      prefixes.seed_B[row] = request.seed
      prefixes.prompt_B[row] = zlib.crc32(np.asarray(request.prompt, "<i4").tobytes())
      prefixes.sample_B[row] = request.first_sample
      prefixes.stop_BX[row, : len(request.stop_ids)] = request.stop_ids
      prefixes.id_B[row] = self._ids
      experts: list[np.ndarray] = []
      for live in lives:
        self._live[self._ids] = live
        self._ids += 1
        if not live.count:  # A response with tokens keeps the experts of its first forward pass.
          live.experts = experts
      number = shard * self._entries + entry
      self._queued[number] = Entry(self._calls, request.samples, end=self._ids)
      fetched.append((row, len(prefix) - 1, experts))
      self.usage.prefilled += len(prefix) - 1
    self.usage.padded += total * length
    lengths = np.array([request.prefix_length - 1 for request, _ in placed])
    work = flops.work(self._model, 1, lengths, lengths)
    self.usage.flops += float(np.sum(work.forward() - work.head))  # Prefill computes no logits.
    arrays = _put_arrays((tokens, prefixes, waiting, entries))
    self._state, experts_rTlk = self._prefill(self._params, self._state, *arrays)
    self._prefills.append((experts_rTlk, fetched))

  def _dispatch(self) -> None:
    """Dispatches a call, and the copy of its results to the host."""
    cancelled = np.full(self._slots, -1, np.int32)
    cancelled[: len(self._cancelled)] = self._cancelled
    self._cancelled = []
    # A scalar from the state after the prefills. `_collect` waits for it, to time the prefills.
    marker = self._state.waiting_R.sum() if self._prefills else None
    self._state, out = self._decode(self._params, self._state, _put_arrays(cancelled, P()))
    for x in jax.tree.leaves(out):
      x.copy_to_host_async()
    self._in_flight.append((self._calls, self._prefills, self._prefix_pages.copy(), marker, out))
    self._calls, self._prefills = self._calls + 1, []

  # Collection from the devices.

  def _collect(self) -> list[Response]:
    """Fetches the results of the oldest call; returns the responses finished in this call."""
    call, prefills, prefix_pages, marker, out = self._in_flight.popleft()
    if prefills:
      jax.block_until_ready(marker)
      self.usage.prefill_seconds += self._lap()
    for experts_rTlk, placed in prefills:
      if experts_rTlk is not None:
        experts_rTlk = np.asarray(experts_rTlk)
        for row, length, experts in placed:
          experts.append(experts_rTlk[row, :length])
    out = jax.tree.map(np.asarray, out)
    self.usage.decode_seconds += self._lap()
    self.usage.steps += int(out.steps)
    self.usage.slot_steps += int(out.steps) * self._slots
    for number, entry in list(self._queued.items()):
      if entry.call <= call:
        self._queued[number] = entry._replace(waiting=int(out.waiting_R[number]))
        if not out.waiting_R[number]:
          del self._queued[number]
          self._free_entries[number // self._entries].append(number % self._entries)
    finished, sampled = [], []
    for id_, *part in split_by_response(out):
      live = self._live.get(id_)
      if live is None:
        continue  # Tokens after a stop string, from a call dispatched before the cancellation.
      old_count = live.count
      live.parts.append(tuple(part))
      live.count += len(part[0])
      count, stopped = live.count, bool(part[0][-1] in live.request.stop_ids)
      ended = stopped or count == live.request.max_new_tokens
      string_end = live.stopped_by(self._text_bytes)
      if string_end is not None:
        if not ended:
          self._cancelled.append(id_)  # The next call ends it, but the call in flight does not.
        count, stopped, ended = string_end, True, True
      self.usage.tokens += count - old_count
      # For FLOPs: number of decode steps, and number of positions up to the last input token.
      sampled.append((count - old_count, live.request.prefix_length + count - 1))
      if ended:
        finished.append(live.response(self._version, count, stopped, finished=True))
        self._load[live.shard] -= 1
        del self._live[id_]
    if sampled:
      new, end = np.array(sampled).T
      self.usage.flops += float(np.sum(flops.work(self._model, 1, new, end).forward()))
    if out.live_W is not None:
      self._free_pages, self._prefix_pages = out.free_d, self._prefix_pages - prefix_pages
      for _, _, later_pages, _, _ in self._in_flight:
        later_pages -= prefix_pages  # `out.free_d` accounts for the pages of these prefixes.
      self._requeue_displaced(call, out)
    return finished

  def _requeue_displaced(self, call: int, out: Sampled) -> None:
    """Queues displaced responses for a restart, at the front of all requests.

    An unfinished response is displaced if it is neither in a slot nor waiting in the queue.
    """
    in_flight = set(out.live_W.tolist())
    for entry in self._queued.values():
      if entry.call <= call:
        in_flight.update(range(entry.end - entry.waiting, entry.end))
    displaced = {
      i: live for i, live in self._live.items() if live.call <= call and i not in in_flight
    }
    for id_, live in displaced.items():
      self._load[live.shard] -= 1
      del self._live[id_]
    self.usage.put_aside += len(displaced)
    self._requests.extendleft(reversed(list(restart_requests(displaced.values()))))

  def _lap(self) -> float:
    """Returns the seconds since the last lap, and starts the next."""
    before, self._clock = self._clock, time.perf_counter()
    return self._clock - before


def _put_arrays(tree: Any, *spec: P) -> Any:
  """Puts arrays on the mesh, if there is one. By default they are split over the batch axes."""
  if sharding.without_mesh():
    return tree
  return sharding.put_batch(tree, jax.sharding.get_mesh(), *spec)
