"""Sections of training: the cold start, RL, optimizers, schedules, checkpoints and alarms."""

import bisect
import dataclasses
import itertools
import re
from pathlib import Path
from typing import Annotated, Literal

from etils import epath

from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import (
  INT32,
  Fraction,
  NonNegativeFloat,
  NonNegativeInt,
  PositiveInt,
  Range,
  Seconds,
)

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


@dataclasses.dataclass(frozen=True)
class SftConfig:
  """Supervised fine-tuning on demonstrations: the cold start."""

  steps: NonNegativeInt  # updates, at most
  target_loss: NonNegativeFloat  # nats per token, held out, that ends it sooner; 0: none
  check_every: PositiveInt  # updates between two looks at the held-out loss
  check_problems: PositiveInt  # demonstrations that are held out for it
  batch: PositiveInt  # demonstrations per update
  microbatches: PositiveInt  # per update; more of them need less memory
  max_tokens: NonNegativeInt  # of prompt and demonstration; 0: as long as prompt and response
  log_every: PositiveInt  # updates between rows of metrics.jsonl
  load_balance_coef: NonNegativeFloat  # router auxiliary loss


@dataclasses.dataclass(frozen=True)
class RLConfig:
  iterations: PositiveInt  # rollout batches
  prompts: PositiveInt  # P, per rollout batch
  group_size: Annotated[int, Range(1, 65_536)]  # G
  lag: Annotated[int, Range(0, 1000)]  # iterations that sampling is ahead of updates, at most
  record: bool  # batches, as they were trained on
  replay: str  # directory of recorded batches to train on; "": sample
  extra_prompts: NonNegativeInt  # begun beyond `prompts` as places become free; carried over
  token_budget: Annotated[int, Range(0, INT32)]  # sampled per iteration; 0: none, all to the end
  mask_truncated: bool  # responses that were cut off are not trained on: DAPO's overlong filtering
  minibatches: PositiveInt  # updates per rollout batch and epoch
  epochs: PositiveInt  # passes over the mini-batches of a rollout batch
  microbatches: PositiveInt  # per update; more of them need less memory
  packed: bool  # several responses to a row; micro-batches that this leaves empty are left out
  lora_rank: Annotated[int, Range(0, 65_536)]  # of adapters, trained instead of all; 0: none
  dump_every: PositiveInt  # iterations between dumped rollouts

  @property
  def updates(self) -> int:
    """Gradient updates per iteration."""
    return self.minibatches * self.epochs

  @property
  def partial(self) -> bool:
    """Whether responses may be carried over to the next iteration."""
    return self.extra_prompts > 0 or self.token_budget > 0

  @property
  def ages(self) -> int:
    """Classes of responses by the age of the weights that sampled them; 0: all are of one."""
    return self.lag + 1 + self.partial if self.lag else 0


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  learning_rate: Annotated[float, ranges.Range(0, 1e10, excluded=(0,))]  # peak
  schedule: Literal["constant", "linear", "cosine"]  # after the warm-up, down to final_fraction
  warmup_steps: NonNegativeInt  # gradient updates, linear from 0
  final_fraction: ranges.Fraction  # of the peak, at the last update
  b1: ranges.FractionBelowOne
  b2: ranges.FractionBelowOne
  eps: ranges.PositiveFraction
  weight_decay: NonNegativeFloat  # decoupled; not on norms and biases
  clip_norm: NonNegativeFloat  # global gradient norm; 0: no bound

  def __post_init__(self):
    ranges.check(self, "optimizer")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  directory: str  # local or gs://..., seen by all hosts (mirror.py); "": workdir/checkpoints
  every: PositiveInt  # iterations (rl) or updates (sft) between checkpoints
  keep: PositiveInt  # how many of the newest are kept; a run resumes from them
  keep_every: NonNegativeInt  # checkpoints of steps that this divides are kept as well; 0: none
  best: str  # the one where this metric is largest is kept as well, e.g. eval/accuracy; "": none
  grace_s: Seconds  # seconds from SIGTERM to the end of the process, at the latest

  def __post_init__(self):
    ranges.check(self, "checkpoint")

  def of(self, workdir: str | Path, phase: str) -> epath.Path:
    """The directory of the checkpoints of a phase."""
    return epath.Path(self.directory or Path(workdir).absolute() / "checkpoints") / phase


@dataclasses.dataclass(frozen=True)
class AlarmConfig:
  """Thresholds; 0 turns one off."""

  window: Annotated[int, Range(2, 1_000_000)]  # iterations that medians and means are taken over
  # Gradient norm, as a multiple of its median over the window before, of iterations that have one.
  grad_norm: NonNegativeFloat
  entropy: NonNegativeFloat  # nats per token that the policy's entropy falls below
  ratio: NonNegativeFloat  # mean |importance ratio - 1| over an iteration that is exceeded
  mismatch: NonNegativeFloat  # of log-probs, per sequence, as a multiple of the clip range
  reward: NonNegativeFloat  # that the mean over a window lies below the highest such mean so far
  unknown: Fraction = 0.0  # share of responses without a verdict that is exceeded

  def __post_init__(self):
    ranges.check(self, "alarms")
