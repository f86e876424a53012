"""A run's configuration: the frozen dataclasses that a config file fills, one per section.

Every key is in the config file; nothing has a default here. Unknown and missing keys are errors.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any

from gspo_jax.data.sources import DataConfig
from gspo_jax.evaluation.benchmarks import EvalConfig
from gspo_jax.learner.objective import ObjectiveConfig, effective
from gspo_jax.learner.optimizer import OptimizerConfig
from gspo_jax.learner.step import Learner
from gspo_jax.models.sizes import ComputeConfig, ModelConfig
from gspo_jax.rewards import RewardConfig
from gspo_jax.runs.alarms import AlarmConfig
from gspo_jax.runs.checkpoint import CheckpointConfig
from gspo_jax.sampling import EngineConfig, EnvironmentConfig, SamplingConfig
from gspo_jax.sharding import MeshConfig

JOBS = ("sft+rl", "sft", "rl", "eval")


@dataclasses.dataclass(frozen=True)
class SftConfig:
  """Supervised fine-tuning on demonstrations: the cold start."""

  steps: int  # updates
  batch: int  # demonstrations per update
  microbatches: int  # per update; more of them need less memory
  max_tokens: int  # of prompt and demonstration; 0: data.max_prompt_tokens + max_new_tokens
  log_every: int  # updates between rows of metrics.jsonl
  load_balance_coef: float  # router auxiliary loss


@dataclasses.dataclass(frozen=True)
class RLConfig:
  iterations: int  # rollout batches
  prompts: int  # P, per rollout batch
  group_size: int  # G, responses per prompt
  extra_prompts: int  # under way beyond `prompts`; what is unfinished then is carried over
  token_budget: int  # sampled per iteration; what is unfinished then is carried over; 0: none
  minibatches: int  # updates per rollout batch
  microbatches: int  # per update; more of them need less memory
  packed: bool  # several responses to a row; micro-batches that this leaves empty are left out
  dump_every: int  # iterations between dumped rollouts

  @property
  def partial(self) -> bool:
    """Whether responses may be carried over to the next iteration."""
    return self.extra_prompts > 0 or self.token_budget > 0


@dataclasses.dataclass(frozen=True)
class RunConfig:
  job: str  # one of JOBS
  seed: int
  distributed: bool  # call jax.distributed.initialize: several hosts
  resume: str  # a workdir of another config: "same" refuses it | "force" goes on with this one
  on_nonfinite: str  # an update with NaN or infinity: "stop" the run | "skip" the update
  profile: int  # iteration whose JAX profiler trace goes to workdir/profile; 0: none
  wandb: str  # project of Weights & Biases that metrics go to as well; "": none
  weights: str  # Hugging Face directory to start from | "random"
  tokenizer: str  # "bytes" | a Hugging Face directory
  model: ModelConfig
  compute: ComputeConfig
  mesh: MeshConfig
  data: DataConfig
  reward: RewardConfig
  environment: EnvironmentConfig
  sampling: SamplingConfig
  engine: EngineConfig
  objective: ObjectiveConfig
  sft: SftConfig
  sft_optimizer: OptimizerConfig
  rl: RLConfig
  rl_optimizer: OptimizerConfig
  eval: EvalConfig
  checkpoint: CheckpointConfig
  alarms: AlarmConfig

  def __post_init__(self):
    """Everything that can be seen to be wrong before any device is touched."""
    _require(self.job in JOBS, f"job={self.job!r} is not one of {', '.join(JOBS)}")
    _require(self.resume in ("same", "force"), f"resume={self.resume!r} is not same or force")
    _require(
      self.on_nonfinite in ("stop", "skip"),
      f"on_nonfinite={self.on_nonfinite!r} is not stop or skip",
    )
    rl, rows = self.rl, self.rl.prompts * self.rl.group_size
    _require(
      rl.group_size >= 2,
      f"rl.group_size={rl.group_size}: advantages are relative to a group, which needs 2 or more",
    )
    _require(
      rl.prompts % rl.minibatches == 0,
      f"rl.prompts={rl.prompts} does not divide into rl.minibatches={rl.minibatches}: groups stay "
      "whole",
    )
    _require(
      rows % (rl.minibatches * rl.microbatches) == 0,
      f"rl.prompts × rl.group_size = {rows} rows do not divide into rl.minibatches="
      f"{rl.minibatches} × rl.microbatches={rl.microbatches}",
    )
    _require(
      not rl.packed or rl.microbatches > 1,
      "rl.packed=True saves the micro-batches that packing leaves empty: set rl.microbatches above "
      "1, so that each device has few rows in each",
    )
    _require(
      self.sft.batch % self.sft.microbatches == 0,
      f"sft.batch={self.sft.batch} does not divide into sft.microbatches={self.sft.microbatches}",
    )
    for key in ("extra_prompts", "token_budget"):
      _require(getattr(rl, key) >= 0, f"rl.{key}={getattr(rl, key)} must not be negative")
    for key, wanted, given in (
      ("objective.old_logp", "sampler", self.objective.old_logp),
      ("objective.replay", "none", self.objective.replay),
      ("objective.volatility", False, self.objective.volatility),
      ("data.query_set.extra_rounds", 0, self.data.query_set.extra_rounds),
      ("environment.name", "", self.environment.name),
    ):
      _require(
        not rl.partial or wanted == given,
        f"rl.extra_prompts={rl.extra_prompts}, rl.token_budget={rl.token_budget} carry responses "
        f"over: that needs {key}={wanted!r}, not {given!r}",
      )
    _require(
      self.objective.replay == "none" or self.model.num_experts > 0,
      f"objective.replay={self.objective.replay!r}: model.num_experts=0 leaves nothing to route",
    )
    window = self.data.max_prompt_tokens + self.sampling.max_new_tokens
    _require(
      window <= self.model.max_position_embeddings,
      f"data.max_prompt_tokens + sampling.max_new_tokens = {window} exceed "
      f"model.max_position_embeddings={self.model.max_position_embeddings}",
    )
    _require(
      "rl" not in self.job or self.sampling.temperature > 0,
      "sampling.temperature=0: a group of greedy responses has no spread to learn from",
    )
    _require(
      "rl" not in self.job or self.sampling.whole,
      f"sampling.top_k={self.sampling.top_k}, sampling.top_p={self.sampling.top_p}, "
      f"sampling.min_p={self.sampling.min_p}: training samples from the whole distribution, or the "
      "ratio would be biased by the mass left out; set top_k=0, top_p=1 and min_p=0 (evaluation "
      "has its own)",
    )
    for key in ("format_weight", "overlong_weight", "false_positive", "false_negative"):
      _require(
        not (self.environment.name and getattr(self.reward, key)),
        f"reward.{key}={getattr(self.reward, key)} has no effect, since environment.name="
        f"{self.environment.name!r} gives the rewards; set it to 0",
      )
    _require(
      not (self.distributed and self.environment.workers),
      f"environment.workers={self.environment.workers}: with distributed=True hosts would come to "
      "different orders; set it to 0",
    )
    for name, steps in ("checkpoint.every", self.checkpoint.every), ("eval.every", self.eval.every):
      _require(steps >= 1, f"{name}={steps} must be at least 1")

  def learner(self, phase: str) -> Learner:
    """What the updates of "sft" or "rl" need besides their arrays."""
    if phase == "sft":
      temperature, section, balance = 1.0, self.sft, self.sft.load_balance_coef
      group = ()
    else:
      temperature, section = self.sampling.temperature, self.rl
      balance = self.objective.load_balance_coef
      group = (self.rl.group_size, self.data.max_prompt_tokens, self.sampling.max_new_tokens)
    common = (section.microbatches, balance, self.on_nonfinite)
    return Learner(self.model, self.compute, temperature, *common, *group)

  def check_devices(self, batch_shards: int) -> None:
    """Rows of every step must divide over the devices that share them."""
    rows = self.rl.prompts * self.rl.group_size // (self.rl.minibatches * self.rl.microbatches)
    for name, count in dict(
      [
        ("rl.prompts × rl.group_size / (rl.minibatches × rl.microbatches)", rows),
        ("sft.batch / sft.microbatches", self.sft.batch // self.sft.microbatches),
      ]
    ).items():
      _require(
        count % batch_shards == 0,
        f"{name} = {count} rows do not divide over the {batch_shards} devices of mesh.data × "
        "mesh.fsdp × mesh.expert",
      )


def from_dict(values: Mapping[str, Any]) -> RunConfig:
  """The configuration. ValueError names a key that is unknown, missing or of a wrong type."""
  if isinstance(values.get("objective"), Mapping):
    values = dict(values) | dict(objective=effective(values["objective"]))
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


def _build(cls: type, values: Mapping[str, Any], path: str) -> Any:
  kinds = typing.get_type_hints(cls)
  names = [field.name for field in dataclasses.fields(cls)]
  for key in values:
    if key not in names:
      near = difflib.get_close_matches(key, names, n=1)
      hint = f"; did you mean {path}{near[0]}?" if near else ""
      raise ValueError(f"unknown config key {path}{key}{hint}")
  missing = [f"{path}{name}" for name in names if name not in values]
  if missing:
    raise ValueError(f"missing config keys: {', '.join(missing)}")
  return cls(**{name: _convert(kinds[name], values[name], path + name) for name in names})


def _convert(kind: Any, value: Any, path: str) -> Any:
  if typing.get_origin(kind) is types.UnionType:  # X | None
    if value is None:
      return None
    kind, _ = typing.get_args(kind)
  if dataclasses.is_dataclass(kind):
    return _build(kind, value, f"{path}.")
  if typing.get_origin(kind) is tuple:
    return tuple(value)
  if typing.get_origin(kind) is dict:
    _, kind = typing.get_args(kind)
    return {name: _convert(kind, entry, f"{path}.{name}") for name, entry in value.items()}
  if kind is float and type(value) is int:
    return float(value)
  if type(value) is not kind:
    raise ValueError(f"config key {path}={value!r} must be {kind.__name__}")
  return value


def _require(ok: bool, message: str) -> None:
  if not ok:
    raise ValueError(message)
