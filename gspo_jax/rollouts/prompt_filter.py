"""Selects prompts worth sampling, by their solve counts.

The verifier's scores count, not the shaped rewards: with a bonus for short answers, the rewards of
an all-right group differ, but it has nothing to learn from. A group without a right response but
with unequal scores is not all wrong. Responses are right from a score of `reward.right_from`.
"""

from collections.abc import Sequence
from typing import Any

from gspo_jax.rollouts.groups import Group
from gspo_jax.settings.data import QuerySetConfig
from gspo_jax.structs import Prompt


class PromptFilter:
  """Counts solved responses per prompt, and drops prompts with constant outcomes.

  A prompt is dropped after `drop_after` consecutive groups that are all right, or all wrong. The
  counts start at the prompt's first use or its readmission. The state is JSON in the checkpoint, so
  a resumed run drops the same prompts.

  Args:
    counts: whether to count even if no prompt is ever dropped.
  """

  def __init__(self, config: QuerySetConfig, counts: bool = False):
    self.config = config
    self._counts = counts or config.drop_after > 0
    # By prompt id: number of groups, of responses and of right responses; length of the current
    # streak of all-right (above 0) or all-wrong groups (below 0); the data row's `Prompt.content`.
    self._tried: dict[str, list[Any]] = {}
    self._dropped: dict[str, int] = {}  # Iteration of dropping by prompt id.

  def readmit(self, step: int) -> None:
    """Readmits prompts after `readmit_after` iterations, with zeroed counts."""
    after = self.config.readmit_after
    for name, dropped_step in [*self._dropped.items()] if after else ():
      if step - dropped_step >= after:
        del self._dropped[name], self._tried[name]

  def wants(self, prompt: Prompt) -> bool:
    return self._row(prompt) not in self._dropped

  def _row(self, prompt: Prompt) -> str:
    """Returns a prompt's id, and drops the counts of another data row with this id."""
    if self._tried.get(prompt.id, ())[4:] not in ((), [], [prompt.content]):
      del self._tried[prompt.id]
      self._dropped.pop(prompt.id, None)
    return prompt.id

  def update(self, groups: Sequence[Group], step: int) -> None:
    """Counts the scored groups of iteration `step`; drops or readmits their prompts.

    A group may readmit a dropped prompt by ending its streak of equal outcomes.

    A response without a verdict does not count. Its group does not extend a streak, and ends it
    only if the group's other responses contradict the streak.
    """
    if not self._counts:
      return
    for group in groups:
      name, known_G = self._row(group.prompt), group.known_G
      right_X = group.correct_G[known_G] > 0
      if not len(right_X):
        continue
      tried, responses, right, streak, *_ = self._tried.get(name, (0, 0, 0, 0))
      all_wrong = not right_X.any() and not group.mixed
      kind = int(right_X.all()) - int(all_wrong)  # 1 if all right, -1 if all wrong.
      same_kind = streak * kind > 0
      if known_G.all():
        streak = streak + kind if same_kind else kind
      elif not same_kind:
        streak = 0
      right += int(right_X.sum())
      counts = tried + 1, responses + len(right_X), right, streak
      self._tried[name] = [*counts, group.prompt.content]
      if 0 < self.config.drop_after <= abs(streak):
        self._dropped.setdefault(name, step)
      else:
        self._dropped.pop(name, None)

  def tried(self, prompt: Prompt) -> tuple[int, int]:
    """Returns the numbers of responses to a prompt and of right responses."""
    _, responses, right, *_ = self._tried.get(self._row(prompt), (0, 0, 0, 0))
    return responses, right

  def metrics(self) -> dict[str, float]:
    """Counts tried prompts, and dropped prompts by reason; empty without dropping."""
    if not self.config.drop_after:
      return {}
    always = sum(self._tried[name][3] > 0 for name in self._dropped)
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
    self._tried = {name: list(counts) for name, counts in state["tried"].items()}
    self._dropped = dict(state["dropped"])
