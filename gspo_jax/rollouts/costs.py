"""Costs of conversations: prices on the policy's tokens and on its tool calls.

R_i = Σ_u r_iu − λ_tok · tokens_i − λ_call · calls_i. Each turn pays for its own tokens and calls,
so the return from turn u on includes the costs of turns u, u + 1, ... only.
"""

from collections.abc import Sequence

import numpy as np

from gspo_jax.rollouts.groups import Group
from gspo_jax.sampling import Trajectory
from gspo_jax.sampling.trajectory import right, totals
from gspo_jax.settings.sampling import EnvironmentConfig


def charge(
  trajectories: Sequence[Trajectory], config: EnvironmentConfig, right_from: float | None = None
) -> np.ndarray:
  """Subtracts costs from rewards of finished conversations, at each turn's last token.

  Adds the figures `reward` (before costs) and `cost`. Call it once per conversation. A
  conversation with contradictory counts of tool calls fails.

  Args:
    right_from: smallest reward of right conversations. None means that their figure `correct`
      decides.

  Returns:
    float32 [B]: total reward less costs of each conversation. It depends on the sums of rewards,
    tokens and calls alone, exactly, and not on their distribution over turns.
  """
  if not config.costs:
    return totals(trajectories)
  net_rewards = []
  for trajectory, is_right in zip(trajectories, right(trajectories, right_from), strict=True):
    # Sums of float32 in float64 are exact: the order of rewards over turns does not matter.
    reward, cost = float(trajectory.rewards.sum(dtype=np.float64)), 0.0
    charged = config.charge == "all" or is_right
    if charged and config.call_cost and not trajectory.failure:
      trajectory.failure = _disagreement(trajectory)
    if charged and not trajectory.failure:
      calls_U = np.array(trajectory.calls) if config.call_cost else np.zeros(trajectory.turn)
      sampled_X = np.flatnonzero(trajectory.turns >= 0)
      last_X = np.diff(trajectory.turns[sampled_X], append=-1) != 0
      ends_U, tokens_U = sampled_X[last_X], np.diff(np.flatnonzero(last_X), prepend=-1)
      rewards = trajectory.rewards.copy()  # Copied trajectories may share the old array.
      rewards[ends_U] -= config.token_cost * tokens_U + config.call_cost * calls_U
      trajectory.columns["rewards"] = rewards
      cost = config.token_cost * int(tokens_U.sum()) + config.call_cost * int(calls_U.sum())
    trajectory.figures = trajectory.figures | dict(reward=reward, cost=cost)
    net_rewards.append(reward - cost)
  return np.array(net_rewards, np.float32)


def teaches(group: Group, config: EnvironmentConfig) -> bool:
  """Whether dynamic sampling keeps a group's advantages.

  Advantages are kept if scores differ (`Group.mixed`). With costs, they are also kept if no
  response with a verdict is wrong. Among equally wrong responses, advantages would only reward
  low costs.
  """
  return group.mixed or (config.costs and bool(group.correct_G[group.known_G].all()))


def _disagreement(trajectory: Trajectory) -> str:
  """Describes contradictory counts of tool calls. Returns "" without a contradiction."""
  reported, calls = trajectory.figures["tool_calls"], sum(trajectory.calls)
  if reported == calls:
    return ""
  name = type(trajectory.environment).__name__
  return (
    f"environment.call_cost: figures() of the environment {name} reports tool_calls={reported:g}"
    f", and {calls} would be charged: give it an attribute tool_calls, the number of calls so far"
  )
