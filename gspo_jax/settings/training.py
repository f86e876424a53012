"""Sections of training: the cold start, RL, optimizers, schedules, checkpoints and alarms."""

import bisect
import dataclasses
import itertools
import re
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import (
  INT32,
  Fraction,
  NonNegativeFloat,
  NonNegativeInt,
  PositiveFloat,
  PositiveInt,
  PositiveSeconds,
  Range,
  key,
)

if TYPE_CHECKING:
  from etils import epath

Matrix = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_STAGE = re.compile(r"\s*(\d+)\s*:\s*(\d+)\s*")


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
  """What changes while a run goes on. docs/objectives.md"""

  new_tokens: str = key("", "most of a response from an iteration on: 1:2048,50:4096")
  refresh_every: NonNegativeInt = key(
    0, "iterations until lines appended to data.train are read; 0: never"
  )
  group_size_min: NonNegativeInt = key(0, "responses to the easiest prompts; 0: rl.group_size")

  def __post_init__(self):
    ranges.check(self, "schedule")
    begins, lengths = zip(*self.stages) if self.stages else ((1,), (1,))
    wrong = [
      (
        begins[0] != 1 or any(b <= a for a, b in itertools.pairwise(begins)),
        "{new_tokens}: iterations go up from 1, as in 1:2048,50:4096",
      ),
      (
        lengths[0] < 1 or any(b <= a for a, b in itertools.pairwise(lengths)),
        "{new_tokens}: responses grow, from at least one token; what was put aside may be longer "
        "than a smaller limit",
      ),
    ]
    ranges.refuse(self, "schedule", wrong)

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

  @property
  def shortest(self) -> int:
    """Tokens that a response may have in the first stage; 0: there are no stages."""
    return self.stages[0][1] if self.stages else 0

  @property
  def longest(self) -> int:
    """The same of the last stage."""
    return self.stages[-1][1] if self.stages else 0

  def limit(self, step: int, longest: int) -> int:
    """Tokens that a response may have in an iteration, of which `longest` is the most."""
    stages = self.stages
    if not stages:
      return longest
    return stages[bisect.bisect_right([begin for begin, _ in stages], step) - 1][1]


@dataclasses.dataclass(frozen=True)
class SftConfig:
  """Supervised fine-tuning on demonstrations: the cold start."""

  steps: NonNegativeInt = key(0, "updates, at most")
  target_loss: NonNegativeFloat = key(
    0.0, "nats per token of held-out demonstrations that end it sooner; 0: none"
  )
  check_every: PositiveInt = key(10, "updates between two looks at the held-out loss")
  check_problems: PositiveInt = key(128, "demonstrations that are held out for it")
  batch: PositiveInt = key(64, "demonstrations per update")
  microbatches: PositiveInt = key(1, "parts of an update: more of them need less memory")
  max_tokens: NonNegativeInt = key(0, "0: data.max_prompt_tokens + sampling.max_new_tokens")
  log_every: PositiveInt = key(10, "updates between rows of metrics.jsonl")
  load_balance_coef: NonNegativeFloat = key(
    0.0, "router auxiliary loss; from scratch, experts collapse without it"
  )


@dataclasses.dataclass(frozen=True)
class RLConfig:
  """Iterations: rollout batches, and the updates that they are trained on."""

  iterations: PositiveInt = key(300, "rollout batches")
  prompts: PositiveInt = key(64, "P, per rollout batch; a multiple of minibatches")
  group_size: Annotated[int, Range(1, 65_536)] = key(8, "G, responses per prompt")
  lag: Annotated[int, Range(0, 1000)] = key(0, "iterations that sampling is ahead of updates")
  record: bool = key(False, "each batch goes into WORKDIR/batches, as it is trained on")
  replay: str = key("", 'WORKDIR/batches of a recorded run, trained on again; "": sample')
  extra_prompts: NonNegativeInt = key(0, "begun beyond prompts as places become free; carried over")
  token_budget: Annotated[int, Range(0, INT32)] = key(
    0, "sampled per iteration, the rest is carried over; 0: none, all go to the end"
  )
  max_age: NonNegativeInt = key(
    0,
    "versions that weights may be ahead of those of a token carried over, or it is begun again; "
    "0: any",
  )
  mask_truncated: bool = key(False, "True: responses that were cut off teach nothing (DAPO, §3.4)")
  minibatches: PositiveInt = key(4, "updates per rollout batch and epoch: §5.1")
  epochs: PositiveInt = key(1, "passes over the mini-batches, in the same order")
  microbatches: PositiveInt = key(1, "parts of an update: more of them need less memory")
  packed: bool = key(False, "several responses to a row. docs/running.md")
  dump_every: PositiveInt = key(10, "iterations between dumped rollouts")

  @property
  def rows(self) -> int:
    """Responses of a rollout batch."""
    return self.prompts * self.group_size

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
class LoraConfig:
  """Low-rank adapters, which RL trains in the place of the model. docs/one_chip.md"""

  rank: Annotated[int, Range(0, 65_536)] = key(0, "r of adapters, trained alone; 0: none")
  alpha: PositiveFloat = key(32.0, "their products count alpha / rank times")
  matrices: tuple[Matrix, ...] = key(
    typing.get_args(Matrix), "those with adapters, of layers and experts, named as PEFT does"
  )
  adapter: str = key(
    "", 'PEFT directory, gs://... too, or OWNER/NAME@COMMIT: they are trained on; "": new adapters'
  )

  def __post_init__(self):
    ranges.check(self, "lora")
    wrong = [
      (self.rank and not self.matrices, "{matrices}: name one of them, or set {rank} to 0"),
    ]
    ranges.refuse(self, "lora", wrong)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW, as RL of language models commonly uses it."""

  learning_rate: Annotated[float, ranges.Range(0, 1e10, excluded=(0,))] = key(
    1e-6, "the largest of the schedule"
  )
  schedule: Literal["constant", "linear", "cosine"] = key("constant", "after the warm-up")
  warmup_steps: NonNegativeInt = key(10, "gradient updates, linear from 0")
  schedule_steps: NonNegativeInt = key(
    0, "gradient updates until final_fraction, from which on it stays; 0: all of the run's"
  )
  final_fraction: ranges.Fraction = key(
    0.1, "of the peak, at the schedule's last update; constant ignores it"
  )
  b1: ranges.FractionBelowOne = key(0.9, "decay of the mean of gradients")
  b2: ranges.FractionBelowOne = key(0.95, "of their squares; RL gradients change quickly")
  eps: ranges.PositiveFraction = key(1e-8, "added to the root of the squares")
  weight_decay: NonNegativeFloat = key(0.0, "decoupled, not on norms and biases; RL moves little")
  clip_norm: NonNegativeFloat = key(1.0, "global gradient norm; 0: no bound")

  def __post_init__(self):
    ranges.check(self, "optimizer")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """Checkpoints, from which the same command goes on. docs/running.md"""

  directory: str = key("", 'local or gs://..., seen by all hosts; "": checkpoints/ of the workdir')
  every: PositiveInt = key(20, "iterations (rl) or updates (sft) between them")
  every_minutes: NonNegativeFloat = key(
    30.0, "and as soon as a step ends after so many since the last one; 0: by steps alone"
  )
  keep: PositiveInt = key(2, "of the newest")
  keep_every: NonNegativeInt = key(0, "those of steps that this divides are kept as well; 0: none")
  best: str = key("", 'metric of which the best is kept as well; "": none')
  best_is: Literal["largest", "smallest"] = key("largest", "which value of it is the best")
  grace_s: PositiveSeconds | None = key(
    None,
    "from SIGTERM to the end of the process, at the latest; None: 28 under Kubernetes, under Slurm "
    "and on Google's machines, no limit elsewhere",
  )

  def __post_init__(self):
    ranges.check(self, "checkpoint")

  def of(self, workdir: str | Path, phase: str) -> "epath.Path":
    """The directory of the checkpoints of a phase."""
    from etils import epath  # which --help goes without

    return epath.Path(self.directory or Path(workdir).absolute() / "checkpoints") / phase


@dataclasses.dataclass(frozen=True)
class AlarmConfig:
  """Thresholds for warnings of a run in trouble; 0 turns one off."""

  window: Annotated[int, Range(2, 1_000_000)] = key(10, "iterations of medians and means")
  grad_norm: NonNegativeFloat = key(10.0, "times its median over the window before")
  entropy: NonNegativeFloat = key(0.03, "nats per token, below which the policy has collapsed")
  ratio: NonNegativeFloat = key(0.005, "mean |importance ratio - 1|: the policy runs away")
  mismatch: NonNegativeFloat = key(1.0, "times the clip range: sampler and trainer differ so much")
  reward: NonNegativeFloat = key(0.2, "that its mean lies below the highest so far")
  unknown: Fraction = key(0.01, "share of responses without a verdict, which are not learned from")

  def __post_init__(self):
    ranges.check(self, "alarms")


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
  """What JAX's profiler traces into WORKDIR/profile. docs/running.md"""

  iteration: NonNegativeInt = key(0, "to trace; 0: none")
  stage: Literal["all", "sample", "update"] = key("all", "of that iteration")
  steps: NonNegativeInt = key(
    0, "from its beginning: of decoding, in whole engine.steps, or updates; 0: all of the stage"
  )
  port: Annotated[int, Range(0, 65_535)] = key(
    0, "of a server for XProf to capture from, on each host; 0: none"
  )

  def __post_init__(self):
    ranges.check(self, "profile")
