"""What changes while a run goes on: the length of responses, the set of problems, sizes of groups.

Each follows from the iteration and from what is in a checkpoint, so a run that is resumed does what
it would have done.
"""

import bisect
import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np

from gspo_jax.runs.metrics import read_rows
from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import NonNegativeInt, Range
from gspo_jax.system import hosts
from gspo_jax.system.files import write_whole

REFRESHES = "refreshes.jsonl"  # of the workdir: what was read of files before which iteration
_STAGE = re.compile(r"\s*(\d+)\s*:\s*(\d+)\s*")


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
  """Section `schedule`; docs/objectives.md has the reasons."""

  new_tokens: str  # iteration:tokens, ...: the most of a response from that iteration on
  refresh_every: NonNegativeInt  # iterations between two looks at the files of data.train; 0: none
  group_size_min: NonNegativeInt  # responses to the easiest prompts; 0: all have rl.group_size
  group_solved: Annotated[float, Range(0.01, 0.9999)]  # probability that a group has a right one

  def __post_init__(self):
    ranges.check(self, "schedule")
    begins, lengths = zip(*self.stages) if self.stages else ((1,), (1,))
    if begins[0] != 1 or any(b <= a for a, b in itertools.pairwise(begins)):
      raise ValueError(
        f"schedule.new_tokens={self.new_tokens!r}: iterations go up from 1, as in 1:2048,50:4096"
      )
    if lengths[0] < 1 or any(b <= a for a, b in itertools.pairwise(lengths)):
      raise ValueError(
        f"schedule.new_tokens={self.new_tokens!r}: responses grow, from at least one token; what "
        "was put aside may be longer than a smaller limit"
      )

  @property
  def stages(self) -> list[tuple[int, int]]:
    """The first iteration of each stage, and the tokens that a response may have in it."""
    if not self.new_tokens.strip():
      return []
    found = [_STAGE.fullmatch(part) for part in self.new_tokens.split(",")]
    if not all(found):
      raise ValueError(
        f"schedule.new_tokens={self.new_tokens!r} is no list of iteration:tokens with commas in "
        "between, as 1:2048,50:4096"
      )
    return [(int(one[1]), int(one[2])) for one in found]

  def limit(self, step: int, longest: int) -> int:
    """Tokens that a response may have in an iteration, of which `longest` is the most."""
    stages = self.stages
    if not stages:
      return longest
    return stages[bisect.bisect_right([begin for begin, _ in stages], step) - 1][1]


def check(c: Any) -> None:
  """ValueError for a schedule that does not fit the rest of a `config.RunConfig`, or has no effect
  there."""
  s, rl, reward, longest = c.schedule, c.rl, c.reward, c.sampling.max_new_tokens
  set_ = {
    "new_tokens": bool(s.stages),
    "refresh_every": s.refresh_every > 0,
    "group_size_min": s.group_size_min > 0,
  }
  for key, on in set_.items():
    if on and "rl" not in c.job:
      raise ValueError(
        f"schedule.{key}={getattr(s, key)!r} is of responses that a run of job=rl samples, and has "
        f"no effect with job={c.job!r}; leave it {type(getattr(s, key))()!r}"
      )
  first, last = s.limit(1, longest), s.stages[-1][1] if s.stages else longest
  wrong = {
    f"schedule.new_tokens={s.new_tokens!r} goes on to {last} tokens, and sampling.max_new_tokens="
    f"{longest} is the most: raise the one or lower the other": last > longest,
    f"schedule.new_tokens={s.new_tokens!r}: the overlong punishment moves with the limit, and "
    f"reward.overlong_buffer={reward.overlong_buffer} is more than {first} tokens; make it "
    "smaller": bool(s.stages and reward.overlong_weight)
    and follows(c)
    and reward.overlong_buffer > first,
    f"schedule.group_size_min={s.group_size_min} is more than rl.group_size={rl.group_size}, the "
    "most": s.group_size_min > rl.group_size,
    f"schedule.group_size_min={s.group_size_min}, rl.extra_prompts={rl.extra_prompts}: small "
    "groups leave room for extra prompts from the start, and these would be trained on late; set "
    "one of them to 0": s.group_size_min > 0 and rl.extra_prompts > 0,
    "schedule.group_size_min=1: advantages are relative to a group; make it at least "
    "2": s.group_size_min == 1 and _needs_a_group(c),
  }
  for what, found in wrong.items():
    if found:
      raise ValueError(what)


def _needs_a_group(c: Any) -> bool:
  """Whether a response is judged by others to the same prompt."""
  soft = c.objective.advantage_kind == "soft" and c.objective.soft_value is None
  return c.critic.name == "none" and (c.objective.relative or soft)


def follows(c: Any) -> bool:
  """Whether the overlong punishment ends where responses are cut off, as it does unless
  `reward.overlong_max` is another number."""
  return c.reward.overlong_max in (0, c.sampling.max_new_tokens)


def overlong_shift(c: Any, limit: int) -> int:
  """Tokens to add to the length of a response under this limit, so that the overlong punishment
  of one that was cut off is that of a response of `sampling.max_new_tokens`."""
  return c.sampling.max_new_tokens - limit if follows(c) else 0


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


def group_sizes(c: Any, tried: Iterable[tuple[int, int]]) -> list[int]:
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


def begin(c: Any, batches: Any, step: int, workdir: Path | None) -> tuple[int, dict[str, float]]:
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
