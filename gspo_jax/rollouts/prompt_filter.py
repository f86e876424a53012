"""Choice of the prompts that are worth sampling, by how often each was solved.

What the verifier said counts, never the shaped reward: a bonus for short answers gives different
rewards to a group in which all are right, and nothing to learn from. A group in which nothing is
right and values differ teaches.
"""

from collections.abc import Sequence
from typing import Any

from gspo_jax.rollouts.groups import Group
from gspo_jax.settings.data import QuerySetConfig
from gspo_jax.structs import Prompt


class PromptFilter:
  """Counts how often each prompt was solved since it came into use, and drops it after so many
  groups in a row that are all right, or all wrong; with `counts` it counts if it drops nothing too.

  Its state is JSON, in the checkpoint: a resumed run leaves out the same prompts.
  """

  def __init__(self, config: QuerySetConfig, counts: bool = False):
    self.config = config
    self._counts = counts or config.drop_after > 0
    # id: groups, responses, right ones, and how many groups in a row up to the last one were all
    # right (above 0) or all wrong (below 0); and the row that this is known of
    self._tried: dict[str, list[Any]] = {}
    self._dropped: dict[str, int] = {}  # id: iteration

  def readmit(self, step: int) -> None:
    """Brings back prompts after `readmit_after` iterations, with a clean slate."""
    after = self.config.readmit_after
    for name, dropped_step in [*self._dropped.items()] if after else ():
      if step - dropped_step >= after:
        del self._dropped[name], self._tried[name]

  def wants(self, prompt: Prompt) -> bool:
    return self._row(prompt) not in self._dropped

  def _row(self, prompt: Prompt) -> str:
    """The id of a prompt. What is known of another row, which had this id once, is forgotten."""
    if self._tried.get(prompt.id, ())[4:] not in ((), [], [prompt.content]):
      del self._tried[prompt.id]
      self._dropped.pop(prompt.id, None)
    return prompt.id

  def update(self, groups: Sequence[Group], step: int) -> None:
    """Counts the scored groups of iteration `step`. Drops prompts, and brings back dropped ones
    that a sampled group speaks for.

    A response without a verdict does not count, and its group adds nothing to those in a row. It
    does not end them either, unless another response does.
    """
    if not self._counts:
      return
    for group in groups:
      name, known_G = self._row(group.prompt), group.known_G
      right_X = group.correct_G[known_G] > 0
      if not len(right_X):
        continue
      tried, responses, right, run, *_ = self._tried.get(name, (0, 0, 0, 0))
      kind = int(right_X.all()) - int(not right_X.any())  # 1: all right, -1: all wrong
      kind = 0 if group.mixed else kind
      goes_on = run * kind > 0
      if known_G.all():
        run = run + kind if goes_on else kind
      elif not goes_on:
        run = 0
      right += int(right_X.sum())
      self._tried[name] = [tried + 1, responses + len(right_X), right, run, group.prompt.content]
      if 0 < self.config.drop_after <= abs(run):
        self._dropped.setdefault(name, step)
      else:
        self._dropped.pop(name, None)

  def tried(self, prompt: Prompt) -> tuple[int, int]:
    """Counts the responses to a prompt since it came into use, and right ones."""
    _, responses, right, *_ = self._tried.get(self._row(prompt), (0, 0, 0, 0))
    return responses, right

  def metrics(self) -> dict[str, float]:
    """Counts prompts in use and dropped ones by reason. Empty if nothing is ever dropped."""
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
