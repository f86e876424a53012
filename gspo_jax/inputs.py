"""Inputs of a run, read and checked before the first write."""

import dataclasses
import datetime
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax import rewards, sharding
from gspo_jax import teacher as teachers
from gspo_jax.data import embedded, growing, recorded, sources, tokenizer
from gspo_jax.data.overlap import shared_prompts
from gspo_jax.evaluation.benchmarks import check_problems, choose
from gspo_jax.evaluation.evaluator import workload
from gspo_jax.learner import compatibility
from gspo_jax.models import transformer
from gspo_jax.rewards import shaping
from gspo_jax.runs import contents, paths, provenance, weight_source
from gspo_jax.runs.metrics import read_rows
from gspo_jax.runs.mirror import Mirror
from gspo_jax.runs.tracking import find_wandb
from gspo_jax.runs.weight_source import WeightSource
from gspo_jax.sampling import Workload, delimiters, requests
from gspo_jax.sampling.driver import new_groups
from gspo_jax.sampling.requests import sizes
from gspo_jax.settings import passes, rules
from gspo_jax.settings.evaluation import BenchmarkConfig
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.rewards import RewardConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import Prompt
from gspo_jax.system import hosts
from gspo_jax.tasks import environments

Tokenizer = tokenizer.Tokenizer


@dataclasses.dataclass(frozen=True)
class Data:
  """Tokenized prompts of a run."""

  train_prompts: Sequence[Prompt]  # [] for a job without training.
  demonstrations: Sequence[Prompt]  # For the cold start; [] without a cold start.
  recordings: recorded.Recordings | None  # Responses for job=offline; None for other jobs.
  problems: Mapping[str, Sequence[Prompt]]  # Held-out problems by benchmark.
  shared_problems: Mapping[str, int]  # Number of problems also in training data, by benchmark.


@dataclasses.dataclass(frozen=True)
class Meshes:
  """Devices of the trainer and of the sampler."""

  trainer: jax.sharding.Mesh
  sampler: jax.sharding.Mesh  # The trainer's mesh unless `rollout_mesh` is set.
  layout: Any  # Shardings of the sampler's parameters.


@dataclasses.dataclass(frozen=True)
class Inputs:
  """Checked inputs of a run."""

  source: WeightSource
  tokenizer: Tokenizer
  environment: environments.Make | None  # None for single turns.
  rewards: Mapping[str, RewardConfig]  # Section `reward` by verifier.
  data: Data
  meshes: Meshes
  teacher: teachers.Teacher | None  # None without distillation.
  date: datetime.datetime  # First start of the run.
  contents: Mapping[str, str]  # Descriptions of contents behind names, for the provenance.


def check(config: RunConfig, workdir: Path | None = None) -> Inputs:
  """Reads and checks a run's inputs, and prints warnings. Writes no files. Raises ValueError as
  `open_run`."""
  paths.check(config, workdir)
  if config.distributed:
    hosts.join()
  values, home, flag = dataclasses.asdict(config), workdir, "--workdir"
  if workdir is not None:
    mirror = Mirror(workdir, config.checkpoint.directory)
    if hosts.run_on_first_host(mirror.can_fill):  # `open_run` will restore the workdir.
      home, flag = mirror.target, "--config.checkpoint.directory"
    provenance.check(home, values, flag)
  origins = provenance.recorded_origins(home, values)
  inputs = read(config, origins, provenance.first_start(home))
  hosts.run_on_first_host(
    lambda: compatibility.check(config, home, inputs.contents, inputs.meshes.trainer)
  )
  if workdir is not None:
    # Raises ValueError for a damaged metrics.jsonl before the first write.
    hosts.run_on_first_host(lambda: len(read_rows(workdir / "metrics.jsonl")))
  if config.wandb:
    hosts.run_on_first_host(lambda: bool(find_wandb(config.wandb)))
  lines = rules.warnings(config, _describe(config, inputs)) + _warn_of_shared(config, inputs.data)
  if hosts.is_first():
    sys.stderr.writelines(f"warning: {line}\n" for line in lines)
  return inputs


def read(
  config: RunConfig, origins: Mapping[str, Mapping[str, Any]], date: datetime.datetime
) -> Inputs:
  """Reads and checks a run's inputs; cheap checks come before slow ones.

  Args:
    config: configuration of the run.
    origins: recorded origins of a resumed run (`provenance.recorded_origins`).
    date: date of the run's first start, for chat templates.
  """
  source = read_model(config, origins["start"])
  tok = read_tokenizer(config, source, origins["tokenizer"], date)
  environment = environments.find(config.environment.name, tok)
  sections = reward_sections(config)
  data = read_data(config, tok, sections)
  sources.require_same_on_hosts(
    [data.train_prompts, data.demonstrations, data.recordings or (), *data.problems.values()]
  )
  _check_environment(config, tok, environment, data)
  meshes = make_meshes(config)
  _check_engine(config, tok, meshes.sampler, data.problems)
  teacher = find_teacher(config, tok, meshes.trainer, origins["teacher"])
  check_memory(config, meshes.trainer, teacher and teacher.model)
  weights = dict(weights=source) | ({teachers.KEY: teacher.source} if teacher else {})
  described = hosts.run_on_first_host(
    lambda: contents.describe(config, weights, data.problems, tok.stop_ids)
  )
  return Inputs(source, tok, environment, sections, data, meshes, teacher, date, described)


def read_model(config: RunConfig, recorded: Mapping[str, Any]) -> WeightSource:
  """Resolves the weights. Raises ValueError unless they are a complete model of this shape."""
  source = weight_source.resolve("weights", config.weights, recorded)
  source.check_model(config.model, config.weights)
  return source


def read_tokenizer(
  config: RunConfig,
  source: WeightSource,
  recorded: Mapping[str, Any],
  date: datetime.datetime | None = None,
) -> Tokenizer:
  """Reads the tokenizer. Raises ValueError if required texts cannot be decoded."""
  name = weight_source.resolve_tokenizer(config.tokenizer, source, recorded)
  tok = tokenizer.load_for(name, config.model.vocab_size, config.data, date)
  if config.has_iterations and config.objective.segment_unit == "step":
    delimiters.choose(config.objective.segment_delimiters, tok)
  for text in config.sampling.stop_strings:
    if not tokenizer.shows(tok, text):
      raise ValueError(
        f"sampling.stop_strings: no text has {text!r}, since special tokens are left out of it; "
        "name such a token as eos_token_id in the tokenizer's generation_config.json"
      )
  for tag in shaping.TAGS[config.reward.format]:
    if not tokenizer.shows(tok, tag):
      raise ValueError(f"reward.format={config.reward.format}: no text of {name} has {tag!r} in it")
  return tok


def read_data(config: RunConfig, tok: Tokenizer, sections: Mapping[str, RewardConfig]) -> Data:
  """Reads prompts, recorded responses and held-out problems.

  Args:
    config: configuration of the run.
    tok: tokenizer of the policy.
    sections: section `reward` by verifier, from `reward_sections`.

  Raises:
    ValueError: data or a gold answer is unusable.
  """
  # An environment's rewards replace the verifier.
  verifier = "" if config.environment.name else config.reward.name
  check_answer = rewards.answer_check(verifier if config.has_iterations else "")
  recordings = _read_recordings(config, tok) if config.job == "offline" else None
  trained = [] if recordings is None else [recordings.prompts]
  if config.samples_prompts:
    load = growing.load if config.schedule.refresh_every else sources.load
    trained.insert(0, load(config.data, tok, "train", check_answer))
  prompts: Sequence[Prompt] = trained[0] if trained else []
  demonstrations = _read_demonstrations(config, tok, prompts) if "sft" in config.job else []
  for section in sections.values():
    rewards.check_lines(section)
  problems, shared = {}, {}
  for name, benchmark, key in config.benchmarks():
    check_gold = rewards.answer_check(benchmark.reward or verifier)
    held_out = sources.load_spec(config.data, tok, benchmark.data, key, check_gold)
    problems[name] = choose(held_out, benchmark.problems)
    check_problems(name, benchmark, problems[name])
    counts = [shared_prompts(source, held_out, problems[name]) for source in trained]
    shared[name] = max(counts, default=0)
  if isinstance(prompts, growing.Growing):
    prompts.watch([prompt for chosen in problems.values() for prompt in chosen])
  return Data(prompts, demonstrations, recordings, problems, shared)


def _read_recordings(config: RunConfig, tok: Tokenizer) -> recorded.Recordings:
  """Reads the recorded responses of job=offline."""
  data = config.data
  limits = recorded.Limits(
    config.rl.group_size,
    data.max_prompt_tokens,
    config.sampling.max_new_tokens,
    config.model.vocab_size,
    tuple(config.sampling.stop_strings),
  )
  return recorded.load(config.offline.data, tok, data.prompt_template, limits, data.on_error)


def _read_demonstrations(
  config: RunConfig, tok: Tokenizer, prompts: Sequence[Prompt]
) -> Sequence[Prompt]:
  """Selects demonstrations by length. Raises DataError if one is too long or too few remain."""
  fitting = sources.fitting(prompts, tok, config.sft.max_tokens, config.data.on_error)
  if config.sft.target_loss and len(fitting) < 2:
    raise sources.DataError("sft.target_loss holds out half of fewer than two demonstrations")
  return fitting


def _check_environment(
  config: RunConfig, tok: Tokenizer, environment: environments.Make | None, data: Data
) -> None:
  """Creates and resets an environment. Raises ValueError if this fails."""
  prompts = data.train_prompts or [
    prompt for name, b, _ in config.benchmarks() if not b.reward for prompt in data.problems[name]
  ]
  if environment is None or not prompts:
    return

  def render(messages: Sequence[Mapping[str, str]]) -> list[int]:
    return tok.encode(tok.chat(messages))

  longest = config.data.max_prompt_tokens
  ((first,),) = new_groups([prompts[0]], 1, 0, longest, environment, render, None, tok.vocab_size)
  if first.failure:
    raise ValueError(first.failure)


def make_meshes(config: RunConfig) -> Meshes:
  """Makes the meshes.

  Raises:
    ValueError: there are too few devices, or batch or model do not fit a mesh.
  """
  trainer, sampler = sharding.make_meshes(config.mesh, config.rollout_mesh)
  rules.check_devices(config, sharding.batch_shards(trainer))
  transformer.check(config.model, config.compute, shared_prompts=config.shares_prompts)
  transformer.check(config.model, config.sampler_compute, shared_prompts=False)
  transformer.shardings(config.model, sharding.TRAIN, trainer)
  rollout = sharding.rollout_rules(config.mesh, sampler, config.model.num_experts)
  return Meshes(trainer, sampler, transformer.shardings(config.model, rollout, sampler))


def _check_engine(
  config: RunConfig,
  tok: Tokenizer,
  mesh: jax.sharding.Mesh,
  problems: Mapping[str, Sequence[Prompt]],
) -> None:
  """Raises ValueError if the engine cannot run the workloads of training or evaluations."""
  if config.engine.name == "local":
    for load in _workloads(config, tok, problems):
      sizes(load, config.engine, sharding.batch_shards(mesh))
  else:
    from gspo_jax.models.hf.config import to_hf  # Only this branch needs safetensors.

    to_hf(config.model, "float32")  # Servers load weights in Hugging Face's format.


def _workloads(
  config: RunConfig, tok: Tokenizer, problems: Mapping[str, Sequence[Prompt]]
) -> list[Workload]:
  """Returns the engine's workloads for training and evaluations."""
  c, stops, loads = config, tuple(tok.stop_ids), []
  if c.samples:
    loads.append(requests.workload(c, stops, bool(c.environment.name), tok.vocab_size))
  for name, b, _ in _evaluations(c):
    fields = dict(
      prompt_length=c.data.max_prompt_tokens,
      trajectories=len(problems[name]) * b.samples,
      group_size=b.samples,
      stop_ids=stops,
      several_turns=bool(c.environment.name) and not b.reward,
    )
    loads.append(workload(c.eval, c.eval.temperature, **fields))
  return loads


def find_teacher(
  config: RunConfig, tok: Tokenizer, mesh: jax.sharding.Mesh, recorded: Mapping[str, Any]
) -> teachers.Teacher | None:
  """Finds and checks the teacher; None without distillation. Raises ValueError as
  `teacher.check`."""
  teacher = teachers.find(config, recorded)
  if teacher is not None:
    teachers.check(teacher, config, tok, mesh)
  return teacher


def check_memory(
  config: RunConfig, mesh: jax.sharding.Mesh, teacher: ModelConfig | None = None
) -> None:
  """Raises ValueError if parameters, gradients and moments exceed the devices' memory."""
  count, _ = transformer.count(config.model)
  adapters = config.job in ("rl", "offline") and config.lora.rank
  trained = config.job != "eval" and not adapters
  needed = count * (16 if trained else 4)  # Bytes; published weights are read in float32 first.
  if config.has_iterations and config.critic.name == "model":
    needed += 16 * count
  if config.has_iterations:
    frozen = passes.frozen(config, teacher).values()
    itemsize = jnp.dtype(config.compute.dtype).itemsize
    needed += itemsize * sum(transformer.count(model)[0] for model in frozen)
  limits = [
    (device.memory_stats() or {}).get("bytes_limit")
    for device in mesh.devices.flat
    if device in mesh.local_devices
  ]
  if None in limits:  # CPU devices report no limit and share the host's memory.
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
  available = sum(limits) * len(mesh.devices.flat) // len(mesh.local_devices)
  if needed > available:
    raise ValueError(
      f"the model has {count:,} parameters, which take {needed / 2**30:,.0f} GiB: more than the "
      f"{available / 2**30:,.0f} GiB of the devices; make model.* smaller, or take more devices"
    )


def reward_sections(config: RunConfig) -> dict[str, RewardConfig]:
  """Returns section `reward` for each verifier of the run and its benchmarks."""
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


def _evaluations(config: RunConfig) -> list[tuple[str, BenchmarkConfig, str]]:
  """Returns the benchmarks evaluated by the job."""
  return [] if config.job == "sft" else config.benchmarks()


def _describe(config: RunConfig, inputs: Inputs) -> rules.DataFacts:
  """Returns facts about machine and data for `rules.warnings`."""
  c, data, encode = config, inputs.data, inputs.tokenizer.encode
  checked = {}
  if c.samples_prompts and c.has_iterations and not c.environment.name:
    checked["data.train"] = data.train_prompts, c.reward.name, c.sampling.max_new_tokens
  for name, b, key in _evaluations(c):
    if b.reward or not c.environment.name:
      checked[key] = data.problems[name], b.reward or c.reward.name, c.eval.max_new_tokens
  golds = {key: [prompts[i].answer for i in embedded.probe(len(prompts))]
    for key, (prompts, *_) in checked.items()}  # fmt: skip
  words = {key: rewards.frequent_word(checked[key][1], golds[key]) for key in checked}
  return rules.DataFacts(
    prompts=len(data.train_prompts) if c.samples_prompts else 0,
    recorded=len(data.recordings.prompts) if data.recordings is not None else 0,
    demonstrations=len(data.demonstrations),
    answers={key: _fitting_share(golds[key], encode, *checked[key][1:]) for key in checked},
    words={key: word for key, word in words.items() if word},
    format_tokens=sum(len(encode(tag)) for tag in shaping.TAGS[c.reward.format]),
    memory_mb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
    processes=jax.process_count(),
    has_tokenizer=inputs.source.has_tokenizer,
  )


def _fitting_share(
  golds: Sequence[str], encode: Callable[[str], list[int]], verifier: str, limit: int
) -> float:
  """Returns the share of gold answers within `limit` tokens.

  About 500 prompts are read. The share is 1 for other verifiers, whose right responses may differ
  from the gold answer.
  """
  if verifier not in ("arithmetic", "recurrence", "math", "string") or not golds:
    return 1.0
  return sum(len(encode(gold)) <= limit for gold in golds) / len(golds)


def _warn_of_shared(config: RunConfig, data: Data) -> list[str]:
  """Returns a warning if training data has held-out problems; [] otherwise."""
  shared, problems = data.shared_problems, data.problems
  if not any(shared.values()):
    return []
  counts = [f"{shared[n]} of {len(problems[n])} of {key}" for n, _, key in config.benchmarks()]
  return [
    f"held-out problems are in data.train too ({', '.join(counts)}): accuracy on them may be "
    "memorised; remove them from one of the two"
  ]
