"""Verdicts on groups, by a verifier or by environments, and further signals.

Scoring runs on host 0, and the caller broadcasts its verdicts: a time limit may be exceeded on one
host and not on another.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from gspo_jax.rewards import Scorer
from gspo_jax.rewards.signals import Signals
from gspo_jax.rollouts import costs
from gspo_jax.rollouts.groups import Group, trajectories_of
from gspo_jax.sampling import EnvironmentConfig, parts
from gspo_jax.verifiers.pool import Failure


@dataclasses.dataclass(frozen=True)
class Verdicts:
  """Scores of B responses."""

  reward: np.ndarray  # float32 [B]
  correct: np.ndarray  # float32 [B]: raw correctness, before any shaping
  unknown: Mapping[int, str]  # reason by index of a response without a verdict
  outcomes: Mapping[str, int]  # number of responses by the verifier's outcome
  signals: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # float32 [B] each
  rewards: Sequence[np.ndarray] | None = None  # rewards of tokens; None: per response
  figures: Sequence[Mapping[str, float]] | None = None  # figures of conversations
  failures: Sequence[str] | None = None  # failures of environments; "": no failure
  values: np.ndarray | None = None  # float32 [B]: scores before any shaping; None: `correct`


def score_conversations(groups: Sequence[Group], config: EnvironmentConfig) -> Verdicts:
  """Collects the environments' verdicts on finished conversations, and charges costs."""
  trajectories = trajectories_of(groups)
  value_B = costs.totals(trajectories)
  reward_B = costs.charge(trajectories, config)
  failures = [trajectory.failure for trajectory in trajectories]
  unknown = {i: f"crash: {failure}" for i, failure in enumerate(failures) if failure}
  return Verdicts(
    reward_B,
    np.array([trajectory.figures["correct"] for trajectory in trajectories], np.float32),
    unknown,
    dict(crash=len(unknown)) if unknown else {},
    rewards=[trajectory.rewards for trajectory in trajectories],
    figures=[trajectory.figures for trajectory in trajectories],
    failures=failures,
    values=value_B,
  )


def score_responses(
  groups: Sequence[Group],
  score: Scorer,
  *,
  longest: int = 0,
  breaks_V: np.ndarray | None = None,
  signals: Signals | None = None,
) -> Verdicts:
  """Scores single-turn responses by the verifier and the signals.

  Args:
    longest: length passed to the overlong penalty for a response at its sampling limit; shorter
      responses are shifted equally. 0: actual lengths.
    breaks_V: number of line breaks in each token's text, for rewards of lines.
    signals: further rewards and costs; None: no signals.
  """
  trajectories = trajectories_of(groups)
  tokens = [trajectory.tokens for trajectory in trajectories]
  stopped = [trajectory.stopped for trajectory in trajectories]
  lengths = [len(x.tokens) + (longest - x.limit if longest else 0) for x in trajectories]
  texts = itertools.chain.from_iterable(group.responses for group in groups)
  texts = [Failure("crash", x.failure) if x.failure else y for x, y in zip(trajectories, texts)]
  prompts = [group.prompt for group in groups for _ in group.trajectories]
  scores = score(texts, prompts, lengths, stopped)
  rewards = None
  if scores.lines:
    rewards = [
      parts.line_rewards(reward_U, ids, breaks_V) for reward_U, ids in zip(scores.lines, tokens)
    ]
  measured, unmeasured = signals(texts, tokens, stopped, prompts) if signals else ({}, {})
  unknown = {**unmeasured, **scores.unknown}
  return Verdicts(
    scores.reward,
    scores.correct,
    unknown,
    scores.outcomes,
    measured,
    rewards,
    values=scores.values,
  )


def assign_verdicts(groups: Sequence[Group], verdicts: Verdicts) -> None:
  """Assigns rewards and verdicts to groups; ValueError for a non-finite reward."""
  start = 0
  for group in groups:
    end = start + len(group.trajectories)
    group.reward_G, group.correct_G = verdicts.reward[start:end], verdicts.correct[start:end]
    group.unknown = {i - start: why for i, why in verdicts.unknown.items() if start <= i < end}
    group.value_G = None if verdicts.values is None else verdicts.values[start:end]
    group.signals = {name: value_B[start:end] for name, value_B in verdicts.signals.items()}
    for i, trajectory in enumerate(group.trajectories, start):
      if verdicts.rewards is not None:
        trajectory.columns["rewards"] = verdicts.rewards[i]
      if verdicts.figures is not None:
        trajectory.figures, trajectory.failure = dict(verdicts.figures[i]), verdicts.failures[i]
    if not np.isfinite(group.reward_G).all():
      raise ValueError(f"reward of prompt {group.prompt.id} is {group.reward_G}: must be finite")
    start = end
