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


@ranges.section("schedule")
class ScheduleConfig:
  """Changes of response length, data and group size during a run. docs/objectives.md"""

  new_tokens: str = key(
    "",
    "limits of response length, as iteration:tokens. For example, 1:2048,50:4096 means 2,048 "
    'tokens from iteration 1 on, and 4,096 from iteration 50 on. "": sampling.max_new_tokens',
  )
  refresh_every: NonNegativeInt = key(
    0, "number of iterations between two searches for lines appended to data.train; 0: never"
  )
  group_size_min: NonNegativeInt = key(
    0, "smallest group size, for the easiest prompts; 0: all groups have rl.group_size responses"
  )

  def __post_init__(self):
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
  check_every: PositiveInt = key(
    10, "number of updates between two measurements of the held-out loss"
  )
  demonstrations: NonNegativeInt = key(
    0, "number of different demonstrations of data.train, the same for every seed; 0: all of them"
  )
  batch: PositiveInt = key(64, "number of demonstrations per update")
  microbatches: PositiveInt = key(
    1, "number of micro-batches per update; more of them need less memory"
  )
  max_tokens: NonNegativeInt = key(
    0,
    "largest number of tokens of a prompt with its demonstration; 0: data.max_prompt_tokens + "
    "sampling.max_new_tokens",
  )
  log_every: PositiveInt = key(10, "number of updates between two rows of metrics.jsonl")
  load_balance_coef: NonNegativeFloat = key(
    0.0,
    "factor of the router's load-balancing loss. In training from scratch, this loss prevents "
    "unused experts.",
  )


@dataclasses.dataclass(frozen=True)
class RLConfig:
  """Iterations: rollout batches and their updates."""

  iterations: PositiveInt = key(300, "number of rollout batches")
  prompts: PositiveInt = key(
    64, "P, number of prompts per rollout batch; a multiple of minibatches"
  )
  group_size: Annotated[int, Range(1, 65_536)] = key(8, "G, number of responses per prompt")
  lag: Annotated[int, Range(0, 1000)] = key(
    0, "number of iterations by which sampling is ahead of updates"
  )
  record: bool = key(False, "True: write each training batch to WORKDIR/batches")
  replay: str = key(
    "",
    'directory WORKDIR/batches of a recorded run, to train on its batches; "": train on sampled '
    "responses",
  )
  extra_prompts: NonNegativeInt = key(
    0,
    "number of prompts beyond rl.prompts that are started in free slots. Unfinished responses "
    "are carried over to the next iteration.",
  )
  token_budget: Annotated[int, Range(0, INT32)] = key(
    0,
    "number of tokens after which sampling ends in an iteration; 0: no budget. Unfinished "
    "responses are carried over to the next iteration.",
  )
  max_age: NonNegativeInt = key(
    0,
    "largest age of a carried-over token, in versions of the weights; 0: any age. A response "
    "with an older token is restarted, even a finished one.",
  )
  mask_truncated: bool = key(False, "True: mask truncated responses (§3.4 of the DAPO paper)")
  minibatches: PositiveInt = key(
    4, "number of mini-batches of a rollout batch, each for one update (§5.1 of the GSPO paper)"
  )
  epochs: PositiveInt = key(1, "number of passes over the mini-batches, all in the same order")
  microbatches: PositiveInt = key(
    1, "number of micro-batches per update; more of them need less memory"
  )
  packed: bool = key(False, "True: pack several responses into a row. docs/running.md")
  dump_every: PositiveInt = key(
    10,
    "number of iterations between two logs of samples in WORKDIR/rollouts. The first and the last "
    "iteration are always logged.",
  )

  @property
  def rows(self) -> int:
    """Number of responses per rollout batch."""
    return self.prompts * self.group_size

  @property
  def updates(self) -> int:
    """Number of updates per iteration."""
    return self.minibatches * self.epochs

  @property
  def partial(self) -> bool:
    """Whether responses may be carried over to the next iteration."""
    return self.extra_prompts > 0 or self.token_budget > 0

  @property
  def ages(self) -> int:
    """Number of classes of responses by age (learner/metrics.py); 0 if `lag` is 0."""
    return self.lag + 1 + self.partial if self.lag else 0


@ranges.section("lora")
class LoraConfig:
  """Low-rank adapters, trained by RL instead of the model. docs/one_chip.md"""

  rank: Annotated[int, Range(0, 65_536)] = key(0, "rank r of adapters; 0: none")
  alpha: PositiveFloat = key(32.0, "adapters are multiplied by alpha / rank")
  matrices: tuple[Matrix, ...] = key(
    typing.get_args(Matrix),
    "matrices with adapters, in layers and in experts, by PEFT's names. In families with gated "
    "attention, q_proj includes these gates.",
  )
  adapter: str = key(
    "", 'initial adapters: PEFT directory, local or gs://... | OWNER/NAME@COMMIT | "": new adapters'
  )

  def __post_init__(self):
    wrong = [
      (
        self.rank and not self.matrices,
        "{matrices}, {rank}: name at least one matrix, or set rank to 0",
      ),
      (
        self.adapter and not self.rank,
        "{adapter}, {rank}: set rank to that of these adapters (r in adapter_config.json)",
      ),
    ]
    ranges.refuse(self, "lora", wrong)


@ranges.section("optimizer")
class OptimizerConfig:
  """AdamW, with defaults that are usual in RL of language models."""

  learning_rate: Annotated[float, ranges.Range(0, 1e10, excluded=(0,))] = key(
    1e-6, "learning rate after the warm-up, the peak of the schedule"
  )
  schedule: Literal["constant", "linear", "cosine"] = key(
    "constant", "change of the learning rate after the warm-up"
  )
  warmup_steps: NonNegativeInt = key(
    10,
    "number of updates in which the learning rate rises linearly. The first update has the peak "
    "divided by warmup_steps.",
  )
  final_fraction: ranges.Fraction = key(
    0.1, "learning rate at the end, divided by the peak; unused if schedule=constant"
  )
  b1: ranges.FractionBelowOne = key(0.9, "β₁, decay of the running mean of gradients")
  b2: ranges.FractionBelowOne = key(
    0.95,
    "β₂, decay of the running mean of squared gradients. It is below Adam's usual 0.999, since "
    "squared gradients change quickly in RL.",
  )
  weight_decay: NonNegativeFloat = key(
    0.0,
    "decoupled weight decay of all weights except norms, biases, convolutions and the decays of "
    "linear attention. RL changes weights so little that it needs no decay.",
  )
  clip_norm: NonNegativeFloat = key(1.0, "largest norm of the whole gradient; 0: no bound")
  router_rate: NonNegativeFloat = key(
    1.0, "factor on the learning rate of routers; 0: routers are frozen (docs/routing.md)"
  )


@ranges.section("checkpoint")
class CheckpointConfig:
  """Checkpoints, from which the same command resumes a run. docs/running.md"""

  directory: str = key(
    "",
    'directory of checkpoints, local or gs://..., shared by all hosts; "": checkpoints/ in the '
    "workdir",
  )
  every: PositiveInt = key(
    20, "number of iterations (RL) or updates (cold start) between checkpoints"
  )
  every_minutes: NonNegativeFloat = key(
    30.0,
    "a checkpoint also follows the first step that ends this many minutes after the last "
    "checkpoint; 0: checkpoints only every `every` steps",
  )
  keep: PositiveInt = key(2, "number of newest checkpoints to keep")
  keep_every: NonNegativeInt = key(
    0, "also keep checkpoints whose step is a multiple of this number; 0: none"
  )
  best: str = key("", 'metric whose best checkpoint is kept too; "": none')
  best_is: Literal["largest", "smallest"] = key(
    "largest", "whether the largest or the smallest value of the metric is the best"
  )
  grace_s: PositiveSeconds | None = key(
    None,
    "seconds from SIGTERM to the end of the process; unset: 28 under Kubernetes, under Slurm and "
    "on Google's machines, no limit elsewhere",
  )

  def phase_directory(self, workdir: str | Path, phase: str) -> "epath.Path":
    """Directory of a phase's checkpoints."""
    from etils import epath  # --help does not import etils.

    return epath.Path(self.directory or Path(workdir).absolute() / "checkpoints") / phase


@ranges.section("alarms")
class AlarmConfig:
  """Thresholds of warnings during a run. A threshold of 0 turns its warning off."""

  grad_norm: NonNegativeFloat = key(
    10.0, "largest gradient norm, as a multiple of the median of the ten previous norms above 0"
  )
  entropy: NonNegativeFloat = key(
    0.03,
    "smallest entropy of the policy, in nats per token. A lower entropy means that the policy "
    "has collapsed to few responses.",
  )
  ratio: NonNegativeFloat | None = key(
    None,
    "largest mean of |importance ratio - 1|; None: the clip range, but at least 0.005. A larger "
    "mean means that the policy moves faster than clipping can limit.",
  )
  mismatch: NonNegativeFloat = key(
    1.0, "largest mean log-prob mismatch of sampler and trainer, as a multiple of the clip range"
  )
  reward: NonNegativeFloat = key(
    0.2,
    "largest fall of the reward, as a mean over ten iterations, below the maximum of such means. "
    "The unit is the range of all rewards so far.",
  )
  unknown: Fraction = key(
    0.01, "largest share of responses without a verdict. Updates mask these responses."
  )


@ranges.section("profile")
class ProfileConfig:
  """Traces of JAX's profiler in WORKDIR/profile. docs/running.md"""

  iteration: NonNegativeInt = key(0, "number of the traced iteration; 0: none")
  stage: Literal["all", "sample", "update"] = key("all", "traced stage of the iteration")
  steps: NonNegativeInt = key(
    0,
    "number of traced updates or decoding steps of a single stage; 0: the whole stage. Decoding "
    "steps are rounded up to a multiple of engine.steps.",
  )
  port: Annotated[int, Range(0, 65_535)] = key(0, "port of an XProf server on each host; 0: none")
