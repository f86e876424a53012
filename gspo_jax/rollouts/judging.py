"""Verdicts on groups: of a verifier or of their environments, and what further signals measure.

The first host judges, and what it says is told to all: a time limit may strike on one host and not
on another.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gspo_jax.rewards import Scorer
from gspo_jax.rewards.signals import Signals
from gspo_jax.rollouts import costs
from gspo_jax.rollouts.groups import Group
from gspo_jax.sampling import EnvironmentConfig, parts


@dataclasses.dataclass(frozen=True)
class Verdicts:
  """What B responses are worth."""

  reward: np.ndarray  # float32 [B]
  correct: np.ndarray  # float32 [B]: raw correctness, before any shaping
  unknown: Mapping[int, str]  # responses without a verdict, and why
  outcomes: Mapping[str, int]  # how often the verifier came to each of them
  signals: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # float32 [B] each
  rewards: Sequence[np.ndarray] | None = None  # of each token, where turns or lines have some
  figures: Sequence[Mapping[str, float]] | None = None  # of conversations
  failures: Sequence[str] | None = None  # of their environments; "": none


def of_conversations(groups: Sequence[Group], config: EnvironmentConfig) -> Verdicts:
  """What environments said of conversations that are over, of which costs are taken."""
  trajectories = [one for group in groups for one in group.trajectories]
  reward_B = costs.charge(trajectories, config)
  correct_B = np.array([one.figures["correct"] for one in trajectories], np.float32)
  unknown = {i: f"crash: {one.failure}" for i, one in enumerate(trajectories) if one.failure}
  return Verdicts(
    reward_B,
    correct_B,
    unknown,
    dict(crash=len(unknown)) if unknown else {},
    rewards=[one.rewards for one in trajectories],
    figures=[one.figures for one in trajectories],
    failures=[one.failure for one in trajectories],
  )


def of_responses(
  groups: Sequence[Group],
  score: Scorer,
  *,
  shift: int = 0,
  breaks_V: np.ndarray | None = None,
  signals: Signals | None = None,
) -> Verdicts:
  """What the verifier and the signals say of responses of one turn.

  Args:
    shift: tokens that the overlong punishment is to see besides.
    breaks_V: line breaks in the text of each token, where lines have rewards.
  """
  trajectories = [one for group in groups for one in group.trajectories]
  texts = [text for group in groups for text in group.responses]
  prompts = [group.prompt for group in groups for _ in group.trajectories]
  lengths = [one.length + shift for one in trajectories]
  scores = score(texts, prompts, lengths, [one.stopped for one in trajectories])
  rewards = None
  if scores.lines:
    rewards = [
      parts.line_rewards(reward_U, one.tokens, breaks_V)
      for one, reward_U in zip(trajectories, scores.lines)
    ]
  measured, unknown = measure(groups, signals) if signals else ({}, {})
  return Verdicts(
    scores.reward,
    scores.correct,
    {**unknown, **scores.unknown},
    scores.outcomes,
    measured,
    rewards,
  )


def measure(
  groups: Sequence[Group], signals: Signals
) -> tuple[dict[str, np.ndarray], dict[int, str]]:
  """The signals of groups whose responses are known, float32 [B] by name, and the responses that
  one of their verifiers failed on."""
  trajectories = [one for group in groups for one in group.trajectories]
  return signals(
    [text for group in groups for text in group.responses],
    [one.tokens[one.turns >= 0] for one in trajectories],
    [one.stopped for one in trajectories],
    [group.prompt for group in groups for _ in group.trajectories],
  )


def hand_out(groups: Sequence[Group], verdicts: Verdicts) -> None:
  """Gives groups what their responses are worth. ValueError for a reward that is not finite."""
  end = 0
  for group in groups:
    start, end = end, end + len(group.trajectories)
    mine = range(start, end)
    group.reward_G, group.correct_G = verdicts.reward[start:end], verdicts.correct[start:end]
    group.unknown = {i - start: verdicts.unknown[i] for i in mine if i in verdicts.unknown}
    group.signals = {name: value_B[start:end] for name, value_B in verdicts.signals.items()}
    for i, trajectory in zip(mine, group.trajectories):
      if verdicts.rewards is not None:
        trajectory.columns["rewards"] = verdicts.rewards[i]
      if verdicts.figures is not None:
        trajectory.figures, trajectory.failure = dict(verdicts.figures[i]), verdicts.failures[i]
    if not np.isfinite(group.reward_G).all():
      raise ValueError(f"reward of prompt {group.prompt.id} is {group.reward_G}: must be finite")


def respond(groups: Sequence[Group], decode: Callable[[list[int]], str]) -> None:
  """Gives finished groups the texts of their responses."""
  for group in groups:
    group.responses = [decode(one.tokens.tolist()) for one in group.trajectories]
