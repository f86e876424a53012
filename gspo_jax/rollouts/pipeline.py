"""Collects batches ahead of the updates: asynchronous training, docs/asynchronous.md.

Version i is the weights before the updates of iteration i, and `first` is the version at the start
of the run. With `rl.lag` = L, the responses of iteration j are sampled with version
max(first, j - L). Batch i + L starts at the beginning of iteration i, right after version i is
published. So a batch's staleness is bounded when it starts, and no late batch is discarded. An
update's batch depends on iteration numbers, not on time: the same seed gives the same results.

  one mesh     the main thread collects batch i + L before the updates of iteration i: two threads
               must not start collectives on the same devices, since each could wait for the other
  two meshes   a worker thread collects batch i + L on `rollout_mesh`, during the updates of
               iterations i, i + 1, ...
  servers      a worker thread sends requests to servers. New weights reach the servers at once, and
               responses in flight continue under them: batch j = i + L has tokens of versions i to
               j, depending on the weights' arrival times

A batch that depends on arrival times can be recorded (`rl.record`) and replayed (`rl.replay`).
"""

import base64
import collections
import concurrent.futures
import contextlib
import dataclasses
import io
import json
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from gspo_jax.rollouts.collector import Collected, Collector, Stages
from gspo_jax.rollouts.groups import Group
from gspo_jax.runs.metrics import Stopwatch
from gspo_jax.runs.paths import batch_file
from gspo_jax.sampling import Engine, SingleTurn, Usage
from gspo_jax.settings.run import RLConfig
from gspo_jax.system import files, hosts, jsons, preemption

POLL_S = 0.1  # Seconds between checks of preemption and servers while waiting for a batch.
ARRAYS = "advantage_PG", "advantage_BL"


class CollectedBatch(NamedTuple):
  """A batch collected for an iteration, and the collector's position after it."""

  collected: Collected
  position: Callable[[], dict[str, Any]]


class Pipeline:
  """Collects the batches of a run, up to `rl.lag` iterations ahead, in a fixed order.

    with run.pipeline(collector, stages, last) as sampling:
      sampling.publish(params, version=last + 1)
      for step in ...:
        collected = sampling.next(step)
        sampling.release()
        ...
        sampling.publish(params, version=step + 1)

  An exception in the worker thread is raised again in `next`, `engine` or the function returned by
  `position`.

  Args:
    last: last finished iteration.
    batches: directory of recorded batches.
    mesh: the engine's separate mesh. None if the engine shares the trainer's mesh.
    publish: copies the trainer's parameters to an engine with a separate mesh, in arrays unaffected
      by later updates.
  """

  def __init__(
    self,
    collector: Collector,
    engine: Engine,
    rl: RLConfig,
    stages: Stages,
    last: int = 0,
    *,
    batches: Path,
    mesh: jax.sharding.Mesh | None = None,
    publish: Callable[[Any], Any] = lambda params: params,
  ):
    self._collector, self._engine, self._stages = collector, engine, stages
    self._rl, self._last_started, self._batches = rl, last, batches
    self._mesh, self._copy = mesh, publish
    # A worker thread queries servers, but the main thread loads weights into them: probing the
    # servers with new weights needs the trainer's devices.
    self._loads_during_steps = rl.lag > 0 and engine.loads_beside_steps
    # Batches in flight, by iteration.
    self._jobs: collections.deque[concurrent.futures.Future] = collections.deque()
    self._position = collector.position()  # After the last batch returned by `next`.
    self._published: tuple[Any, int] = None, -1  # Weights and their version.
    self._loaded = -1  # Version of the engine's weights; only the worker changes it during jobs.
    self._worker, self._idle_since, self._stop = None, 0.0, threading.Event()
    if self._mesh is not None or self._loads_during_steps:
      self._worker = concurrent.futures.ThreadPoolExecutor(1, "sampler")

  def __enter__(self) -> "Pipeline":
    return self

  def __exit__(self, *_: object) -> None:
    """Stops the worker thread and discards its batch."""
    self._stop.set()
    if self._worker is not None:
      self._worker.shutdown(cancel_futures=True)

  def publish(self, params: Any, version: int) -> None:
    """Publishes the trainer's parameters to the sampler for all later batches.

    A preemption notice interrupts loading without an exception. The next check raises Preempted,
    after the caller has set the resume point.
    """
    if self._worker is None or self._loads_during_steps:
      with contextlib.suppress(preemption.Preempted):
        self._engine.load(params, version)
      self._published = None, version
    else:
      self._published = self._copy(params), version

  def release(self) -> None:
    """Frees the engine's weights if the updates need their memory."""
    if self._worker is None:
      self._engine.release()

  def next(self, step: int) -> Collected:
    """Returns the batch of the next iteration; starts batches up to `step + lag`."""
    if self._rl.replay:
      return read(Path(self._rl.replay), step, self._collector)
    while self._last_started < min(step + self._rl.lag, self._rl.iterations):
      self._last_started += 1
      self._jobs.append(self._begin(self._last_started))
    collected, self._position = self._wait(self._jobs.popleft())
    if self._rl.record and hosts.is_first():
      write(self._batches, collected)
    return collected

  @contextlib.contextmanager
  def engine(self) -> Iterator[Engine]:
    """Yields the engine with the last published weights, once all batches in flight are done."""
    if self._worker is None:
      yield self._engine
      return
    for job in self._jobs:
      self._wait(job)
    weights, version = self._published
    with self._engine_mesh():
      self._load(weights, version)
      yield self._engine

  def position(self) -> Callable[[], dict[str, Any]]:
    """Snapshots the sampling state; returns a function that serializes it to JSON.

    The function waits for the batches in flight. Its JSON includes them, and the collector's state
    after them.
    """
    jobs, position = tuple(self._jobs), self._position

    def state() -> dict[str, Any]:
      with preemption.checked_by(lambda: None):  # A notice may be the reason for saving.
        batches = [self._wait(job) for job in jobs]
      snapshot = batches[-1].position if batches else position
      states = [get_state(collected) for collected, _ in batches]
      return snapshot() | (dict(ahead=states) if states else {})

    return state

  def set_position(self, state: Mapping[str, Any]) -> None:
    """Restores a state of `position`.

    All saved batches are trained on, even if `rl.lag` is smaller now. If it is larger, `next`
    starts additional batches. Raises ValueError if a saved batch does not fit the configuration.
    """
    self._collector.set_position(state)
    self._position = self._collector.position()
    for batch in state.get("ahead", ()):
      try:
        collected = from_state(batch, self._collector)
      except ValueError as error:
        reason = f"the checkpoint has a batch that is not trained on yet: {error}"
        raise ValueError(f"{reason}, or begin in a new --workdir") from error
      self._jobs.append(_finished_job(CollectedBatch(collected, self._position)))
      self._last_started += 1

  def _begin(self, step: int) -> concurrent.futures.Future:
    weights, version = self._published
    if self._worker is not None:
      return self._worker.submit(self._collect_in_worker, step, weights, version)
    return _finished_job(self._collect(step, version, self._stages))

  def _collect(self, step: int, version: int, stages: Stages) -> CollectedBatch:
    collected = self._collector.collect(step, stages, version)
    return CollectedBatch(collected, self._collector.position())

  def _collect_in_worker(self, step: int, weights: Any, version: int) -> CollectedBatch:
    """Collects in the worker thread; records the stages' seconds and the idle time."""
    start_s, stages = time.perf_counter(), Stopwatch()
    waited = start_s - self._idle_since if self._idle_since else 0.0
    try:
      with self._engine_mesh(), preemption.checked_by(self._check):
        self._check()
        with stages("load"):
          self._load(weights, version)
        batch = self._collect(step, version, stages)
    except BaseException:
      self._stop.set()  # Later batches would differ from those of a run without the error.
      raise
    self._idle_since = time.perf_counter()
    seconds = stages.lap() | {"time/wait_for_learner": waited}
    # Separate names: the seconds of the trainer's stages sum to the iteration's.
    times = {name.replace("/", "/sampler/", 1): value for name, value in seconds.items()}
    batch.collected.metrics.update(times)
    return batch

  def _check(self) -> None:
    """Raises Preempted in the worker thread once the pipeline has stopped.

    Until then, the trainer handles preemption notices, and saves the batches in flight.
    """
    if self._stop.is_set():
      raise preemption.Preempted

  def _load(self, weights: Any, version: int) -> None:
    if self._loaded != version and not self._loads_during_steps:
      self._engine.load(weights, version)
      self._loaded = version

  def _wait(self, job: concurrent.futures.Future) -> CollectedBatch:
    if self._worker is None:
      return job.result()
    with self._stages("wait_for_sampler"):
      while not job.done() and not concurrent.futures.wait([job], POLL_S).done:
        preemption.check()
        if self._loads_during_steps:
          self._engine.revive()
    return job.result()

  def _engine_mesh(self) -> contextlib.AbstractContextManager:
    return jax.set_mesh(self._mesh) if self._mesh is not None else contextlib.nullcontext()


def _finished_job(batch: CollectedBatch) -> concurrent.futures.Future:
  job = concurrent.futures.Future()
  job.set_result(batch)
  return job


def write(directory: Path, collected: Collected) -> None:
  """Writes the batch of an iteration to a file for `read`. Raises WriteError."""
  with files.writing(directory):
    directory.mkdir(exist_ok=True)
  files.write_whole(batch_file(directory, collected.step), [json.dumps(get_state(collected))])


def read(directory: Path, step: int, collector: Collector) -> Collected:
  """Reads the recorded batch of an iteration.

  Raises:
    ValueError: the file is missing, damaged, or of another configuration; the message names it.
  """
  path = batch_file(directory, step)
  try:
    return from_state(jsons.parse_object(path.read_bytes()), collector)
  except OSError as error:
    raise ValueError(f"rl.replay: {path} cannot be read: {error.strerror or error}") from error
  except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
    raise ValueError(f"rl.replay: {path} is no batch of this configuration: {error}") from error


def get_state(collected: Collected) -> dict[str, Any]:
  """Returns a batch as JSON, without its rollout: `from_state` rebuilds it from the groups."""
  file, arrays = io.BytesIO(), {name: getattr(collected, name) for name in ARRAYS}
  np.savez_compressed(file, **{name: x for name, x in arrays.items() if x is not None})
  return dict(
    step=collected.step,
    version=collected.version,
    groups=[group.get_state() for group in collected.groups],
    arrays=base64.b64encode(file.getvalue()).decode(),
    usage=dataclasses.asdict(collected.usage),
    metrics=collected.metrics,
  )


def from_state(state: Mapping[str, Any], collector: Collector) -> Collected:
  """Restores a batch from `get_state`."""
  arrays = np.load(io.BytesIO(base64.b64decode(state["arrays"])))
  groups = [Group.from_state(g, lambda p: SingleTurn(p.tokens)) for g in state["groups"]]
  return Collected(
    groups,
    collector.rollout(groups),
    state["step"],
    state["version"],
    usage=Usage(**state["usage"]),
    metrics=dict(state["metrics"]),
    **dict.fromkeys(ARRAYS) | dict(arrays),
  )
