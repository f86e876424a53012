"""Costs of conversations: prices on the policy's tokens and on its tool calls.

R_i = Σ_u r_iu − λ_tok · tokens_i − λ_call · calls_i. Each turn pays for its own tokens and calls,
so the return from turn u on includes the costs of turns u, u + 1, ... only.
"""

from collections.abc import Sequence

import numpy as np

from gspo_jax.rollouts.groups import Group
from gspo_jax.sampling import Trajectory
from gspo_jax.settings.sampling import EnvironmentConfig


def charge(trajectories: Sequence[Trajectory], config: EnvironmentConfig) -> np.ndarray:
  """Subtracts costs from rewards of finished conversations, at each turn's last token.

  Adds the figures `reward` (without costs) and `cost`. Must be called once per conversation.

  Returns:
    float32 [B]: total reward less costs of each conversation. It depends on the sums of rewards,
    tokens and calls alone, exactly, and not on their distribution over turns.

  Raises:
    ValueError: an environment's counts of its tool calls disagree.
  """
  if not config.costs:
    return totals(trajectories)
  worth = []
  for trajectory in trajectories:
    # Sums of float32 in float64 are exact: the order of rewards over turns does not matter.
    reward, cost = float(trajectory.rewards.sum(dtype=np.float64)), 0.0
    if config.charge == "all" or trajectory.figures["correct"] > 0:
      calls_U = _calls(trajectory) if config.call_cost else np.zeros(trajectory.turn)
      sampled_X = np.flatnonzero(trajectory.turns >= 0)
      last_X = np.diff(trajectory.turns[sampled_X], append=-1) != 0
      ends_U, tokens_U = sampled_X[last_X], np.diff(np.flatnonzero(last_X), prepend=-1)
      rewards = trajectory.rewards.copy()  # Copied trajectories may share the old array.
      rewards[ends_U] -= config.token_cost * tokens_U + config.call_cost * calls_U
      trajectory.columns["rewards"] = rewards
      cost = config.token_cost * int(tokens_U.sum()) + config.call_cost * int(calls_U.sum())
    trajectory.figures = trajectory.figures | dict(reward=reward, cost=cost)
    worth.append(reward - cost)
  return np.array(worth, np.float32)


def totals(trajectories: Sequence[Trajectory]) -> np.ndarray:
  """Sums the rewards of each conversation, float32 [B]."""
  # Sums of float32 in float64 are nearly exact: the order of rewards over turns does not matter.
  return np.array([x.rewards.sum(dtype=np.float64) for x in trajectories], np.float32)


def teaches(group: Group, config: EnvironmentConfig) -> bool:
  """Whether dynamic sampling keeps a group's advantages.

  A group is kept if its scores differ, or if all responses are right and costs are configured. In a
  group of equally wrong responses, the cheapest wrong response teaches nothing.
  """
  return group.mixed or (config.costs and bool(group.correct_G[group.known_G].all()))


def _calls(trajectory: Trajectory) -> np.ndarray:
  """Returns the number of tool calls of each turn."""
  calls = trajectory.calls
  name, reported = type(trajectory.environment).__name__, trajectory.figures["tool_calls"]
  if min(calls) < 0:
    raise ValueError(
      f"environment.call_cost: tool_calls of the environment {name} fell in turn "
      f"{int(np.argmin(calls)) + 1}: let it count all calls of its conversation"
    )
  if reported != sum(calls):
    raise ValueError(
      f"environment.call_cost: figures() of the environment {name} reports tool_calls={reported:g}"
      f", and {sum(calls)} would be paid for: give it an attribute tool_calls, the calls so far, "
      "which says in which turn they were"
    )
  return np.array(calls)
