"""Trajectories, the unit of sampling, and their assembly into arrays.

A trajectory is a prompt, followed by turns that the policy samples and by observations from an
environment. A response to a prompt is a trajectory with one turn. A conversation has several turns,
with observations between them. A partial rollout is an unfinished trajectory, to be resumed with
newer weights. One class represents all three.
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

Message = Mapping[str, str]  # Keys `role` and `content`.
MOST_FIGURES = 200  # Maximum number of environments' metrics in a result of `means`.


class Environment(Protocol):
  """Environment of one trajectory: user code on the host, one object per trajectory.

  An optional integer attribute `tool_calls` counts the tool calls so far. If there is no such
  attribute, every turn but the last counts as one tool call. If a method raises, returns an
  unusable value or exceeds the time limit (tasks/environments.py), only this trajectory fails.
  """

  def reset(self) -> Sequence[Message] | Sequence[int]:
    """Returns the prompt: messages to render, or token ids."""
    ...

  def step(self, response: Sequence[int]) -> tuple[Sequence[int], float, bool]:
    """Steps with a turn's tokens; returns (observation tokens, the turn's reward, done).

    A turn ends with a stop token or a stop string, unless it was truncated at the trajectory's
    maximum length. The next turn follows the observation directly. So the observation must include
    all tokens between the two turns, such as a chat template's headers. The observation after the
    last turn is ignored.

    A run resumed in the middle of a trajectory creates a new environment, and steps it with the
    past turns. So the same turns must always lead to the same state of an environment.
    """
    ...

  def figures(self) -> Mapping[str, float]:
    """Returns metrics of a finished trajectory, by name (optional method).

    The metrics' means over trajectories are logged. A trajectory is right if `correct` is 1 or
    more, unless reward.right_from is set (see `right`). By default, `correct` is 1 if the rewards
    sum to more than 0, else 0. The sampler adds `tokens`, `tool_calls` and `overlong_observation`
    (1 if an observation was dropped because it was too long, else 0), unless the environment
    returns metrics of these names.
    """
    return {}


class SingleTurn:
  """Environment of single-turn responses; a verifier scores them afterwards."""

  def __init__(self, prompt: Sequence[int]):
    self._prompt = prompt

  def reset(self) -> Sequence[int]:
    return self._prompt

  def step(self, response: Sequence[int]) -> tuple[Sequence[int], float, bool]:
    return (), 0.0, True


# Dtypes of a trajectory's columns: arrays with one value for each token after the prompt.
COLUMNS = dict(
  tokens=np.int32,
  turns=np.int32,  # Turn 0, 1, ... of a sampled token; -1 on observations.
  logp=np.float32,  # Log-prob under the sampling distribution; 0 on observations.
  full_logp=np.float32,  # Log-prob without top-k, top-p, min-p, NaN if unknown; 0 on observations.
  version=np.int32,  # Weight version of a sampled token; -1 on observations.
  rewards=np.float32,  # Reward of a turn or line, at its last token; 0 elsewhere.
)


class Trajectory:
  """One response or conversation, unfinished or finished.

  Attributes:
    prompt: token ids of the prompt, which the columns do not contain.
    sample: number among all trajectories with the same prompt; consecutive in a group.
    seed: seed of the request; `seed`, `prompt` and `sample` determine the PRNG key.
    environment: the environment. For conversations it is None on hosts other than the first, and
      after a restore until `conversations.resume` has created it.
    tag: the caller's label, such as the prompt's id; error messages show it.
    turn: index of the current turn, which is also the number of finished turns.
    calls: number of tool calls in each finished turn.
    finished: whether the trajectory has ended. The environment ends it, or it reaches the maximum
      length or number of turns, or it fails.
    stopped: whether the last turn ended with a stop token or stop string, and the environment was
      done. After a single turn, the environment is always done.
    limit: maximum number of tokens after the prompt; 0 until a driver sets it.
    experts: experts chosen in each token's first forward pass, int8 or int16 [m, l, k], for the
      first m tokens, prompt included. Later tokens have had no pass yet. None if not recorded.
    support: token ids in each token's sampling distribution, int32 [n, X], padded with NO_TOKEN. A
      row of NO_TOKEN alone means an observation or the whole vocabulary. None if not recorded.
    figures: metrics of the finished trajectory, by name (`Environment.figures`).
    failure: description of the environment's or the response's failure; "" if there is none. The
      reward of a failed trajectory is unknown.
    columns: dict of the arrays named in COLUMNS, [n] each, for the n tokens after the prompt.
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
    self._turn_start = 0  # Index of the current turn's first token in `tokens`.

  tokens = property(lambda self: self.columns["tokens"])
  turns = property(lambda self: self.columns["turns"])
  rewards = property(lambda self: self.columns["rewards"])
  version = property(lambda self: self.columns["version"])
  truncated = property(lambda self: self.finished and not (self.stopped or self.failure))

  @property
  def length(self) -> int:
    """Number of sampled tokens."""
    return int((self.turns >= 0).sum())

  @property
  def oldest_version(self) -> int | None:
    """Oldest version of the weights that sampled a token; None if no token is sampled."""
    return min(self.version[self.turns >= 0].tolist(), default=None)

  @property
  def turn_tokens(self) -> list[int]:
    """Tokens of the current turn."""
    return self.tokens[self._turn_start :].tolist()

  def add(self, response: Response) -> None:
    """Appends a response's tokens to the current turn."""
    n = len(response.tokens)
    if not n:  # No experts are lost: the next response includes the experts of all earlier tokens.
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
      # Every turn prefills the prefix again; only the experts of a token's first pass are recorded.
      filled = 0 if self.experts is None else len(self.experts)
      new = response.experts[filled:]
      self.experts = np.concatenate([self.experts, new]) if filled else new

  def end_turn(self, reward: float, calls: int = 0) -> None:
    """Ends the current turn with its reward and its number of tool calls."""
    rewards = self.rewards.copy()  # Snapshots (`copy`) share the old array.
    rewards[-1] = reward
    self.columns["rewards"] = rewards
    self.calls = (*self.calls, calls)
    self.turn += 1
    self._turn_start = len(self.tokens)

  def observe(self, tokens: Sequence[int]) -> None:
    """Appends an observation's tokens. The next turn begins after them."""
    n = len(tokens)
    self._extend_support(n, None)
    self._extend(
      tokens=np.array(tokens, np.int32),
      turns=np.full(n, -1, np.int32),
      logp=np.zeros(n, np.float32),
      full_logp=np.zeros(n, np.float32),
      version=np.full(n, -1, np.int32),
      rewards=np.zeros(n, np.float32),
    )
    self._turn_start = len(self.tokens)

  def finish(self, stopped: bool, figures: Mapping[str, float] | None = None) -> None:
    """Finishes the trajectory. The environment's figures override defaults of the same names."""
    self.finished, self.stopped = True, stopped
    if not isinstance(self.environment, SingleTurn):
      self.figures = self._default_figures(float(self.rewards.sum() > 0)) | dict(figures or {})

  def fail(self, failure: str) -> None:
    """Finishes the trajectory after a failure in or before the current turn.

    A trajectory without any token after the prompt also loses its prompt, and becomes padding in a
    batch.
    """
    if len(self.tokens) > self._turn_start:
      self.end_turn(0.0)
    if not len(self.tokens):
      self.prompt, self.experts = (), None
    self.finished, self.failure, self.figures = True, failure, self._default_figures(0.0)

  def cut(self, limit: int) -> None:
    """Limits the tokens after the prompt to `limit`.

    A longer trajectory, or an unfinished one of this length, loses its last sampled token within
    the limit, and all later tokens. It becomes unfinished, with at least one token to sample.
    """
    if len(self.tokens) < limit + self.finished:
      return
    n = int(np.flatnonzero(self.turns[:limit] >= 0)[-1])
    self.turn = int(self.turns[n])
    self._turn_start = int(np.flatnonzero(self.turns == self.turn)[0])
    self.columns = {name: column[:n] for name, column in self.columns.items()}
    if self.support is not None:
      self.support = self.support[:n]
    if self.experts is not None:
      self.experts = self.experts[: len(self.prompt) + n - 1]
    self.calls, self.figures, self.failure = self.calls[: self.turn], {}, ""
    self.finished, self.stopped, self.limit = False, False, 0

  def _default_figures(self, correct: float) -> dict[str, float]:
    return dict(correct=correct, tokens=float(self.length), tool_calls=float(sum(self.calls)))

  def copy(self) -> "Trajectory":
    """Returns a snapshot of the trajectory. It shares the environment."""
    snapshot = copy.copy(self)
    snapshot.columns = dict(self.columns)
    return snapshot

  def _extend(self, **parts: np.ndarray) -> None:
    for name, part in parts.items():
      old = self.columns[name]
      self.columns[name] = np.concatenate([old, part]) if len(old) else part

  def _extend_support(self, n: int, new: np.ndarray | None) -> None:
    """Appends the support of n new tokens. Call it before `_extend` appends the tokens.

    Args:
      n: number of new tokens.
      new: support of the new tokens; None if it is not recorded.
    """
    if self.support is None and new is None:
      return
    old = np.zeros((len(self.tokens), 0), np.int32) if self.support is None else self.support
    new = np.zeros((n, 0), np.int32) if new is None else new
    width = max(old.shape[1], new.shape[1])
    self.support = np.concatenate([_pad_support(old, width), _pad_support(new, width)])

  def get_state(self) -> dict[str, Any]:
    """Returns the trajectory without environment and tag, in JSON types, for a checkpoint."""
    arrays, file = self.columns | dict(routing=self.experts, support=self.support), io.BytesIO()
    np.savez(file, **{name: x for name, x in arrays.items() if x is not None})
    plain = "prompt sample seed turn calls finished stopped limit figures failure".split()
    state = {name: getattr(self, name) for name in plain} | dict(_begun=self._turn_start)
    return state | dict(arrays=base64.b64encode(file.getvalue()).decode())

  @classmethod
  def from_state(
    cls, state: Mapping[str, Any], environment: Environment | None, tag: Any = None
  ) -> "Trajectory":
    """Restores a trajectory from `get_state`.

    Args:
      state: result of `get_state`.
      environment: environment in its state after the past turns. None if
        `conversations.resume` creates it later, on the first host.
      tag: the caller's label.
    """
    state = dict(state)
    arrays = dict(np.load(io.BytesIO(base64.b64decode(state.pop("arrays")))))
    trajectory = cls(state.pop("prompt"), state.pop("sample"), state.pop("seed"), environment, tag)
    turn_start = state.pop("_begun")
    vars(trajectory).update(state | dict(calls=tuple(state["calls"]), _turn_start=turn_start))
    trajectory.experts = arrays.pop("routing", None)
    trajectory.support = arrays.pop("support", None)
    trajectory.columns = arrays
    return trajectory


def _pad_support(support_nX: np.ndarray, width: int) -> np.ndarray:
  missing = width - support_nX.shape[1]
  return np.pad(support_nX, ((0, 0), (0, missing)), constant_values=NO_TOKEN)


def recorded_turn(
  prompt: Sequence[int], sample: int, tokens: np.ndarray, stopped: bool, tag: Any = None
) -> Trajectory:
  """Returns a finished trajectory with one recorded turn, versions of -1 and log-probs of 0."""
  trajectory = Trajectory(prompt, sample, 0, SingleTurn(prompt), tag)
  zeros = np.zeros(len(tokens), np.float32)
  unversioned = np.full(len(tokens), -1, np.int32)
  trajectory.add(Response(None, sample, tokens, zeros, zeros, unversioned, stopped, True, None))
  trajectory.finish(stopped)
  return trajectory


def turn_rewards(trajectory: Trajectory) -> np.ndarray:
  """Sums the rewards within each of the U finished turns, float64 [U]."""
  sampled_X = trajectory.turns >= 0
  return np.bincount(trajectory.turns[sampled_X], trajectory.rewards[sampled_X], trajectory.turn)


def totals(trajectories: Sequence[Trajectory]) -> np.ndarray:
  """Sums the rewards of each conversation, float32 [B]."""
  # Sums of float32 values in float64 are nearly exact, whatever the order of the rewards.
  return np.array([x.rewards.sum(dtype=np.float64) for x in trajectories], np.float32)


def right(trajectories: Sequence[Trajectory], right_from: float | None) -> np.ndarray:
  """Whether each conversation is right, bool [B]. Failed conversations are not right.

  Args:
    trajectories: finished trajectories.
    right_from: smallest total reward of a right conversation. None means that a conversation is
      right if its metric `correct` is 1 or more.
  """
  if right_from is None:
    right_B = np.array([trajectory.figures["correct"] >= 1 for trajectory in trajectories], bool)
  else:
    right_B = totals(trajectories) >= np.float32(right_from)
  return right_B & np.array([not trajectory.failure for trajectory in trajectories], bool)


def means(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Returns the mean of each figure over the trajectories with this figure.

  Args:
    figures: `Trajectory.figures` of some trajectories. Only the MOST_FIGURES most frequent names
      are returned.
  """
  by_name: dict[str, list[float]] = {}
  for row in figures:
    for name, value in row.items():
      by_name.setdefault(name, []).append(value)
  names = sorted(by_name, key=lambda name: (-len(by_name[name]), name))[:MOST_FIGURES]
  return {name: float(np.mean(by_name[name])) for name in names}


def assemble(
  trajectories: Sequence[Trajectory], length: int, pad_id: int, support: int = 0
) -> Rollout:
  """Assembles trajectories into batch rows of `length`: prompt, continuation, padding.

  Args:
    trajectories: finished trajectories. Experts are recorded either for all trajectories with
      sampled tokens or for none.
    length: number of positions of a batch row.
    pad_id: token id of padding.
    support: maximum number of tokens in a token's sampling distribution (sampling.top_k). If it is
      0, the rollout has no supports. A trajectory without recorded supports counts as sampled from
      the whole vocabulary.

  Raises:
    ValueError: a trajectory has a wider support, since sampling.top_k was larger before a resume.
  """
  B = len(trajectories)
  fields = {name: np.zeros((B, length), dtype) for name, dtype in COLUMNS.items()}
  fields["tokens"][:] = pad_id
  fields["turns"][:] = fields["version"][:] = -1
  experts_BLlk = None
  first = next((trajectory.experts for trajectory in trajectories if trajectory.prompt), None)
  if first is not None:
    # Tokens after the last forward pass have no experts: the last token, or a last observation.
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
      experts_BLlk[row, : len(trajectory.experts)] = trajectory.experts
    if trajectory.support is not None:
      if (width := trajectory.support.shape[1]) > support:
        raise ValueError(
          f"sampling.top_k={support}, but an unfinished response from the checkpoint was sampled "
          f"with top_k={width}: set sampling.top_k to {width} until that response is finished"
        )
      support_BLX[row, start:end] = _pad_support(trajectory.support, support)
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
