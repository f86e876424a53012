"""Choice of the prompts that are worth sampling, by how often each was solved.

Raw correctness counts, never the shaped reward: a bonus for short answers gives different rewards
to a group in which all are right, and nothing to learn from.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from gspo_jax import ranges
from gspo_jax.ranges import NonNegativeInt
from gspo_jax.structs import Prompt


@dataclasses.dataclass(frozen=True)
class QuerySetConfig:
  drop_after: NonNegativeInt  # groups, all right or all wrong, that end a prompt's use; 0: none
  readmit_after: NonNegativeInt  # iterations until a dropped prompt gets another chance; 0: never
  extra_rounds: NonNegativeInt  # of sampling, at most, to find P groups with spread

  def __post_init__(self):
    ranges.check(self, "data.query_set")
    if self.readmit_after and not self.drop_after:
      raise ValueError("data.query_set.readmit_after is set, and drop_after=0 drops nothing")


class PromptFilter:
  """Counts how often each prompt was solved since it came into use. Its state is JSON, in the
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
