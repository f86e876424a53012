"""Inputs of a run: what can be read and checked before anything is written."""

import dataclasses
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
from gspo_jax.models import transformer
from gspo_jax.rewards import shaping
from gspo_jax.runs import paths, provenance, start
from gspo_jax.runs.metrics import read_rows
from gspo_jax.runs.mirror import Mirror
from gspo_jax.runs.tracking import find_wandb
from gspo_jax.sampling import Workload, delimiters, requests
from gspo_jax.sampling.driver import new_groups
from gspo_jax.sampling.requests import sizes
from gspo_jax.settings import passes, rules
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.rewards import RewardConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import Prompt
from gspo_jax.system import hosts, hub
from gspo_jax.tasks import environments


@dataclasses.dataclass(frozen=True)
class Inputs:
  """Whatever a configuration names and can be read without writing anything."""

  weights: str  # the key; of a repository of the hub with its commit
  tokenizer: tokenizer.Tokenizer
  environment: environments.Make | None
  train_prompts: Sequence[Prompt]
  demonstrations: Sequence[Prompt]  # those of them that a cold start imitates; [] without one
  problems: dict[str, Sequence[Prompt]]  # of each benchmark
  in_both: dict[str, int]  # how many of them are in the training data too
  mesh: jax.sharding.Mesh
  rollout_mesh: jax.sharding.Mesh  # the same one, or that of the sampler alone
  layout: Any  # shardings of the parameters where they sample
  records: recorded.Recordings | None
  teacher: teachers.Teacher | None


def check(config: RunConfig, workdir: Path | None = None) -> Inputs:
  """Reads what a run is given, writes nothing, and says on the terminal what can hardly be meant.
  Raises ValueError as `open_run` does."""
  paths.check(config, workdir)
  if config.distributed:
    _join_hosts()
  inputs = read(config, workdir)
  if workdir is not None:
    mirror, values = Mirror(workdir, config.checkpoint.directory), dataclasses.asdict(config)
    provenance.check(workdir, values)
    if hosts.run_on_first_host(mirror.fills):  # another workdir would be filled with the same
      provenance.check(mirror.target, values, "--config.checkpoint.directory")
    # Finds a damaged file before anything is written.
    hosts.run_on_first_host(lambda: len(read_rows(workdir / "metrics.jsonl")))
  if config.wandb:
    hosts.run_on_first_host(lambda: bool(find_wandb(config.wandb)))
  lines = rules.warnings(config, _facts(config, inputs)) + _shared(config, inputs)
  if hosts.is_first():
    sys.stderr.writelines(f"warning: {line}\n" for line in lines)
  return inputs


def read(config: RunConfig, workdir: Path | None) -> Inputs:
  """Reads and checks tokenizer, data and mesh; cheap checks come before slow ones."""
  began_with = provenance.origin(workdir, dataclasses.asdict(config), "start")
  weights = start.pinned("weights", config.weights, began_with)
  paths.check_weights(config, weights)
  had = provenance.origin(workdir, dataclasses.asdict(config), "tokenizer")
  name = start.tokenizer(config, weights, had)
  tok = tokenizer.load_for(name, config.model.vocab_size, config.data)
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
      raise ValueError(f"reward.format={config.reward.format}: no text of {name} has {tag!r} in it")
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
  demonstrations = _demonstrations(config, tok, train_prompts) if "sft" in config.job else []
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
  talked_about = train_prompts or [
    prompt for name, b, _ in config.benchmarks() if not b.reward for prompt in problems[name][:1]
  ]
  if environment is not None and talked_about:

    def render(messages: Sequence[Mapping[str, str]]) -> list[int]:
      return tok.encode(tok.chat(messages))

    longest = config.data.max_prompt_tokens
    new_groups([talked_about[0]], 1, 0, longest, environment, render)  # or it cannot begin
  mesh, rollout_mesh = sharding.make_meshes(config.mesh, config.rollout_mesh)
  rules.check_devices(config, sharding.batch_shards(mesh))
  transformer.check(config.model, config.compute, shared_prompts=config.shares_prompts)
  transformer.check(config.model, config.sampler_compute, shared_prompts=False)
  rollout = sharding.rollout_rules(config.mesh, rollout_mesh, config.model.num_experts)
  layout = transformer.shardings(config.model, rollout, rollout_mesh)
  if config.engine.name == "local":
    for load in _workloads(config, tok, problems):
      sizes(load, config.engine, sharding.batch_shards(rollout_mesh))
  else:
    from gspo_jax.models.hf.config import to_hf  # safetensors is only needed here

    to_hf(config.model, "float32")  # as servers are given weights
  if taught := teachers.find(config, workdir):
    teachers.check(taught, config, tok, mesh)
  check_memory(config, mesh, taught and taught.model)
  transformer.shardings(config.model, sharding.TRAIN, mesh)
  return Inputs(
    weights=weights,
    tokenizer=tok,
    environment=environment,
    train_prompts=train_prompts,
    demonstrations=demonstrations,
    problems=problems,
    in_both=in_both,
    mesh=mesh,
    rollout_mesh=rollout_mesh,
    layout=layout,
    records=records,
    teacher=taught,
  )


def _demonstrations(
  config: RunConfig, tok: tokenizer.Tokenizer, prompts: Sequence[Prompt]
) -> Sequence[Prompt]:
  """What a cold start imitates. DataError: one does not fit, or there are too few to hold out."""
  c = config.sft
  chosen = sources.fitting(prompts, tok, c.max_tokens, config.data.on_error)
  if c.target_loss and len(chosen) < 2 * c.check_problems:
    raise sources.DataError(
      f"sft.check_problems={c.check_problems} is more than half of the {len(chosen)} "
      "demonstrations: lower it, or set sft.target_loss=0"
    )
  return chosen


def _workloads(
  config: RunConfig, tok: tokenizer.Tokenizer, problems: Mapping[str, Sequence[Prompt]]
) -> list[Workload]:
  """What the engine is asked for in training and in evaluations."""
  c, stops, loads = config, tuple(tok.stop_ids), []
  if c.samples:
    loads.append(requests.workload(c, stops, bool(c.environment.name), tok.vocab_size))
  for name, b, _ in c.benchmarks() if c.job != "sft" else ():
    asked = dict(
      prompt_length=c.data.max_prompt_tokens,
      trajectories=len(problems[name]) * b.samples,
      group_size=b.samples,
      stop_ids=stops,
      several_turns=bool(c.environment.name) and not b.reward,
    )
    loads.append(workload(c.eval, c.eval.temperature, **asked))
  return loads


def _facts(config: RunConfig, inputs: Inputs) -> rules.DataFacts:
  """Facts about machine and data, for rules.warnings."""
  c, encode = config, inputs.tokenizer.encode
  answers = {}
  if c.samples_prompts and c.has_iterations and not c.environment.name:
    judged = c.reward.name, c.sampling.max_new_tokens
    answers["data.train"] = _answered(inputs.train_prompts, encode, *judged)
  for name, b, key in c.benchmarks() if c.job != "sft" else ():
    if b.reward or not c.environment.name:
      judged = b.reward or c.reward.name, c.eval.max_new_tokens
      answers[key] = _answered(inputs.problems[name], encode, *judged)
  return rules.DataFacts(
    prompts=len(inputs.train_prompts) if c.samples_prompts else 0,
    recorded=len(inputs.records.prompts) if inputs.records is not None else 0,
    demonstrations=len(inputs.demonstrations),
    problems={key: len(inputs.problems[name]) for name, _, key in c.benchmarks()},
    answers=answers,
    format_tokens=sum(len(encode(tag)) for tag in shaping.TAGS[c.reward.format]),
    processors=os.cpu_count() or 1,
    memory_mb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
    processes=jax.process_count(),
    has_tokenizer=c.weights != "random"
    and (hub.directory(inputs.weights) / "tokenizer.json").is_file(),
  )


def _answered(
  prompts: Sequence[Prompt], encode: Callable[[str], list[int]], verifier: str, most: int
) -> float:
  """The share of answers that take so many tokens at most, of about 500 of them all over a source;
  1 where a verifier takes other texts for right."""
  if verifier not in ("arithmetic", "recurrence", "math", "string") or not len(prompts):
    return 1.0
  indices = embedded.probe(len(prompts))
  return sum(len(encode(prompts[i].answer)) <= most for i in indices) / len(indices)


def _shared(config: RunConfig, inputs: Inputs) -> list[str]:
  """A warning of held-out problems that are trained on."""
  shared, problems = inputs.in_both, inputs.problems
  if not any(shared.values()):
    return []
  counts = [f"{shared[n]} of {len(problems[n])} of {key}" for n, _, key in config.benchmarks()]
  return [
    f"held-out problems are in data.train too ({', '.join(counts)}): accuracy on them shows what "
    "was memorised; leave them out of one of both"
  ]


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


def check_memory(
  config: RunConfig, mesh: jax.sharding.Mesh, teacher: ModelConfig | None = None
) -> None:
  """ValueError if parameters, gradients and moments alone are more than the devices hold."""
  count, _ = transformer.count(config.model)
  adapters = config.job in ("rl", "offline") and config.lora.rank
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
