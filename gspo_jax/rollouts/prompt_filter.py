"""Excludes prompts that teach nothing: their responses are always right, or always wrong.

Right responses are those of `Group.correct_G`. Shaped rewards are not used, since rewards of right
responses may differ, for example by a bonus for short answers. A group is *all-right* if each
response is right. It is *all-wrong* if no response is right and all scores are equal (`Group.mixed`
is False).
"""

from collections.abc import Sequence
from typing import Any

from gspo_jax.rollouts.groups import Group
from gspo_jax.settings.data import QuerySetConfig
from gspo_jax.structs import Prompt


class PromptFilter:
  """Counts right responses per prompt, and drops prompts with constant outcomes.

  A prompt is dropped after `drop_after` consecutive all-right groups, or after `drop_after`
  consecutive all-wrong groups. It is readmitted `readmit_after` iterations later, with counts of 0.
  If `readmit_after` is 0, it stays dropped; `update` names an exception. The state is in the
  checkpoint, so a resumed run drops the same prompts as an uninterrupted run.

  Args:
    config: section `data.query_set`.
    counts: whether to count responses even if the section drops no prompts.
  """

  def __init__(self, config: QuerySetConfig, counts: bool = False):
    self.config = config
    self._counts = counts or config.drop_after > 0
    # By prompt id, a list: number of groups, number of responses, number of right responses, streak
    # and `Prompt.content`. A streak n > 0 means that the last n complete groups were all-right, and
    # a streak -n that the last n were all-wrong. See `update` for groups with missing verdicts.
    self._tried: dict[str, list[Any]] = {}
    self._dropped: dict[str, int] = {}  # Iteration in which a prompt was dropped, by prompt id.

  def readmit(self, step: int) -> None:
    """Readmits prompts dropped at least `readmit_after` iterations ago, without their counts."""
    after = self.config.readmit_after
    for name, dropped_step in [*self._dropped.items()] if after else ():
      if step - dropped_step >= after:
        del self._dropped[name], self._tried[name]

  def wants(self, prompt: Prompt) -> bool:
    """Whether the prompt may be drawn."""
    return self._row(prompt) not in self._dropped

  def _row(self, prompt: Prompt) -> str:
    """Returns a prompt's id; forgets its counts if they belong to another row with this id."""
    if self._tried.get(prompt.id, ())[4:] not in ((), [], [prompt.content]):
      del self._tried[prompt.id]
      self._dropped.pop(prompt.id, None)
    return prompt.id

  def update(self, groups: Sequence[Group], step: int) -> None:
    """Counts the scored groups of iteration `step`; drops or readmits their prompts.

    A dropped prompt may have a further group that was in flight. If that group leaves a streak
    shorter than `drop_after`, the prompt is readmitted.

    Responses without a verdict are not counted. A group with such a response never extends a
    streak. It ends the streak if its responses with a verdict do not have the streak's outcome.
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
      kind = int(right_X.all()) - int(all_wrong)  # 1 if all-right, -1 if all-wrong.
      same_kind = streak * kind > 0
      if known_G.all():
        streak = streak + kind if same_kind else kind
      elif not same_kind:
        streak = 0
      right += int(right_X.sum())
      self._tried[name] = [tried + 1, responses + len(right_X), right, streak, group.prompt.content]
      if 0 < self.config.drop_after <= abs(streak):
        self._dropped.setdefault(name, step)
      else:
        self._dropped.pop(name, None)

  def tried(self, prompt: Prompt) -> tuple[int, int]:
    """Returns the numbers of counted and of right responses to a prompt."""
    _, responses, right, *_ = self._tried.get(self._row(prompt), (0, 0, 0, 0))
    return responses, right

  def metrics(self) -> dict[str, float]:
    """Returns metrics of sampled and dropped prompts; {} if `drop_after` is 0."""
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
    """Returns the counts and dropped prompts as a dict for JSON."""
    return dict(tried={k: list(v) for k, v in self._tried.items()}, dropped=dict(self._dropped))

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores a state of `get_state`; readmits prompts with streaks below `drop_after`."""
    self._tried = {name: list(counts) for name, counts in state["tried"].items()}
    self._dropped = {
      name: step
      for name, step in state["dropped"].items()
      if 0 < self.config.drop_after <= abs(self._tried[name][3])
    }
