"""Reads and checks a run's inputs: weights, tokenizer, data, devices."""

import dataclasses
import datetime
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_jax import sharding
from gspo_jax.data import tokenizer
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.inputs import facts
from gspo_jax.inputs.data import Data, Trial, read_data, reward_sections, try_environment
from gspo_jax.inputs.devices import Meshes, check_devices, check_engine, check_memory, make_meshes
from gspo_jax.inputs.objective import check_objective
from gspo_jax.learner.state import check_state
from gspo_jax.rewards import shaping
from gspo_jax.runs import contents, provenance, weight_source
from gspo_jax.runs.metrics import read_rows
from gspo_jax.runs.mirror import find_record
from gspo_jax.runs.paths import check_paths
from gspo_jax.runs.tracking import find_wandb
from gspo_jax.runs.weight_source import WeightSource
from gspo_jax.sampling import delimiters
from gspo_jax.settings import rules
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.rewards import RewardConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.system import files, hosts
from gspo_jax.tasks import environments
from gspo_jax.teacher import Teacher, check_teacher, find_teacher


@dataclasses.dataclass(frozen=True)
class Inputs:
  """Configuration of a run, and its checked inputs."""

  config: RunConfig
  workdir: Path | None  # None for a dry run without a workdir.
  source: WeightSource
  tokenizer: Tokenizer
  environment: environments.Make | None  # None for single turns.
  rewards: Mapping[str, RewardConfig]  # Reward settings, by name of the verifier.
  data: Data
  # Trial of the environment on the first problem; None if there is no environment or no problem.
  trial: Trial | None
  meshes: Meshes
  teacher: Teacher | None  # None if there is no distillation.
  date: datetime.datetime  # First start of the run.
  contents: Mapping[str, str]  # Descriptions of weights, code and data, by configuration key.

  @property
  def origins(self) -> dict[str, Any]:
    """Arguments of `provenance.record`."""
    return dict(
      start=self.source.about,
      teacher=self.teacher and self.teacher.source.about,
      tokenizer=self.tokenizer.path,
      date=self.date,
      contents=self.contents,
    )


def read_inputs(
  config: RunConfig, workdir: Path | None = None, devices: list[Any] | None = None
) -> Inputs:
  """Reads and checks a run's inputs, and prints warnings. Writes no files.

  Args:
    config: configuration of the run.
    workdir: directory of the run; None for a dry run without a workdir.
    devices: descriptions of devices to plan for; None for all devices of this run.

  Raises:
    ValueError: an input is missing or invalid, inputs contradict each other, or the workdir belongs
      to another configuration (unless `resume` is "force"). The message names the remedy.
  """
  check_paths(config, workdir)
  if config.distributed and devices is None:
    hosts.join()
  values, home, recorded = dataclasses.asdict(config), None, {}
  if workdir is not None:
    home, flag = find_record(workdir, config.checkpoint.directory)
    recorded = provenance.check_configuration(home, values, flag)
  inputs = read_parts(config, workdir, recorded, devices)

  def check_on_first_host() -> None:
    if home is not None:
      provenance.check_contents(home, values, inputs.contents)
      if changed := provenance.changes(recorded, values):
        check_state(config, home, changed, inputs.meshes.trainer)
      read_rows(workdir / "metrics.jsonl")  # Raises ValueError for a damaged row.
    if config.wandb:
      find_wandb(config.wandb)

  hosts.run_on_first_host(check_on_first_host)
  data, encode = inputs.data, inputs.tokenizer.encode
  data_facts = facts.describe(config, data, encode, inputs.source.has_tokenizer)
  # If `devices` is set, this is a dry run for other devices, in a single process.
  single_host = config if devices is None else dataclasses.replace(config, distributed=False)
  lines = rules.warnings(single_host, data_facts)
  if hosts.is_first():
    sys.stderr.writelines(f"warning: {line}\n" for line in lines)
  return inputs


def model_of_weights(config: RunConfig, workdir: Path | None = None) -> ModelConfig:
  """Returns the model configuration of the weights.

  Random weights have the configured model. A resumed run has the model of the weights recorded at
  its first start. Collective: call it on all hosts. Raises ValueError if the config.json of the
  weights is missing or unsupported.
  """
  recorded = {}
  if workdir is not None:
    home, _ = find_record(workdir, config.checkpoint.directory)
    recorded = hosts.run_on_first_host(lambda: provenance.read(home))
  origins = provenance.recorded_origins(recorded, dataclasses.asdict(config))
  return weight_source.resolve("weights", config.weights, origins["start"]).model(config.model)


def read_parts(
  config: RunConfig,
  workdir: Path | None,
  recorded: Mapping[str, Any],
  devices: list[Any] | None = None,
) -> Inputs:
  """Reads and checks a run's inputs. Does not compare them with an earlier start.

  Args:
    config: configuration of the run.
    workdir: as in `read_inputs`.
    recorded: contents of the run's config.json; {} for a new run.
    devices: as in `read_inputs`.
  """
  origins = provenance.recorded_origins(recorded, dataclasses.asdict(config))
  date = provenance.first_start(recorded)  # Chat templates may contain the date.
  check_objective(config)
  sections = reward_sections(config)
  source = read_model(config, origins["start"])
  teacher = find_teacher(config, origins["teacher"])
  tok = read_tokenizer(config, source, origins["tokenizer"], date)
  environment = environments.find(config.environment.name, tok)
  data = read_data(config, tok)
  trial = None
  if environment is not None and (prompts := data.main_prompts):
    trial = try_environment(config, environment, tok, prompts[0])
  meshes = make_meshes(config, devices)
  check_devices(config, sharding.batch_shards(meshes.trainer))
  check_engine(config, tok, meshes.sampler, data.evaluations)
  check_memory(config, meshes.trainer, teacher and teacher.model)
  if teacher is not None:
    check_teacher(teacher, config, tok, meshes.trainer)
  sources = [source, teacher.source] if teacher else [source]
  problems = {b.key: b.problems for b in data.held_out}
  described = hosts.run_on_first_host(
    lambda: contents.describe(config, sources, problems, tok.stop_ids)
  )
  return Inputs(
    config,
    workdir,
    source,
    tok,
    environment,
    sections,
    data,
    trial,
    meshes,
    teacher,
    date,
    described,
  )


def read_model(config: RunConfig, recorded: Mapping[str, Any]) -> WeightSource:
  """Resolves the weights.

  Raises ValueError if weights or adapters do not fit the model, or adapters name no fixed commit.
  """
  source = weight_source.resolve("weights", config.weights, recorded)
  source.check_model(config.model, config.weights)
  if adapter := config.lora.adapter:
    from gspo_jax.models.hf import peft  # Imported here: other runs do not need safetensors.

    if (pinned := weight_source.pin("lora.adapter", adapter, {}, peft.CONFIG)) != adapter:
      raise ValueError(
        f"lora.adapter={adapter} may change before the run is resumed: name a commit, for example "
        f"the present one, lora.adapter={pinned}"
      )
    files.located(adapter, "lora.adapter")
    peft.check(adapter, config.model, config.lora)
  return source


def read_tokenizer(
  config: RunConfig,
  source: WeightSource,
  recorded: Mapping[str, Any],
  date: datetime.datetime | None = None,
) -> Tokenizer:
  """Reads the tokenizer.

  Raises ValueError if decoded text can never contain a stop string or a tag of `reward.format`, or
  if delimiters of steps are needed, and neither set nor found in the chat template.
  """
  name = weight_source.resolve_tokenizer(config.tokenizer, source, recorded)
  tok = tokenizer.load_for(name, config.model.vocab_size, config.data, date)
  if config.has_iterations and config.objective.segment_unit == "step":
    delimiters.choose(config.objective.segment_delimiters, tok)
  for text in config.sampling.stop_strings:
    if not tokenizer.shows(tok, text):
      raise ValueError(
        f"sampling.stop_strings: {text!r} never occurs in decoded text, which excludes special "
        "tokens; to stop at a special token, add it to eos_token_id in the tokenizer's "
        "generation_config.json"
      )
  for tag in shaping.TAGS[config.reward.format]:
    if not tokenizer.shows(tok, tag):
      raise ValueError(
        f"reward.format={config.reward.format}: text decoded by the tokenizer {name} never has "
        f"{tag!r}; set the format to none, or use another tokenizer"
      )
  return tok
