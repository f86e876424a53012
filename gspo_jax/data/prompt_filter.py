"""Which prompts are worth sampling: solve rates per prompt, and batches in which every group has
spread (the dynamic sampling of DAPO, arXiv:2503.14476, §3.2).

Both look at raw correctness, never at the shaped reward: a bonus for short answers gives spread to
a group in which all are right, and nothing to learn from.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gspo_jax import ranges
from gspo_jax.ranges import NonNegativeInt
from gspo_jax.structs import Prompt, Rollout


@dataclasses.dataclass(frozen=True)
class QuerySetConfig:
  drop_after: NonNegativeInt  # groups, all right or all wrong, that end a prompt's use; 0: none
  readmit_after: NonNegativeInt  # iterations until a dropped prompt gets another chance; 0: never
  extra_rounds: NonNegativeInt  # of sampling, at most, to find P groups with spread

  def __post_init__(self):
    ranges.check(self, "data.query_set")
    if self.readmit_after and not self.drop_after:
      raise ValueError("data.query_set.readmit_after is set, and drop_after=0 drops nothing")


class QuerySet:
  """How often each prompt was solved since it came into use. Its state is JSON, and goes into the
  checkpoint: a resumed run leaves out the same prompts."""

  def __init__(self, config: QuerySetConfig):
    self.config = config
    self._tried: dict[str, list[float]] = {}  # id: groups, responses, right ones
    self._dropped: dict[str, int] = {}  # id: iteration

  def readmit(self, step: int) -> int:
    """Brings back, with a clean slate, what has been out long enough; returns how many."""
    after = self.config.readmit_after
    due = [name for name, when in self._dropped.items() if after and step - when >= after]
    for name in due:
      del self._dropped[name], self._tried[name]
    return len(due)

  def wants(self, prompt: Prompt) -> bool:
    return prompt.id not in self._dropped

  def update(self, prompts: Sequence[Prompt], correct_PG: np.ndarray, step: int) -> None:
    """Counts the groups of iteration `step`, and drops whom they speak against."""
    if not self.config.drop_after:
      return
    for prompt, correct_G in zip(prompts, correct_PG):
      counts = self._tried.setdefault(prompt.id, [0, 0, 0])
      counts[0] += 1
      counts[1] += len(correct_G)
      counts[2] += int((correct_G > 0).sum())
      if counts[0] >= self.config.drop_after and counts[2] in (0, counts[1]):
        self._dropped.setdefault(prompt.id, step)

  def metrics(self) -> dict[str, float]:
    """Prompts seen and prompts out, the latter by reason; nothing where nothing is dropped."""
    if not self.config.drop_after:
      return {}
    always = sum(self._tried[name][2] > 0 for name in self._dropped)
    right, total = (sum(counts[i] for counts in self._tried.values()) for i in (2, 1))
    return {
      "query_set/tried": float(len(self._tried)),
      "query_set/dropped": float(len(self._dropped)),
      "query_set/dropped/always_solved": float(always),
      "query_set/dropped/never_solved": float(len(self._dropped) - always),
      "query_set/solve_rate": right / max(total, 1),
    }

  def get_state(self) -> dict[str, Any]:
    return dict(tried={k: list(v) for k, v in self._tried.items()}, dropped=dict(self._dropped))

  def set_state(self, state: dict[str, Any]) -> None:
    self._tried = {k: list(v) for k, v in state["tried"].items()}
    self._dropped = dict(state["dropped"])


@dataclasses.dataclass(frozen=True)
class Groups:
  """Prompts with their sampled and scored responses, G rows per prompt."""

  prompts: list[Prompt]
  rollout: Rollout
  responses: list[str]
  reward_PG: np.ndarray
  correct_PG: np.ndarray  # raw correctness: reward before any shaping
  outcomes: collections.Counter  # of the verifier
  figures: dict[str, float] = dataclasses.field(default_factory=dict)  # of environments: sums

  def take(self, index: Sequence[int]) -> "Groups":
    """Some of the groups; outcomes and figures, which are not known by group, stay whole."""
    group = self.reward_PG.shape[1]
    rows = (np.asarray(index, int)[:, None] * group + np.arange(group)).reshape(-1)
    return Groups(
      [self.prompts[i] for i in index],
      _each(lambda x: x[rows], [self.rollout]),
      [self.responses[row] for row in rows],
      self.reward_PG[index],
      self.correct_PG[index],
      self.outcomes,
      self.figures,
    )


def join(rounds: Sequence[Groups]) -> Groups:
  """All groups of several rounds, in order."""
  if len(rounds) == 1:
    return rounds[0]
  length = max(r.rollout.tokens.shape[1] for r in rounds)

  def stack(*arrays: np.ndarray) -> np.ndarray:
    wide = rounds[0].rollout.tokens.shape[1]
    if arrays[0].ndim > 1 and arrays[0].shape[1] == wide:  # a time axis: pad to the longest
      arrays = [
        np.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2)) for x in arrays
      ]
    return np.concatenate(arrays)

  return Groups(
    [prompt for r in rounds for prompt in r.prompts],
    _each(stack, [r.rollout for r in rounds]),
    [response for r in rounds for response in r.responses],
    np.concatenate([r.reward_PG for r in rounds]),
    np.concatenate([r.correct_PG for r in rounds]),
    sum((r.outcomes for r in rounds), collections.Counter()),
    {name: sum(r.figures[name] for r in rounds) for name in rounds[0].figures},
  )


def fill(
  round_of_groups: Callable[[int], Groups], extra_rounds: int
) -> tuple[Groups, Groups, dict[str, float]]:
  """A batch of P groups with spread, from as many rounds of P prompts as that takes.

  Args:
    round_of_groups: samples and scores P new prompts in round 0, 1, ...
    extra_rounds: how many rounds there may be after the first.

  Returns:
    The P groups to train on, in the order they were sampled (the first ones with spread; where the
    rounds did not yield P of them, the first ones without fill the batch: their advantages are 0),
    all groups that were sampled, and metrics.
  """
  rounds = [round_of_groups(0)]
  wanted = len(rounds[0].prompts)
  if extra_rounds == 0:
    return rounds[0], rounds[0], {}
  while sum(_spread(r).sum() for r in rounds) < wanted and len(rounds) <= extra_rounds:
    rounds.append(round_of_groups(len(rounds)))
  sampled = join(rounds)
  spread_P = _spread(sampled)
  kept = np.sort(np.argsort(~spread_P, kind="stable")[:wanted])
  metrics = {
    "dynamic_sampling/rounds": float(len(rounds)),
    "dynamic_sampling/discarded_groups": float(len(spread_P) - wanted),
    "dynamic_sampling/filled_groups": float((~spread_P[kept]).sum()),
  }
  return sampled.take(kept.tolist()), sampled, metrics


def _spread(groups: Groups) -> np.ndarray:
  """Whether each group has right and wrong responses."""
  return np.ptp(groups.correct_PG, axis=1) > 0


def _each(function: Callable[..., np.ndarray], rollouts: Sequence[Rollout]) -> Rollout:
  """`function` of each field's arrays; fields that the sampler left out stay out."""
  values = {}
  for field in dataclasses.fields(Rollout):
    arrays = [getattr(r, field.name) for r in rollouts]
    values[field.name] = None if arrays[0] is None else function(*arrays)
  return Rollout(**values)
