"""Batches that are collected ahead of the updates: asynchronous training, docs/asynchronous.md.

With `rl.lag` = L the responses of iteration j are sampled with the weights of version
max(first, j - L), where version i is what there is before the updates of iteration i and `first`
what the run starts with. Batch i + L is begun when iteration i begins, which has just published
version i. So staleness is bounded by when a batch is begun, nothing that comes late is discarded,
and what is trained on when follows from counts: the same seed gives the same figures.

  one mesh     batch i + L is collected before the updates of i, by the same thread: two threads
               must not start collectives on the same devices, each could wait for the other
  two meshes   a thread collects it on `rollout_mesh` while the updates of i, i + 1, ... are made
  servers      a thread asks them, and new weights reach them at once: a response goes on under
               these, so that a batch is of versions i to j, by when its tokens came

What is by arrival can be recorded (`rl.record`), and trained on again as it was (`rl.replay`).
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

POLL_S = 0.1  # seconds between two looks at notices and servers while the trainer waits for a batch
ARRAYS = "advantage_PG", "advantage_BL"


class Ahead(NamedTuple):
  """A batch that was collected for an iteration, and where the collector stood after it."""

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

  What is raised while a batch is collected is raised where it is waited for.

  Args:
    last: the iteration that is done.
    batches: directory of the batches that are recorded.
    mesh: of the engine alone; None: it is on the trainer's.
    publish: the trainer's parameters as such an engine loads them, in arrays that no update
      changes.
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
    # Servers that are asked by a thread; loading is the trainer's, whose devices the probe needs.
    self._beside = rl.lag > 0 and engine.loads_beside_steps
    self._jobs: collections.deque[concurrent.futures.Future] = collections.deque()  # ordered
    self._position = collector.position()  # after the batch that was given out last
    self._published: tuple[Any, int] = None, -1  # weights and their version
    self._loaded = -1  # version that the engine has; the thread's, unless it has nothing to do
    self._worker, self._idle_since, self._ended = None, 0.0, threading.Event()
    if self._mesh is not None or self._beside:
      self._worker = concurrent.futures.ThreadPoolExecutor(1, "sampler")

  def __enter__(self) -> "Pipeline":
    return self

  def __exit__(self, *_: object) -> None:
    """Stops the collecting thread and discards its batch."""
    self._ended.set()
    if self._worker is not None:
      self._worker.shutdown(cancel_futures=True)

  def publish(self, params: Any, version: int) -> None:
    """Gives the sampler the trainer's parameters for all later batches. A notice breaks it off and
    is left to the next check: the caller has yet to say what to save."""
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
    """Returns the batch of an iteration, in turn. Begins the one `lag` iterations later."""
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
    """Yields the engine with the last published weights, while nothing is collected."""
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
    """Snapshots the sampling state. The returned function makes JSON of it for a checkpoint. It
    waits for the batches in flight, and adds them and the collector's state after them."""
    jobs, position = tuple(self._jobs), self._position

    def state() -> dict[str, Any]:
      with preemption.checked_by(lambda: None):  # a notice may be why
        ahead = [self._wait(job) for job in jobs]
      snapshot = ahead[-1].position if ahead else position
      batches = [get_state(collected) for collected, _ in ahead]
      return snapshot() | (dict(ahead=batches) if batches else {})

    return state

  def set_position(self, state: Mapping[str, Any]) -> None:
    """Restores a state of `position`. Batches of a run with a larger lag are all trained on; after
    one with a smaller lag more are begun at once. Raises ValueError if they do not go with the
    run."""
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
    """Collects in the worker's thread; records its seconds and its waiting time."""
    start_s, stages = time.perf_counter(), Stopwatch()
    waited = start_s - self._idle_since if self._idle_since else 0.0
    try:
      with self._on_its_mesh(), preemption.checked_by(self._check):
        self._check()
        with stages("load"):
          self._load(weights, version)
        ahead = self._collect(step, version, stages)
    except BaseException:
      self._ended.set()  # batches after this one would be others than those of a run that goes on
      raise
    self._idle_since = time.perf_counter()
    seconds = stages.lap() | {"time/wait_for_learner": waited}
    # Beside the trainer's stages, which add up to an iteration.
    beside = {name.replace("/", "/sampler/", 1): value for name, value in seconds.items()}
    ahead.collected.metrics.update(beside)
    return ahead

  def _check(self) -> None:
    """Ends the thread's work after the trainer has ended. Until then a notice is the trainer's: it
    saves the batches in flight."""
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
    ValueError: there is none, or it does not go with the run; names the file.
  """
  path = batch_file(directory, step)
  try:
    return from_state(jsons.parse_object(path.read_bytes()), collector)
  except OSError as error:
    raise ValueError(f"rl.replay: {path} cannot be read: {error.strerror or error}") from error
  except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
    raise ValueError(f"rl.replay: {path} is no batch of such a run: {error}") from error


def get_state(collected: Collected) -> dict[str, Any]:
  """Returns JSON of a batch without its rollout, which its groups make."""
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
