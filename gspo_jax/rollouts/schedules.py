"""Schedules of a run: response length, set of problems, group sizes, length buckets.

Each schedule is a function of the iteration and the checkpoint, so a resumed run makes the same
choices.

A batch row of an update has a bucket's length for the prompt, and the maximum response length after
it. Buckets of `data.max_prompt_tokens` would be mostly padding for short prompts, and each bucket
compiles a program. So a few buckets are chosen at the start, from the lengths of all prompts.
"""

import math
from collections.abc import Sequence
from typing import Any

from gspo_jax.data.sources import Mixture, Prompts, Source
from gspo_jax.settings.run import RunConfig
from gspo_jax.settings.training import ScheduleConfig

SOLVED = 0.9  # Probability of at least one right response in a group.
SHARES = (0.5, 0.9, 1.0)  # Share of iterations with all prompts within each bucket.
MULTIPLE = 16  # Buckets are multiples of this number of tokens.
WORTH = 1.25  # Minimum ratio of two buckets; for less, another program is not worth compiling.


def group_size(tried: int, right: int, least: int, most: int) -> int:
  """Returns the number of responses for a prompt.

  The prompt has had `right` right responses among `tried`.

  The result is the smallest number with at least one right response at probability SOLVED, clipped
  to [`least`, `most`]. Each response is right with probability (right + 1) / (tried + 2), by the
  rule of Laplace. Untried prompts have `most` responses.
  """
  if not tried:
    return most
  wrong, all_wrong, size = (tried - right + 1) / (tried + 2), 1.0, 0
  while size < most and (size < least or 1 - all_wrong < SOLVED):
    all_wrong *= wrong
    size += 1
  return size


def begin(s: ScheduleConfig, prompts: Any, step: int, longest: int) -> tuple[int, dict[str, float]]:
  """Reads new problems if due; returns the maximum response length and metrics."""
  metrics, limit = {}, s.limit(step, longest)
  if s.stages:
    metrics["sampling/max_new_tokens"] = float(limit)
  if s.refresh_every:
    due = step > 1 and (step - 1) % s.refresh_every == 0
    added = prompts.look() if due else 0
    metrics |= {"data/rows": float(len(prompts)), "data/added": float(added)}
  return limit, metrics


def length_buckets(config: RunConfig, sources: Sequence[Source]) -> tuple[int, ...]:
  """Returns prompt lengths of the updates' batch rows, at most three, ascending.

  The only bucket is `data.max_prompt_tokens` if later prompts may be longer (growing files,
  embedded tasks), and for packed rows and conversations.

  An iteration draws P = `rl.prompts` prompts. All of them are within the q-quantile of the lengths
  with probability q^P.
  """
  most = config.data.max_prompt_tokens
  parts = [p for s in sources for p in (s.sources if isinstance(s, Mixture) else (s,))]
  finite = bool(parts) and all(isinstance(part, Prompts) for part in parts)
  if config.rl.packed or config.environment.name or not finite:
    return (most,)
  lengths = sorted(len(prompt.tokens) for part in parts for prompt in part.rows)
  ranks = (math.ceil(len(lengths) * share ** (1 / config.rl.prompts)) - 1 for share in SHARES)
  buckets: list[int] = []
  for length in sorted((lengths[i] for i in ranks), reverse=True):
    bucket = min(-(-length // MULTIPLE) * MULTIPLE, most)
    if not buckets or WORTH * bucket <= buckets[0]:
      buckets.insert(0, bucket)
  return tuple(buckets)


def bucket_length(longest: int, buckets: Sequence[int], most: int) -> int:
  """Returns the smallest bucket for `longest` prompt tokens.

  Returns `most` if no bucket is large enough: before a restart, data may have had longer prompts.
  """
  return next((bucket for bucket in buckets if bucket >= longest), most)
