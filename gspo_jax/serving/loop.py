"""The thread that owns the engine: requests go in, trajectories come out, weights change meanwhile.

Nobody else touches the engine or an array of it. Others `send` what is to be done, and get a future
of what comes of it.
"""

import concurrent.futures
import contextlib
import dataclasses
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Literal

from gspo_jax.sampling import Request, Response, Trajectory, Usage, Workload
from gspo_jax.sampling.local.engine import LocalEngine
from gspo_jax.sampling.trajectory import SingleTurn
from gspo_jax.serving.dialect import Ask
from gspo_jax.serving.limits import Refused

FAILURES = 3  # of the engine, with no response between them, after which the server has none


@dataclasses.dataclass(eq=False)
class Job:
  """An `Ask` under way. Its future becomes its trajectories; what was given up is unfinished."""

  id: str
  ask: Ask
  future: concurrent.futures.Future
  trajectories: list[Trajectory]
  name: str  # of the request, which may have several prompts: what it is aborted by

  @property
  def done(self) -> bool:
    return all(one.finished for one in self.trajectories)

  @classmethod
  def of(cls, id: str, ask: Ask, name: str = "") -> "Job":
    begun = [
      Trajectory(ask.prompt, sample, ask.seed, SingleTurn(ask.prompt))
      for sample in range(ask.samples)
    ]
    return cls(id, ask, _future(), begun, name or id)

  def requests(self) -> list[Request]:
    """What is left to sample: one request for all that have not begun, one for each other."""
    left = [one for one in self.trajectories if not one.finished]
    groups = [[one] for one in left]
    if len(left) == len(self.trajectories) and not any(len(one.tokens) for one in left):
      groups = [left]
    return [
      Request(
        self.ask.prompt,
        self.ask.sampling.max_new_tokens - len(group[0].tokens),
        samples=len(group),
        first_sample=group[0].sample,
        seed=self.ask.seed,
        stop_ids=self.ask.stop_ids,
        stop_strings=self.ask.stop_strings,
        begun=tuple(group[0].tokens.tolist()),
        unfinished=len(group[0].tokens),
        tag=self,
        sampling=self.ask.sampling,
      )
      for group in groups
    ]


class Loop:
  """Continuous batching of whatever is asked for, with weights that are replaced in flight.

  Args:
    make_engine: an engine without weights; called again for every reload, so that the old one
      serves on if the new weights cannot be loaded.
    read: from a path to the trainer's parameters, checked. Raises ValueError or OSError.
    workload: of all requests, with `own_sampling` and `partial`.
    context: entered by the thread: the mesh.

  Attributes:
    labels: of weights, by the number of their load; a client names them.
    paused: nothing is sampled.
    failed: why the engine is gone for good; None: it is not.
  """

  def __init__(
    self,
    make_engine: Callable[[], LocalEngine],
    read: Callable[[str], Any],
    workload: Workload,
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
  ):
    self._make_engine, self._read, self._context = make_engine, read, context
    self._workload = workload
    self._engine: LocalEngine | None = None
    self._started = False  # whether all jobs but those held are in the engine
    self._jobs: dict[str, Job] = {}
    self._held: list[Job] = []  # that came while a pause waits for others
    self._waiters: list[concurrent.futures.Future] = []  # of that pause
    self._inbox: queue.SimpleQueue = queue.SimpleQueue()
    self._closing = False
    self._in_a_row = 0  # failures of the engine
    self.labels: dict[int, str] = {0: "default"}
    self.version = 0
    self.paused = False
    self.failed: str | None = None
    self.failures = 0
    # Of the workloads that are over, and of the one that is not; replaced, never changed in place.
    self._usages: tuple[Usage, Usage | None] = (Usage(), None)
    self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

  def start(self, weights: str) -> None:
    """Begins, and returns when the first weights are there. Raises what `read` raises."""
    self._thread.start()
    self.send("reload", weights, 0).result()

  def send(self, name: str, *arguments: Any) -> concurrent.futures.Future:
    """Has the thread do one of: submit, cancel, abort, pause, resume, reload, label, close."""
    future = _future()
    self._inbox.put((name, arguments, future))
    return future

  def submit(self, job: Job) -> None:
    self.send("submit", job)

  def close(self, timeout_s: float = 30.0) -> None:
    """Gives up what is under way and ends the thread."""
    self.send("close")
    self._thread.join(timeout_s)

  @property
  def alive(self) -> bool:
    """Whether there is a thread that takes requests."""
    return self._thread.is_alive() and not self._closing

  @property
  def running(self) -> int:
    """Requests under way."""
    return len(self._jobs)

  def total(self) -> Usage:
    """The cost of all sampling so far."""
    before, now = self._usages  # at once: the thread may replace both
    total = dataclasses.replace(before)
    if now is not None:
      total.add(now)
    return total

  @property
  def label(self) -> str:
    """Of the weights in use."""
    return self.labels[self.version]

  # In the thread.

  def _run(self) -> None:
    with self._context():
      while not self._closing:
        self._obey()
        if not (self.paused or self._closing):
          self._advance()
      self._give_up()

  def _obey(self) -> None:
    """Does what was sent; waits for something if there is nothing else to do."""
    idle = self.paused or not self._jobs
    while not self._closing:
      try:
        name, arguments, future = self._inbox.get(block=idle)
      except queue.Empty:
        return
      idle = False
      try:
        getattr(self, f"_{name}")(future, *arguments)
      except Exception as error:  # of the file system, of the devices: the server goes on
        if not isinstance(error, Refused | ValueError | OSError):
          traceback.print_exc()
        if not future.done():
          future.set_exception(error)

  def _advance(self) -> None:
    """Has the engine go on with the jobs."""
    try:
      if self._jobs and not self._started:
        self._engine.start(self._workload)
        self._started, self._usages = True, (self._usages[0], self._engine.usage)
        for job in list(self._jobs.values()):
          self._enter(job)
      if self._started and self._engine.busy:
        found = self._engine.step()
        for response in found:
          self._take(response)
        if found:  # a step that only starts computation succeeds on a broken device, too
          self._in_a_row = 0
    except Exception as error:
      self._recover(error)
    if self._waiters and not self._jobs:
      self._rest()

  def _rest(self) -> None:
    """Nothing is sampled from here on; those who waited for it are told."""
    self.paused = True
    waiters, self._waiters = self._waiters, []
    for future in waiters:
      future.set_result(None)

  def _enter(self, job: Job) -> None:
    try:
      for request in job.requests():
        self._engine.submit(request)
    except ValueError as error:
      self._engine.cancel(job)
      del self._jobs[job.id]
      job.future.set_exception(Refused(400, str(error)))

  def _take(self, response: Response) -> None:
    job = response.request.tag
    trajectory = job.trajectories[response.sample]
    trajectory.add(response)
    if response.finished:
      trajectory.finish(response.stopped)
    if job.done and self._jobs.pop(job.id, None):
      job.future.set_result(job.trajectories)

  def _interrupt(self) -> None:
    """Takes what is sampled so far out of the engine, whose cache is freed."""
    if self._started:
      try:
        for response in self._engine.stop():  # which counts what it still fetches
          self._take(response)
      finally:
        self._over()

  def _over(self) -> None:
    """The workload is: what it has cost is added to that of those before, all at once."""
    self._usages, self._started = (self.total(), None), False

  def _recover(self, error: Exception) -> None:
    """What was under way is lost; the engine begins anew with what comes next."""
    traceback.print_exc()
    self.failures, self._in_a_row = self.failures + 1, self._in_a_row + 1
    self._over()
    text = f"the engine failed: {type(error).__name__}: {str(error)[:500]}"
    if self._in_a_row == FAILURES:
      sys.stderr.write("gspo_jax.serve: the engine has failed too often, and samples no more\n")
      self.failed = text
    self._fail(Refused(500, text))

  def _fail(self, error: Exception) -> None:
    for job in self._jobs.values():
      job.future.set_exception(error)
    self._jobs = {}

  def _give_up(self) -> None:
    """Ends all jobs with what they have."""
    try:
      self._interrupt()
    finally:
      jobs, self._jobs, self._held = [*self._jobs.values(), *self._held], {}, []
      for job in jobs:
        job.future.set_result(job.trajectories)

  # What may be sent.

  def _submit(self, future: concurrent.futures.Future, job: Job) -> None:
    future.set_result(None)
    if self.failed:
      job.future.set_exception(Refused(503, self.failed))
    elif job.id in self._jobs:
      job.future.set_exception(Refused(400, f"request_id={job.id!r} is under way already"))
    elif self._waiters:
      self._held.append(job)
    else:
      self._jobs[job.id] = job
      if self._started:
        self._enter(job)

  def _cancel(self, future: concurrent.futures.Future, jobs: list[Job]) -> None:
    """Ends jobs with what they have."""
    for job in jobs:
      if job in self._held:
        self._held.remove(job)
      elif self._jobs.get(job.id) is job:
        del self._jobs[job.id]
        for response in self._engine.cancel(job) if self._started else ():
          self._take(response)
      else:
        continue  # it is over
      job.future.set_result(job.trajectories)
    future.set_result(None)

  def _abort(self, future: concurrent.futures.Future, ids: list[str] | None) -> None:
    """Cancels requests by their ids, None: all; gives the number of their prompts."""
    there = [*self._jobs.values(), *self._held]
    # vLLM wants the ids of /inference/v1/generate with this before them.
    names = None if ids is None else {id_.removeprefix("generate-tokens-") for id_ in ids}
    ended = [job for job in there if names is None or job.name in names]
    self._cancel(_future(), ended)
    future.set_result(len(ended))

  def _pause(
    self, future: concurrent.futures.Future, mode: Literal["keep", "abort", "wait"]
  ) -> None:
    if mode == "wait" and self._jobs and not self.paused:
      self._waiters.append(future)
      return
    if mode == "abort":
      self._give_up()
    self._rest()
    future.set_result(None)

  def _resume(self, future: concurrent.futures.Future) -> None:
    self.paused = False
    for waiter in self._waiters:
      waiter.set_exception(Refused(409, "resumed before all requests had ended"))
    self._waiters, held, self._held = [], self._held, []
    for job in held:
      self._submit(_future(), job)
    future.set_result(None)

  def _reload(
    self, future: concurrent.futures.Future, weights: str, version: int | None = None
  ) -> None:
    """Replaces the weights. What is under way goes on under the new ones, and its prefixes are
    prefilled with them. An error leaves everything as it is."""
    params = self._read(weights)
    engine = self._make_engine()
    self._interrupt()  # frees the cache; on an error the old engine starts again
    number = self.version + 1 if version is None else version
    engine.load(params, number)
    del params
    if self._engine is not None:
      self._engine.release()
    # Never the label of other weights; there before others look for that of the version.
    self.labels.setdefault(number, f"reload-{number}")
    self._engine, self.version, self.failed, self._in_a_row = engine, number, None, 0
    future.set_result(None)

  def _label(self, future: concurrent.futures.Future, label: str) -> None:
    self.labels[self.version] = label
    future.set_result(None)

  def _close(self, future: concurrent.futures.Future) -> None:
    self._closing = True
    future.set_result(None)


def _future() -> concurrent.futures.Future:
  """A future that whoever waits for it cannot cancel."""
  future = concurrent.futures.Future()
  future.set_running_or_notify_cancel()
  return future
