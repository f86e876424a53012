"""Calls of environments, and checks of everything that they return.

An environment (`trajectory.Environment`) is user code. It reads arbitrary policy output and often
calls outside services, so its results are not trusted. If a call raises, exits, hangs or returns an
unusable value, only the conversation of this environment fails. All calls run in threads with a
time limit (system/workers.py). Results are converted to plain Python values of limited size.

A conversation's *figures* are named metrics from its environment (`Environment.figures`).
"""

import concurrent.futures
import functools
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from reprlib import repr as _repr
from typing import Any, NamedTuple

import numpy as np

from gspo_jax.sampling.trajectory import Environment, Message, Trajectory
from gspo_jax.settings.rewards import LARGEST_REWARD
from gspo_jax.structs import Prompt
from gspo_jax.system import user_code, workers
from gspo_jax.tasks.environments import Make, time_limit

FIGURES = 100  # Maximum number of figures of a conversation.
NAME = 100  # Maximum number of characters of a figure's name.
LARGEST_FIGURE = 1e30  # Largest absolute value of a figure, so that means fit into float32.
CALLS = 2**31  # Exclusive upper bound on the number of a conversation's tool calls.
LIMIT_KEY = "time_limit_s of the environment's class"  # The time limit's name in messages.
REASON = 300  # Maximum number of characters of a failure's description.

Render = Callable[[Sequence[Message]], Sequence[int]]  # Function from messages to token ids.


class Unusable(ValueError):
  """An environment returned an unusable value; the message says what to return instead."""


class Turn(NamedTuple):
  """A finished turn of the policy, and limits on the environment's answer."""

  tokens: list[int]
  last: bool  # Whether no turn can follow: this turn was truncated, or is turn `max_turns`.
  # Number of further tokens that the trajectory may have. An observation of this length or more
  # ends the conversation.
  remaining: int
  vocab_size: int  # Exclusive upper bound on token ids.
  calls: int  # Number of tool calls in earlier turns.


class Answer(NamedTuple):
  """Checked result of an environment's step. The defaults are the answer to a single turn.

  Attributes:
    observation: token ids between this turn and the next; () after the last turn.
    reward: reward of the turn.
    done: whether the environment ended the conversation.
    over: whether this was the last turn, because `done` or `Turn.last` is True, or because the
      observation is too long.
    calls: number of tool calls of the turn.
    figures: figures of the conversation after its last turn; {} after other turns.
    failure: description of a failure; "" if there is none.
  """

  observation: tuple[int, ...] = ()
  reward: float = 0.0
  done: bool = True
  over: bool = True
  calls: int = 0
  figures: Mapping[str, float] = {}
  failure: str = ""


class Beginning(NamedTuple):
  """Start of a conversation: prompt tokens and environment, or a description of the failure."""

  tokens: tuple[int, ...] = ()
  environment: Environment | None = None
  failure: str = ""


def begin(
  make: Make,
  prompts: Sequence[Prompt],
  longest: int,
  render: Render | None,
  vocab_size: int,
  threads: int = 0,
) -> list[Beginning]:
  """Creates environments and resets them. Never raises for a fault of an environment.

  Args:
    make: constructor of an environment.
    prompts: problems of the conversations.
    longest: maximum number of prompt tokens.
    render: function from messages to token ids; None for environments without messages.
    vocab_size: exclusive upper bound on token ids.
    threads: `environment.workers`.
  """

  def reset(prompt: Prompt) -> Beginning:
    environment = make(prompt)
    name = f"{type(environment).__name__}.reset()"
    return Beginning(_prompt(environment.reset(), name, longest, render, vocab_size), environment)

  results = _call([(reset, (prompt,), time_limit(make)) for prompt in prompts], threads)
  failed = "the environment of prompt {} cannot begin: {}".format
  return [
    beginning or Beginning(failure=failed(prompt.id, reason))
    for prompt, (beginning, reason) in zip(prompts, results, strict=True)
  ]


def resume(
  conversations: Sequence[tuple[Trajectory, Prompt]], make: Make, threads: int = 0
) -> list[str]:
  """Creates environments of restored trajectories, and repeats their past turns.

  Args:
    conversations: each trajectory and its prompt; sets `Trajectory.environment`.
    make: constructor of an environment.
    threads: `environment.workers`.

  Returns:
    A description of each trajectory's failure; "" if there is none.
  """

  def repeat(trajectory: Trajectory, prompt: Prompt) -> Environment:
    environment = make(prompt)
    environment.reset()
    for turn in range(trajectory.turn):
      environment.step(trajectory.tokens[trajectory.turns == turn].tolist())
    return environment

  limit_s = time_limit(make)
  results = _call([(repeat, x, limit_s * (1 + x[0].turn)) for x in conversations], threads)
  failures = []
  for (trajectory, prompt), (environment, reason) in zip(conversations, results, strict=True):
    trajectory.environment = environment
    failed = f"the environment of prompt {prompt.id} cannot repeat its turns: {reason}"
    failures.append(failed if reason else "")
  return failures


def step(environment: Environment, turn: Turn) -> Answer:
  """Steps an environment with a turn of the policy, and checks the environment's answer.

  Raises:
    Unusable: the environment returned an unusable value.
    BaseException: the environment raised this exception.
  """
  result = environment.step(turn.tokens)
  if not isinstance(result, tuple | list) or len(result) != 3:
    raise Unusable(f"returned {_repr(result)}: return observation, reward and done")
  observation, reward, done = result
  reward, done, tokens = _reward(reward), _done(done), ()
  if not (done or turn.last):
    tokens = _observation(observation, turn)
  overlong = len(tokens) > 0 and len(tokens) >= turn.remaining
  over = done or turn.last or overlong
  calls = _tool_calls(environment, turn.calls, default=int(not over))
  if not over:
    return Answer(tokens, reward, done=False, over=False, calls=calls)
  figures = dict(overlong_observation=float(overlong)) | _figures(environment)
  return Answer((), reward, done, calls=calls, figures=figures)


def try_turn(
  make: Make, environment: Environment, tokens: Sequence[int], remaining: int, vocab_size: int
) -> Answer:
  """Steps a new environment with a first turn, to check the environment before a run.

  Args:
    make: constructor of the environment; only its time limit is used.
    environment: environment after `reset`.
    tokens, remaining, vocab_size: fields of `Turn`.
  """
  turn = Turn([*tokens], last=False, remaining=remaining, vocab_size=vocab_size, calls=0)
  return answer(workers.shared(1).run(step, environment, turn, limit_s=time_limit(make)))


def answer(call: concurrent.futures.Future) -> Answer:
  """Returns a finished call's answer. If the call raised, the answer describes the failure."""
  result, failure = _result(
    call, lambda error: f"raised {error!r}: return an observation about it instead"
  )
  return Answer(failure=failure) if call.exception() else result


def _call(
  functions: Sequence[tuple[Callable, tuple, float]], threads: int
) -> list[tuple[Any, str]]:
  """Calls functions with arguments and time limits, in threads.

  Returns:
    Each function's value and "", or None and the failure's description.
  """
  pool = workers.shared(max(1, threads))
  calls = [pool.submit(f, *arguments, limit_s=limit_s) for f, arguments, limit_s in functions]
  pool.wait(calls)
  return [_result(call) for call in calls]


def _result(
  call: concurrent.futures.Future,
  describe: Callable[[BaseException], str] = lambda error: f"{type(error).__name__}: {error}",
) -> tuple[Any, str]:
  """Returns a finished call's value and "", or None and the failure's description."""
  error = call.exception()
  if error is None:
    return call.result(), ""
  if isinstance(error, workers.TooLong):
    _warn_of_waiting(str(error))
    return None, f"{error} ({LIMIT_KEY})"
  if isinstance(error, Unusable):
    return None, _printable_line(lambda: str(error))
  return None, _printable_line(lambda: describe(error)) + user_code.locate(error)


@functools.cache
def _warn_of_waiting(reason: str) -> None:
  """Writes a warning to stderr, once for each reason."""
  sys.stderr.write(
    f"warning: a call of an environment {reason} ({LIMIT_KEY}). The conversation has no verdict, "
    "and counts in the metric verifier/crash\n"
  )


def _printable_line(write: Callable[[], str]) -> str:
  """Returns the text from `write()` as one printable line of limited length.

  Formatting a user's exception runs user code, so `write` may raise.
  """
  try:
    text = " ".join(write().split())
  except BaseException as error:
    text = f"{type(error).__name__} in the text of another exception"
  text = text if len(text) <= REASON else f"{text[:REASON]}..."
  return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _prompt(
  first: Any, name: str, longest: int, render: Render | None, vocab_size: int
) -> tuple[int, ...]:
  """Checks a result of `reset` (`first`), and returns it as token ids."""
  unusable = Unusable(f"{name} returned {_repr(first)}: return messages or token ids")
  if isinstance(first, str | bytes | bytearray | Mapping) or not isinstance(first, Iterable):
    raise unusable
  entries = list(itertools.islice(first, longest + 1))
  messages = entries if entries and isinstance(entries[0], Mapping) else ()
  try:
    tokens = () if messages else tuple(map(operator.index, entries))
  except TypeError:
    raise unusable from None
  if messages:
    if render is None:
      raise Unusable(f"{name} returned messages, and `render` is None: return token ids")
    tokens = tuple(render(messages))
  if not 0 < len(tokens) <= longest:
    more = " or more" if tokens else ""
    raise Unusable(
      f"{name} begins with {len(tokens)} tokens{more}: return at least 1 token, and at most "
      f"data.max_prompt_tokens={longest}"
    )
  _require_ids(tokens, vocab_size, f"{name} begins")
  return tokens


def _observation(observation: Any, turn: Turn) -> tuple[int, ...]:
  """Checks an observation; returns its first token ids, at most `max(turn.remaining, 1)`."""
  advice = "return a list of token ids, for example an encoded text"
  if observation is None or isinstance(observation, str | bytes | bytearray | Mapping):
    raise Unusable(f"answered with {_repr(observation)}: {advice}")
  try:
    tokens = tuple(map(operator.index, itertools.islice(observation, max(turn.remaining, 1))))
  except TypeError:
    raise Unusable(f"answered with {_repr(observation)}: {advice}") from None
  if not tokens:
    raise Unusable(
      "returned done=False with an empty observation, so nothing would separate the next turn from "
      "this one: return at least one token, or done=True"
    )
  _require_ids(tokens, turn.vocab_size, "answered")
  return tokens


def _require_ids(tokens: Sequence[int], vocab_size: int, verb: str) -> None:
  """Raises Unusable unless the model has all token ids. `verb` begins the message."""
  if not 0 <= min(tokens) <= max(tokens) < vocab_size:
    raise Unusable(
      f"{verb} with token ids from {min(tokens)} to {max(tokens)}, and the model has 0 to "
      f"{vocab_size - 1}: use the run's tokenizer"
    )


def _reward(reward: Any) -> float:
  number = _number(reward)
  if not abs(number) <= LARGEST_REWARD:  # NaN fails too.
    raise Unusable(
      f"gave the reward {_repr(reward)}: return a finite number from -{LARGEST_REWARD:g} to "
      f"{LARGEST_REWARD:g}"
    )
  return number


def _done(done: Any) -> bool:
  done = done.item() if isinstance(done, np.generic | np.ndarray) and not done.ndim else done
  if not (isinstance(done, bool | int) and done in (0, 1)):
    raise Unusable(f"gave done={_repr(done)}: return True or False")
  return bool(done)


def _number(value: Any) -> float:
  """Converts a number or an array without axes to float; other values become NaN."""
  if isinstance(value, str | bytes | bytearray) or getattr(value, "ndim", 0):
    return math.nan
  try:
    return float(value)
  except (TypeError, ValueError, OverflowError):
    return math.nan


def _tool_calls(environment: Environment, earlier: int, default: int) -> int:
  """Returns the number of tool calls of the latest turn.

  Args:
    environment: environment after the turn.
    earlier: number of tool calls in earlier turns.
    default: number for an environment without an integer `tool_calls`.
  """
  total = getattr(environment, "tool_calls", None)
  if not isinstance(total, int | np.integer):
    return default
  if not earlier <= total < CALLS:
    raise Unusable(
      f"has tool_calls={_repr(int(total))}, and {earlier} were reported before: count all calls of "
      "the conversation so far"
    )
  return int(total) - earlier


def _figures(environment: Environment) -> dict[str, float]:
  """Returns the checked figures of a conversation."""
  try:
    reported = getattr(environment, "figures", dict)()
    pairs = list(itertools.islice(reported.items(), FIGURES + 1))
  except Exception as error:  # User code may raise anything.
    raise Unusable(f"has no figures: figures() raised {error!r}") from error
  if len(pairs) > FIGURES:
    raise Unusable(f"has more than {FIGURES} figures: return fewer")
  figures = {}
  for name, value in pairs:
    if not (isinstance(name, str) and 0 < len(name) <= NAME and name.isprintable()):
      raise Unusable(
        f"has the figure {_repr(name)}: use a printable name of 1 to {NAME} characters"
      )
    figures[name] = _number(value)
    if not abs(figures[name]) <= LARGEST_FIGURE:
      raise Unusable(
        f"has the figure {name}={_repr(value)}: return a finite number of at most 1e30"
      )
  return figures
