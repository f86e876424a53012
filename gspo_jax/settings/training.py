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
  """Changes during a run. docs/objectives.md"""

  new_tokens: str = key("", "iteration:tokens, a length limit from each iteration: 1:2048,50:4096")
  refresh_every: NonNegativeInt = key(
    0, "iterations between reads of lines appended to data.train; 0: never"
  )
  group_size_min: NonNegativeInt = key(0, "group size of the easiest prompts; 0: rl.group_size")

  def __post_init__(self):
    ranges.check(self, "schedule")
    starts, lengths = zip(*self.stages) if self.stages else ((1,), (1,))
    wrong = [
      (
        starts[0] != 1 or any(b <= a for a, b in itertools.pairwise(starts)),
        "{new_tokens}: iterations must increase from 1, as in 1:2048,50:4096",
      ),
      (
        lengths[0] < 1 or any(b <= a for a, b in itertools.pairwise(lengths)),
        "{new_tokens}: lengths must be at least 1 and increase, since unfinished responses of a "
        "stage could exceed a smaller limit of the next one",
      ),
    ]
    ranges.refuse(self, "schedule", wrong)

  @property
  def stages(self) -> list[tuple[int, int]]:
    """First iteration and length limit of each stage."""
    if not self.new_tokens.strip():
      return []
    stages = [_STAGE.fullmatch(part) for part in self.new_tokens.split(",")]
    if not all(stages):
      raise ValueError(
        f"schedule.new_tokens={self.new_tokens!r} must be a list of iteration:tokens, separated by "
        "commas, as in 1:2048,50:4096"
      )
    return [(int(stage[1]), int(stage[2])) for stage in stages if stage]

  @property
  def shortest(self) -> int:
    """Length limit of the first stage; 0 if there are no stages."""
    return self.stages[0][1] if self.stages else 0

  @property
  def longest(self) -> int:
    """Length limit of the last stage; 0 if there are no stages."""
    return self.stages[-1][1] if self.stages else 0

  def limit(self, step: int, longest: int) -> int:
    """Returns the length limit of an iteration; `longest` if there are no stages."""
    stages = self.stages
    if not stages:
      return longest
    return stages[bisect.bisect_right([start for start, _ in stages], step) - 1][1]


@dataclasses.dataclass(frozen=True)
class SftConfig:
  """Supervised fine-tuning on demonstrations: the cold start."""

  steps: NonNegativeInt = key(0, "largest number of updates")
  target_loss: NonNegativeFloat = key(
    0.0, "held-out loss at which the cold start ends, in nats per token; 0: none"
  )
  check_every: PositiveInt = key(10, "updates between two held-out losses")
  batch: PositiveInt = key(64, "demonstrations per update")
  microbatches: PositiveInt = key(1, "parts of an update; more need less memory")
  max_tokens: NonNegativeInt = key(0, "0: data.max_prompt_tokens + sampling.max_new_tokens")
  log_every: PositiveInt = key(10, "updates between rows of metrics.jsonl")
  load_balance_coef: NonNegativeFloat = key(
    0.0, "factor of the router's auxiliary loss, against unused experts in training from scratch"
  )


@dataclasses.dataclass(frozen=True)
class RLConfig:
  """Iterations: rollout batches and their updates."""

  iterations: PositiveInt = key(300, "number of rollout batches")
  prompts: PositiveInt = key(64, "P, prompts per rollout batch; a multiple of minibatches")
  group_size: Annotated[int, Range(1, 65_536)] = key(8, "G, responses per prompt")
  lag: Annotated[int, Range(0, 1000)] = key(0, "iterations by which sampling is ahead of updates")
  record: bool = key(False, "write each training batch to WORKDIR/batches")
  replay: str = key("", 'WORKDIR/batches of a recorded run, to train on; "": sample')
  extra_prompts: NonNegativeInt = key(
    0, "prompts beyond rl.prompts, started in free slots; unfinished ones are carried over"
  )
  token_budget: Annotated[int, Range(0, INT32)] = key(
    0, "tokens sampled per iteration; unfinished responses are carried over; 0: no budget"
  )
  max_age: NonNegativeInt = key(
    0,
    "largest age of carried-over tokens, in versions of the weights; older responses begin "
    "again; 0: any age",
  )
  mask_truncated: bool = key(False, "True: mask truncated responses (DAPO, §3.4)")
  minibatches: PositiveInt = key(4, "updates per rollout batch and epoch (§5.1)")
  epochs: PositiveInt = key(1, "passes over the mini-batches, in the same order")
  microbatches: PositiveInt = key(1, "parts of an update; more need less memory")
  packed: bool = key(False, "pack several responses into a row. docs/running.md")
  dump_every: PositiveInt = key(10, "iterations between logs of samples in WORKDIR/rollouts")

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
    """Number of classes of responses by age (learner/metrics.py); 0 if `lag` is 0."""
    return self.lag + 1 + self.partial if self.lag else 0


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """Low-rank adapters, trained by RL instead of the model. docs/one_chip.md"""

  rank: Annotated[int, Range(0, 65_536)] = key(0, "rank r of adapters; 0: none")
  alpha: PositiveFloat = key(32.0, "adapters are scaled by alpha / rank")
  matrices: tuple[Matrix, ...] = key(
    typing.get_args(Matrix),
    "matrices with adapters, in layers and experts, by PEFT's names; q_proj includes gates",
  )
  adapter: str = key(
    "", 'initial adapters: PEFT directory, local or gs://..., or OWNER/NAME@COMMIT; "": new ones'
  )

  def __post_init__(self):
    ranges.check(self, "lora")
    wrong = [
      (self.rank and not self.matrices, "{matrices}: name one of them, or set {rank} to 0"),
    ]
    ranges.refuse(self, "lora", wrong)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW, with the usual defaults of RL of language models."""

  learning_rate: Annotated[float, ranges.Range(0, 1e10, excluded=(0,))] = key(
    1e-6, "peak of the schedule"
  )
  schedule: Literal["constant", "linear", "cosine"] = key("constant", "schedule after the warm-up")
  warmup_steps: NonNegativeInt = key(10, "gradient updates of linear warm-up from 0")
  final_fraction: ranges.Fraction = key(
    0.1, "fraction of the peak at the last update; unused by constant"
  )
  b1: ranges.FractionBelowOne = key(0.9, "β₁: decay of the mean of gradients")
  b2: ranges.FractionBelowOne = key(
    0.95, "β₂: decay of the mean of squared gradients, below 0.999 since they change quickly in RL"
  )
  weight_decay: NonNegativeFloat = key(
    0.0,
    "decoupled weight decay, except for norms, biases, convolutions and decays; small changes by "
    "RL need none",
  )
  clip_norm: NonNegativeFloat = key(1.0, "largest global gradient norm; 0: no bound")
  router_rate: NonNegativeFloat = key(
    1.0, "factor on the learning rate of routers; 0 freezes them (docs/routing.md)"
  )

  def __post_init__(self):
    ranges.check(self, "optimizer")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """Checkpoints, resumed by the same command. docs/running.md"""

  directory: str = key(
    "", 'local or gs://..., shared by all hosts; "": checkpoints/ of the workdir'
  )
  every: PositiveInt = key(20, "iterations (rl) or updates (sft) between checkpoints")
  every_minutes: NonNegativeFloat = key(
    30.0, "minutes between checkpoints at most, at the end of a step; 0: by steps alone"
  )
  keep: PositiveInt = key(2, "number of newest checkpoints to keep")
  keep_every: NonNegativeInt = key(0, "keep checkpoints of multiples of this step too; 0: none")
  best: str = key("", 'metric of a best checkpoint to keep too; "": none')
  best_is: Literal["largest", "smallest"] = key("largest", "best value of the metric")
  grace_s: PositiveSeconds | None = key(
    None,
    "seconds from SIGTERM to the end of the process; None: 28 under Kubernetes, under Slurm and on "
    "Google's machines, no limit elsewhere",
  )

  def __post_init__(self):
    ranges.check(self, "checkpoint")

  def phase_directory(self, workdir: str | Path, phase: str) -> "epath.Path":
    """Directory of a phase's checkpoints."""
    from etils import epath  # --help does not import etils.

    return epath.Path(self.directory or Path(workdir).absolute() / "checkpoints") / phase


@dataclasses.dataclass(frozen=True)
class AlarmConfig:
  """Thresholds for warnings during a run; 0: no warning."""

  grad_norm: NonNegativeFloat = key(
    10.0, "upper bound, as a multiple of the median of the ten iterations before"
  )
  entropy: NonNegativeFloat = key(
    0.03, "lower bound in nats per token, against collapse of the policy"
  )
  ratio: NonNegativeFloat = key(
    0.005, "upper bound of the mean |importance ratio - 1|, against divergence"
  )
  mismatch: NonNegativeFloat = key(
    1.0, "upper bound of the mismatch of sampler and trainer, as a multiple of the clip range"
  )
  reward: NonNegativeFloat = key(
    0.2, "largest fall of the mean reward below its maximum, as a share of the range of rewards"
  )
  unknown: Fraction = key(
    0.01, "upper bound of the share of responses without a verdict; updates mask such responses"
  )

  def __post_init__(self):
    ranges.check(self, "alarms")


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
  """Traces of JAX's profiler in WORKDIR/profile. docs/running.md"""

  iteration: NonNegativeInt = key(0, "traced iteration; 0: none")
  stage: Literal["all", "sample", "update"] = key("all", "traced stage of the iteration")
  steps: NonNegativeInt = key(
    0,
    "number of traced updates, or of decoding steps (rounded up to a multiple of engine.steps); "
    "0: the whole stage",
  )
  port: Annotated[int, Range(0, 65_535)] = key(0, "port of an XProf server on each host; 0: none")

  def __post_init__(self):
    ranges.check(self, "profile")
