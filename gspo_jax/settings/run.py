"""A run's configuration: a frozen dataclass for each section."""

import dataclasses
import zlib
from typing import Literal

from gspo_jax import objectives as O
from gspo_jax.settings import ranges
from gspo_jax.settings.critic import CriticConfig, DistillationConfig
from gspo_jax.settings.data import DataConfig, OfflineConfig
from gspo_jax.settings.evaluation import BenchmarkConfig, EvalConfig
from gspo_jax.settings.losses import find_estimator
from gspo_jax.settings.mesh import MeshConfig, RolloutMeshConfig
from gspo_jax.settings.model import ComputeConfig, ModelConfig
from gspo_jax.settings.objective import ObjectiveConfig
from gspo_jax.settings.ranges import key
from gspo_jax.settings.rewards import ConstraintConfig, RewardConfig
from gspo_jax.settings.sampling import EngineConfig, EnvironmentConfig, SamplingConfig
from gspo_jax.settings.sizes import tiny_moe
from gspo_jax.settings.training import (
  AlarmConfig,
  CheckpointConfig,
  LoraConfig,
  OptimizerConfig,
  ProfileConfig,
  RLConfig,
  ScheduleConfig,
  SftConfig,
)


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """Job, weights and sections of a run. The defaults run on any machine: GSPO with the paper's clip
  ranges, a toy model and problems of addition."""

  job: Literal["sft+rl", "sft", "rl", "offline", "eval"] = key(
    "rl",
    "sft: the cold start | rl: RL | sft+rl: the cold start, then RL | offline: RL on recorded "
    "responses | eval: evaluation alone",
  )
  seed: ranges.Seed = key(0, "seed of all random numbers")
  distributed: bool = key(
    False, "True: connect the processes of several hosts by jax.distributed.initialize"
  )
  resume: Literal["same", "force"] = key(
    "same",
    "same: refuse a workdir whose run has another configuration | force: resume the run of the "
    "workdir with this configuration",
  )
  on_nonfinite: Literal["stop", "skip"] = key(
    "stop",
    "stop: NaN or infinity in an update stops the run | skip: skips such updates, up to seven in "
    "steps without others",
  )
  wandb: str = key(
    "", 'project of Weights & Biases for metrics, in addition to TensorBoard; "": none'
  )
  weights: str = key(
    "random",
    "random: new weights | Hugging Face directory, local or gs://... | Hugging Face repository, "
    "OWNER/NAME[@REVISION] | run or its checkpoint. docs/running.md",
  )
  tokenizer: str = key(
    "",
    'bytes: a token for each byte | Hugging Face directory or repository | "": the tokenizer of '
    "the weights; random weights have bytes",
  )
  model: ModelConfig = tiny_moe(vocab_size=264)
  compute: ComputeConfig = ComputeConfig()
  mesh: MeshConfig = MeshConfig()
  rollout_mesh: RolloutMeshConfig = RolloutMeshConfig()
  data: DataConfig = DataConfig()
  offline: OfflineConfig = OfflineConfig()
  reward: RewardConfig = RewardConfig()
  constraints: ConstraintConfig = ConstraintConfig()
  environment: EnvironmentConfig = EnvironmentConfig()
  sampling: SamplingConfig = SamplingConfig()
  engine: EngineConfig = EngineConfig()
  objective: ObjectiveConfig = ObjectiveConfig()
  sft: SftConfig = SftConfig()
  sft_optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
  rl: RLConfig = RLConfig()
  lora: LoraConfig = LoraConfig()
  rl_optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-6)
  schedule: ScheduleConfig = ScheduleConfig()
  critic: CriticConfig = CriticConfig()
  critic_optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
  distillation: DistillationConfig = DistillationConfig()
  eval: EvalConfig = EvalConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  alarms: AlarmConfig = AlarmConfig()
  profile: ProfileConfig = ProfileConfig()

  def seed_of(self, *names: str | int) -> int:
    """Derives a 31-bit seed from the run's seed and names, without state."""
    return zlib.crc32("/".join(map(str, (self.seed, *names))).encode()) & 0x7FFFFFFF

  @property
  def has_iterations(self) -> bool:
    """Whether RL trains the policy, online or on recorded responses."""
    return "rl" in self.job or self.job == "offline"

  @property
  def shares_prompts(self) -> bool:
    """Whether a group's rows may share their padded prompt in a pass.

    Rows of conversations may not, since environments may give them different prompts.
    """
    grouped = self.rl.group_size > 1 and not (self.rl.packed or self.environment.name)
    return self.has_iterations and grouped

  @property
  def sampled_share(self) -> float:
    """Share of prompts with sampled responses. The other prompts have recorded responses."""
    return self.offline.fresh if self.job == "offline" else 1.0

  @property
  def samples(self) -> bool:
    """Whether responses to train on are sampled."""
    return self.has_iterations and self.sampled_share > 0

  @property
  def samples_prompts(self) -> bool:
    """Whether `data.train` is needed."""
    return self.job != "eval" and self.sampled_share > 0

  def benchmarks(self) -> list[tuple[str, BenchmarkConfig, str]]:
    """Returns each benchmark's name, section and data key.

    `data.eval` comes first, with the name "". Benchmarks without data are excluded.
    """
    c = self.eval
    held_out = BenchmarkConfig(self.data.eval, problems=c.problems, samples=c.samples)
    named = [(n, b, f"eval.benchmarks.{n}.data") for n, b in c.benchmarks.items()]
    return [entry for entry in [("", held_out, "data.eval"), *named] if entry[1].data]

  @property
  def overlong_at_limit(self) -> bool:
    """Whether the overlong penalty is largest at the limit of response length."""
    return self.reward.overlong_max in (0, self.sampling.max_new_tokens)

  @property
  def advantage_sources(self) -> dict[str, str]:
    """Sources of advantages beside a group's rewards.

    The dict's keys are names in `Estimator.needs`. Its values are `KEY=VALUE`, for messages.
    """
    sources, rl = {}, self.has_iterations
    if rl and self.distillation.enabled:
      sources["teacher"] = f"distillation.teacher={self.distillation.teacher!r}"
    if rl and self.constraints.enabled:
      sources["signals"] = f"constraints ({self.constraints.names})"
    if self.critic.name != "none":
      sources["critic"] = f"critic.name={self.critic.name!r}"
    if rl and self.objective.reward_kl_coef:
      sources["reference"] = f"objective.reward_kl_coef={self.objective.reward_kl_coef}"
    if self.environment.name:
      sources["turns"] = f"environment.name={self.environment.name!r}"
    elif self.reward.per_line:
      sources["lines"] = "reward.per_line=True"
    return sources

  @property
  def estimator(self) -> O.Estimator:
    """Estimator of advantages: the first of these candidates to exist.

    1. The estimator `objective.advantage`, if it needs more than a group's rewards.
    2. The first of ESTIMATORS with nonempty `needs` among `advantage_sources`, and with `kinds`
       that allow `objective.advantage_kind`.
    3. The estimator `objective.advantage_kind`, which needs a group's rewards alone.
    """
    name = self.objective.advantage
    named = find_estimator(name) if name else None
    return named if named and named.of_group is None else self._first_estimator()

  @property
  def estimator_of_rewards(self) -> O.Estimator:
    """Estimator of the host's part of advantages, computed from rewards."""
    return self._first_estimator(host=True) if self.estimator.on_devices else self.estimator

  def _first_estimator(self, host: bool = False) -> O.Estimator:
    sources, kind = self.advantage_sources.keys(), self.objective.advantage_kind
    for estimator in O.ESTIMATORS.values():
      possible = not (estimator.on_devices and host)
      met = estimator.needs and estimator.needs <= sources
      if possible and met and kind in (estimator.kinds or (kind,)):
        return estimator
    return find_estimator(kind)

  @property
  def compares_parts(self) -> bool:
    """Whether advantages compare turns or lines instead of whole responses."""
    return self.estimator.parts and self.objective.loss.by_token

  @property
  def kl_by_group(self) -> bool:
    """Whether groups without advantages have no KL penalty.

    If there is a critic, a teacher or a KL penalty in the reward, all groups have advantages.
    """
    return self.objective.kl_groups == "mixed" and not self.estimator.on_devices

  @property
  def trains_on_host_advantages(self) -> bool:
    """Whether updates use advantages from the host."""
    distilled = self.estimator.name == "distillation" and not self.distillation.alone
    return distilled or not self.estimator.on_devices

  @property
  def needs_group(self) -> bool:
    """Whether advantages compare responses to one prompt."""
    if self.distillation.alone or not self.estimator.of_rewards:
      return False
    return self.objective.soft_value is None and self.estimator_of_rewards.group

  @property
  def models(self) -> int:
    """Number of trained models: the policy, and the critic if critic.name=model."""
    return 1 + (self.critic.name == "model")

  @property
  def sampler_compute(self) -> ComputeConfig:
    """Precision and implementations of the model in rollouts and evaluations."""
    return self.engine.compute(self.compute)

  @property
  def support(self) -> int:
    """Largest number of recorded candidates of a sampled token.

    It is 0 if tokens are drawn from the whole vocabulary, or if no responses are sampled.
    """
    if self.sampling.untruncated or not self.samples:
      return 0
    return min(self.sampling.top_k, self.model.vocab_size)
