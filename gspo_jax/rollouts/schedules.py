"""Schedules of a run: length of responses, set of problems, sizes of groups, length buckets.

Each follows from the iteration and from the checkpoint, so a resumed run makes the same choices.

Rows of updates are as long as a bucket for the prompt and the longest response. Rows as long as
`data.max_prompt_tokens` allows would be padding where all prompts are shorter, and each length is a
program. So the lengths of the prompts on file choose a few buckets, once, at the start.
"""

import math
from collections.abc import Sequence
from typing import Any

from gspo_jax.data.sources import Mixture, Prompts, Source
from gspo_jax.settings.run import RunConfig

SOLVED = 0.9  # probability of at least one right response in a group
SHARES = (0.5, 0.9, 1.0)  # shares of all iterations whose prompts fit each bucket
MULTIPLE = 16  # positions
WORTH = 1.25  # least ratio of two buckets; a program for less would bring little


def group_size(tried: int, right: int, least: int, most: int) -> int:
  """Number of responses for a prompt with `right` right ones among `tried`.

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
  """Reads new problems if they are due, and returns the tokens of a response and metrics."""
  s, metrics = c.schedule, {}
  limit = s.limit(step, c.sampling.max_new_tokens)
  if s.stages:
    metrics["sampling/max_new_tokens"] = float(limit)
  if s.refresh_every:
    due = step > 1 and (step - 1) % s.refresh_every == 0
    added = prompts.look() if due else 0
    metrics |= {"data/rows": float(len(prompts)), "data/added": float(added)}
  return limit, metrics


def length_buckets(config: RunConfig, sources: Sequence[Source]) -> tuple[int, ...]:
  """Lengths for prompts in the rows of updates, at most three, the smallest first.

  `data.max_prompt_tokens` is the only one where later prompts may be longer, and where rows are not
  a prompt and its response: packed ones, and conversations.

  An iteration draws `rl.prompts` prompts. All of them are within the quantile q of the lengths with
  probability q^P.
  """
  most = config.data.max_prompt_tokens
  parts = [p for s in sources for p in (s.sources if isinstance(s, Mixture) else (s,))]
  finite = bool(parts) and all(isinstance(part, Prompts) for part in parts)
  if config.rl.packed or config.environment.name or not finite:
    return (most,)
  ordered = sorted(len(prompt.tokens) for part in parts for prompt in part.rows)
  places = (math.ceil(len(ordered) * share ** (1 / config.rl.prompts)) - 1 for share in SHARES)
  buckets: list[int] = []
  for length in sorted((ordered[i] for i in places), reverse=True):
    bucket = min(-(-length // MULTIPLE) * MULTIPLE, most)
    if not buckets or WORTH * bucket <= buckets[0]:
      buckets.insert(0, bucket)
  return tuple(buckets)


def bucket_length(longest: int, buckets: Sequence[int], most: int) -> int:
  """Smallest bucket for a prompt of `longest` tokens, else `most`.

  Data of an earlier start of the run may have longer prompts than all buckets.
  """
  return next((bucket for bucket in buckets if bucket >= longest), most)
