"""Opens a run: everything that can fail before training, cheap checks first."""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from gspo_jax import hardware, offline, paths, rewards, sharding
from gspo_jax import teacher as teachers
from gspo_jax.data import growing, recorded, sources, tokenizer
from gspo_jax.data.overlap import shared_prompts
from gspo_jax.evaluation.benchmarks import Benchmark, check_problems, choose
from gspo_jax.evaluation.evaluator import Evaluator
from gspo_jax.models import lora, transformer
from gspo_jax.rewards import user_function
from gspo_jax.rollouts import multipliers
from gspo_jax.runs import provenance, start
from gspo_jax.runs.checkpoint import Checkpointer
from gspo_jax.runs.metrics import Writer
from gspo_jax.runs.mirror import Mirror
from gspo_jax.runs.nonfinite import Guard
from gspo_jax.runs.phase import Phase
from gspo_jax.runs.weights import initial
from gspo_jax.sampling import Engine, LocalEngine, Workload, delimiters
from gspo_jax.sampling.driver import new_groups
from gspo_jax.sampling.requests import workload
from gspo_jax.settings import checks
from gspo_jax.settings.rewards import RewardConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import Prompt
from gspo_jax.system import hosts, lock
from gspo_jax.system.files import WriteError
from gspo_jax.tasks import environments


@dataclasses.dataclass(frozen=True)
class Run:
  """The parts of an open run, from which its phases are made; each hands on what its parts need."""

  config: RunConfig
  workdir: Path
  mesh: jax.sharding.Mesh
  tokenizer: tokenizer.Tokenizer
  train_prompts: Sequence[Prompt]
  score: rewards.Scorer
  environment: environments.Make | None  # None: a response is one turn, and `score` judges it
  engine: Engine
  evaluate: Evaluator
  writer: Writer
  shared_prompts: int = 0  # held-out problems that are among the prompts that are trained on
  records: recorded.Recordings | None = None  # responses that job=offline learns from
  signals: multipliers.Signals | None = None  # further rewards, and costs
  teacher: teachers.Teacher | None = None  # of distillation
  rollout_mesh: jax.sharding.Mesh | None = None  # of the engine alone; None: it is on `mesh`
  # The trainer's parameters as such an engine loads them, in arrays that no update changes.
  publish: Callable[[Any], Any] = lambda params: params

  def seed(self, *names: str | int) -> int:
    """A 31-bit seed from the run's seed and what it is for: resuming needs no state."""
    return self.config.seed_of(*names)

  @property
  def workload(self) -> Workload:
    """The requests that RL makes of the engine."""
    return workload(self.config, tuple(self.tokenizer.stop_ids), self.environment is not None)

  @functools.cached_property
  def line_breaks(self) -> np.ndarray:
    """int32 [V]: line breaks in the text of each token."""
    tok = self.tokenizer
    return np.array([tok.decode([i]).count("\n") for i in range(tok.vocab_size)], np.int32)

  @functools.cached_property
  def delimiters(self) -> delimiters.Delimiters:
    return delimiters.delimiters(self.config.objective.segment_delimiters, self.tokenizer)

  def initial_params(self) -> Any:
    """The configured weights, or random ones, in the training layout."""
    return initial(self.config, self.mesh, self.workdir)

  def phase(self, name: str, total: int, *, updates: int, keep: int) -> Phase:
    """A phase of `total` steps with `updates` gradient updates each; their mini-batches are kept
    for `keep` steps."""
    c = self.config
    home = epath.Path(c.checkpoint.directory or self.workdir.absolute())
    values = dataclasses.asdict(c)
    return Phase(
      name,
      total,
      Checkpointer(self.workdir, name, c.checkpoint),
      self.writer,
      Guard(home, values, c.on_nonfinite, updates=updates, keep=keep),
      c.alarms if name == "rl" else None,
      at_most=name == "sft" and c.sft.target_loss > 0,
    )


@contextlib.contextmanager
def open_run(config: RunConfig, workdir: str | Path) -> Iterator[Run]:
  """Opens a run in its directory.

  Raises:
    ValueError: weights, tokenizer, data, mesh and model do not fit together, or the workdir belongs
      to a run of another configuration, or to one that is going on; says what to change.
    WriteError: the directory cannot be written.
  """
  workdir = Path(workdir)
  inputs = check(config, workdir)  # nothing is written before
  alone = lock.alone_in(workdir, config.checkpoint.directory)
  with alone, _opened(config, workdir, inputs) as run:
    yield run


@dataclasses.dataclass(frozen=True)
class Inputs:
  """What a configuration names, as far as it can be read without writing anything."""

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
  paths.check(config, workdir)
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
  tok = tokenizer.load_for(config.tokenizer, config.model.vocab_size)
  if config.has_iterations and config.objective.segment_unit == "step":
    delimiters.choose(config.objective.segment_delimiters, tok)
  environment = environments.find(config.environment.name, tok)
  for text in config.environment.stop_strings:
    if not tokenizer.shows(tok, text):
      raise ValueError(
        f"environment.stop_strings: no text has {text!r}, since special tokens are left out of it; "
        "name such a token as eos_token_id in the tokenizer's generation_config.json"
      )
  verifier = "" if config.environment.name else config.reward.name  # or it judges
  check_answer = rewards.answer_check(verifier if config.has_iterations else "")
  records = None
  if config.job == "offline":
    limits, on_error = offline.limits(config), config.data.on_error
    template = config.data.prompt_template
    records = recorded.load(config.offline.data, tok, template, limits, on_error)
  train_prompts: Sequence[Prompt] = [] if records is None else records.prompts
  if config.samples_prompts:
    load = growing.load if config.schedule.refresh_every else sources.load
    train_prompts = load(config.data, tok, "train", check_answer)
  held_out = {
    name: sources.load_spec(
      config.data, tok, b.data, key, rewards.answer_check(b.reward or verifier)
    )
    for name, b, key in config.benchmarks()
  }
  problems = {name: choose(held_out[name], b.problems) for name, b, _ in config.benchmarks()}
  for name, b, _ in config.benchmarks():
    check_problems(name, b, problems[name])
  for one in _reward_configs(config).values():
    rewards.check_lines(one)
  if isinstance(train_prompts, growing.Growing):
    train_prompts.watch([prompt for some in problems.values() for prompt in some])
  in_both = {}
  if config.job != "eval":
    trained_on = [train_prompts, *([records.prompts] if records else [])]
    in_both = {
      n: max(shared_prompts(some, held_out[n], problems[n]) for some in trained_on)
      for n in problems
    }
  if environment is not None and config.job != "eval":
    render = lambda messages: tok.encode(tok.chat(messages))  # noqa: E731
    longest = config.data.max_prompt_tokens
    new_groups([train_prompts[0]], 1, 0, longest, environment, render)  # or it cannot begin
  mesh, rollout_mesh = sharding.make_meshes(config.mesh, config.rollout_mesh)
  checks.check_devices(config, sharding.batch_shards(mesh))
  transformer.check(config.model, config.compute, shared_prompts=config.shares_prompts)
  transformer.check(config.model, config.sampler_compute, shared_prompts=False)
  rollout = sharding.rollout_rules(config.mesh, rollout_mesh, config.model.num_experts)
  layout = transformer.shardings(config.model, rollout, rollout_mesh)
  taught = _teacher(config, workdir, tok, mesh)
  hardware.check_memory(config, mesh, taught and taught.model)
  transformer.shardings(config.model, sharding.TRAIN, mesh)
  data = dict(train_prompts=train_prompts, problems=problems, in_both=in_both, records=records)
  meshes = dict(mesh=mesh, rollout_mesh=rollout_mesh, layout=layout)
  return Inputs(tokenizer=tok, environment=environment, teacher=taught, **data, **meshes)


def _teacher(
  config: RunConfig, workdir: Path | None, tok: tokenizer.Tokenizer, mesh: jax.sharding.Mesh
) -> teachers.Teacher | None:
  """The teacher, checked."""
  if taught := teachers.find(config, workdir):
    teachers.check(taught, config, tok, mesh)
  return taught


@contextlib.contextmanager
def _opened(config: RunConfig, workdir: Path, inputs: Inputs) -> Iterator[Run]:
  tok, problems, in_both = inputs.tokenizer, inputs.problems, inputs.in_both
  if hosts.of_first(Mirror(workdir, config.checkpoint.directory).back, WriteError):
    if jax.process_index() == 0:
      sys.stderr.write(f"{workdir} is filled again from {config.checkpoint.directory}\n")
    # Only now is it known which checkpoint the run began to learn from.
    inputs = dataclasses.replace(inputs, teacher=_teacher(config, workdir, tok, inputs.mesh))
  if jax.process_index() == 0 and any(in_both.values()):
    found = [f"{in_both[n]} of {len(problems[n])} of {key}" for n, _, key in config.benchmarks()]
    sys.stderr.write(
      f"warning: held-out problems are in data.train too ({', '.join(found)}): accuracy on them "
      "shows what was memorised; leave them out of one of both\n"
    )
  values = dataclasses.asdict(config)
  provenance.check(workdir, values)
  if isinstance(inputs.train_prompts, growing.Growing):
    inputs.train_prompts.keep(workdir / growing.JOURNAL)
  active = jax.process_index() == 0
  with (
    jax.set_mesh(inputs.mesh),
    _open_scorers(config) as scorers,
    multipliers.open_signals(config.constraints, config.reward) as signals,
    Writer(workdir, active=active, wandb=config.wandb, config=values) as writer,
    contextlib.ExitStack() as stack,
  ):
    for scorer in scorers.values():
      writer.notes |= scorer.notes
    # The sampler's layout and types are made by the engine as it loads; for a mesh of its own, by
    # `publish`, in arrays that no update changes.
    load = publish = lambda params: params
    dtypes = transformer.dtypes(config.model, config.sampler_compute.dtype)
    if config.rollout_mesh.on:
      publish = sharding.publisher_to(inputs.layout, dtypes, lora.merged)
    else:
      load = sharding.publisher(inputs.layout, dtypes, lora.merged)
    engine = stack.enter_context(open_engine(config, load, tok.decode, workdir))
    benchmarks = [
      Benchmark(
        name,
        b,
        problems[name],
        scorers[b.reward or config.reward.name],
        None if b.reward else inputs.environment,
      )
      for name, b, _ in config.benchmarks()
    ]
    evaluator = Evaluator(
      config=config.eval,
      model=config.model,
      benchmarks=benchmarks,
      tokenizer=tok,
      prompt_length=config.data.max_prompt_tokens,
      seed=config.seed_of("eval"),
      environment=config.environment,
      directory=workdir / "evaluations",
      identity=repr((config.sampler_compute, config.reward, config.tokenizer, config.environment))
      + "".join(map(user_function.checksum, [*sorted(scorers), config.environment.name]))
      + "server" * (config.engine.name == "server")
      + repr(config.constraints) * config.constraints.on,
      signals=signals,
    )
    begins_with = provenance.origin(workdir, values, "start")
    if jax.process_index() == 0:
      if not begins_with and (origin := start.find(config.weights)):
        begins_with = origin.about
      provenance.record(workdir, values, begins_with, inputs.teacher and inputs.teacher.about)
    yield Run(
      config=config,
      workdir=workdir,
      mesh=inputs.mesh,
      tokenizer=tok,
      train_prompts=inputs.train_prompts,
      score=scorers[config.reward.name],
      environment=inputs.environment,
      engine=engine,
      evaluate=evaluator,
      writer=writer,
      shared_prompts=sum(in_both.values()),
      records=inputs.records,
      signals=signals,
      teacher=inputs.teacher,
      rollout_mesh=inputs.rollout_mesh if config.rollout_mesh.on else None,
      publish=publish,
    )


@contextlib.contextmanager
def open_engine(
  config: RunConfig,
  publish: Callable[[Any], Any],
  detokenize: Callable[[list[int]], str],
  workdir: Path,
) -> Iterator[Engine]:
  """What samples: slots on the mesh, or servers. `publish` is from the trainer's parameters to the
  sampler's."""
  common = config.model, config.engine, config.compute, publish, detokenize
  if config.engine.name == "local":
    yield LocalEngine(*common)
    return
  from gspo_jax.sampling.servers.engine import ServerEngine  # an HTTP client is only needed here

  new = max(config.sampling.max_new_tokens, config.eval.max_new_tokens)
  with ServerEngine(
    *common,
    workdir=workdir,
    window=config.data.max_prompt_tokens + new,
    temperature=config.sampling.temperature,
    routing=config.has_iterations and config.objective.needs_sampler_routing,
    tokenizer=None if config.tokenizer == "bytes" else Path(config.tokenizer),
  ) as engine:
    yield engine


@contextlib.contextmanager
def _open_scorers(config: RunConfig) -> Iterator[dict[str, rewards.Scorer]]:
  """The verifier of the run and those of benchmarks that have another one, by name."""
  with contextlib.ExitStack() as stack:
    scorers = {}
    for name, section in sorted(_reward_configs(config).items()):
      try:
        scorers[name] = stack.enter_context(rewards.open_scorer(section))
      except RuntimeError as error:  # of a traceback the last line says it
        raise ValueError(f"reward.name={name!r}: {str(error).strip().splitlines()[-1]}") from error
    yield scorers


def _reward_configs(config: RunConfig) -> dict[str, RewardConfig]:
  """The section `reward` by verifier: of the run, and of benchmarks that have another one."""
  found = {config.reward.name: config.reward}
  for name, b, _ in config.benchmarks():
    if b.reward and b.reward not in found:
      try:
        own = dict(name=b.reward, partial=0.0, per_line=False)
        found[b.reward] = dataclasses.replace(config.reward, **own)
      except ValueError as error:
        raise ValueError(f"eval.benchmarks.{name}.reward={b.reward!r}: {error}") from error
  return found


def _join_hosts() -> None:
  """Connects the processes of all hosts.

  JAX finds out by itself who they are on a TPU slice, under Slurm, Open MPI and Kubernetes; else
  JAX_COORDINATOR_ADDRESS (host:port of the first process), JAX_NUM_PROCESSES and JAX_PROCESS_ID
  say it. (JAX reads the first of them only.)
  """
  try:
    number = {
      argument: int(os.environ[variable])
      for argument, variable in (
        ("num_processes", "JAX_NUM_PROCESSES"),
        ("process_id", "JAX_PROCESS_ID"),
      )
      if variable in os.environ
    }
    jax.distributed.initialize(**number)
  except (ValueError, RuntimeError) as error:
    raise ValueError(
      f"jax.distributed.initialize: {error}; on a single host set --config.distributed=false, "
      "otherwise JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment"
    ) from error
