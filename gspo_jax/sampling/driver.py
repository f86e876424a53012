"""The host loop: trajectories through an engine, turn by turn, with their environments.

The environments are the first host's, which tells the others what they say. A turn that has ended
goes to its environment at once, and the next turn of that trajectory into the engine's queue, so
that no slot waits for another trajectory.
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
  """Takes trajectories of one workload to their end.

    driver = Driver(engine, workload, vocab_size=V)
    driver.begin(group); ...
    for trajectory in driver.run():  # as they are finished
      ...

  Args:
    vocab_size: that the token ids of observations must lie in.
    max_turns: of the policy, after which a trajectory is cut off.
    workers: threads that environments run in; 0: none.
    limit: tokens that may follow a prompt, observations included; 0: those of the workload. What
      was put aside under a larger one gets one token more.
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
    """Submits a group of new trajectories, or the unfinished ones of a group. A common prompt is
    prefilled once."""
    prompt = group[0].prompt
    alike = all(each.prompt is prompt or each.prompt == prompt for each in group)
    if alike and not any(len(each.tokens) for each in group):
      self._submit(group)
      return
    for trajectory in group:
      if not trajectory.finished:
        self._submit([trajectory])

  def run(self, enough: Callable[[], bool] = lambda: False) -> Iterator[Trajectory]:
    """Yields trajectories as they are finished, until all are or `enough()` is true. One whose
    environment raises is over, with `failure`.

    Those that are not finished by then keep what they have, and `begin` goes on with them.

    Raises:
      ValueError: an environment whose observation or reward cannot be used.
    """
    with contextlib.ExitStack() as stack:
      pool = _Here()
      if self._workers:
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(self._workers))
      while (self._engine.busy or self._asked) and not enough():
        for response in self._engine.step() if self._engine.busy else ():
          self._hand_over(response, pool)
        if self._asked and not self._engine.busy:  # the devices have nothing to do
          futures = [future for *_, future in self._asked]
          concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED)
        yield from self._answered()
      for response in self._engine.stop():
        self._hand_over(response, pool)
      concurrent.futures.wait([future for *_, future in self._asked])
      yield from self._answered(go_on=False)

  def _submit(self, trajectories: Sequence[Trajectory]) -> None:
    """Submits one request: new trajectories of one prompt in order of samples, or any single
    one."""
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
    """Appends a response to its trajectory, and a finished turn to its environment's queue."""
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
    """Requests the next turn of trajectories with an answered turn, or ends them."""
    answered, waiting = [], []
    for turn in self._asked:  # each is looked at once: threads may answer between two looks
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
  """Begins `size` trajectories, or a size for each prompt, with the noise of one seed.

  Groups that begin with the same tokens are numbered like one larger group, so that no trajectory
  has the noise of another.

  Args:
    longest: tokens that a prompt may have.
    make: an environment for each; None: they are single turns.
    render: from messages to token ids, for environments that begin with messages.
    tags: of the groups, for the caller and for messages; by default the prompts' ids.

  Raises:
    ValueError: an environment begins with nothing, with too many tokens, or with messages where
      there is no `render` for them; or it raises, and there is no conversation yet to end by that.
  """
  groups, numbers = [], collections.Counter()  # trajectories by their first tokens
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
  """Returns the first tokens and the environment of each conversation; None: another host has
  the environment."""
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
  """Returns the prompt of a new environment, and the environment."""
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
  except Exception as error:  # it is the user's
    reason = str(error)
    if not isinstance(error, ValueError):
      reason = f"{type(error).__name__}: {error} (--verbosity=1: where)"
    raise ValueError(f"the environment of prompt {prompt.id} cannot begin: {reason}") from error


class Answer(NamedTuple):
  """What an environment says of a turn, or how it failed."""

  observation: Sequence[int] = ()
  reward: float = 0.0
  done: bool = True
  failure: str = ""


def _answer(environment: Environment | None, response: list[int]) -> Answer:
  """Returns an environment's answer to a turn."""
  if environment is None:
    return Answer()
  try:
    observation, reward, done = environment.step(response)
    return Answer(observation, reward, done)
  except Exception as error:  # it is the user's, and was given what a policy wrote
    return Answer(failure=repr(error))


class _Here:
  """An executor that does what it is given at once, so that all is in a fixed order."""

  def submit(self, function: Callable, *arguments: Any) -> concurrent.futures.Future:
    future = concurrent.futures.Future()
    future.set_result(function(*arguments))
    return future
