"""Costs of conversations: a price per sampled token, and a price per tool call.

R_i = Σ_u r_iu − λ_tok · tokens_i − λ_call · calls_i.

R_i is the net reward of conversation i, and r_iu the reward of its turn u. λ_tok is
`environment.token_cost`, and λ_call is `environment.call_cost`. The costs of a turn are subtracted
from the reward of this turn. So the return of turn u has the costs of this and later turns alone.
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

  Call `charge` once per conversation, since it changes the trajectory's rewards. It also adds two
  metrics (`Trajectory.figures`): `reward`, before costs, and `cost`. If no costs are configured,
  nothing is changed. If `environment.charge=right`, only right conversations have costs. If calls
  have a cost (`environment.call_cost`), the environment must report as many tool calls as the
  driver counted. Otherwise the conversation fails, even if it has no costs.

  Args:
    right_from: smallest reward of a right conversation. None means that a conversation is right if
      its metric `correct` is 1 or more.

  Returns:
    float32 [B]: total reward less costs of each conversation. The result does not depend on how
    rewards, tokens and calls are distributed over turns.
  """
  if not config.costs:
    return totals(trajectories)
  net_rewards = []
  for trajectory, is_right in zip(trajectories, right(trajectories, right_from), strict=True):
    # The sum in float64 does not depend on the distribution of rewards over turns.
    reward, cost = float(trajectory.rewards.sum(dtype=np.float64)), 0.0
    charged = config.charge == "all" or is_right
    if config.call_cost and not trajectory.failure:
      trajectory.failure = _disagreement(trajectory)
    if charged and not trajectory.failure:
      calls_U = np.array(trajectory.calls) if config.call_cost else np.zeros(trajectory.turn)
      sampled_X = np.flatnonzero(trajectory.turns >= 0)
      last_X = np.diff(trajectory.turns[sampled_X], append=-1) != 0
      ends_U, tokens_U = sampled_X[last_X], np.diff(np.flatnonzero(last_X), prepend=-1)
      rewards = trajectory.rewards.copy()  # Copies of the trajectory may share the old array.
      rewards[ends_U] -= config.token_cost * tokens_U + config.call_cost * calls_U
      trajectory.columns["rewards"] = rewards
      cost = config.token_cost * int(tokens_U.sum()) + config.call_cost * int(calls_U.sum())
    trajectory.figures = trajectory.figures | dict(reward=reward, cost=cost)
    net_rewards.append(reward - cost)
  return np.array(net_rewards, np.float32)


def teaches(group: Group, config: EnvironmentConfig) -> bool:
  """Whether dynamic sampling (`data.query_set.extra_rounds`) keeps the advantages of a group.

  The advantages are kept if the scores of the responses differ (`Group.mixed`). If there are costs,
  the advantages are also kept if all responses with a verdict are right, because advantages then
  favour lower costs. If all responses are equally wrong, advantages would favour cheap wrong
  responses, so the advantages are set to 0.
  """
  return group.mixed or (config.costs and bool(group.correct_G[group.known_G].all()))


def _disagreement(trajectory: Trajectory) -> str:
  """Returns an error message if two counts of tool calls differ, otherwise ""."""
  reported, calls = trajectory.figures["tool_calls"], sum(trajectory.calls)
  if reported == calls:
    return ""
  name = type(trajectory.environment).__name__
  return (
    f"environment.call_cost: figures() of the environment {name} reports tool_calls={reported:g}"
    f", but the driver counted {calls}: give the environment an attribute tool_calls with "
    "the number of calls so far, and the driver counts by it"
  )
