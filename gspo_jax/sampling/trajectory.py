"""Trajectories: what sampling makes, whoever asks, and the arrays that they become.

A response to a prompt is a trajectory whose environment ends it after one turn. A conversation has
more turns, with observations between them. A partial rollout is a trajectory that is put aside and
gone on with under other weights. They are the same thing at different moments.
"""

import base64
import copy
import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from gspo_jax.models.experts import routing
from gspo_jax.models.head import NO_TOKEN
from gspo_jax.sampling.requests import Response
from gspo_jax.structs import Rollout

Message = Mapping[str, str]  # role and content


class Environment(Protocol):
  """The other side of one trajectory. Host code; one object per trajectory, used once.

  It may have an attribute `tool_calls`, a whole number: the calls of tools that it has made so far.
  Without one, every turn that it answered is a call.
  """

  def reset(self) -> Sequence[Message] | Sequence[int]:
    """Returns the beginning: messages to be rendered, or the prompt's token ids."""
    ...

  def step(self, response: Sequence[int]) -> tuple[Sequence[int], float, bool]:
    """Takes a turn's tokens; returns observation tokens, the turn's reward, and if it was the last.

    A turn ends with a stop token, or with a stop string; one that has neither was cut off because
    the trajectory may not become longer. The next turn goes on right after the observation, so
    what the model expects to see there (a chat template's headers) belongs to it. After the last
    turn the observation is not looked at.

    A run that is resumed in the middle of a trajectory makes a new environment and repeats the
    turns: the same turns must be answered in the same way.
    """
    ...

  def figures(self) -> Mapping[str, float]:
    """May be left out. Numbers of a trajectory that is over, whose means are logged by these
    names. `correct`, 0 or 1, is what accuracy counts; without it, whether rewards sum to above 0.
    `tokens` and `tool_calls` need not be among them.
    """
    return {}


class SingleTurn:
  """The environment of responses that a verifier judges afterwards: one turn, and it is over."""

  def __init__(self, prompt: Sequence[int]):
    self._prompt = prompt

  def reset(self) -> Sequence[int]:
    return self._prompt

  def step(self, response: Sequence[int]) -> tuple[Sequence[int], float, bool]:
    return (), 0.0, True


COLUMNS = dict(  # columns of the n tokens after the prompt
  tokens=np.int32,
  turns=np.int32,  # 0, 1, ... on sampled tokens, -1 on observations
  logp=np.float32,  # under the distribution that it was drawn from; 0 on observations
  full_logp=np.float32,  # under the one without top-k, top-p and min-p
  version=np.int32,  # weights of a sampled token, -1 on observations
  rewards=np.float32,  # turn's reward at its last token
)


class Trajectory:
  """One response or conversation, under way or over.

  Attributes:
    prompt: token ids; `tokens` and the other columns follow it.
    sample: its number among those that begin with the same prompt: in a group they follow each
      other.
    seed: of its noise; with the prompt and `sample` it decides every token.
    turn: turns that are over, which is also the number of the one under way.
    calls: of tools, in each turn that is over.
    finished: the environment ended it, or it was cut off, by its length or its turns.
    stopped: the environment ended it.
    limit: tokens that may follow the prompt, of the driver that it went on with last; 0: of none.
    experts: int8 or int16 [prompt + n - 1, l, k], experts of every token as it was fed first; None
      where they are not recorded.
    support: int32 [n, X], tokens that each one was drawn from; NO_TOKEN where they are fewer, and
      throughout for the whole vocabulary and for observations; None where they are not recorded.
    figures: what the environment says of it once it is over.
    failure: how the environment failed, which ended it: nothing is known about it then.
    columns: by the names of COLUMNS, [n] each.
  """

  def __init__(
    self, prompt: Sequence[int], sample: int, seed: int, environment: Environment, tag: Any = None
  ):
    self.prompt, self.sample, self.seed = tuple(prompt), sample, seed
    self.environment, self.tag = environment, tag
    self.turn, self.finished, self.stopped, self.limit = 0, False, False, 0
    self.calls: tuple[int, ...] = ()
    self.figures: dict[str, float] = {}
    self.failure = ""
    self.experts: np.ndarray | None = None
    self.support: np.ndarray | None = None
    self.columns = {name: np.zeros(0, dtype) for name, dtype in COLUMNS.items()}
    self._begun = 0  # tokens after the prompt when the turn under way began

  tokens = property(lambda self: self.columns["tokens"])
  turns = property(lambda self: self.columns["turns"])
  rewards = property(lambda self: self.columns["rewards"])
  version = property(lambda self: self.columns["version"])

  @property
  def length(self) -> int:
    """Sampled tokens."""
    return int((self.turns >= 0).sum())

  @property
  def oldest(self) -> int | None:
    """Oldest version of the weights of its tokens; None: it has no tokens."""
    return min(self.version[self.turns >= 0].tolist(), default=None)

  @property
  def turn_tokens(self) -> list[int]:
    """Tokens of the turn under way."""
    return self.tokens[self._begun :].tolist()

  def add(self, response: Response) -> None:
    """Appends sampled tokens to the turn under way."""
    n = len(response.tokens)
    if not n:  # nobody has begun it, though its prompt may have been prefilled
      return
    self._extend_support(n, response.support)
    self._extend(
      tokens=response.tokens,
      turns=np.full(n, self.turn, np.int32),
      logp=response.logp,
      full_logp=response.full_logp,
      version=response.version,
      rewards=np.zeros(n, np.float32),
    )
    if response.experts is not None:
      # A prefix is prefilled anew in every turn; what counts is how each token was fed at first.
      filled = 0 if self.experts is None else len(self.experts)
      new = response.experts[filled:]
      self.experts = np.concatenate([self.experts, new]) if filled else new

  def end_turn(self, reward: float) -> None:
    rewards = self.rewards.copy()  # a copy of the trajectory may share it
    rewards[-1] = reward
    self.columns["rewards"] = rewards
    counted = self._counted
    self.calls = (*self.calls, 0 if counted is None else counted - sum(self.calls))
    self.turn += 1
    self._begun = len(self.tokens)

  def observe(self, tokens: Sequence[int]) -> None:
    """Appends the environment's tokens; the next turn follows."""
    n = len(tokens)
    if self._counted is None:
      self.calls = (*self.calls[:-1], 1)
    self._extend_support(n, None)
    self._extend(
      tokens=np.array(tokens, np.int32),
      turns=np.full(n, -1, np.int32),
      logp=np.zeros(n, np.float32),
      full_logp=np.zeros(n, np.float32),
      version=np.full(n, -1, np.int32),
      rewards=np.zeros(n, np.float32),
    )
    self._begun = len(self.tokens)

  def finish(self, stopped: bool) -> None:
    self.finished, self.stopped = True, stopped
    if isinstance(self.environment, SingleTurn):
      return
    right = float(self.rewards.sum() > 0)
    self.figures = dict(correct=right, tokens=float(self.length), tool_calls=float(sum(self.calls)))
    try:
      reported = getattr(self.environment, "figures", dict)()
      self.figures |= {name: float(value) for name, value in reported.items()}
    except Exception as error:  # it is the user's
      self.failure = f"{type(self.environment).__name__}.figures() raised {error!r}"

  def fail(self, failure: str) -> None:
    """Ends it in the turn of the environment's failure."""
    self.end_turn(0.0)
    self.finished, self.failure = True, failure
    self.figures = dict(correct=0.0, tokens=float(self.length), tool_calls=float(sum(self.calls)))

  @property
  def _counted(self) -> int | None:
    """Tool calls so far; None: the environment does not count them."""
    calls = getattr(self.environment, "tool_calls", None)
    return int(calls) if isinstance(calls, int | np.integer) else None

  def copy(self) -> "Trajectory":
    """Returns a snapshot with the same environment."""
    snapshot = copy.copy(self)
    snapshot.columns = dict(self.columns)
    return snapshot

  def _extend(self, **parts: np.ndarray) -> None:
    for name, part in parts.items():
      old = self.columns[name]
      self.columns[name] = np.concatenate([old, part]) if len(old) else part

  def _extend_support(self, n: int, new: np.ndarray | None) -> None:
    """Appends the support of n tokens before their columns."""
    if self.support is None and new is None:
      return
    old = np.zeros((len(self.tokens), 0), np.int32) if self.support is None else self.support
    new = np.zeros((n, 0), np.int32) if new is None else new
    width = max(old.shape[1], new.shape[1])
    self.support = np.concatenate([_widened(old, width), _widened(new, width)])

  def get_state(self) -> dict[str, Any]:
    """Returns JSON, for a checkpoint; all but the environment."""
    arrays, file = self.columns | dict(routing=self.experts, support=self.support), io.BytesIO()
    np.savez_compressed(file, **{name: x for name, x in arrays.items() if x is not None})
    plain = "prompt sample seed turn calls finished stopped limit figures failure _begun".split()
    state = {name: getattr(self, name) for name in plain}
    return state | dict(arrays=base64.b64encode(file.getvalue()).decode())

  @classmethod
  def from_state(
    cls, state: Mapping[str, Any], environment: Environment | None, tag: Any = None
  ) -> "Trajectory":
    """Restores the trajectory of `get_state` and replays its turns to a new environment; None:
    another host has it."""
    state = dict(state)
    arrays = dict(np.load(io.BytesIO(base64.b64decode(state.pop("arrays")))))
    trajectory = cls(state.pop("prompt"), state.pop("sample"), state.pop("seed"), environment, tag)
    vars(trajectory).update(state | dict(calls=tuple(state["calls"])))
    trajectory.experts = arrays.pop("routing", None)
    trajectory.support = arrays.pop("support", None)
    trajectory.columns = arrays
    if not trajectory.finished and environment is not None:
      environment.reset()
      for turn in range(trajectory.turn):
        environment.step(trajectory.tokens[trajectory.turns == turn].tolist())
    return trajectory


def _widened(support_nX: np.ndarray, width: int) -> np.ndarray:
  lacking = width - support_nX.shape[1]
  return np.pad(support_nX, ((0, 0), (0, lacking)), constant_values=NO_TOKEN)


def recorded_turn(
  prompt: Sequence[int], sample: int, tokens: np.ndarray, stopped: bool, tag: Any = None
) -> Trajectory:
  """Returns a finished single turn sampled elsewhere, with versions -1 and log-probs 0."""
  trajectory = Trajectory(prompt, sample, 0, SingleTurn(prompt), tag)
  zeros = np.zeros(len(tokens), np.float32)
  unversioned = np.full(len(tokens), -1, np.int32)
  trajectory.add(Response(None, sample, tokens, zeros, zeros, unversioned, stopped, True, None))
  trajectory.finish(stopped)
  return trajectory


def means(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Means of figures, each over the trajectories with it."""
  by_name: dict[str, list[float]] = {}
  for row in figures:
    for name, value in row.items():
      by_name.setdefault(name, []).append(value)
  return {name: float(np.mean(values)) for name, values in by_name.items()}


def assemble(
  trajectories: Sequence[Trajectory], length: int, pad_id: int, support: int = 0
) -> Rollout:
  """Puts each trajectory into one row of `length`: prompt, continuation, padding.

  Args:
    trajectories: finished ones, all with routing or none; but that those without a prompt, which
      become rows of padding, have none in any case.
    support: tokens of a support, at most; 0: there are none. Those of trajectories without one, of
      recorded responses, are the whole vocabulary.

  Raises:
    ValueError: a trajectory that was put aside has a wider support, of another configuration.
  """
  B = len(trajectories)
  fields = {name: np.zeros((B, length), dtype) for name, dtype in COLUMNS.items()}
  fields["tokens"][:] = pad_id
  fields["turns"][:] = fields["version"][:] = -1
  experts_BLlk = None
  if trajectories[0].experts is not None:
    # The last token of a trajectory was never fed to the sampler: no experts were chosen for it,
    # None are needed: nothing is predicted from it.
    first = trajectories[0].experts
    experts_BLlk = np.full((B, length, *first.shape[1:]), routing.NO_EXPERT, first.dtype)
  support_BLX = np.full((B, length, support), NO_TOKEN, np.int32) if support else None
  prompts, ends = np.zeros(B, np.int32), np.zeros(B, np.int32)
  for row, trajectory in enumerate(trajectories):
    prompts[row] = start = len(trajectory.prompt)
    ends[row] = end = start + len(trajectory.tokens)
    fields["tokens"][row, :start] = trajectory.prompt
    for name, column in trajectory.columns.items():
      fields[name][row, start:end] = column
    if experts_BLlk is not None and trajectory.experts is not None:
      experts_BLlk[row, : end - 1] = trajectory.experts
    if trajectory.support is not None:
      if (width := trajectory.support.shape[1]) > support:
        raise ValueError(
          f"sampling.top_k is {support} tokens now, and a response that was put aside has tokens "
          f"drawn from {width}: set it to {width} until that response is finished"
        )
      support_BLX[row, start:end] = _widened(trajectory.support, support)
  mask = (fields["turns"] >= 0).astype(np.float32)
  return Rollout(
    **fields,
    mask=mask,
    prompt_lengths=prompts,
    lengths=mask.sum(1).astype(np.int32),
    ends=ends,
    stopped=np.array([trajectory.stopped for trajectory in trajectories]),
    routing=experts_BLlk,
    support=support_BLX,
  )
