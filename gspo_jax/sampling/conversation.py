"""Conversations: turns of the policy, and the observations of an environment in between.

Many are held at the same time on one `Scheduler`. A turn that has ended goes to its environment at
once, and the next turn of that conversation into the queue, so that no slot waits for another
conversation.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from gspo_jax import ranges
from gspo_jax.models import routing, transformer
from gspo_jax.models.sizes import REFERENCE, ComputeConfig, ModelConfig
from gspo_jax.ranges import Fraction, NonNegativeInt, PositiveInt
from gspo_jax.sampling.requests import DEFAULT, EngineConfig, Request, Response, Usage
from gspo_jax.sampling.sampler import SamplingConfig
from gspo_jax.sampling.scheduler import Scheduler
from gspo_jax.structs import Rollout

Message = Mapping[str, str]  # role and content


class Environment(Protocol):
  """The other side of one conversation. Host code; one object per conversation, used once."""

  def reset(self) -> Sequence[Message] | Sequence[int]:
    """What the policy answers first: messages to be rendered, or the prompt's token ids."""
    ...

  def step(self, response: Sequence[int]) -> tuple[Sequence[int], float, bool]:
    """Takes the tokens of a turn: observation tokens, the turn's reward, whether that was the last.

    A turn ends with a stop token, or with a stop string; one that has neither was cut off because
    the conversation may not become longer. The next turn goes on right after the observation, so
    what the model expects to see there (a chat template's headers) belongs to it. After the last
    turn the observation is not looked at.
    """
    ...

  def figures(self) -> Mapping[str, float]:
    """May be left out. Numbers of a conversation that is over, whose means are logged by these
    names. `correct`, 0 or 1, is what accuracy counts; without it, whether rewards sum to above 0.
    """
    return {}


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
  """Whether responses are conversations, and with whom. docs/multi_turn.md has more."""

  name: str  # calculator | package.module:function | "": none; a verifier looks at one response
  max_turns: PositiveInt  # of the policy; a conversation that is not over by then is cut off
  stop_strings: tuple[str, ...]  # they end a turn, as stop tokens do
  discount: Fraction  # of rewards of later turns in the advantage of an earlier one
  workers: NonNegativeInt  # threads that environments run in; 0: none, for those that never wait

  def __post_init__(self):
    ranges.check(self, "environment")


@dataclasses.dataclass(frozen=True)
class Conversation:
  """One that is over. n tokens follow the prompt: turns, and observations between them."""

  environment: Environment
  index: int  # among those that were begun together
  sample: int  # index in the group
  prompt: tuple[int, ...]
  tokens: np.ndarray  # int32 [n]
  turns: np.ndarray  # int32 [n]: 0, 1, ... on sampled tokens, -1 on observations
  logp: np.ndarray  # float32 [n]: as in Response; 0 on observations
  full_logp: np.ndarray  # float32 [n]
  rewards: np.ndarray  # float32 [n]: of each turn, at its last token
  stopped: bool  # the environment ended it; False: cut off, by its length or its turns
  routing: np.ndarray | None  # [prompt + n - 1, l, k]

  @property
  def length(self) -> int:
    """Sampled tokens."""
    return int((self.turns >= 0).sum())


def figures(environment: Environment, reward: float) -> dict[str, float]:
  """Those of a conversation that is over and earned `reward`; there is `correct` in any case."""
  found = dict(getattr(environment, "figures", dict)())
  return dict(correct=float(reward > 0)) | {name: float(value) for name, value in found.items()}


def converse(
  params: transformer.Params,
  model_config: ModelConfig,
  environments: Sequence[Environment],
  *,
  config: EnvironmentConfig,
  group_size: int,
  max_new_tokens: int,
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
  stop_ids: tuple[int, ...] = (),
  detokenize: Callable[[list[int]], str] | None = None,
  render: Callable[[Sequence[Message]], Sequence[int]] | None = None,
  seed: int = 0,
  pad_id: int = 0,
  prompt_length: int,
  record_routing: bool = False,
  compute: ComputeConfig = REFERENCE,
  engine: EngineConfig = DEFAULT,
  usage: Usage | None = None,
) -> Rollout:
  """`generate` for conversations: one row per environment, `group_size` after each other a group.

  What the policy says depends on the weights, `seed`, the prompt's tokens, the index in the group
  and the observations, and on nothing else.

  Args:
    max_new_tokens: after the prompt, observations included.
    render: from messages to token ids, for environments that begin with messages.
    prompt_length: the longest prompt to be expected.

  Raises:
    ValueError: a prompt that is empty or too long; an environment whose observation or reward
      cannot be used.
  """
  window = prompt_length + max_new_tokens
  scheduler = Scheduler(
    params,
    model_config,
    SamplingConfig(temperature, top_k, top_p, min_p, max_new_tokens),
    engine.for_rows(len(environments)),
    window=window,
    context=window - 1,  # all but the last token may come back as the context of a turn
    group_size=1,  # turns come back one by one, and each needs a place in the queue
    stop_ids=len(stop_ids),
    compute=compute,
    record_routing=record_routing,
    detokenize=detokenize,
  )
  talks = Conversations(
    scheduler,
    config,
    vocab_size=model_config.vocab_size,
    max_new_tokens=max_new_tokens,
    seed=seed,
    stop_ids=stop_ids,
    render=render,
    prompt_length=prompt_length,
  )
  for start in range(0, len(environments), group_size):
    talks.begin(environments[start : start + group_size])
  over = sorted(talks.run(), key=lambda conversation: conversation.index)
  if usage is not None:
    usage.add(scheduler.usage)
  return assemble(over, max(len(c.prompt) for c in over) + max_new_tokens, pad_id)


class Conversations:
  """Those of one scheduler: `begin` groups of them, then `run`."""

  def __init__(
    self,
    scheduler: Scheduler,
    config: EnvironmentConfig,
    *,
    vocab_size: int,
    max_new_tokens: int,
    seed: int,
    stop_ids: tuple[int, ...],
    prompt_length: int,
    render: Callable[[Sequence[Message]], Sequence[int]] | None = None,
  ):
    self._scheduler, self._config = scheduler, config
    self._vocab_size, self._room = vocab_size, max_new_tokens
    self._prompt_of = functools.partial(prompt_of, render=render, longest=prompt_length)
    stop_strings = tuple(config.stop_strings)
    self._common = dict(seed=seed, stop_ids=tuple(stop_ids), stop_strings=stop_strings)
    self._count = 0

  def begin(self, group: Sequence[Environment]) -> None:
    """Conversations that differ by their index in the group. Equal prompts are prefilled once."""
    by_prompt: dict[tuple[int, ...], list[_Talk]] = collections.defaultdict(list)
    for sample, environment in enumerate(group):
      talk = _Talk(environment, self._count, sample, self._prompt_of(environment))
      by_prompt[talk.prompt].append(talk)
      self._count += 1
    for talks in by_prompt.values():
      if len(talks) == len(group):
        self._submit(talks, samples=len(talks))
      else:
        for talk in talks:
          self._submit([talk], first_sample=talk.sample)

  def run(self) -> Iterator[Conversation]:
    """As they come to their end."""
    with contextlib.ExitStack() as stack:
      pool = _Here()
      if self._config.workers:
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(self._config.workers))
      steps: list[tuple[_Talk, Response, concurrent.futures.Future]] = []
      while self._scheduler.busy or steps:
        for response in self._scheduler.run():
          talk = response.request.tag[response.sample - response.request.first_sample]
          future = pool.submit(talk.environment.step, response.tokens.tolist())
          steps.append((talk, response, future))
          yield from self._go_on(steps)
        if steps:  # the devices have nothing to do
          concurrent.futures.wait(
            [future for *_, future in steps], return_when=concurrent.futures.FIRST_COMPLETED
          )
          yield from self._go_on(steps)

  def _go_on(self, steps: list) -> Iterator[Conversation]:
    """The next turn of every conversation whose environment has answered, or its end."""
    waiting = [step for step in steps if not step[-1].done()]
    answered = [step for step in steps if step[-1].done()]
    steps[:] = waiting
    for talk, response, future in answered:
      talk.turn += 1
      try:
        observation, reward, done = future.result()
      except Exception as error:
        raise RuntimeError(
          f"{talk.name} raised {error!r}: let it answer with an observation instead"
        ) from error
      if not (isinstance(reward, (int, float, np.number)) and math.isfinite(reward)):
        raise ValueError(f"{talk.name} gave the reward {reward!r}: return a finite number")
      talk.add_turn(response, float(reward))
      if not done and response.stopped and talk.turn < self._config.max_turns:
        observation = self._observation(talk, observation)
        if len(talk.after_prompt) + len(observation) < self._room:
          talk.add_observation(observation)
          self._submit([talk], first_sample=talk.sample, begun=tuple(talk.after_prompt))
          continue
      yield talk.end(bool(done and response.stopped))

  def _submit(self, talks: "list[_Talk]", **options: Any) -> None:
    left = self._room - len(talks[0].after_prompt)
    self._scheduler.submit(Request(talks[0].prompt, left, tag=talks, **options, **self._common))

  def _observation(self, talk: "_Talk", observation: Sequence[int]) -> list[int]:
    try:
      tokens = list(map(operator.index, observation))
    except TypeError as error:
      raise ValueError(
        f"{talk.name} answered with {observation!r:.60}: encode it, an observation is token ids"
      ) from error
    if not tokens:
      raise ValueError(
        f"{talk.name} is not done and its observation is empty: the next turn could not be told "
        "from this one; return a token at least, or done=True"
      )
    if len(tokens) >= self._room:
      raise ValueError(
        f"{talk.name} answered with {len(tokens)} tokens, and a whole conversation has "
        f"max_new_tokens={self._room}: shorten the observation, or raise sampling.max_new_tokens "
        "and eval.max_new_tokens"
      )
    if not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
      raise ValueError(
        f"{talk.name} answered with token ids from {min(tokens)} to {max(tokens)}: the model has 0 "
        f"to {self._vocab_size - 1}; use the run's tokenizer"
      )
    return tokens


def prompt_of(
  environment: Environment,
  render: Callable[[Sequence[Message]], Sequence[int]] | None,
  longest: int,
) -> tuple[int, ...]:
  """Resets an environment. ValueError if what it begins with is no prompt."""
  first = environment.reset()
  if len(first) and isinstance(first[0], Mapping):
    if render is None:
      raise ValueError("an environment begins with messages, and there is no `render` for them")
    first = render(first)
  prompt = tuple(map(int, first))
  if not 0 < len(prompt) <= longest:
    raise ValueError(
      f"{type(environment).__name__}.reset() begins with {len(prompt)} tokens: it must be 1 to "
      f"data.max_prompt_tokens={longest} of them"
    )
  return prompt


class _Here:
  """An executor that does what it is given at once, so that all is in a fixed order."""

  def submit(self, function: Callable, *arguments: Any) -> concurrent.futures.Future:
    future = concurrent.futures.Future()
    try:
      future.set_result(function(*arguments))
    except Exception as error:
      future.set_exception(error)
    return future


class _Talk:
  """A conversation that is going on."""

  def __init__(self, environment: Environment, index: int, sample: int, prompt: tuple[int, ...]):
    self.environment, self.index, self.sample, self.prompt = environment, index, sample, prompt
    self.turn, self.after_prompt = 0, []  # turns that have ended; all tokens but the prompt's
    self._columns: list[tuple[np.ndarray, ...]] = []  # turns, logp, full_logp, rewards
    self._routing: list[np.ndarray] = []

  @property
  def name(self) -> str:
    kind = type(self.environment).__name__
    return f"the environment {kind} of conversation {self.index}, turn {self.turn},"

  def add_turn(self, response: Response, reward: float) -> None:
    n = len(response.tokens)
    rewards = np.zeros(n, np.float32)
    rewards[-1] = reward
    turns = np.full(n, self.turn - 1, np.int32)
    self._columns.append((turns, response.logp, response.full_logp, rewards))
    if response.routing is not None:
      # A context is prefilled anew in every turn; what counts is how each token was fed at first.
      seen = sum(map(len, self._routing))
      self._routing.append(response.routing[seen:])
    self.after_prompt += response.tokens.tolist()

  def add_observation(self, tokens: list[int]) -> None:
    zeros = np.zeros(len(tokens), np.float32)
    self._columns.append((np.full(len(tokens), -1, np.int32), zeros, zeros, zeros))
    self.after_prompt += tokens

  def end(self, stopped: bool) -> Conversation:
    turns, logp, full_logp, rewards = map(np.concatenate, zip(*self._columns))
    return Conversation(
      environment=self.environment,
      index=self.index,
      sample=self.sample,
      prompt=self.prompt,
      tokens=np.array(self.after_prompt, np.int32),
      turns=turns,
      logp=logp,
      full_logp=full_logp,
      rewards=rewards,
      stopped=stopped,
      routing=np.concatenate(self._routing) if self._routing else None,
    )


def assemble(conversations: Sequence[Conversation], length: int, pad_id: int) -> Rollout:
  """Prompt, then turns and observations, in one row of `length`, right-padded."""
  B = len(conversations)
  tokens, turns = np.full((B, length), pad_id, np.int32), np.full((B, length), -1, np.int32)
  logp, full_logp, rewards = (np.zeros((B, length), np.float32) for _ in range(3))
  routes = None
  if conversations[0].routing is not None:
    first = conversations[0].routing
    routes = np.full((B, length, *first.shape[1:]), routing.NO_ROUTE, first.dtype)
  for row, one in enumerate(conversations):
    start, end = len(one.prompt), len(one.prompt) + len(one.tokens)
    tokens[row, :start], tokens[row, start:end] = one.prompt, one.tokens
    turns[row, start:end], rewards[row, start:end] = one.turns, one.rewards
    logp[row, start:end], full_logp[row, start:end] = one.logp, one.full_logp
    if routes is not None:
      routes[row, : end - 1] = one.routing
  mask = (turns >= 0).astype(np.float32)
  return Rollout(
    tokens=tokens,
    mask=mask,
    logp=logp,
    full_logp=full_logp,
    prompt_lengths=np.array([len(one.prompt) for one in conversations], np.int32),
    lengths=mask.sum(1).astype(np.int32),
    stopped=np.array([one.stopped for one in conversations]),
    routing=routes,
    turns=turns,
    rewards=rewards,
  )
