"""Inputs of a run: what can be read and checked before anything is written."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from gspo_jax import rewards, sharding
from gspo_jax import teacher as teachers
from gspo_jax.data import growing, recorded, sources, tokenizer
from gspo_jax.data.overlap import shared_prompts
from gspo_jax.evaluation.benchmarks import check_problems, choose
from gspo_jax.models import transformer
from gspo_jax.rewards import shaping
from gspo_jax.rewards.signals import check_signals
from gspo_jax.runs import provenance, start
from gspo_jax.runs.mirror import Mirror
from gspo_jax.sampling import delimiters
from gspo_jax.sampling.driver import new_groups
from gspo_jax.settings import checks, passes
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.rewards import RewardConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import Prompt
from gspo_jax.system import hosts
from gspo_jax.tasks import environments


@dataclasses.dataclass(frozen=True)
class Inputs:
  """Whatever a configuration names and can be read without writing anything."""

  tokenizer: tokenizer.Tokenizer
  environment: environments.Make | None
  train_prompts: Sequence[Prompt]
  problems: dict[str, Sequence[Prompt]]  # of each benchmark
  in_both: dict[str, int]  # how many of them are in the training data too
  mesh: jax.sharding.Mesh
  rollout_mesh: jax.sharding.Mesh  # the same one, or that of the sampler alone
  layout: Any  # shardings of the parameters where they sample
  records: recorded.Recordings | None
  teacher: teachers.Teacher | None


def check(config: RunConfig, workdir: Path | None = None) -> Inputs:
  """Reads what a run is given, and writes nothing. Raises ValueError as `open_run` does."""
  check_paths(config, workdir)
  if config.distributed:
    _join_hosts()
  inputs = _read(config, workdir)
  if workdir is not None:
    mirror, values = Mirror(workdir, config.checkpoint.directory), dataclasses.asdict(config)
    provenance.check(workdir, values)
    if hosts.of_first(mirror.fills):  # another workdir would be filled with the same
      provenance.check(mirror.target, values, "--config.checkpoint.directory")
  return inputs


def _read(config: RunConfig, workdir: Path | None) -> Inputs:
  """Reads and checks tokenizer, data and mesh; cheap checks come before slow ones."""
  tok = tokenizer.load_for(config.tokenizer, config.model.vocab_size, config.data)
  if config.has_iterations and config.objective.segment_unit == "step":
    delimiters.choose(config.objective.segment_delimiters, tok)
  environment = environments.find(config.environment.name, tok)
  for text in config.sampling.stop_strings:
    if not tokenizer.shows(tok, text):
      raise ValueError(
        f"sampling.stop_strings: no text has {text!r}, since special tokens are left out of it; "
        "name such a token as eos_token_id in the tokenizer's generation_config.json"
      )
  for tag in shaping.TAGS[config.reward.format]:
    if not tokenizer.shows(tok, tag):
      raise ValueError(
        f"reward.format={config.reward.format}: no text of {config.tokenizer} has {tag!r} in it"
      )
  verifier = "" if config.environment.name else config.reward.name  # or it judges
  check_answer = rewards.answer_check(verifier if config.has_iterations else "")
  records = None
  if config.job == "offline":
    data = config.data
    limits = recorded.Limits(
      config.rl.group_size,
      data.max_prompt_tokens,
      config.sampling.max_new_tokens,
      config.model.vocab_size,
    )
    records = recorded.load(config.offline.data, tok, data.prompt_template, limits, data.on_error)
  trained_on = [] if records is None else [records.prompts]
  if config.samples_prompts:
    load = growing.load if config.schedule.refresh_every else sources.load
    trained_on.insert(0, load(config.data, tok, "train", check_answer))
  train_prompts: Sequence[Prompt] = trained_on[0] if trained_on else []
  for section in reward_configs(config).values():
    rewards.check_lines(section)
  problems, in_both = {}, {}
  for name, b, key in config.benchmarks():
    check_gold = rewards.answer_check(b.reward or verifier)
    held_out = sources.load_spec(config.data, tok, b.data, key, check_gold)
    problems[name] = choose(held_out, b.problems)
    check_problems(name, b, problems[name])
    shared = [shared_prompts(prompts, held_out, problems[name]) for prompts in trained_on]
    in_both[name] = max(shared, default=0)
  if isinstance(train_prompts, growing.Growing):
    train_prompts.watch([prompt for chosen in problems.values() for prompt in chosen])
  if environment is not None and config.job != "eval":

    def render(messages: Sequence[Mapping[str, str]]) -> list[int]:
      return tok.encode(tok.chat(messages))

    longest = config.data.max_prompt_tokens
    new_groups([train_prompts[0]], 1, 0, longest, environment, render)  # or it cannot begin
  mesh, rollout_mesh = sharding.make_meshes(config.mesh, config.rollout_mesh)
  checks.check_devices(config, sharding.batch_shards(mesh))
  transformer.check(config.model, config.compute, shared_prompts=config.shares_prompts)
  transformer.check(config.model, config.sampler_compute, shared_prompts=False)
  rollout = sharding.rollout_rules(config.mesh, rollout_mesh, config.model.num_experts)
  layout = transformer.shardings(config.model, rollout, rollout_mesh)
  taught = find_teacher(config, workdir, tok, mesh)
  check_memory(config, mesh, taught and taught.model)
  transformer.shardings(config.model, sharding.TRAIN, mesh)
  return Inputs(
    tokenizer=tok,
    environment=environment,
    train_prompts=train_prompts,
    problems=problems,
    in_both=in_both,
    mesh=mesh,
    rollout_mesh=rollout_mesh,
    layout=layout,
    records=records,
    teacher=taught,
  )


def find_teacher(
  config: RunConfig, workdir: Path | None, tok: tokenizer.Tokenizer, mesh: jax.sharding.Mesh
) -> teachers.Teacher | None:
  """The teacher, checked."""
  if taught := teachers.find(config, workdir):
    teachers.check(taught, config, tok, mesh)
  return taught


def _join_hosts() -> None:
  """Connects the processes of all hosts.

  JAX finds out by itself who they are on a TPU slice, under Slurm, Open MPI and Kubernetes; else
  JAX_COORDINATOR_ADDRESS (host:port of the first process), JAX_NUM_PROCESSES and JAX_PROCESS_ID
  say it. (JAX reads the first of them only.)
  """
  said = dict(num_processes="JAX_NUM_PROCESSES", process_id="JAX_PROCESS_ID")
  try:
    numbers = {key: int(os.environ[name]) for key, name in said.items() if name in os.environ}
    jax.distributed.initialize(**numbers)
  except (ValueError, RuntimeError) as error:
    raise ValueError(
      f"jax.distributed.initialize: {error}; on a single host set --config.distributed=false, "
      "otherwise JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment"
    ) from error


def check_paths(config: RunConfig, workdir: Path | None = None) -> None:
  """Names every path that is still to be set, all at once."""
  paths = {
    "weights": (config.weights, "a Hugging Face directory (config.json, *.safetensors), or random"),
    "tokenizer": (config.tokenizer, "a Hugging Face directory (tokenizer.json), or bytes"),
    "data.train": (config.data.train, "problems with answers: *.jsonl, *.parquet, tfds:name/split"),
    "data.eval": (
      config.data.eval,
      "held-out problems, in one of the same forms, or else eval.benchmarks.NAME.data",
    ),
  }
  if not config.samples_prompts:
    del paths["data.train"]
  if config.job == "offline":
    what = "recorded responses: RUN/rollouts/rl_*.jsonl of a run, or files like them"
    paths["offline.data"] = config.offline.data, what
  if config.benchmarks():
    del paths["data.eval"]
  missing = [f"--config.{key}= ({what})" for key, (path, what) in paths.items() if not path]
  if missing:
    raise ValueError("this configuration needs paths of yours: " + "; ".join(missing))
  if config.rl.replay and not Path(config.rl.replay).is_dir():
    raise ValueError(
      f"--config.rl.replay={config.rl.replay} is not a directory: set it to WORKDIR/batches of "
      "a run with rl.record=True"
    )
  if config.checkpoint.directory:
    _check_checkpoints(config.checkpoint.directory, workdir)
  for name in {config.reward.name, *(b.reward for _, b, _ in config.benchmarks())} - {""}:
    rewards.check_importable(name)
  check_signals(config.constraints)
  check_weights(config)


def _check_checkpoints(directory: str, workdir: Path | None) -> None:
  what, path = f"--config.checkpoint.directory={directory}", epath.Path(directory)
  if "://" not in directory:
    if not path.is_absolute():
      raise ValueError(f"{what}: write the whole path, from / on")
    if workdir is not None and Path(directory).resolve().is_relative_to(workdir.resolve()):
      raise ValueError(
        f"{what} lies in the workdir, of which a copy is kept there: name a directory elsewhere, "
        "or leave it unset for WORKDIR/checkpoints"
      )
  try:
    usable = path.is_dir() or not path.exists()
  except Exception as error:  # of a file system
    raise ValueError(f"{what}: {type(error).__name__}: {error}") from error
  if not usable:
    raise ValueError(f"{what} is a file: set it to a directory, or to a new name")


def check_weights(config: RunConfig) -> None:
  """ValueError unless `weights` names a complete model of the configured shape."""
  if config.weights == "random":
    return
  if origin := start.find(config.weights):
    had = origin.config.get("model", {})
    had = {k: tuple(v) if isinstance(v, list) else v for k, v in had.items()}
  else:
    what = "to the workdir of a run, or to random"
    start.check_published("--config.weights", config.weights, what)
    from gspo_jax.models import hf  # safetensors is only needed here

    had = dataclasses.asdict(hf.check(config.weights))
  asked = dataclasses.asdict(config.model)
  changed = [
    f"model.{key}={asked[key]!r} and not {had[key]!r}"
    for key in had
    if key in asked and had[key] != asked[key] and not _rounded(had[key], asked[key])
  ]
  if changed:
    raise ValueError(
      f"--config.weights={config.weights} holds another model than the configuration, which has "
      f"{', '.join(changed)}: set these, or name a configuration of this model"
    )


def _rounded(a: Any, b: Any) -> bool:
  """Whether a number is the other one in float32, in which some files keep them."""
  return isinstance(a, float) and np.float32(a) == np.float32(b)


def check_memory(
  config: RunConfig, mesh: jax.sharding.Mesh, teacher: ModelConfig | None = None
) -> None:
  """ValueError if parameters, gradients and moments alone are more than the devices hold."""
  count, _ = transformer.count(config.model)
  adapters = config.job in ("rl", "offline") and config.rl.lora_rank
  trained = config.job != "eval" and not adapters
  read = jnp.dtype(config.compute.dtype).itemsize  # of what is not trained
  needed = count * (16 if trained else 4)  # published weights are read in float32 at first
  if config.has_iterations and config.critic.name == "model":
    needed += 16 * count
  if config.has_iterations:
    frozen = passes.frozen(config, teacher).values()
    needed += read * sum(transformer.count(model)[0] for model in frozen)
  held = [
    (device.memory_stats() or {}).get("bytes_limit")
    for device in mesh.devices.flat
    if device in mesh.local_devices
  ]
  if None in held:  # a CPU, whose devices share the memory of the host
    held = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
  there = sum(held) * len(mesh.devices.flat) // len(mesh.local_devices)
  if needed > there:
    raise ValueError(
      f"the model has {count:,} parameters, which take {needed / 2**30:,.0f} GiB: more than the "
      f"{there / 2**30:,.0f} GiB of the devices; make model.* smaller, or take more devices"
    )


def reward_configs(config: RunConfig) -> dict[str, RewardConfig]:
  """The section `reward` by verifier: of the run, and of benchmarks that have another one."""
  sections = {config.reward.name: config.reward}
  for name, b, _ in config.benchmarks():
    if b.reward and b.reward not in sections:
      try:
        sections[b.reward] = dataclasses.replace(
          config.reward, name=b.reward, partial=0.0, per_line=False
        )
      except ValueError as error:
        raise ValueError(f"eval.benchmarks.{name}.reward={b.reward!r}: {error}") from error
  return sections
