"""Advantages from the rewards of an iteration's groups, computed on the host.

A response has one advantage, or a separate advantage for each of its parts. A part is a turn of a
conversation, or a line of a response. Advantages that need a critic, a teacher or a reference
policy are computed on the devices, in learner/advantages.py.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from gspo_jax import objectives as O
from gspo_jax.rollouts import costs
from gspo_jax.rollouts.groups import Group, trajectories_of
from gspo_jax.rollouts.multipliers import Constraints
from gspo_jax.sampling import parts
from gspo_jax.settings.losses import find_estimator, options_of
from gspo_jax.settings.objective import ObjectiveConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import Rollout


@dataclasses.dataclass(frozen=True)
class ScoredGroups:
  """Scored groups of an iteration, and the other inputs of their advantages."""

  config: RunConfig
  groups: Sequence[Group]
  rollout: Rollout  # `groups` as arrays.
  # Costs with limits, and their multipliers. None if there are no constraints.
  constraints: Constraints | None = None
  # Number of line breaks in each token's text. None if lines have no rewards.
  breaks_V: np.ndarray | None = None

  @property
  def reward_PG(self) -> np.ndarray:
    """Rewards of responses, float32."""
    return np.stack([group.reward_G for group in self.groups])

  @property
  def known_PG(self) -> np.ndarray:
    """Mask of responses with a verdict, bool."""
    return np.stack([group.known_G for group in self.groups])

  @property
  def valid_PG(self) -> np.ndarray:
    """Mask of the responses compared by the estimator, bool.

    Responses without a verdict are excluded. If `rl.mask_truncated` is set, and the estimator
    compares responses of different groups or selects responses, truncated ones are excluded too.
    """
    c, known_PG = self.config, self.known_PG
    estimator = c.estimator_of_rewards
    selects = "right_from" in estimator.options
    if c.rl.mask_truncated and (estimator.across_groups or selects):
      return known_PG & self.rollout.stopped.reshape(known_PG.shape)
    return known_PG


class Advantages(NamedTuple):
  """Advantages of an iteration's groups."""

  response_PG: np.ndarray
  token_BL: np.ndarray | None  # None if all tokens of a response have the same advantage.
  metrics: dict[str, float]  # Metrics of the estimator, by name.


def compute(scored: ScoredGroups) -> Advantages:
  """Computes advantages by the configured estimator.

  If `data.query_set.extra_rounds` is set, groups for which `costs.teaches` is False have advantages
  of 0. If `rl.mask_truncated` is set, truncated responses have advantages of 0. In these responses,
  advantages of single tokens are unchanged, since the loss masks the tokens.
  """
  c, rollout = scored.config, scored.rollout
  part = PARTS.get(c.estimator_of_rewards.name, group_advantages)
  response_PG, token_BL, metrics = part(scored)
  if c.data.query_set.extra_rounds:
    # In a group of equal scores, shaped rewards may still differ, for example by response length.
    teaches_P1 = np.array([[costs.teaches(group, c.environment)] for group in scored.groups])
    response_PG = np.where(teaches_P1, response_PG, 0)
    if token_BL is not None:
      token_BL = np.where(np.repeat(teaches_P1, c.rl.group_size, axis=0), token_BL, 0)
  if c.rl.mask_truncated:
    # The mean of a group may include truncated responses, but updates do not train on them.
    stopped_PG = rollout.stopped.reshape(response_PG.shape)
    response_PG = np.where(stopped_PG, response_PG, 0)
    masked = sum(x.truncated and x.length > 0 for x in trajectories_of(scored.groups))
    metrics = metrics | {"masked_responses": float(masked)}
  return Advantages(response_PG, token_BL, metrics)


def group_advantages(scored: ScoredGroups) -> Advantages:
  """Computes advantages of responses from the responses' rewards alone."""
  c = scored.config
  advantage_PG = advantages(c.objective, scored.reward_PG, scored.valid_PG, c.reward.right_from)
  return Advantages(advantage_PG, None, {})


def constrained_advantages(scored: ScoredGroups) -> Advantages:
  """Combines advantages of all rewards and costs, standardised within groups.

  The multipliers of the costs are also updated (multipliers.py).
  """
  advantage_PG, metrics = scored.constraints.advantages(scored.groups)
  return Advantages(advantage_PG, None, metrics)


def constrained_batch_advantages(scored: ScoredGroups) -> Advantages:
  """Combines advantages of all rewards and costs as GDPO does.

  The combined advantages are standardised again, over the batch (`objectives.gdpo_advantages`). The
  multipliers of the costs are also updated (multipliers.py).
  """
  advantage_PG, metrics = scored.constraints.advantages(scored.groups, scored.valid_PG, _gdpo)
  return Advantages(advantage_PG, None, metrics)


def turn_advantages(scored: ScoredGroups) -> Advantages:
  """Computes an advantage for each turn of a conversation."""
  return _advantages_of_parts(scored, scored.rollout.turns)


def line_advantages(scored: ScoredGroups) -> Advantages:
  """Computes an advantage for each line of a response."""
  ends_BL = parts.breaks(scored.rollout.tokens, scored.breaks_V) > 0
  return _advantages_of_parts(scored, parts.segment_ids(scored.rollout.mask, ends_BT=ends_BL))


# Functions by name of the estimator. Estimators without an entry use `group_advantages`.
PARTS: dict[str, Callable[[ScoredGroups], Advantages]] = dict(
  constraints=constrained_advantages,
  gdpo=constrained_batch_advantages,
  turns=turn_advantages,
  lines=line_advantages,
)


def advantages(
  config: ObjectiveConfig,
  reward_PG: np.ndarray,
  valid_PG: np.ndarray,
  right_from: float | None = None,
) -> np.ndarray:
  """Computes the advantages of responses, [P, G].

  Args:
    config: section `objective`, which names the estimator and its options.
    reward_PG: rewards of responses.
    valid_PG: mask of responses to compare.
    right_from: option of estimators that select right responses. A response is right if its reward
      is above 0 or at least `right_from`. None means that only rewards above 0 are right.
  """
  estimator = find_estimator(config.advantage_kind)
  values = options(config, right_from)
  chosen = {name: values.get(name) for name in estimator.options}
  return np.asarray(_compiled(estimator)(reward_PG, valid_PG=valid_PG, **chosen))


def options(config: ObjectiveConfig, right_from: float | None) -> dict[str, Any]:
  """Returns options of estimators, by name. Arguments are as in `advantages`."""
  return options_of(config.name) | config.options() | dict(right_from=right_from)


@functools.cache
def _compiled(estimator: O.Estimator) -> Callable[..., jax.Array]:
  return jax.jit(estimator.of_group)


# Each of these functions is compiled as one program.
_gdpo = jax.jit(O.gdpo_advantages)
_turn_advantages = jax.jit(O.turn_advantages, static_argnames="normalize")


def _advantages_of_parts(scored: ScoredGroups, part_BL: np.ndarray) -> Advantages:
  """Computes advantages of responses and of their parts.

  Args:
    part_BL: number of each token's part in its response.
  """
  c, rollout = scored.config, scored.rollout
  token_BL = part_advantages(
    rollout.rewards,
    part_BL,
    rollout.mask * scored.known_PG.reshape(-1, 1),
    c.rl.group_size,
    c.environment.discount,
    c.objective.advantage_kind,
  )
  return group_advantages(scored)._replace(token_BL=token_BL)


def part_advantages(
  reward_BL: np.ndarray,
  part_BL: np.ndarray,
  mask_BL: np.ndarray,
  group_size: int,
  discount: float,
  normalize: str,
) -> np.ndarray:
  """Computes the advantages of parts, by token.

  Parts of a group with the same number are compared (`objectives.turn_advantages`). The result is
  float32 [B, L], 0 where the mask is 0.

  Args:
    reward_BL: rewards of tokens; the reward of a part is the sum over its tokens.
    part_BL: number of each token's part in its trajectory, 0, 1, ...
    mask_BL: 1 on sampled tokens. A trajectory is not compared if its mask is 0 everywhere.
    group_size: number of responses in a group.
    discount: discount factor γ per part, for the returns.
    normalize: estimator of advantages within a group: "std", "none" or "leave_one_out".
  """
  row_X, column_X = np.nonzero(mask_BL > 0)
  part_X = part_BL[row_X, column_X]
  # Rounding up to a power of two limits the number of compiled programs.
  U = 1 << int(part_X.max(initial=0)).bit_length()
  reward_BU = np.zeros((len(part_BL), U))  # Sums in float64.
  valid_BU = np.zeros((len(part_BL), U), np.float32)
  np.add.at(reward_BU, (row_X, part_X), reward_BL[row_X, column_X])
  valid_BU[row_X, part_X] = 1
  shape = (-1, group_size, U)
  reward_PGU = reward_BU.reshape(shape).astype(np.float32)
  advantage_PGU = _turn_advantages(
    reward_PGU, valid_BU.reshape(shape), discount=discount, normalize=normalize
  )
  advantage_BL = np.zeros(part_BL.shape, np.float32)
  advantage_BL[row_X, column_X] = np.asarray(advantage_PGU).reshape(-1, U)[row_X, part_X]
  return advantage_BL
