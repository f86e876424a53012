"""Groups: a prompt with its trajectories, which are in flight, finished or scored.

The verdict on a response is its score, and whether it is right. A response without a verdict is
unknown: sampling, the verifier, a further reward or the environment failed, or the response is
blank and only pads its group. `Group.unknown` has the reason. Unknown responses are excluded from
statistics of rewards, and have no advantage from rewards.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gspo_jax.data import recorded
from gspo_jax.objectives import advantages
from gspo_jax.rewards.shaping import reaches
from gspo_jax.sampling import SingleTurn, Trajectory, conversations
from gspo_jax.sampling.trajectory import recorded_turn
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import Prompt
from gspo_jax.system import hosts
from gspo_jax.tasks.environments import Make

# Reasons of blank responses, which pad a group to its size.
MISSING = "the recorded data has no more responses to this prompt"
NOT_SAMPLED = "fewer than rl.group_size responses to this prompt were sampled"


@dataclasses.dataclass
class Group:
  """A prompt with its trajectories. Scoring sets all further fields.

  Axes: G, responses of the group; U, turns or lines of a response.
  """

  prompt: Prompt
  trajectories: list[Trajectory]
  responses: Sequence[str] = ()  # Decoded texts.
  reward_G: np.ndarray | None = None  # float32: shaped rewards.
  correct_G: np.ndarray | None = None  # float32: 1 for right responses, before reward shaping.
  # Reasons for missing verdicts, by index of the unknown response.
  unknown: Mapping[int, str] = dataclasses.field(default_factory=dict)
  # Further rewards and costs by name, float32 [G] each (rewards/signals.py).
  signals: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
  # float32: scores before reward shaping. None if they equal `correct_G`.
  value_G: np.ndarray | None = None
  # Returns of each response's turns or lines, float64 [U], before reward shaping. None if
  # advantages compare whole responses. Checkpoints do not have this field.
  returns: Sequence[np.ndarray] | None = None

  @property
  def finished(self) -> bool:
    """Whether all responses are finished."""
    return not self.unfinished

  @property
  def unfinished(self) -> int:
    """Number of unfinished responses."""
    return sum(not trajectory.finished for trajectory in self.trajectories)

  @property
  def known_G(self) -> np.ndarray:
    """Mask of responses with a verdict, bool. Only these responses are in statistics of rewards."""
    return np.array([g not in self.unknown for g in range(len(self.trajectories))], bool)

  def trained_G(self, config: RunConfig) -> np.ndarray:
    """Returns the mask of responses with a share in the loss, bool."""
    stopped_G = np.array([trajectory.stopped for trajectory in self.trajectories], bool)
    has_verdict_G = self.known_G | config.distillation.alone
    return has_verdict_G & (stopped_G | (not config.rl.mask_truncated))

  @property
  def mixed(self) -> bool:
    """Whether the scores of responses differ, before reward shaping.

    If advantages compare turns or lines, the returns of equally numbered turns or lines are
    compared instead of scores.
    """
    if self.returns is None:
      value_G = self.correct_G if self.value_G is None else self.value_G
      return not alike(value_G[self.known_G])
    scored = [return_U for g, return_U in enumerate(self.returns) if g not in self.unknown]
    longest = max(map(len, scored), default=0)
    columns = ([x[u] for x in scored if len(x) > u] for u in range(longest))
    return not all(alike(np.array(column)) for column in columns)

  def get_state(self) -> dict[str, Any]:
    """Returns the group as a dict for JSON; if the group is scored, the dict includes scores."""
    trajectories = [trajectory.get_state() for trajectory in self.trajectories]
    state = dict(prompt=dataclasses.asdict(self.prompt), trajectories=trajectories)
    if self.reward_G is None:
      return state
    if self.value_G is not None:
      state["value_G"] = self.value_G.tolist()
    return state | dict(
      responses=list(self.responses),
      reward_G=self.reward_G.tolist(),
      correct_G=self.correct_G.tolist(),
      unknown=list(self.unknown.items()),
      signals={name: value_G.tolist() for name, value_G in self.signals.items()},
    )

  @classmethod
  def from_state(cls, state: Mapping[str, Any], make: Callable[[Prompt], Any]) -> "Group":
    """Restores a group from `get_state`.

    Args:
      make: function from the prompt to the environment of a trajectory.
    """
    state = dict(state)
    prompt = state.pop("prompt")
    info = tuple((key, value) for key, value in prompt["info"])
    prompt = Prompt(**prompt | dict(tokens=tuple(prompt["tokens"]), info=info))
    trajectories = [
      Trajectory.from_state(trajectory, make(prompt), prompt.id)
      for trajectory in state.pop("trajectories")
    ]
    if state:
      names = [name for name in ("reward_G", "correct_G", "value_G") if name in state]
      state |= {name: np.float32(state[name]) for name in names}
      state["unknown"] = dict(state["unknown"])
      state["signals"] = {name: np.float32(value_G) for name, value_G in state["signals"].items()}
    return cls(prompt, trajectories, **state)

  @classmethod
  def on_record(
    cls,
    record: recorded.Group,
    size: int,
    decode: Callable[[list[int]], str],
    right_from: float = 1.0,
  ) -> "Group":
    """Builds a scored group of `size` recorded responses.

    If the record has fewer responses, blank responses are added (`filled`).

    Args:
      decode: function from token ids to text.
      right_from: smallest reward of a right response.
    """
    prompt = record.prompt
    trajectories = [
      recorded_turn(prompt.tokens, g, response.tokens, response.stopped, prompt.id)
      for g, response in enumerate(record.responses)
    ]
    texts = [decode(trajectory.tokens.tolist()) for trajectory in trajectories]
    reward_G = np.array([response.reward for response in record.responses], np.float32)
    correct_G = reaches(reward_G, right_from).astype(np.float32)
    group = cls(prompt, trajectories, texts, reward_G, correct_G, value_G=reward_G)
    return filled(group, size, prompt.tokens, MISSING)


def filled(group: Group, size: int, prompt: Sequence[int] = (), reason: str = NOT_SAMPLED) -> Group:
  """Pads a scored group to `size` responses with blank responses.

  A blank response has no sampled tokens and no verdict.

  Args:
    prompt: prompt tokens of blank responses. If empty, their rows have no tokens at all.
    reason: reason of the missing verdict.
  """
  blanks, no_tokens = range(len(group.trajectories), size), np.zeros(0, np.int32)
  rows = [recorded_turn(prompt, g, no_tokens, False, group.prompt.id) for g in blanks]

  def widen(value_G: np.ndarray) -> np.ndarray:
    return np.pad(value_G, (0, len(blanks)))

  return Group(
    group.prompt,
    [*group.trajectories, *rows],
    [*group.responses, *[""] * len(blanks)],
    widen(group.reward_G),
    widen(group.correct_G),
    {**group.unknown, **dict.fromkeys(blanks, reason)},
    {name: widen(value_G) for name, value_G in group.signals.items()},
    None if group.value_G is None else widen(group.value_G),
    None if group.returns is None else [*group.returns, *(np.zeros(0) for _ in blanks)],
  )


def restored(
  states: Iterable[Mapping[str, Any]],
  make: Make | None,
  longest_prompt: int,
  longest: int,
  workers: int = 0,
) -> list[Group]:
  """Restores unscored groups, and the environments of unfinished conversations.

  Responses sampled under another configuration may be longer than `longest`. Such responses are cut
  (`Trajectory.cut`), and sampling resumes them. Environments run on the first host. If an
  environment fails, its trajectory fails.

  Args:
    states: states of the groups, from `Group.get_state`.
    make: constructor of environments. None means single turns.
    longest_prompt: value of `data.max_prompt_tokens`.
    longest: value of `sampling.max_new_tokens`.
    workers: value of `environment.workers`.

  Raises:
    ValueError: a prompt is longer than `longest_prompt`.
  """
  groups = [Group.from_state(x, lambda p: None if make else SingleTurn(p.tokens)) for x in states]
  for trajectory in trajectories_of(groups):
    trajectory.cut(longest)
  require_lengths(trajectories_of(groups), longest_prompt, longest)
  if make is None:
    return groups
  pairs = [(x, group.prompt) for group in groups for x in group.trajectories if not x.finished]
  failures = hosts.run_on_first_host(lambda: conversations.resume(pairs, make, workers))
  for (trajectory, _), failure in zip(pairs, failures, strict=True):
    if failure:
      trajectory.fail(failure)
  return groups


def require_lengths(trajectories: Sequence[Trajectory], longest_prompt: int, longest: int) -> None:
  """Raises ValueError for prompts or responses beyond the configured lengths.

  Updates compute no log-probs of tokens beyond these lengths, and would use 0 instead.
  """
  limits = (
    ("prompt", "data.max_prompt_tokens", longest_prompt),
    ("tokens", "sampling.max_new_tokens", longest),
  )
  for field, key, limit in limits:
    length = max((len(getattr(trajectory, field)) for trajectory in trajectories), default=0)
    if length > limit:
      kind = "prompt" if field == "prompt" else "response"
      raise ValueError(
        f"a {kind} has {length} tokens, but {key}={limit}: set the key to at least {length}"
      )


def trajectories_of(groups: Iterable[Group]) -> list[Trajectory]:
  """Lists the trajectories of all groups."""
  return [trajectory for group in groups for trajectory in group.trajectories]


def alike(values: np.ndarray) -> bool:
  """Whether all values are equal up to float32 rounding; True for an empty array."""
  return not len(values) or np.ptp(values) <= advantages.ROUNDING * abs(values).max()
