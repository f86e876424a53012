"""Host loop of sampling: runs trajectories turn by turn through an engine and environments.

Environments run on the first host only. `conversations` checks their answers, and the driver
broadcasts the answers to the other hosts. Each finished turn goes to its environment at once, and
the next turn is submitted as soon as the environment has answered. If `workers` is above 0, the
engine samples further trajectories while environments step.
"""

import collections
import concurrent.futures
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gspo_jax.sampling import conversations
from gspo_jax.sampling.conversations import Answer, Beginning, Render, Turn
from gspo_jax.sampling.engine import Engine
from gspo_jax.sampling.requests import Request, Response, Workload
from gspo_jax.sampling.trajectory import Environment, SingleTurn, Trajectory
from gspo_jax.structs import Prompt
from gspo_jax.system import hosts
from gspo_jax.system import workers as threads
from gspo_jax.tasks.environments import TIME_LIMIT_S


class Driver:
  """Runs the trajectories of one workload until they are finished.

    driver = Driver(engine, workload, vocab_size=V)
    driver.begin(group); ...
    for trajectory in driver.run():  # In order of completion.
      ...

  Args:
    engine: engine with loaded weights. The driver starts it.
    workload: limits and sampling settings of all requests.
    vocab_size: exclusive upper bound on token ids of observations.
    max_turns: number of policy turns after which a trajectory is truncated.
    workers: number of threads for the environments' steps. If 0, each step ends before the next
      step begins, in a fixed order.
    time_limit_s: time limit of an environment's step, in seconds.
    limit: maximum number of tokens after a prompt, observations included; 0 means the workload's
      `max_new_tokens`. A resumed trajectory that has already reached the limit samples one more
      token, since a request asks for at least one.
  """

  def __init__(
    self,
    engine: Engine,
    workload: Workload,
    *,
    vocab_size: int = 2**31,
    max_turns: int = 1,
    workers: int = 0,
    time_limit_s: float = TIME_LIMIT_S,
    limit: int = 0,
  ):
    self._limit = limit or workload.sampling.max_new_tokens
    self._engine, self._workload, self._max_turns = engine, workload, max_turns
    self._vocab_size = min(vocab_size, workload.vocabulary or vocab_size)
    self._workers, self._ordered = threads.shared(max(1, workers)), not workers
    self._time_limit_s = time_limit_s
    self._failed: list[Trajectory] = []  # Failed trajectories that `run` has not yielded yet.
    # Environment steps under way, each with its trajectory and the turn's response.
    self._environment_calls: list[tuple[Trajectory, Response, concurrent.futures.Future]] = []
    engine.start(workload)

  def begin(self, group: Sequence[Trajectory]) -> None:
    """Submits a group's unfinished trajectories.

    A new group with one common prompt is submitted as one request, so the prompt is prefilled only
    once. `run` also yields the group's trajectories that failed before they sampled a token.
    """
    prompt = group[0].prompt
    same_prompt = all(x.prompt is prompt or x.prompt == prompt for x in group)
    self._failed += [x for x in group if x.failure and not x.turn]
    if same_prompt and not any(x.finished or len(x.tokens) for x in group):
      self._submit(group)
      return
    for trajectory in group:
      if not trajectory.finished:
        self._submit([trajectory])

  def run(self, enough: Callable[[], bool] = lambda: False) -> Iterator[Trajectory]:
    """Yields trajectories as they finish, until all have finished or `enough()` returns True.

    The driver calls `enough` before each step of the engine. Once `enough` has returned True, the
    driver submits no more requests, and stops the engine. It waits until environments have answered
    all finished turns, and yields the trajectories that these answers end.

    If an environment or a response fails, its trajectory finishes with `failure` set. Call `run`
    once. Unfinished trajectories keep their tokens; to resume them, pass them to `begin` of a new
    driver.

    Raises:
      Preempted, ServersGone: as `Engine.step`.
      ValueError: the workload needs supports (`Workload.support`), and the engine records none.
    """
    yield from self._pop_failed()
    try:
      while (self._engine.busy or self._environment_calls) and not enough():
        for response in self._engine.step() if self._engine.busy else ():
          self._handle_response(response)
        if self._environment_calls and not self._engine.busy:  # The devices are idle.
          self._wait(concurrent.futures.FIRST_COMPLETED)
        yield from self._finish_turns()
      for response in self._engine.stop():
        self._handle_response(response)
      self._wait()
      yield from self._finish_turns(submit_next=False)
    finally:
      for *_, call in self._environment_calls:
        call.cancel()

  def _submit(self, trajectories: Sequence[Trajectory]) -> None:
    """Submits one request, for one trajectory or for new trajectories of one prompt.

    The trajectories must be in the order of their sample numbers, without gaps.
    """
    first, workload = trajectories[0], self._workload
    for trajectory in trajectories:
      trajectory.limit = max(self._limit, len(trajectory.tokens) + 1)
    self._engine.submit(
      Request(
        first.prompt,
        first.limit - len(first.tokens),
        samples=len(trajectories),
        first_sample=first.sample,
        seed=first.seed,
        stop_ids=workload.stop_ids,
        stop_strings=workload.stop_strings,
        prior=tuple(first.tokens.tolist()),
        unfinished=len(first.turn_tokens),
        tag=trajectories,
      )
    )

  def _handle_response(self, response: Response) -> None:
    """Appends a response to its trajectory.

    If the turn is finished, starts the environment's step.

    Raises:
      ValueError: the workload needs supports (`Workload.support`), and the engine records none.
    """
    if self._workload.support and response.support is None and len(response.tokens):
      raise ValueError(
        f"{type(self._engine).__name__} does not record the tokens inside top-k, top-p and min-p, "
        "so updates would use another distribution than sampling: set sampling.top_k=0, "
        "sampling.top_p=1 and sampling.min_p=0"
      )
    trajectory = response.request.tag[response.sample - response.request.first_sample]
    trajectory.add(response)
    if response.failure:
      trajectory.fail(response.failure)
      self._failed.append(trajectory)
    elif response.finished:
      self._environment_calls.append((trajectory, response, self._step(trajectory, response)))

  def _pop_failed(self) -> list[Trajectory]:
    """Returns the failed trajectories that `run` has not yielded yet, and empties their list."""
    failed, self._failed = self._failed, []
    return failed

  def _step(self, trajectory: Trajectory, response: Response) -> concurrent.futures.Future:
    """Starts the environment's step after a finished turn; returns its future."""
    environment = trajectory.environment
    # Hosts other than the first have no environments; `_finish_turns` broadcasts the answers.
    if environment is None or isinstance(environment, SingleTurn):
      call = concurrent.futures.Future()
      call.set_result(Answer())
      return call
    turn = Turn(
      trajectory.turn_tokens,
      last=not response.stopped or trajectory.turn + 1 >= self._max_turns,
      remaining=self._limit - len(trajectory.tokens),
      vocab_size=self._vocab_size,
      calls=sum(trajectory.calls),
    )
    submit = self._workers.run if self._ordered else self._workers.submit
    return submit(conversations.step, environment, turn, limit_s=self._time_limit_s)

  def _wait(self, return_when: str = concurrent.futures.ALL_COMPLETED) -> None:
    """Waits for all environment steps, or for the first of them to end."""
    self._workers.wait([call for *_, call in self._environment_calls], return_when)

  def _finish_turns(self, submit_next: bool = True) -> Iterator[Trajectory]:
    """Processes completed environment steps, and yields finished and failed trajectories.

    Args:
      submit_next: whether to submit the next turns of unfinished trajectories.
    """
    yield from self._pop_failed()
    self._workers.expire()
    completed, pending = [], []
    for turn in self._environment_calls:  # `done()` is read once, since it may change meanwhile.
      (completed if turn[-1].done() else pending).append(turn)
    self._environment_calls = pending
    answers = [conversations.answer(call) for *_, call in completed]
    if not all(isinstance(trajectory.environment, SingleTurn) for trajectory, *_ in completed):
      answers = hosts.broadcast(answers)
    for (trajectory, response, _), answer in zip(completed, answers, strict=True):
      if answer.failure:
        name = f"the environment {type(trajectory.environment).__name__} of prompt {trajectory.tag}"
        turn = f"sample {trajectory.sample}, turn {trajectory.turn + 1},"
        trajectory.fail(f"{name}, {turn} {answer.failure}")
        yield trajectory
        continue
      trajectory.end_turn(answer.reward, answer.calls)
      if answer.over:
        trajectory.finish(bool(answer.done and response.stopped), answer.figures)
        yield trajectory
        continue
      trajectory.observe(answer.observation)
      if submit_next:
        self._submit([trajectory])


def new_groups(
  prompts: Sequence[Prompt],
  size: int | Sequence[int],
  seed: int,
  longest: int,
  make: Callable[[Prompt], Environment] | None,
  render: Render | None = None,
  tags: Sequence[Any] | None = None,
  vocab_size: int = 2**31,
  workers: int = 0,
  numbers: collections.Counter | None = None,
) -> list[list[Trajectory]]:
  """Creates one group of new trajectories for each prompt.

  Sample numbers of equal prompts continue from group to group, so no two trajectories share a PRNG
  key. If an environment cannot begin, its trajectory is finished, with a `failure` and no tokens.

  Args:
    prompts: prompts, one for each group.
    size: number of trajectories in a group. A sequence has a separate number for each prompt.
    seed: seed of the PRNG keys.
    longest: maximum number of tokens of an environment's prompt.
    make: constructor of a trajectory's environment. None means single turns.
    render: function from messages to token ids. None if no environment has messages.
    tags: labels of the groups, for the caller and for error messages. None means the prompts' ids.
    vocab_size: exclusive upper bound on token ids of an environment's prompt.
    workers: number of threads that create environments; 0 means one.
    numbers: next sample number of each prompt's tokens, updated for the next call. None means 0.
  """
  groups, next_sample = [], collections.Counter() if numbers is None else numbers
  sizes = [size] * len(prompts) if isinstance(size, int) else size
  tags = tags or [prompt.id for prompt in prompts]
  repeated = [prompt for prompt, size in zip(prompts, sizes, strict=True) for _ in range(size)]
  if make is None:
    beginnings = iter([Beginning(x.tokens, SingleTurn(x.tokens)) for x in repeated])
  else:
    beginnings = iter(_beginnings(repeated, longest, make, render, vocab_size, workers))
  for tag, size in zip(tags, sizes, strict=True):
    group = list(itertools.islice(beginnings, size))
    # Environments choose their prompts (`reset`), so the prompts of a group may differ.
    first = max(next_sample[x.tokens] for x in group)
    for x in group:
      next_sample[x.tokens] = first + size
    trajectories = [
      Trajectory(x.tokens, g, seed, x.environment, tag) for g, x in enumerate(group, first)
    ]
    for trajectory, beginning in zip(trajectories, group):
      if beginning.failure:
        trajectory.fail(beginning.failure)
    groups.append(trajectories)
  return groups


def _beginnings(
  prompts: Sequence[Prompt],
  longest: int,
  make: Callable[[Prompt], Environment],
  render: Render | None,
  vocab_size: int,
  workers: int,
) -> list[Beginning]:
  """Begins a conversation for each prompt. On hosts other than the first, environments are None."""
  local: list[Beginning] = []

  def begin() -> list[Beginning]:
    local.extend(conversations.begin(make, prompts, longest, render, vocab_size, workers))
    return [beginning._replace(environment=None) for beginning in local]

  shared = hosts.run_on_first_host(begin)
  return local or shared
