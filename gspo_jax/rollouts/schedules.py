"""What changes while a run goes on: the length of responses, the set of problems, sizes of groups.

Each follows from the iteration and from what is in a checkpoint, so a run that is resumed does what
it would have done.
"""

from typing import Any

from gspo_jax.settings.run import RunConfig

SOLVED = 0.9  # Probability of at least one right response in a group.


def group_size(tried: int, right: int, least: int, most: int) -> int:
  """Responses for a prompt of which so many of those tried were right.

  The smallest number with which one at least is right with probability SOLVED, between `least`
  and `most`, if each is with probability (right + 1) / (tried + 2): Laplace's rule of succession.
  """
  if not tried:
    return most
  wrong, missed, size = (tried - right + 1) / (tried + 2), 1.0, 0
  while size < most and (size < least or 1 - missed < SOLVED):
    missed *= wrong
    size += 1
  return size


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
