"""Collects batches ahead of the updates, for asynchronous training (docs/asynchronous.md).

Batch i is the training data of iteration i. Version i is the weights before the updates of
iteration i, and `first` is the version at the start of the run. If `rl.lag` is L, sampling of batch
j starts with version max(first, j - L). Sampling of batch i + L may start at the beginning of
iteration i, when version i is published. So the age of a batch is known in advance, and no batch is
discarded as too old. In the first two arrangements below, batches of a local engine do not depend
on time, so the same seed gives the same results.

There are three arrangements:

- One mesh: the main thread collects batch i + L before the updates of iteration i. Two threads
  might deadlock, if they started collectives on the same devices in different orders. Servers have
  this arrangement too, if L = 0 or the run has several processes.
- Two meshes: a worker thread collects batch i + L on `rollout_mesh`, during the updates of
  iterations i, i + 1, and so on.
- Servers, if L > 0 and the run has one process: a worker thread sends requests to servers. The
  servers load new weights as soon as the trainer has computed them, and responses in flight
  continue with the new weights. So batch j = i + L has tokens of versions i to j, and depends on
  the times at which weights arrive. Such batches can be recorded (`rl.record`) and replayed
  (`rl.replay`).
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

from gspo_jax.rollouts.advantages import options
from gspo_jax.rollouts.collector import Collected, Collector, Stages
from gspo_jax.rollouts.groups import Group
from gspo_jax.runs.metrics import Stopwatch
from gspo_jax.runs.paths import batch_file
from gspo_jax.sampling import Engine, SingleTurn, Usage
from gspo_jax.settings.run import RLConfig, RunConfig
from gspo_jax.system import files, hosts, jsons, preemption

POLL_S = 0.1  # Seconds between checks of preemption and servers while waiting for a batch.
ARRAYS = "advantage_PG", "advantage_BL"  # Fields of `Collected` saved as arrays.
DISTRIBUTION = "temperature", "top_k", "top_p", "min_p"


class CollectedBatch(NamedTuple):
  """A batch collected for an iteration, and the collector's state after it."""

  collected: Collected
  position: Callable[[], dict[str, Any]]  # Result of `Collector.position`.


class Pipeline(contextlib.AbstractContextManager):
  """Collects the batches of a run, up to `rl.lag` iterations ahead, in a fixed order.

    with run.pipeline(collector, stages, last) as sampling:
      sampling.publish(params, version=last + 1)
      for step in ...:
        collected = sampling.next(step)
        sampling.release()
        ...  # Updates
        sampling.publish(params, version=step + 1)

  An exception in the worker thread is raised again in the main thread: in `next`, in `engine`, or
  in the function returned by `position`.

  Args:
    stages: timer of the main thread's stages; `stages(name)` is a context manager.
    last: number of the last finished iteration; 0 at the start of a run.
    batches: directory in which batches are recorded.
    mesh: mesh of the engine. None if the engine has the trainer's mesh.
    publish: copies the trainer's parameters to `mesh`; unused if `mesh` is None. Later updates must
      not change the copy.
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
    # The worker thread sends requests to servers, but the main thread loads weights, since loading
    # also compares log-probs of servers and trainer on the trainer's devices.
    self._loads_during_steps = rl.lag > 0 and engine.loads_beside_steps
    # Batches that were started and not yet returned by `next`, in order of iteration.
    self._jobs: collections.deque[concurrent.futures.Future] = collections.deque()
    self._position = collector.position()  # State after the last batch that `next` returned.
    # Newest weights and their version. The weights are None if `publish` has already loaded them.
    self._published: tuple[Any, int] = None, -1
    self._loaded = -1  # Version loaded by `_load`; only the worker changes it during jobs.
    self._worker, self._idle_since, self._stop = None, 0.0, threading.Event()
    if self._mesh is not None or self._loads_during_steps:
      self._worker = concurrent.futures.ThreadPoolExecutor(1, "sampler")

  def __exit__(self, *_: object) -> None:
    """Stops the worker thread, and discards the batches in flight."""
    self._stop.set()
    if self._worker is not None:
      self._worker.shutdown(cancel_futures=True)

  def publish(self, params: Any, version: int) -> None:
    """Publishes the trainer's parameters to the sampler for all later batches.

    A preemption notice interrupts loading, but raises no exception. `Preempted` is raised by the
    next check instead, after the caller has set the resume point.
    """
    if self._worker is None or self._loads_during_steps:
      with contextlib.suppress(preemption.Preempted):
        self._engine.load(params, version)
      self._published = None, version
    else:
      self._published = self._copy(params), version

  def release(self) -> None:
    """Frees the engine's weights before updates on the same devices."""
    if self._worker is None:
      self._engine.release()

  def next(self, step: int) -> Collected:
    """Returns the batch of iteration `step`; starts batches up to `step` + `rl.lag`.

    If `rl.replay` is set, the batch is read from a file, and nothing is sampled.
    """
    if self._rl.replay:
      return read(Path(self._rl.replay), step, self._collector)
    while self._last_started < min(step + self._rl.lag, self._rl.iterations):
      self._last_started += 1
      self._jobs.append(self._begin(self._last_started))
    collected, self._position = self._wait(self._jobs.popleft())
    if self._rl.record and hosts.is_first():
      write(self._batches, collected, self._collector.config)
    return collected

  @contextlib.contextmanager
  def engine(self) -> Iterator[Engine]:
    """Yields the engine with the last published weights, for evaluation.

    `engine` first waits for all batches in flight.
    """
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
    """Copies the sampling state; returns a function that converts the copy to JSON types.

    The function waits for the batches in flight. It returns these batches, and the collector's
    state after the last of them.
    """
    jobs, position = tuple(self._jobs), self._position

    def state() -> dict[str, Any]:
      # A preemption notice must not interrupt the wait: it may be the reason for saving.
      with preemption.checked_by(lambda: None):
        batches = [self._wait(job) for job in jobs]
      snapshot = batches[-1].position if batches else position
      states = [get_state(collected) for collected, _ in batches]
      sampled = dict(temperature=self._collector.config.sampling.temperature)
      return snapshot() | sampled | (dict(ahead=states) if states else {})

    return state

  def set_position(self, state: Mapping[str, Any]) -> None:
    """Restores a state of `position`.

    If the state was saved with a different `rl.lag`, all saved batches are still trained on, and
    `next` starts the batches that a larger lag needs. Raises ValueError if a saved batch does not
    fit the configuration, or if saved responses were sampled at another temperature.
    """
    temperature = self._collector.config.sampling.temperature
    before = state.get("temperature", temperature)  # Earlier versions did not save it.
    if before != temperature and (state.get("ahead") or state["under_way"]):
      raise ValueError(
        f"the checkpoint has responses of sampling.temperature={before}, and this run has "
        f"{temperature}: set the key to {before}, or start in a new --workdir"
      )
    self._collector.set_position(state)
    self._position = self._collector.position()
    for batch in state.get("ahead", ()):
      try:
        collected = from_state(batch, self._collector)
      except ValueError as error:
        reason = f"the checkpoint has a batch that is not trained on yet: {error}"
        raise ValueError(f"{reason}, or start in a new --workdir") from error
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
    """Collects a batch in the worker thread; adds its times to the metrics."""
    start_s, stages = time.perf_counter(), Stopwatch()
    waited = start_s - self._idle_since if self._idle_since else 0.0
    try:
      with self._engine_mesh(), preemption.checked_by(self._check):
        self._check()
        with stages("load"):
          self._load(weights, version)
        batch = self._collect(step, version, stages)
    except BaseException:
      # No further batch is collected: without this batch, later batches would be different.
      self._stop.set()
      raise
    self._idle_since = time.perf_counter()
    seconds = stages.lap() | {"time/wait_for_learner": waited}
    # The worker's times have separate names, so that the times of the main thread alone add up to
    # the time of the iteration.
    times = {name.replace("/", "/sampler/", 1): value for name, value in seconds.items()}
    batch.collected.metrics.update(times)
    return batch

  def _check(self) -> None:
    """Raises Preempted in the worker thread once the pipeline has stopped.

    A preemption notice alone does not stop the worker thread. The main thread handles it, and saves
    the batches in flight.
    """
    if self._stop.is_set():
      raise preemption.Preempted

  def _load(self, weights: Any, version: int) -> None:
    """Loads weights on an engine with a separate mesh, unless this version is loaded."""
    if self._loaded != version and not self._loads_during_steps:
      self._engine.load(weights, version)
      self._loaded = version

  def _wait(self, job: concurrent.futures.Future) -> CollectedBatch:
    """Waits for a batch; meanwhile checks for preemption and lost servers."""
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
  """Wraps a batch as a finished job."""
  job = concurrent.futures.Future()
  job.set_result(batch)
  return job


def write(directory: Path, collected: Collected, config: RunConfig) -> None:
  """Writes the batch of an iteration to a file for `read`.

  Raises WriteError if the file cannot be written.
  """
  state = get_state(collected) | dict(settings=_distribution(config) | _estimator(config))
  with files.writing(directory):
    directory.mkdir(exist_ok=True)
  files.write_whole(batch_file(directory, collected.step), [json.dumps(state)])


def read(directory: Path, step: int, collector: Collector) -> Collected:
  """Reads the recorded batch of an iteration.

  Raises:
    ValueError: the file is missing, damaged, or does not fit the configuration.
  """
  path = batch_file(directory, step)
  try:
    state = jsons.parse_object(path.read_bytes())
    c = collector.config
    expected = _distribution(c) | (_estimator(c) if c.trains_on_host_advantages else {})
    expected = json.loads(json.dumps(expected))  # Tuples become lists.
    recorded = state.get("settings", expected)  # Earlier versions did not write them.
    for key, value in expected.items():
      if recorded.get(key) != value:
        raise ValueError(f"it was recorded with {key}={recorded.get(key)}, this run has {value}")
    return from_state(state, collector)
  except OSError as error:
    raise ValueError(f"rl.replay: {path} cannot be read: {error.strerror or error}") from error
  except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
    reason = f"it has no field {error}" if isinstance(error, KeyError) else error
    raise ValueError(f"rl.replay: {path} is no batch of this configuration: {reason}") from error


def _distribution(c: RunConfig) -> dict[str, Any]:
  """Returns the settings of a batch's log-probs, by key."""
  return {f"sampling.{name}": getattr(c.sampling, name) for name in DISTRIBUTION}


def _estimator(c: RunConfig) -> dict[str, Any]:
  """Returns the estimator of a batch's advantages and its options, by name."""
  estimator, values = c.estimator_of_rewards, options(c.objective, c.reward.right_from)
  settings = {"estimator of advantages": estimator.name, "rl.mask_truncated": c.rl.mask_truncated}
  if estimator.parts:
    parts = {"objective.advantage": c.objective.advantage_kind}
    settings |= parts | {"environment.discount": c.environment.discount}
  return settings | {name: values.get(name) for name in estimator.options}


def get_state(collected: Collected) -> dict[str, Any]:
  """Returns a batch as a dict for JSON, without its rollout.

  `from_state` builds the rollout from the groups again.
  """
  file, arrays = io.BytesIO(), {name: getattr(collected, name) for name in ARRAYS}
  np.savez(file, **{name: x for name, x in arrays.items() if x is not None})
  return dict(
    step=collected.step,
    version=collected.version,
    groups=[group.get_state() for group in collected.groups],
    arrays=base64.b64encode(file.getvalue()).decode(),
    usage=dataclasses.asdict(collected.usage),
    metrics=collected.metrics,
  )


def from_state(state: Mapping[str, Any], collector: Collector) -> Collected:
  """Restores a batch from `get_state`.

  Raises ValueError if the batch does not fit the collector's configuration.
  """
  arrays = dict(np.load(io.BytesIO(base64.b64decode(state["arrays"]))))
  groups = [Group.from_state(g, lambda p: SingleTurn(p.tokens)) for g in state["groups"]]
  rollout = collector.rollout(groups)
  if (saved_BL := arrays.get("advantage_BL")) is not None:  # Maybe for another length of rows.
    arrays["advantage_BL"] = advantage_BL = np.zeros_like(rollout.logp, saved_BL.dtype)
    length = min(saved_BL.shape[1], advantage_BL.shape[1])
    advantage_BL[:, :length] = saved_BL[:, :length]
  return Collected(
    groups,
    rollout,
    state["step"],
    state["version"],
    usage=Usage(**state["usage"]),
    metrics=dict(state["metrics"]),
    **dict.fromkeys(ARRAYS) | arrays,
  )
