"""What changes while a run goes on: the length of responses, the set of problems, sizes of groups.

Each follows from the iteration and from what is in a checkpoint, so a run that is resumed does what
it would have done.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gspo_jax.runs.metrics import read_rows
from gspo_jax.settings.run import RunConfig
from gspo_jax.system import hosts
from gspo_jax.system.files import write_whole

REFRESHES = "refreshes.jsonl"  # of the workdir: what was read of files before which iteration


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


def begin_run(source: Any, workdir: Path) -> None:
  """Leaves a growing source the rows with which the run of a workdir began: a run that is killed
  before its first checkpoint begins again with what it had. Writes them down if it begins now.

  Raises:
    DataError: they are not what they were.
  """
  journal = _Journal(workdir, source.path)
  source.begin_with(journal.pieces(0))
  journal.write(0, source.pieces)


def begin(
  c: RunConfig, batches: Any, step: int, workdir: Path | None
) -> tuple[int, dict[str, float]]:
  """Reads on in the files of problems where that is due before an iteration. Returns the tokens
  that a response may have in it, and metrics.

  A file of the workdir says what was read, so that an iteration that is repeated after a restart
  has the rows that it had, whatever was appended since.
  """
  s, metrics = c.schedule, {}
  limit = s.limit(step, c.sampling.max_new_tokens)
  if s.stages:
    metrics["sampling/max_new_tokens"] = float(limit)
  if s.refresh_every:
    added, every = 0, s.refresh_every
    if step > 1 and (step - 1) % every == 0:
      journal = _Journal(workdir, batches.source.path)
      added = batches.refresh(journal.pieces(step))
      journal.write(step, batches.source.pieces)
    metrics |= {"data/rows": float(len(batches.source)), "data/added": float(added)}
  return limit, metrics


class _Journal:
  """What was read of files at the start (0) and at each refresh. Only the first host looks at
  it."""

  def __init__(self, workdir: Path | None, source: str):
    self._path, self._source = workdir / REFRESHES if workdir else None, source

  def pieces(self, step: int) -> list[list[Any]] | None:
    """On all hosts; ValueError names a damaged line."""
    return hosts.of_first(lambda: self._pieces(step))

  def _pieces(self, step: int) -> list[list[Any]] | None:
    rows = read_rows(self._path) if self._path else []
    mine = (row for row in rows if (row["step"], row.get("source")) == (step, self._source))
    return next((row.get("pieces") for row in mine), None)

  def write(self, step: int, pieces: list[list[Any]]) -> None:
    """Raises WriteError."""
    if self._path is None or jax.process_index() or self._pieces(step) is not None:
      return
    rows = [*read_rows(self._path), dict(step=step, source=self._source, pieces=pieces)]
    write_whole(self._path, (json.dumps(row) + "\n" for row in rows))
