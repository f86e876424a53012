"""A run's configuration: the frozen dataclasses that a config file fills, one per section.

Every key is in the config file; nothing has a default here. Unknown and missing keys are errors.
"""

import dataclasses
import difflib
import sys
import types
import typing
import zlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from gspo_jax.data.recorded import OfflineConfig
from gspo_jax.data.sources import DataConfig
from gspo_jax.evaluation.benchmarks import BenchmarkConfig, EvalConfig
from gspo_jax.learner import optimizer
from gspo_jax.learner.critic import Critic, CriticConfig
from gspo_jax.learner.distillation import DistillationConfig
from gspo_jax.learner.objective import ObjectiveConfig, effective
from gspo_jax.learner.optimizer import Optimizer, OptimizerConfig
from gspo_jax.learner.step import Learner
from gspo_jax.rewards import RewardConfig
from gspo_jax.rollouts.multipliers import ConstraintConfig
from gspo_jax.rollouts.schedules import ScheduleConfig
from gspo_jax.runs.alarms import AlarmConfig
from gspo_jax.runs.checkpoint import CheckpointConfig
from gspo_jax.sampling import EngineConfig, EnvironmentConfig, SamplingConfig, Workload
from gspo_jax.settings import checks, ranges
from gspo_jax.settings.model import ComputeConfig, ModelConfig
from gspo_jax.settings.ranges import INT32, NonNegativeFloat, NonNegativeInt, PositiveInt, Range
from gspo_jax.sharding import MeshConfig, RolloutMeshConfig

FLOAT_MAX = sys.float_info.max


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
class RunConfig:
  job: Literal["sft+rl", "sft", "rl", "offline", "eval"]
  seed: ranges.Seed
  distributed: bool  # call jax.distributed.initialize: several hosts
  resume: Literal["same", "force"]  # a workdir of another config: refuse it | go on with this one
  on_nonfinite: Literal["stop", "skip"]  # NaN or infinity: stop the run | skip the update
  profile: NonNegativeInt  # iteration whose JAX profiler trace goes to workdir/profile; 0: none
  wandb: str  # project of Weights & Biases that metrics go to as well; "": none
  weights: str  # "random" | Hugging Face directory | run or checkpoint of one (runs/start.py)
  tokenizer: str  # "bytes" | a Hugging Face directory
  model: ModelConfig
  compute: ComputeConfig
  mesh: MeshConfig
  rollout_mesh: RolloutMeshConfig
  data: DataConfig
  offline: OfflineConfig
  reward: RewardConfig
  constraints: ConstraintConfig
  environment: EnvironmentConfig
  sampling: SamplingConfig
  engine: EngineConfig
  objective: ObjectiveConfig
  sft: SftConfig
  sft_optimizer: OptimizerConfig
  rl: RLConfig
  rl_optimizer: OptimizerConfig
  schedule: ScheduleConfig
  critic: CriticConfig
  critic_optimizer: OptimizerConfig
  distillation: DistillationConfig
  eval: EvalConfig
  checkpoint: CheckpointConfig
  alarms: AlarmConfig

  def __post_init__(self):
    checks.check(self)

  def seed_of(self, *names: str | int) -> int:
    """A 31-bit seed from the run's seed and what it is for: resuming needs no state."""
    return zlib.crc32("/".join(map(str, (self.seed, *names))).encode()) & 0x7FFFFFFF

  @property
  def has_iterations(self) -> bool:
    """Whether the policy is trained by rewards: of its own responses, or of recorded ones."""
    return "rl" in self.job or self.job == "offline"

  @property
  def shares_prompts(self) -> bool:
    """Whether a group's rows may share their prompt in a pass. Conversations begin differently."""
    grouped = self.rl.group_size > 1 and not (self.rl.packed or self.environment.name)
    return self.has_iterations and grouped

  @property
  def sampled_share(self) -> float:
    """The share of an iteration's prompts whose responses are sampled; of others they are read."""
    return self.offline.fresh if self.job == "offline" else 1.0

  @property
  def samples_prompts(self) -> bool:
    """Whether `data.train` is needed."""
    return self.job != "eval" and self.sampled_share > 0

  def benchmarks(self) -> list[tuple[str, BenchmarkConfig, str]]:
    """Every benchmark that has data: name, what to do, and the config key of its data."""
    held_out = BenchmarkConfig(
      self.data.eval, "", self.eval.problems, self.eval.samples, (), False, ""
    )
    named = [(n, b, f"eval.benchmarks.{n}.data") for n, b in self.eval.benchmarks.items()]
    return [entry for entry in [("", held_out, "data.eval"), *named] if entry[1].data]

  def optimizers(self) -> tuple[Optimizer, Critic | None]:
    """Of the updates of RL: the policy's optimizer, and the critic with its own."""
    updates, warmup = self.rl.iterations * self.rl.updates, self.critic.warmup * self.rl.updates
    policy = optimizer.make(self.rl_optimizer, updates - warmup)
    if self.critic.name == "none":
      return policy, None
    tx = optimizer.make(self.critic_optimizer, updates)
    return policy, Critic(self.critic, tx, self.critic.numbers(self.rl.updates))

  @property
  def needs_reference(self) -> bool:
    """Whether the policy before RL is asked for its log-probabilities."""
    of_critic = self.critic.name != "none" and self.critic.kl_coef > 0
    return self.objective.needs_reference or of_critic

  @property
  def passes(self) -> int:
    """Passes without gradient over a rollout: old log-probs, a reference's, values."""
    return (
      (self.objective.old_logp != "sampler") + self.needs_reference + (self.critic.name != "none")
    )

  @property
  def models(self) -> int:
    """Models that an update trains: the policy, and a critic that is one."""
    return 1 + (self.critic.name == "model")

  def learner(self, phase: str) -> Learner:
    """Settings of the updates of "sft" or "rl"."""
    both = dict(model=self.model, compute=self.compute, on_nonfinite=self.on_nonfinite)
    if phase == "sft":
      balance = self.sft.load_balance_coef
      return Learner(
        temperature=1.0, microbatches=self.sft.microbatches, load_balance_coef=balance, **both
      )
    return Learner(
      temperature=self.sampling.temperature,
      microbatches=self.rl.microbatches,
      load_balance_coef=self.objective.load_balance_coef,
      group_size=self.rl.group_size,
      prompt_tokens=self.data.max_prompt_tokens,
      response_tokens=self.sampling.max_new_tokens,
      ages=self.rl.ages,
      **both,
    )

  @property
  def sampler_compute(self) -> ComputeConfig:
    """Precision and formulations of whatever samples: rollouts and evaluations."""
    return self.engine.compute(self.compute)

  @property
  def support(self) -> int:
    """Tokens that each sampled token is drawn from, at most, where they are put on record for the
    updates; 0: from the whole vocabulary, or nothing is sampled."""
    if self.sampling.whole or not (self.has_iterations and self.sampled_share):
      return 0
    return min(self.sampling.top_k, self.model.vocab_size)

  def workload(self, stop_ids: tuple[int, ...], several_turns: bool) -> Workload:
    """The requests that RL makes of the engine; several_turns: of an environment."""
    return Workload(
      self.sampling,
      prompt_length=self.data.max_prompt_tokens,
      trajectories=self.rl.prompts * self.rl.group_size,
      group_size=self.rl.group_size,
      stop_ids=stop_ids,
      stop_strings=self.environment.stop_strings if several_turns else (),
      several_turns=several_turns,
      partial=self.rl.partial,
      record_routing=self.objective.needs_sampler_routing,
      support=self.support,
    )


def from_dict(values: Mapping[str, Any]) -> RunConfig:
  """The configuration. ValueError names a key that is unknown, missing, of a wrong type or out of
  its range."""
  if isinstance(values.get("objective"), Mapping):
    kinds, section = ranges.kinds(ObjectiveConfig), values["objective"]
    values = dict(values) | dict(objective=effective(section))
    for loss, options in section.get("tuned", {}).items():
      for option, value in options.items():
        _convert(kinds[option], value, f"objective.tuned.{loss}.{option}")
  return derived(_build(RunConfig, values, ""))


def derived(config: RunConfig) -> RunConfig:
  """The configuration, with the lengths that follow from others in the place of 0."""
  new = config.sampling.max_new_tokens
  window = config.data.max_prompt_tokens + new

  def filled(section: Any, **lengths: int) -> Any:
    missing = {key: n for key, n in lengths.items() if getattr(section, key) == 0}
    return dataclasses.replace(section, **missing)

  return dataclasses.replace(
    config,
    sft=filled(config.sft, max_tokens=window),
    reward=filled(config.reward, overlong_max=new),
    eval=filled(config.eval, max_new_tokens=new),
  )


def kind_of(key: str) -> Any:
  """The declared type of a key with dots, None if there is no such key."""
  kind, tuned = RunConfig, "objective.tuned."  # which is not in its dataclass
  for part in [key, f"objective.{key.rpartition('.')[2]}"][key.startswith(tuned)].split("."):
    if typing.get_origin(kind) is dict:
      kind = typing.get_args(kind)[1]
    else:
      kind = ranges.kinds(kind).get(part) if dataclasses.is_dataclass(kind) else None
  return kind


def unknown(path: str, key: str, known: Iterable[str]) -> str:
  """What is said of a key that a section does not have; `path` is the section's, with a dot."""
  near = difflib.get_close_matches(key, known, n=1)
  hint = f"did you mean {path}{near[0]}?" if near else f"there are {', '.join(known) or 'none'}"
  return f"unknown config key {path}{key}; {hint}"


def _build(cls: type, values: Any, path: str) -> Any:
  kinds = ranges.kinds(cls)
  key = path.rstrip(".")
  if not isinstance(values, Mapping):
    raise ValueError(f"{key or 'the configuration'}={values!r} must be a section")
  for key in values:
    if key not in kinds:
      raise ValueError(unknown(path, key, kinds))
  missing = [f"{path}{name}" for name in kinds if name not in values]
  if missing:
    raise ValueError(f"missing config keys: {', '.join(missing)}")
  return cls(**{name: _convert(kinds[name], values[name], path + name) for name in kinds})


def _convert(kind: Any, value: Any, key: str) -> Any:
  """The value as the type that is declared for its key."""
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if dataclasses.is_dataclass(kind):
    return _build(kind, value, f"{key}.")
  if origin in (typing.Union, types.UnionType):  # the type and None
    return None if value is None else _convert(arguments[0], value, key)
  plain = str if origin is Literal else arguments[0] if origin is Annotated else origin or kind
  accepted = {dict: Mapping, tuple: (tuple, list), float: (int, float)}.get(plain, plain)
  number = not isinstance(value, bool) or plain is bool  # Python's True is an int
  if not (isinstance(value, accepted) and number):
    raise ValueError(f"{key}={value!r} must be {ranges.describe(kind)}")
  if plain is dict:
    return {name: _convert(arguments[1], entry, f"{key}.{name}") for name, entry in value.items()}
  if plain is tuple:
    return tuple(_convert(arguments[0], entry, key) for entry in value)
  if plain is float:
    value = float(max(-FLOAT_MAX, min(FLOAT_MAX, value))) if isinstance(value, int) else value
  ranges.check_value(kind, value, key)
  return value
