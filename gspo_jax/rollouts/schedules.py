"""Schedules of a run: response length, set of problems, group sizes, length buckets.

Each schedule is a function of the iteration and the checkpoint, so a resumed run makes the same
choices as an uninterrupted run.

A row of an update has space for a prompt, and for a response of maximum length. The space for the
prompt is equal in all rows of an iteration, and is one of a few lengths, the *buckets*. If the
space were always `data.max_prompt_tokens`, rows of short prompts would be mostly padding. If it
were the length of the iteration's longest prompt, a program would be compiled for each of many
lengths. So up to three buckets are chosen at the start, from the lengths of all prompts.
"""

import math
from collections.abc import Sequence
from typing import Any

from gspo_jax.data.sources import Mixture, Prompts, Source
from gspo_jax.settings.run import RunConfig
from gspo_jax.settings.training import ScheduleConfig

SOLVED = 0.9  # Intended probability of at least one right response in a group.
SHARES = (0.5, 0.9, 1.0)  # For each bucket, the share of iterations whose prompts all fit into it.
MULTIPLE = 16  # Buckets are rounded up to a multiple of this number of tokens.
# Minimum ratio of a bucket to the next smaller bucket. The padding saved by a closer bucket is not
# worth the compilation of a program.
WORTH = 1.25


def group_size(tried: int, right: int, least: int, most: int) -> int:
  """Returns the number of responses to sample for a prompt.

  This is the smallest number such that at least one response is right with a probability of
  `SOLVED` or more, clipped to [`least`, `most`]. Laplace's rule of succession estimates the
  probability that a response is right: (right + 1) / (tried + 2). For a prompt without earlier
  responses, the result is `most`.

  Args:
    tried: number of earlier responses to the prompt.
    right: number of right responses among the earlier responses.
    least: minimum size of a group.
    most: maximum size of a group.
  """
  if not tried:
    return most
  wrong, all_wrong, size = (tried - right + 1) / (tried + 2), 1.0, 0
  while size < most and (size < least or 1 - all_wrong < SOLVED):
    all_wrong *= wrong
    size += 1
  return size


def begin(s: ScheduleConfig, prompts: Any, step: int, longest: int) -> tuple[int, dict[str, float]]:
  """Starts an iteration; returns its maximum response length, and metrics.

  If `schedule.refresh_every` = n > 0, growing files are read again in iterations n + 1, 2n + 1, ...

  Args:
    s: section `schedule`.
    prompts: source of prompts.
    step: number of the iteration.
    longest: value of `sampling.max_new_tokens`.
  """
  metrics, limit = {}, s.limit(step, longest)
  if s.stages:
    metrics["sampling/max_new_tokens"] = float(limit)
  if s.refresh_every:
    due = step > 1 and (step - 1) % s.refresh_every == 0
    added = prompts.look() if due else 0
    metrics |= {"data/rows": float(len(prompts)), "data/added": float(added)}
  return limit, metrics


def length_buckets(config: RunConfig, sources: Sequence[Source]) -> tuple[int, ...]:
  """Returns the buckets of prompt lengths, at most three, in ascending order.

  `data.max_prompt_tokens` is the only bucket for packed rows, for conversations, and if later
  prompts may be longer than all known prompts (growing files, embedded tasks).

  Otherwise buckets are quantiles of the lengths of all prompts. An iteration draws P = `rl.prompts`
  prompts, and all of these are within the q-quantile with probability q^P. So a bucket for the
  share s of iterations (`SHARES`) is the s^(1/P)-quantile.
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
  """Returns the smallest bucket for a batch with prompts of at most `longest` tokens.

  Returns `most` if no bucket is large enough. This happens if a partial rollout was started before
  a restart, from data with longer prompts.
  """
  return next((bucket for bucket in buckets if bucket >= longest), most)
