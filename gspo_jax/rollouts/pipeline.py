"""Collects batches ahead of the updates: asynchronous training, docs/asynchronous.md.

Version i is the weights before the updates of iteration i, and `first` is the version at the start
of the run. With `rl.lag` = L, the responses of iteration j are sampled with version
max(first, j - L). Batch i + L starts at the beginning of iteration i, right after version i is
published. So the start of a batch bounds its staleness, and no late batch is discarded. Counts
alone decide the batch of each update: the same seed gives the same results.

  one mesh     the main thread collects batch i + L before the updates of iteration i: two threads
               must not start collectives on the same devices, since each could wait for the other
  two meshes   a worker thread collects batch i + L on `rollout_mesh`, during the updates of
               iterations i, i + 1, ...
  servers      a worker thread sends requests to servers. New weights reach the servers at once, and
               responses in flight continue under them: batch j = i + L has tokens of versions i to
               j, depending on their arrival times

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

POLL_S = 0.1  # seconds between checks of notices and servers during a wait for a batch
ARRAYS = "advantage_PG", "advantage_BL"


class Ahead(NamedTuple):
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

  An exception during collection is raised again in `next`, `engine` or the function of `position`.

  Args:
    last: the last finished iteration.
    batches: directory of recorded batches.
    mesh: the engine's own mesh; None: the engine shares the trainer's mesh.
    publish: copies the trainer's parameters into the layout of an engine with its own mesh, in
      arrays unaffected by later updates.
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
    self._rl, self._begun, self._batches = rl, last, batches
    self._mesh, self._copy = mesh, publish
    # A worker thread queries servers, but the main thread loads weights into them: the probe needs
    # the trainer's devices.
    self._beside = rl.lag > 0 and engine.loads_beside_steps
    self._jobs: collections.deque[concurrent.futures.Future] = collections.deque()  # ordered
    self._position = collector.position()  # after the last batch returned by `next`
    self._published: tuple[Any, int] = None, -1  # weights and their version
    self._loaded = -1  # version of the engine's weights; the worker's while it has jobs
    self._worker, self._idle_since, self._ended = None, 0.0, threading.Event()
    if self._mesh is not None or self._beside:
      self._worker = concurrent.futures.ThreadPoolExecutor(1, "sampler")

  def __enter__(self) -> "Pipeline":
    return self

  def __exit__(self, *_: object) -> None:
    """Stops the worker thread and discards its batch."""
    self._ended.set()
    if self._worker is not None:
      self._worker.shutdown(cancel_futures=True)

  def publish(self, params: Any, version: int) -> None:
    """Publishes the trainer's parameters to the sampler for all later batches.

    A preemption notice interrupts loading without an exception. The next check raises it, once the
    caller has set the resume point.
    """
    if self._worker is None or self._beside:
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
    while self._begun < min(step + self._rl.lag, self._rl.iterations):
      self._begun += 1
      self._jobs.append(self._begin(self._begun))
    collected, self._position = self._wait(self._jobs.popleft())
    if self._rl.record and hosts.is_first():
      write(self._batches, collected)
    return collected

  @contextlib.contextmanager
  def engine(self) -> Iterator[Engine]:
    """Yields the engine with the last published weights, after all batches in flight."""
    if self._worker is None:
      yield self._engine
      return
    for job in self._jobs:
      self._wait(job)
    weights, version = self._published
    with self._on_its_mesh():
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
        ahead = [self._wait(job) for job in jobs]
      snapshot = ahead[-1].position if ahead else position
      batches = [get_state(collected) for collected, _ in ahead]
      return snapshot() | (dict(ahead=batches) if batches else {})

    return state

  def set_position(self, state: Mapping[str, Any]) -> None:
    """Restores a state of `position`.

    All saved batches are trained on, even if the lag has become smaller. If it has become larger,
    the next call of `next` starts the additional batches. Raises ValueError if a saved batch does
    not fit the run's configuration.
    """
    self._collector.set_position(state)
    self._position = self._collector.position()
    for batch in state.get("ahead", ()):
      try:
        collected = from_state(batch, self._collector)
      except ValueError as error:
        reason = f"a batch waits to be trained on in the checkpoint: {error}"
        raise ValueError(f"{reason}, or begin in a new --workdir") from error
      self._jobs.append(_done(Ahead(collected, self._position)))
      self._begun += 1

  def _begin(self, step: int) -> concurrent.futures.Future:
    weights, version = self._published
    if self._worker is not None:
      return self._worker.submit(self._elsewhere, step, weights, version)
    return _done(self._collect(step, version, self._stages))

  def _collect(self, step: int, version: int, stages: Stages) -> Ahead:
    collected = self._collector.collect(step, stages, version)
    return Ahead(collected, self._collector.position())

  def _elsewhere(self, step: int, weights: Any, version: int) -> Ahead:
    """Collects in the worker thread; records the stages' seconds and the idle time."""
    start_s, stages = time.perf_counter(), Stopwatch()
    waited = start_s - self._idle_since if self._idle_since else 0.0
    try:
      with self._on_its_mesh(), preemption.checked_by(self._check):
        self._check()
        with stages("load"):
          self._load(weights, version)
        ahead = self._collect(step, version, stages)
    except BaseException:
      self._ended.set()  # Later batches would differ from an uninterrupted run's.
      raise
    self._idle_since = time.perf_counter()
    seconds = stages.lap() | {"time/wait_for_learner": waited}
    # Names apart from the trainer's stages, whose seconds sum to the iteration's.
    beside = {name.replace("/", "/sampler/", 1): value for name, value in seconds.items()}
    ahead.collected.metrics.update(beside)
    return ahead

  def _check(self) -> None:
    """Raises Preempted in the worker thread once the pipeline has ended.

    Before that, preemption notices are handled by the trainer, which saves the batches in flight.
    """
    if self._ended.is_set():
      raise preemption.Preempted

  def _load(self, weights: Any, version: int) -> None:
    if self._loaded != version and not self._beside:
      self._engine.load(weights, version)
      self._loaded = version

  def _wait(self, job: concurrent.futures.Future) -> Ahead:
    if self._worker is None:
      return job.result()
    with self._stages("wait_for_sampler"):
      while not job.done() and not concurrent.futures.wait([job], POLL_S).done:
        preemption.check()
        if self._beside:
          self._engine.revive()
    return job.result()

  def _on_its_mesh(self) -> contextlib.AbstractContextManager:
    return jax.set_mesh(self._mesh) if self._mesh is not None else contextlib.nullcontext()


def _done(ahead: Ahead) -> concurrent.futures.Future:
  job = concurrent.futures.Future()
  job.set_result(ahead)
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
    raise ValueError(f"rl.replay: {path} is no batch of such a run: {error}") from error


def get_state(collected: Collected) -> dict[str, Any]:
  """Returns JSON of a batch without its rollout, rebuilt from the groups on loading."""
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
