"""Costs of conversations: of what the policy says, and of what it asks others for.

R_i = Σ_u r_iu − λ_tok · tokens_i − λ_call · calls_i: each turn pays for its own tokens and its own
calls, so that a return from turn u on has the costs that are still to come and no others.
"""

from collections.abc import Sequence

import numpy as np

from gspo_jax.rollouts.groups import Group
from gspo_jax.sampling import Trajectory
from gspo_jax.settings.sampling import EnvironmentConfig


def charge(trajectories: Sequence[Trajectory], config: EnvironmentConfig) -> np.ndarray:
  """Subtracts costs from rewards of finished conversations, at each turn's last token. Adds the
  figures `reward`, without costs, and `cost`. Call it once for each conversation.

  Returns:
    float32 [B]: what each conversation is worth. Conversations of the same task rewards, tokens and
    calls are worth exactly the same, whatever turns these are in.

  Raises:
    ValueError: an environment that counts its calls in two ways.
  """
  if not config.costs:
    return totals(trajectories)
  worth = []
  for trajectory in trajectories:
    # float64 adds up float32 exactly, so that it does not matter in which turns rewards are.
    reward, cost = float(trajectory.rewards.sum(dtype=np.float64)), 0.0
    if config.charge == "all" or trajectory.figures["correct"] > 0:
      calls_U = _calls(trajectory) if config.call_cost else np.zeros(trajectory.turn)
      sampled_X = np.flatnonzero(trajectory.turns >= 0)
      last_X = np.diff(trajectory.turns[sampled_X], append=-1) != 0
      ends_U, tokens_U = sampled_X[last_X], np.diff(np.flatnonzero(last_X), prepend=-1)
      rewards = trajectory.rewards.copy()  # A copy of the trajectory may refer to the old one.
      rewards[ends_U] -= config.token_cost * tokens_U + config.call_cost * calls_U
      trajectory.columns["rewards"] = rewards
      cost = config.token_cost * int(tokens_U.sum()) + config.call_cost * int(calls_U.sum())
    trajectory.figures = trajectory.figures | dict(reward=reward, cost=cost)
    worth.append(reward - cost)
  return np.array(worth, np.float32)


def totals(trajectories: Sequence[Trajectory]) -> np.ndarray:
  """Sums the rewards of each conversation, float32 [B]."""
  # float64 adds up float32 all but exactly, so that it does not matter in which turns they are.
  return np.array([x.rewards.sum(dtype=np.float64) for x in trajectories], np.float32)


def teaches(group: Group, config: EnvironmentConfig) -> bool:
  """Whether dynamic sampling keeps a group. Its values differ, or all are right and their costs may
  differ. If all are wrong alike, the cheapest wrong response teaches nothing."""
  return group.mixed or (config.costs and bool(group.correct_G[group.known_G].all()))


def _calls(trajectory: Trajectory) -> np.ndarray:
  """Returns the tool calls of each turn."""
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
