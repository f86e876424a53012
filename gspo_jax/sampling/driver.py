"""Host loop of sampling: runs trajectories turn by turn through an engine and environments.

Environments run on the first host only, which broadcasts their observations and rewards. A finished
turn is stepped at once and the next one queued, so no decoding slot waits on another trajectory.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gspo_jax.sampling.engine import Engine
from gspo_jax.sampling.requests import Request, Response, Workload
from gspo_jax.sampling.trajectory import Environment, Message, SingleTurn, Trajectory
from gspo_jax.structs import Prompt
from gspo_jax.system import hosts


class Driver:
  """Runs the trajectories of one workload until they are finished.

    driver = Driver(engine, workload, vocab_size=V)
    driver.begin(group); ...
    for trajectory in driver.run():  # In order of completion.
      ...

  Args:
    engine: engine with loaded weights.
    workload: bounds and sampling settings of all requests, such as token limit and stop ids.
    vocab_size: exclusive upper bound on observation token ids.
    max_turns: policy turns after which a trajectory is truncated.
    workers: threads for the environments' steps; 0 runs them in the caller's thread.
    limit: maximum tokens after a prompt, observations included; 0 for the workload's
      `max_new_tokens`. A partial rollout at or beyond this limit gets one more token.
  """

  def __init__(
    self,
    engine: Engine,
    workload: Workload,
    *,
    vocab_size: int = 2**31,
    max_turns: int = 1,
    workers: int = 0,
    limit: int = 0,
  ):
    self._limit = limit or workload.sampling.max_new_tokens
    self._engine, self._workload = engine, workload
    self._vocab_size, self._max_turns, self._workers = vocab_size, max_turns, workers
    self._asked: list[tuple[Trajectory, Response, concurrent.futures.Future]] = []
    engine.start(workload)

  def begin(self, group: Sequence[Trajectory]) -> None:
    """Submits a group's unfinished trajectories. A new group with one common prompt is one request,
    so the prompt is prefilled once."""
    prompt = group[0].prompt
    alike = all(each.prompt is prompt or each.prompt == prompt for each in group)
    if alike and not any(len(each.tokens) for each in group):
      self._submit(group)
      return
    for trajectory in group:
      if not trajectory.finished:
        self._submit([trajectory])

  def run(self, enough: Callable[[], bool] = lambda: False) -> Iterator[Trajectory]:
    """Yields trajectories as they finish, until none is left or `enough()` is true.

    An exception in an environment's step finishes its trajectory and sets `failure`. Unfinished
    trajectories keep their tokens; pass them to `begin` to resume.

    Raises:
      ValueError: an environment returned an invalid observation or reward.
    """
    with contextlib.ExitStack() as stack:
      pool = _Here()
      if self._workers:
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(self._workers))
      while (self._engine.busy or self._asked) and not enough():
        for response in self._engine.step() if self._engine.busy else ():
          self._hand_over(response, pool)
        if self._asked and not self._engine.busy:  # The devices are idle.
          futures = [future for *_, future in self._asked]
          concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED)
        yield from self._answered()
      for response in self._engine.stop():
        self._hand_over(response, pool)
      concurrent.futures.wait([future for *_, future in self._asked])
      yield from self._answered(go_on=False)

  def _submit(self, trajectories: Sequence[Trajectory]) -> None:
    """Submits one request: new trajectories of one prompt, ordered by `sample`, or one trajectory
    with tokens."""
    first, load = trajectories[0], self._workload
    for trajectory in trajectories:
      trajectory.limit = max(self._limit, len(trajectory.tokens) + 1)
    self._engine.submit(
      Request(
        first.prompt,
        first.limit - len(first.tokens),
        samples=len(trajectories),
        first_sample=first.sample,
        seed=first.seed,
        stop_ids=load.stop_ids,
        stop_strings=load.stop_strings,
        prior=tuple(first.tokens.tolist()),
        unfinished=len(first.turn_tokens),
        tag=trajectories,
      )
    )

  def _hand_over(self, response: Response, pool: Any) -> None:
    """Appends a response to its trajectory. A finished turn goes to the environment."""
    if self._workload.support and response.support is None and len(response.tokens):
      raise ValueError(
        f"{type(self._engine).__name__} does not say which tokens each one was drawn from, and the "
        "updates would take another distribution: set sampling.top_k=0, top_p=1 and min_p=0"
      )
    trajectory = response.request.tag[response.sample - response.request.first_sample]
    trajectory.add(response)
    if response.finished:
      future = pool.submit(_answer, trajectory.environment, trajectory.turn_tokens)
      self._asked.append((trajectory, response, future))

  def _answered(self, go_on: bool = True) -> Iterator[Trajectory]:
    """Processes finished environment steps: queues the next turn or finishes the trajectory.

    Args:
      go_on: whether to submit requests for next turns.
    """
    answered, waiting = [], []
    for turn in self._asked:  # One `done()` per future: it may change between two calls.
      (answered if turn[-1].done() else waiting).append(turn)
    self._asked = waiting
    answers = [future.result() for *_, future in answered]
    if not all(isinstance(trajectory.environment, SingleTurn) for trajectory, *_ in answered):
      answers = hosts.broadcast(answers)
    for (trajectory, response, _), answer in zip(answered, answers, strict=True):
      name = f"the environment {type(trajectory.environment).__name__} of prompt {trajectory.tag}"
      name = f"{name}, sample {trajectory.sample}, turn {trajectory.turn + 1},"
      if answer.failure:
        advice = "let it answer with an observation instead"
        trajectory.fail(f"{name} raised {answer.failure}: {advice}")
        yield trajectory
        continue
      observation, reward, done, _ = answer
      if not (isinstance(reward, (int, float, np.number)) and math.isfinite(reward)):
        raise ValueError(f"{name} gave the reward {reward!r}: return a finite number")
      trajectory.end_turn(float(reward))
      if not done and response.stopped and trajectory.turn < self._max_turns:
        observation = self._checked(observation, name)
        if len(trajectory.tokens) + len(observation) < self._limit:
          trajectory.observe(observation)
          if go_on:
            self._submit([trajectory])
          continue
      trajectory.finish(bool(done and response.stopped))
      yield trajectory

  def _checked(self, observation: Sequence[int], name: str) -> list[int]:
    try:
      tokens = list(map(operator.index, observation))
    except TypeError as error:
      raise ValueError(
        f"{name} answered with {observation!r:.60}: encode it, an observation is token ids"
      ) from error
    if not tokens:
      raise ValueError(
        f"{name} is not done and its observation is empty: the next turn could not be told "
        "from this one; return a token at least, or done=True"
      )
    room = self._workload.sampling.max_new_tokens
    if len(tokens) >= room:
      raise ValueError(
        f"{name} answered with {len(tokens)} tokens, and a whole conversation has "
        f"max_new_tokens={room}: shorten the observation, or raise sampling.max_new_tokens "
        "and eval.max_new_tokens"
      )
    if not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
      raise ValueError(
        f"{name} answered with token ids from {min(tokens)} to {max(tokens)}: the model has 0 "
        f"to {self._vocab_size - 1}; use the run's tokenizer"
      )
    return tokens


def new_groups(
  prompts: Sequence[Prompt],
  size: int | Sequence[int],
  seed: int,
  longest: int,
  make: Callable[[Prompt], Environment] | None,
  render: Callable[[Sequence[Message]], Sequence[int]] | None = None,
  tags: Sequence[Any] | None = None,
) -> list[list[Trajectory]]:
  """Creates one group of new trajectories for each prompt.

  Groups with the same prompt tokens share one sample numbering, so no two trajectories share a PRNG
  key.

  Args:
    prompts: prompts, one for each group.
    size: trajectories in a group, for all prompts or for each prompt.
    seed: seed of the PRNG keys.
    longest: maximum number of tokens of a prompt.
    make: constructor of a trajectory's environment; None for single turns.
    render: function from messages to token ids, for environments with messages; None without one.
    tags: labels of the groups, for the caller and for error messages; None for the prompts' ids.

  Raises:
    ValueError: an environment's `reset` returned no tokens, too many tokens, or messages without
      a `render`; or its constructor or `reset` raised.
  """
  groups, numbers = [], collections.Counter()  # Next sample number by prompt tokens.
  sizes = [size] * len(prompts) if isinstance(size, int) else size
  tags = tags or [prompt.id for prompt in prompts]
  repeated = [prompt for prompt, size in zip(prompts, sizes, strict=True) for _ in range(size)]
  if make is None:
    conversations = iter([(x.tokens, SingleTurn(x.tokens)) for x in repeated])
  else:
    conversations = iter(_conversations(repeated, longest, make, render))
  for tag, size in zip(tags, sizes, strict=True):
    group = list(itertools.islice(conversations, size))
    first = max(numbers[tokens] for tokens, _ in group)
    numbers |= {tokens: first + size for tokens, _ in group}
    samples = enumerate(group, first)
    groups.append([Trajectory(tokens, g, seed, x, tag) for g, (tokens, x) in samples])
  return groups


def _conversations(
  prompts: Sequence[Prompt],
  longest: int,
  make: Callable[[Prompt], Environment],
  render: Callable[[Sequence[Message]], Sequence[int]] | None,
) -> list[tuple[tuple[int, ...], Environment | None]]:
  """Returns the prompt tokens and the environment of each conversation. Environments are None on
  all hosts but the first."""
  conversations: list[tuple[tuple[int, ...], Environment]] = []

  def begin() -> list[tuple[int, ...]]:
    conversations.extend(_begin_conversation(make, prompt, longest, render) for prompt in prompts)
    return [tokens for tokens, _ in conversations]

  tokens = hosts.run_on_first_host(begin)
  return conversations or [(prefix, None) for prefix in tokens]


def _begin_conversation(
  make: Callable[[Prompt], Environment],
  prompt: Prompt,
  longest: int,
  render: Callable[[Sequence[Message]], Sequence[int]] | None,
) -> tuple[tuple[int, ...], Environment]:
  """Creates and resets an environment; returns its prompt tokens and the environment."""
  try:
    environment = make(prompt)
    first = environment.reset()
    if len(first) and isinstance(first[0], Mapping):
      if render is None:
        raise ValueError("an environment begins with messages, and there is no `render` for them")
      first = render(first)
    tokens = tuple(map(int, first))
    if not 0 < len(tokens) <= longest:
      raise ValueError(
        f"{type(environment).__name__}.reset() begins with {len(tokens)} tokens: it must be 1 to "
        f"data.max_prompt_tokens={longest} of them"
      )
    return tokens, environment
  except Exception as error:  # User code may raise anything.
    reason = str(error)
    if not isinstance(error, ValueError):
      reason = f"{type(error).__name__}: {error} (--verbosity=1: where)"
    raise ValueError(f"the environment of prompt {prompt.id} cannot begin: {reason}") from error


class Answer(NamedTuple):
  """Result of an environment's step, or the exception that it raised (`failure`)."""

  observation: Sequence[int] = ()
  reward: float = 0.0
  done: bool = True
  failure: str = ""


def _answer(environment: Environment | None, response: list[int]) -> Answer:
  """Steps an environment with a turn's tokens; returns a default Answer for None."""
  if environment is None:
    return Answer()
  try:
    observation, reward, done = environment.step(response)
    return Answer(observation, reward, done)
  except Exception as error:  # User code may raise anything, on arbitrary policy output.
    return Answer(failure=repr(error))


class _Here:
  """Executor that runs each task in `submit`, for a deterministic order of steps."""

  def submit(self, function: Callable, *arguments: Any) -> concurrent.futures.Future:
    future = concurrent.futures.Future()
    future.set_result(function(*arguments))
    return future
