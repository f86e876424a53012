"""Groups: a prompt and its trajectories, under way, finished and scored."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gspo_jax.data import recorded
from gspo_jax.sampling import Trajectory
from gspo_jax.sampling.trajectory import recorded_turn
from gspo_jax.structs import Prompt

MISSING = "there is no further response on record"
NOT_SAMPLED = "its group is smaller"


@dataclasses.dataclass
class Group:
  """A prompt with its trajectories, and what they are worth once they have been scored."""

  prompt: Prompt
  trajectories: list[Trajectory]
  responses: Sequence[str] = ()
  reward_G: np.ndarray | None = None  # float32
  correct_G: np.ndarray | None = None  # float32: raw correctness, before any shaping
  unknown: Mapping[int, str] = dataclasses.field(default_factory=dict)  # as in `rewards.Scores`
  # float32, by name: further rewards, and costs (rewards/signals.py)
  signals: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

  @property
  def finished(self) -> bool:
    return all(one.finished for one in self.trajectories)

  @property
  def left(self) -> int:
    """Responses that are not finished."""
    return sum(not one.finished for one in self.trajectories)

  @property
  def known_G(self) -> np.ndarray:
    """bool: there is a verdict on the response. What has none is in no statistic."""
    return np.array([i not in self.unknown for i in range(len(self.trajectories))], bool)

  @property
  def mixed(self) -> bool:
    """Whether there are right and wrong responses, and so something to learn from."""
    return spread(self.correct_G[self.known_G]) > 0

  def get_state(self) -> dict[str, Any]:
    """Returns JSON; of a group that has been scored, with what it is worth."""
    trajectories = [one.get_state() for one in self.trajectories]
    state = dict(prompt=dataclasses.asdict(self.prompt), trajectories=trajectories)
    if self.reward_G is None:
      return state

    def floats(value_G: np.ndarray) -> list[float]:
      return np.asarray(value_G, np.float32).tolist()

    return state | dict(
      responses=list(self.responses),
      reward=floats(self.reward_G),
      correct=floats(self.correct_G),
      unknown=list(self.unknown.items()),
      signals={name: floats(value_G) for name, value_G in self.signals.items()},
    )

  @classmethod
  def from_state(cls, state: Mapping[str, Any], make: Callable[[Prompt], Any]) -> "Group":
    """A group as `get_state` left it, with environments that `make` makes."""
    info = tuple((key, value) for key, value in state["prompt"]["info"])
    prompt = Prompt(**state["prompt"] | dict(tokens=tuple(state["prompt"]["tokens"]), info=info))
    trajectories = [
      Trajectory.from_state(one, make(prompt), prompt.id) for one in state["trajectories"]
    ]
    if "reward" not in state:
      return cls(prompt, trajectories)
    signals = {name: np.float32(values) for name, values in state["signals"].items()}
    worth = np.float32(state["reward"]), np.float32(state["correct"]), dict(state["unknown"])
    return cls(prompt, trajectories, state["responses"], *worth, signals)

  @classmethod
  def on_record(cls, one: recorded.Group, size: int, decode: Callable[[list[int]], str]) -> "Group":
    """A scored group of responses that were read from a file. In the place of those that are
    missing it has some without a token, on which there is no verdict."""
    prompt, own = one.prompt, one.responses
    trajectories = [
      recorded_turn(prompt.tokens, g, response.tokens, response.stopped, prompt.id)
      for g, response in enumerate(own)
    ]
    nothing = np.zeros(0, np.int32)
    blanks = range(len(own), size)
    trajectories += [recorded_turn(prompt.tokens, g, nothing, False, prompt.id) for g in blanks]
    texts = [decode(trajectory.tokens.tolist()) for trajectory in trajectories]
    reward_G = np.array([response.reward for response in own] + [0.0] * len(blanks), np.float32)
    correct_G = (reward_G > 0).astype(np.float32)
    return cls(prompt, trajectories, texts, reward_G, correct_G, dict.fromkeys(blanks, MISSING))


def filled(group: Group, size: int) -> Group:
  """A scored group with rows of padding, on which there is no verdict, in the place of responses
  that it has fewer than `size`."""
  blanks, nothing = range(len(group.trajectories), size), np.zeros(0, np.int32)
  if not blanks:
    return group
  padding = [recorded_turn((), g, nothing, True, group.prompt.id) for g in blanks]

  def widen(values_G: np.ndarray) -> np.ndarray:
    return np.pad(values_G, (0, len(blanks)))

  return Group(
    group.prompt,
    [*group.trajectories, *padding],
    [*group.responses, *[""] * len(blanks)],
    widen(group.reward_G),
    widen(group.correct_G),
    {**group.unknown, **dict.fromkeys(blanks, NOT_SAMPLED)},
    {name: widen(values_G) for name, values_G in group.signals.items()},
  )


def spread(values: np.ndarray) -> float:
  """Difference of the largest and the smallest; 0 where there is none."""
  return float(np.ptp(values)) if len(values) else 0.0
