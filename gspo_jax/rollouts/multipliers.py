"""Advantages from several rewards and costs; Lagrange multipliers keep costs within limits.

Rewards and costs are standardised within groups (Z) before they are added:

  A = w Z(R) + Σ_j w_j Z(R_j) − Σ_k λ_k s_k Z(C_k)

R is the main reward, R_j are further rewards, and w and w_j are their weights. C_k are costs, and
λ_k their multipliers. The sign s_k is 1 if cost k has an upper limit, and −1 if it has a lower
limit. After each iteration, the multiplier λ of each cost is updated from the mean cost of the
compared responses. λ is the output of a PI (proportional-integral) controller:

  v = clip( s (mean C − limit) / σ(C), −1, 1 ),  I ← clip(I + rate · v, 0, most),
  λ ← clip(I + gain · v, 0, most)

The violation v is in units of σ(C), the standard deviation within groups, because Z divides by a
standard deviation. I is the integral term. `rate`, `gain`, `limit` and `most` are keys of the cost.

Without further rewards, the advantages are those of arXiv:2602.05863. In that paper, too, a
multiplier rises while the cost is above its limit. The unit of v, the bounds of v, and the term
with `gain` (arXiv:2007.03964) are additions to the paper.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from gspo_jax import objectives as O
from gspo_jax.rollouts.groups import Group
from gspo_jax.settings.rewards import ConstraintConfig, CostSignal

# Multipliers are arguments of the program, so it is compiled once.
_combine = jax.jit(O.constrained_advantages)


@dataclasses.dataclass
class Multiplier:
  """Multiplier of one cost in the next iteration."""

  sum: float  # Integral term I, the bounded sum of violations times `rate`.
  value: float  # Multiplier λ.

  def update(self, cost: CostSignal, violation: float) -> None:
    """Updates the multiplier after an iteration.

    Args:
      violation: s (mean C − limit) / σ(C), before it is clipped.
    """
    v = min(max(violation, -1.0), 1.0)
    self.sum = min(max(self.sum + cost.rate * v, 0.0), cost.most)
    self.value = min(max(self.sum + cost.gain * v, 0.0), cost.most)


class Constraints:
  """Computes advantages under constraints, and updates the multipliers."""

  def __init__(self, config: ConstraintConfig):
    self._config = config
    self.multipliers = {
      name: Multiplier(cost.initial, cost.initial) for name, cost in config.active_costs.items()
    }

  def advantages(
    self,
    groups: Sequence[Group],
    valid_PG: np.ndarray | None = None,
    combine: Callable = _combine,
  ) -> tuple[np.ndarray, dict[str, float]]:
    """Computes advantages [P, G] and metrics; then updates the multipliers.

    If no response is valid, the multipliers are unchanged.

    Args:
      groups: scored groups, with their signals.
      valid_PG: mask of responses in means and deviations. None means responses with a verdict.
      combine: `objectives.constrained_advantages`, or a function of the same arguments.
    """
    c = self._config
    if valid_PG is None:
      valid_PG = np.stack([group.known_G for group in groups])

    def stack(name: str) -> np.ndarray:
      return np.stack([group.signals[name] for group in groups])

    gains = [np.stack([group.reward_G for group in groups]), *map(stack, c.active_rewards)]
    weights = [c.reward_weight, *(reward.weight for reward in c.active_rewards.values())]
    costs = {name: cost.sign * stack(name) for name, cost in c.active_costs.items()}
    prices = [self.multipliers[name].value for name in costs]
    advantage_PG = combine(gains, list(costs.values()), weights, prices, valid_PG=valid_PG)
    row = {f"constraint/{name}/reward": _mean(stack(name), valid_PG) for name in c.active_rewards}
    for name, cost in c.active_costs.items():
      mean, multiplier = _mean(stack(name), valid_PG), self.multipliers[name]
      excess, spread = cost.sign * (mean - cost.limit), deviation(costs[name], valid_PG)
      row |= {
        f"constraint/{name}/cost": mean,
        f"constraint/{name}/limit": cost.limit,
        f"constraint/{name}/violation": excess,
        f"constraint/{name}/spread": spread,
        f"constraint/{name}/multiplier": multiplier.value,
      }
      if valid_PG.any():
        multiplier.update(cost, excess / max(spread, 1e-9))
    return np.asarray(advantage_PG), row

  def get_state(self) -> dict[str, dict[str, float]]:
    """Returns the multipliers as a dict for JSON."""
    return {name: vars(multiplier).copy() for name, multiplier in self.multipliers.items()}

  def set_state(self, state: Mapping[str, Mapping[str, float]]) -> None:
    """Restores a state of `get_state`, clipped to the configured maximum.

    Costs absent from the state keep their initial multiplier.
    """
    for name in self.multipliers.keys() & state.keys():
      most = self._config.active_costs[name].most
      self.multipliers[name] = Multiplier(*(min(x, most) for x in state[name].values()))


def deviation(value_PG: np.ndarray, valid_PG: np.ndarray) -> float:
  """Computes the standard deviation within groups, pooled over groups.

  It is 0 if no group has two valid responses.
  """
  value_PG, size_P1 = np.where(valid_PG, value_PG, 0.0), valid_PG.sum(1, keepdims=True)
  mean_P1 = value_PG.sum(1, keepdims=True) / np.maximum(size_P1, 1)
  squares = np.where(valid_PG, (value_PG - mean_P1) ** 2, 0.0).sum()
  return float(np.sqrt(squares / max(np.maximum(size_P1 - 1, 0).sum(), 1)))


def _mean(value_PG: np.ndarray, valid_PG: np.ndarray) -> float:
  return float(value_PG[valid_PG].mean(dtype=np.float64)) if valid_PG.any() else 0.0
