"""Verdicts on responses, from a verifier or from environments, and further signals.

The verdict on a response is its score, and whether it is right. Signals are further
rewards and costs (rewards/signals.py). A response without a verdict is called unknown.

Scoring runs on the first host, and the collector broadcasts the verdicts. If every host scored, a
time limit might be exceeded on some hosts only, and the hosts' verdicts would differ.
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
from gspo_jax.sampling.trajectory import right, totals, turn_rewards
from gspo_jax.verifiers.pool import Failure


@dataclasses.dataclass(frozen=True)
class Verdicts:
  """Scores of B responses."""

  reward: np.ndarray  # float32 [B]: shaped rewards.
  correct: np.ndarray  # float32 [B]: 1 for right responses, before reward shaping.
  unknown: Mapping[int, str]  # Reasons of missing verdicts, by index of the response.
  outcomes: Mapping[str, int]  # Number of responses by the verifier's outcome.
  signals: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # float32 [B] each
  # Rewards of each response's tokens. None if each response has one reward.
  rewards: Sequence[np.ndarray] | None = None
  # Metrics of each conversation, from its environment. None for single turns.
  figures: Sequence[Mapping[str, float]] | None = None
  # Failure of each conversation, "" if there is none. None for single turns.
  failures: Sequence[str] | None = None
  # float32 [B]: scores before reward shaping. None if scores equal `correct`.
  values: np.ndarray | None = None
  # Returns of each response's turns or lines, before reward shaping. None if advantages compare
  # whole responses.
  returns: Sequence[np.ndarray] | None = None


def score_conversations(
  groups: Sequence[Group],
  config: EnvironmentConfig,
  right_from: float | None = None,
  compares_parts: bool = False,
) -> Verdicts:
  """Collects the environments' verdicts on finished conversations, and charges costs.

  Args:
    right_from: smallest reward of a right conversation. None means that a conversation is right if
      the environment's metric `correct` is 1 or more.
    compares_parts: whether advantages compare equally numbered turns of a group.
  """
  trajectories = trajectories_of(groups)
  value_B, right_B = totals(trajectories), right(trajectories, right_from)
  turns = [turn_rewards(x) for x in trajectories] if compares_parts else None
  reward_B = costs.charge(trajectories, config, right_from)
  failures = [trajectory.failure for trajectory in trajectories]
  unknown = {i: f"crash: {failure}" for i, failure in enumerate(failures) if failure}
  return Verdicts(
    reward_B,
    right_B.astype(np.float32),
    unknown,
    dict(crash=len(unknown)) if unknown else {},
    rewards=[trajectory.rewards for trajectory in trajectories],
    figures=[trajectory.figures for trajectory in trajectories],
    failures=failures,
    values=value_B,
    returns=_returns(turns, config.discount),
  )


def score_responses(
  groups: Sequence[Group],
  score: Scorer,
  *,
  longest: int = 0,
  breaks_V: np.ndarray | None = None,
  signals: Signals | None = None,
  discount: float | None = None,
) -> Verdicts:
  """Scores single-turn responses with the verifier and the signals.

  Args:
    longest: `sampling.max_new_tokens` if the overlong penalty depends on the distance to the length
      limit. If a response had a lower limit, its length is increased by the difference before the
      penalty is computed. 0 means that the penalty depends on actual lengths.
    breaks_V: number of line breaks in each token's text. None if lines have no rewards.
    signals: function for further rewards and costs. None means no such signals.
    discount: γ of the returns of lines. None if advantages compare whole responses.
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
  values, unknown = signals(texts, tokens, stopped, prompts) if signals else ({}, {})
  unknown = {**unknown, **scores.unknown}
  return Verdicts(
    scores.reward,
    scores.correct,
    unknown,
    scores.outcomes,
    values,
    rewards,
    values=scores.values,
    returns=None if discount is None else _returns(scores.line_values, discount),
  )


def _returns(values: Sequence[np.ndarray] | None, discount: float) -> list[np.ndarray] | None:
  """Computes the returns of turns or lines from their rewards, float64 [U] for each response.

  The return of turn u is the discounted sum of the rewards of turns u, u + 1, and so on. If there
  are no rewards (`values` is None), returns None.
  """
  if values is None:
    return None
  returns = [np.array(value_U, np.float64) for value_U in values]
  for return_U in returns:
    for u in reversed(range(len(return_U) - 1)):
      return_U[u] += discount * return_U[u + 1]
  return returns


def assign_verdicts(groups: Sequence[Group], verdicts: Verdicts) -> None:
  """Stores verdicts in the groups and their trajectories.

  Raises ValueError if a reward is not finite.
  """
  start = 0
  for group in groups:
    end = start + len(group.trajectories)
    group.reward_G, group.correct_G = verdicts.reward[start:end], verdicts.correct[start:end]
    group.unknown = {i - start: x for i, x in verdicts.unknown.items() if start <= i < end}
    group.value_G = None if verdicts.values is None else verdicts.values[start:end]
    group.returns = None if verdicts.returns is None else verdicts.returns[start:end]
    group.signals = {name: value_B[start:end] for name, value_B in verdicts.signals.items()}
    for i, trajectory in enumerate(group.trajectories, start):
      if verdicts.rewards is not None:
        trajectory.columns["rewards"] = verdicts.rewards[i]
      if verdicts.figures is not None:
        trajectory.figures, trajectory.failure = dict(verdicts.figures[i]), verdicts.failures[i]
    if not np.isfinite(group.reward_G).all():
      raise ValueError(
        f"the rewards of prompt {group.prompt.id} are {group.reward_G.tolist()}, and must be finite"
      )
    start = end
