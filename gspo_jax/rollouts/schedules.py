"""What changes while a run goes on: the length of responses, the set of problems, sizes of groups.

Each follows from the iteration and from what is in a checkpoint, so a run that is resumed does what
it would have done.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gspo_jax.settings.run import RunConfig


def overlong_shift(c: RunConfig, limit: int) -> int:
  """Tokens to add to the length of a response under this limit, so that the overlong punishment
  of one that was cut off is that of a response of `sampling.max_new_tokens`."""
  return c.sampling.max_new_tokens - limit if c.overlong_follows else 0


def group_size(tried: int, right: int, least: int, most: int, solved: float) -> int:
  """Responses for a prompt of which so many of those tried were right.

  The smallest number with which one at least is right with probability `solved`, between `least`
  and `most`, if each is with probability (right + 1) / (tried + 2): Laplace's rule of succession.
  """
  if not tried:
    return most
  wrong, missed, size = (tried - right + 1) / (tried + 2), 1.0, 0
  while size < most and (size < least or 1 - missed < solved):
    missed *= wrong
    size += 1
  return size


def group_sizes(c: RunConfig, tried: Iterable[tuple[int, int]]) -> list[int]:
  """Responses for each of some prompts, of which so many were tried, and right."""
  s, most = c.schedule, c.rl.group_size
  least = s.group_size_min or most
  return [group_size(n, right, least, most, s.group_solved) for n, right in tried]


def size_metrics(sizes: Sequence[int]) -> dict[str, float]:
  """Of the groups that an iteration has sampled."""
  return {
    "group_size/mean": float(np.mean(sizes)),
    "group_size/min": float(min(sizes)),
    "group_size/max": float(max(sizes)),
    "group_size/responses": float(sum(sizes)),
  }


def begin(c: RunConfig, prompts: Any, step: int) -> tuple[int, dict[str, float]]:
  """Reads on in the files of problems where that is due before an iteration. Returns the tokens
  that a response may have in it, and metrics."""
  s, metrics = c.schedule, {}
  limit = s.limit(step, c.sampling.max_new_tokens)
  if s.stages:
    metrics["sampling/max_new_tokens"] = float(limit)
  if s.refresh_every:
    due = step > 1 and (step - 1) % s.refresh_every == 0
    added = prompts.look() if due else 0
    metrics |= {"data/rows": float(len(prompts)), "data/added": float(added)}
  return limit, metrics
