"""Several rewards and costs: advantages standardised one by one, costs held at limits.

A = w Z(R) + Σ_j w_j Z(R_j) − Σ_k λ_k s_k Z(C_k), with Z the standardisation within a group and s 1
for a cost that is to be at most its limit, −1 for one that is to be at least that. After each
iteration a multiplier follows the cost of the responses that were trained on:

  v = clip( s (mean C − limit) / σ(C), −1, 1 ),  I ← clip(I + rate · v, 0, most),
  λ ← clip(I + gain · v, 0, most)

where σ(C) is the deviation within groups: the unit that C has in A, and so in the Lagrangian whose
slope in λ this is. arXiv:2602.05863 has the advantages, and multipliers that rise while a cost is
above its limit. The unit of v, its bounds and the term of `gain` (arXiv:2007.03964) are ours.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gspo_jax import objectives as O
from gspo_jax import rewards
from gspo_jax.rewards import Scorer, shaping
from gspo_jax.rollouts.groups import Group
from gspo_jax.sampling import Trajectory
from gspo_jax.settings.rewards import (
  ConstraintConfig,
  CostSignal,
  RewardConfig,
  RewardSignal,
  _verifier_config,
)
from gspo_jax.structs import Prompt


class Signals:
  """Measures the signals of responses."""

  def __init__(self, config: ConstraintConfig, reward: RewardConfig, scorers: Mapping[str, Scorer]):
    self._signals, self._reward, self._scorers = config.signals, reward, scorers

  def __call__(
    self, responses: Sequence[str], trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]
  ) -> tuple[dict[str, np.ndarray], dict[int, str]]:
    """The numbers of B responses, float32 [B] by name, and those of them that one of the verifiers
    came to no verdict on, with the reason."""
    tokens = [one.tokens[one.turns >= 0] for one in trajectories]
    stopped = [one.stopped for one in trajectories]
    verdicts = {
      name: scorer(responses, prompts, finished=stopped) for name, scorer in self._scorers.items()
    }
    unknown = {i: f"{n}: {why}" for n, s in verdicts.items() for i, why in s.unknown.items()}
    found = {}
    for name, one in self._signals.items():
      if one.signal in verdicts:
        found[name] = verdicts[one.signal].reward
      else:
        found[name] = np.asarray(self._shown(one, responses, tokens, stopped), np.float32)
    return found, unknown

  def rows(
    self, responses: Sequence[str], trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]
  ) -> list[dict[str, float | None]]:
    """The same, by response; None for those without a verdict."""
    found, unknown = self(responses, trajectories, prompts)
    one = lambda i: {name: float(value_B[i]) for name, value_B in found.items()}  # noqa: E731
    return [dict.fromkeys(found) if i in unknown else one(i) for i in range(len(responses))]

  def _shown(
    self,
    one: RewardSignal | CostSignal,
    responses: Sequence[str],
    tokens: Sequence[np.ndarray],
    stopped: Sequence[bool],
  ) -> Sequence[float] | np.ndarray:
    if one.signal == "truncated":
      return ~np.asarray(stopped, bool)
    if one.signal == "format":
      return [shaping.keeps_format(response, self._reward.format) for response in responses]
    if one.signal == "text":
      return [one.text in response for response in responses]
    if one.signal == "token":
      return [one.token in ids for ids in tokens]
    lengths = [len(ids) for ids in tokens]
    if one.signal == "overlong":
      return -shaping.overlong(lengths, self._reward.overlong_max, self._reward.overlong_buffer)
    return lengths


@contextlib.contextmanager
def open_signals(config: ConstraintConfig, reward: RewardConfig) -> Iterator[Signals | None]:
  """The configured signals, with the processes of their verifiers; None if there are none.

  Raises:
    ValueError: a verifier cannot be started.
  """
  if not config.on:
    yield None
    return
  with contextlib.ExitStack() as stack:
    scorers = {}
    for name in config.verifiers:
      opened = rewards.open_scorer(_verifier_config(reward, name))
      try:
        scorers[name] = stack.enter_context(opened)
      except RuntimeError as error:  # of a traceback the last line says it
        last = str(error).strip().splitlines()[-1]
        raise ValueError(f"constraints: signal={name!r}: {last}") from error
    yield Signals(config, reward, scorers)


@dataclasses.dataclass
class Multiplier:
  """Of one cost, as the next iteration takes it."""

  sum: float  # of what its violations came to
  value: float

  def update(self, cost: CostSignal, violation: float) -> None:
    """Follows the last iteration's violation, in standard deviations."""
    v = min(max(violation, -1.0), 1.0)
    self.sum = min(max(self.sum + cost.rate * v, 0.0), cost.most)
    self.value = min(max(self.sum + cost.gain * v, 0.0), cost.most)


class Constraints:
  """Measures groups, makes their advantages, and moves the multipliers."""

  def __init__(self, config: ConstraintConfig, signals: Signals):
    self._config, self._measure = config, signals
    costs = config.active_costs.items()
    self.multipliers = {name: Multiplier(one.initial, one.initial) for name, one in costs}

  def judge(self, groups: Sequence[Group]) -> None:
    """Gives scored groups their signals. Responses that a verifier of these failed on are without a
    verdict too."""
    flat = [(group, g) for group in groups for g in range(len(group.trajectories))]
    trajectories = [group.trajectories[g] for group, g in flat]
    texts, prompts = [group.responses[g] for group, g in flat], [group.prompt for group, _ in flat]
    found, unknown = self._measure(texts, trajectories, prompts)
    if jax.process_count() > 1:  # the first one's word counts, as for the reward
      known_B = np.array([i not in unknown for i in range(len(flat))], np.float32)
      found, known_B = multihost_utils.broadcast_one_to_all((found, known_B))
      elsewhere = dict.fromkeys(np.flatnonzero(known_B == 0).tolist(), "on another host")
      unknown = {i: unknown.get(i, reason) for i, reason in elsewhere.items()}
    start = 0
    for group in groups:
      size = len(group.trajectories)
      group.signals = {name: value_B[start : start + size] for name, value_B in found.items()}
      mine = {g: unknown[start + g] for g in range(size) if start + g in unknown}
      group.unknown = mine | dict(group.unknown)
      start += size

  def advantages(self, groups: Sequence[Group]) -> tuple[np.ndarray, dict[str, float]]:
    """Advantages [P, G] under the present multipliers, which then move; and metrics."""
    c = self._config
    valid_PG = np.stack([group.known_G for group in groups])
    stacked = lambda name: np.stack([group.signals[name] for group in groups])  # noqa: E731
    gains = [np.stack([group.reward_G for group in groups]), *map(stacked, c.active_rewards)]
    weights = [c.reward_weight, *(one.weight for one in c.active_rewards.values())]
    costs = {name: one.sign * stacked(name) for name, one in c.active_costs.items()}
    prices = [self.multipliers[name].value for name in costs]
    advantage_PG = _advantages(gains, list(costs.values()), weights, prices, valid_PG)
    row = {f"constraint/{name}/reward": _mean(stacked(name), valid_PG) for name in c.active_rewards}
    for name, one in c.active_costs.items():
      mean, multiplier = _mean(stacked(name), valid_PG), self.multipliers[name]
      excess, spread = one.sign * (mean - one.limit), deviation(costs[name], valid_PG)
      row[f"constraint/{name}/cost"], row[f"constraint/{name}/limit"] = mean, one.limit
      row[f"constraint/{name}/violation"] = excess
      row[f"constraint/{name}/spread"] = spread
      row[f"constraint/{name}/multiplier"] = multiplier.value
      if valid_PG.any():
        multiplier.update(one, excess / max(spread, 1e-9))
    return np.asarray(advantage_PG), row

  def get_state(self) -> dict[str, dict[str, float]]:
    """JSON of the multipliers."""
    return {name: dataclasses.asdict(one) for name, one in self.multipliers.items()}

  def set_state(self, state: Mapping[str, Mapping[str, float]]) -> None:
    """Goes on with what `get_state` gave; costs that it does not have begin anew. Bounds are those
    of now."""
    for name in self.multipliers.keys() & state.keys():
      most = self._config.active_costs[name].most
      self.multipliers[name] = Multiplier(*(min(x, most) for x in state[name].values()))


def deviation(value_PG: np.ndarray, valid_PG: np.ndarray) -> float:
  """The standard deviation within groups, of all groups together; 0 where there is none."""
  value_PG, size_P1 = np.where(valid_PG, value_PG, 0.0), valid_PG.sum(1, keepdims=True)
  mean_P1 = value_PG.sum(1, keepdims=True) / np.maximum(size_P1, 1)
  squares = np.where(valid_PG, (value_PG - mean_P1) ** 2, 0.0).sum()
  return float(np.sqrt(squares / max(np.maximum(size_P1 - 1, 0).sum(), 1)))


def _mean(value_PG: np.ndarray, valid_PG: np.ndarray) -> float:
  return float(value_PG[valid_PG].mean(dtype=np.float64)) if valid_PG.any() else 0.0


@jax.jit  # one small program; multipliers are arguments, so that nothing is compiled again
def _advantages(gains: Any, costs: Any, weights: Any, multipliers: Any, valid_PG: Any) -> jax.Array:
  return O.constrained_advantages(gains, costs, weights, multipliers, valid_PG=valid_PG)
