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
  """Takes the costs from the rewards of finished conversations, at the last token of each turn, and
  adds figures: `reward`, which is without costs, and `cost`. Once for each conversation.

  Returns:
    float32 [B]: what each conversation is worth. Conversations of the same task rewards, tokens and
    calls are worth exactly the same, whatever turns these are in.

  Raises:
    ValueError: an environment that counts its calls in two ways.
  """
  worth = []
  for one in trajectories:
    # float64 adds up float32 exactly, so that it does not matter in which turns rewards are.
    reward = float(one.rewards.sum(dtype=np.float64 if config.costs else None))
    if not config.costs:
      worth.append(reward)
      continue
    if config.charge == "right" and one.figures["correct"] <= 0:
      one.figures = one.figures | dict(reward=reward, cost=0.0)
      worth.append(reward)
      continue
    calls_U = _calls(one) if config.call_cost else np.zeros(one.turn)
    ends_U, tokens_U = _turns(one.turns)
    rewards = one.rewards.copy()  # of which a copy of the trajectory may know
    rewards[ends_U] -= config.token_cost * tokens_U + config.call_cost * calls_U
    one.columns["rewards"] = rewards
    cost = config.token_cost * int(tokens_U.sum()) + config.call_cost * int(calls_U.sum())
    one.figures = one.figures | dict(reward=reward, cost=cost)
    worth.append(reward - cost)
  return np.array(worth, np.float32)


def teaches(group: Group, config: EnvironmentConfig) -> bool:
  """Whether dynamic sampling lets a group teach: it has right and wrong responses, or all are right
  and one may have cost more than another. Where all are wrong, the cheapest way to be wrong is
  nothing to learn."""
  return group.mixed or (config.costs and bool(group.correct_G[group.known_G].all()))


def _turns(turns_X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Where each turn ends, and its sampled tokens."""
  sampled_X = np.flatnonzero(turns_X >= 0)
  last_X = np.diff(turns_X[sampled_X], append=-1) != 0
  ends_U = sampled_X[last_X]
  return ends_U, np.diff(np.flatnonzero(last_X), prepend=-1)


def _calls(one: Trajectory) -> np.ndarray:
  """Tool calls of each turn."""
  name, total = type(one.environment).__name__, sum(one.calls)
  if min(one.calls) < 0:
    raise ValueError(
      f"environment.call_cost: tool_calls of the environment {name} fell in turn "
      f"{int(np.argmin(one.calls)) + 1}: let it count all calls of its conversation"
    )
  if one.figures["tool_calls"] != total:
    raise ValueError(
      f"environment.call_cost: figures() of the environment {name} reports "
      f"tool_calls={one.figures['tool_calls']:g}, and {total} would be paid for: give it an "
      "attribute tool_calls, the calls so far, which says in which turn they were"
    )
  return np.array(one.calls)
