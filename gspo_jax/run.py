"""Opens a run: locks its workdir, and starts its scorers, engine, writer and evaluator."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath

from gspo_jax import rewards, teacher
from gspo_jax.data import tokenizer
from gspo_jax.evaluation.benchmarks import Benchmark
from gspo_jax.evaluation.evaluator import Evaluator
from gspo_jax.inputs.reading import Inputs
from gspo_jax.models import publication
from gspo_jax.models.publication import Publishers
from gspo_jax.report.page import RunningReport
from gspo_jax.rewards import user_source
from gspo_jax.rewards.scorer import Prompt
from gspo_jax.rewards.signals import Signals, open_signals
from gspo_jax.rollouts.collector import Collector, Stages
from gspo_jax.rollouts.pipeline import Pipeline
from gspo_jax.runs import provenance
from gspo_jax.runs.checkpoint import Checkpointer
from gspo_jax.runs.goodput import Goodput
from gspo_jax.runs.metrics import Writer
from gspo_jax.runs.mirror import restore_workdir
from gspo_jax.runs.nonfinite import Guard
from gspo_jax.runs.phase import Phase
from gspo_jax.runs.profiler import Profiler
from gspo_jax.sampling import Engine, LocalEngine, stop_strings
from gspo_jax.settings.rewards import ConstraintConfig, RewardConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.system import hosts, hub, lock
from gspo_jax.system.meshes import use_mesh


@dataclasses.dataclass(frozen=True)
class Scoring:
  """Scorers of responses, and signals of `constraints`. They run on the first host."""

  # Dict from name of the verifier to scorer. On all hosts but the first, each value is None.
  scorers: Mapping[str, rewards.Scorer | None]
  # None on all hosts but the first, and if there are no constraints.
  signals: Signals | None = None


@dataclasses.dataclass(frozen=True)
class Run:
  """An open run: its inputs, and the objects that its phases share."""

  inputs: Inputs
  scoring: Scoring
  engine: Engine
  evaluate: Evaluator
  writer: Writer
  report: RunningReport
  profiler: Profiler
  publishers: Publishers  # Functions from the trainer's parameters to the sampler's.
  goodput: Goodput = dataclasses.field(default_factory=Goodput)

  @property
  def config(self) -> RunConfig:
    """The run's configuration."""
    return self.inputs.config

  @property
  def workdir(self) -> Path:
    """The run's directory."""
    return self.inputs.workdir

  @property
  def mesh(self) -> jax.sharding.Mesh:
    """The trainer's mesh."""
    return self.inputs.meshes.trainer

  @property
  def tokenizer(self) -> tokenizer.Tokenizer:
    """The policy's tokenizer."""
    return self.inputs.tokenizer

  @property
  def teacher(self) -> teacher.Teacher | None:
    """The teacher; None if distillation is off."""
    return self.inputs.teacher

  def initial_params(self) -> Any:
    """Loads or initializes the configured weights in the training layout."""
    seed = self.config.seed_of("init")
    return self.inputs.source.load(self.config.model, self.mesh, "float32", seed)

  def collector(self) -> Collector:
    """Builds RL's collector, to sample and score groups of responses."""
    data = self.inputs.data
    return Collector(
      self.config,
      self.engine,
      self.tokenizer,
      data.train_prompts,
      self.scoring.scorers[self.config.reward.name],
      self.inputs.environment,
      writer=self.writer,
      records=data.recordings,
      signals=self.scoring.signals,
      shared_prompts=sum(b.shared for b in data.held_out),
    )

  def pipeline(self, collector: Collector, stages: Stages, last: int = 0) -> Pipeline:
    """Builds RL's pipeline, to sample batches ahead of the updates.

    Args:
      collector: collector of groups.
      stages: stopwatch of an iteration's stages.
      last: number of the last finished iteration.
    """
    return Pipeline(
      collector,
      self.engine,
      self.config.rl,
      stages,
      last,
      batches=self.workdir / "batches",
      mesh=self.inputs.meshes.sampler if self.inputs.meshes.separate else None,
      publish=self.publishers.copy,
    )

  def phase(self, name: str, total: int, *, updates: int, keep: int) -> Phase:
    """Builds a phase of training.

    Args:
      name: "sft" or "rl".
      total: number of steps.
      updates: gradient updates per step.
      keep: number of newest steps whose mini-batches are kept. A dump after NaN or infinity has
        the mini-batches of the failing step.
    """
    c = self.config
    home = epath.Path(c.checkpoint.directory or self.workdir.absolute())
    values = dataclasses.asdict(c)
    return Phase(
      name,
      total,
      Checkpointer(self.workdir, name, c.checkpoint),
      self.writer,
      Guard(home, values, c.on_nonfinite, updates=updates, keep=keep),
      self.goodput,
      c.alarms if name == "rl" else None,
      at_most=name == "sft" and c.sft.target_loss > 0,
    )


@contextlib.contextmanager
def open_run(inputs: Inputs) -> Iterator[Run]:
  """Opens a run in its workdir, and locks the workdir.

  Args:
    inputs: result of `read_inputs`.

  Raises:
    ValueError: the workdir is in use or belongs to another configuration, or a verifier or the
      engine fails.
    WriteError: the workdir cannot be written.
  """
  with (
    lock.alone_in(*locked_directories(inputs.config, inputs.workdir)),
    jax.set_mesh(inputs.meshes.trainer),
    _open_parts(inputs) as run,
  ):
    yield run


def locked_directories(config: RunConfig, workdir: Path) -> list[str | Path]:
  """Returns the directories that a run locks, to be alone in them."""
  directories: list[str | Path] = [workdir, config.checkpoint.directory]
  if config.engine.name == "server" and config.engine.server.directory:
    from gspo_jax.sampling.servers.probe import publication_directory

    directories.append(publication_directory(config.engine.server, workdir))
  return directories


def rehearse(inputs: Inputs) -> list[str]:
  """Runs the checks of `open_run` without writing; returns the scores of `try_rewards`.

  Raises ValueError as `open_run` does, but not for a workdir of another configuration.
  """
  config, workdir = inputs.config, inputs.workdir
  if workdir is not None:
    hosts.run_on_first_host(lambda: lock.check(*locked_directories(config, workdir)))
  directory = workdir or Path()
  profiler = Profiler(config.profile, directory / "profile")
  with (
    use_mesh(inputs.meshes.trainer),
    open_scoring(inputs.rewards, config.constraints, config.reward) as scoring,
    open_engine(config, Publishers().load, inputs.tokenizer, directory, profiler),
  ):
    return try_rewards(inputs, scoring)


def try_rewards(inputs: Inputs, scoring: Scoring) -> list[str]:
  """Scores the first problem's answer and an empty response.

  Returns the two results of `rewards.try_out`. Returns [] for conversations in an
  environment, for jobs without sampled responses, and if there are no problems. Raises ValueError
  if the verifier fails on both responses, or a user's function for a signal or a benchmark does.
  """
  config, prompts = inputs.config, inputs.data.main_prompts
  scores = config.job == "eval" or (config.has_iterations and config.samples_prompts)
  prompts = prompts if scores and inputs.environment is None else []
  hosts.run_on_first_host(lambda: _try_functions(inputs, scoring, prompts))
  if not prompts:
    return []
  name = config.reward.name
  return hosts.run_on_first_host(
    lambda: rewards.try_out(scoring.scorers[name], "reward.name", name, prompts[0])
  )


def _try_functions(inputs: Inputs, scoring: Scoring, prompts: Sequence[Prompt]) -> None:
  """Tries users' functions for signals and benchmarks, as `try_rewards` does."""
  signals = scoring.signals.scorers.items() if scoring.signals else ()
  tried = [("constraints: signal", name, scorer, prompts) for name, scorer in signals]
  for b in inputs.data.evaluations:
    name = b.config.reward
    tried.append((f"eval.benchmarks.{b.name}.reward", name, scoring.scorers.get(name), b.problems))
  for key, name, scorer, problems in tried:
    if ":" in name and problems:
      rewards.try_out(scorer, key, name, problems[0])


@contextlib.contextmanager
def _open_parts(inputs: Inputs) -> Iterator[Run]:
  """Opens the parts of a run in a locked workdir. Raises errors as `open_run` does."""
  config, workdir = inputs.config, inputs.workdir
  restore_workdir(workdir, config.checkpoint.directory)
  values = dataclasses.asdict(config)
  provenance.check_configuration(workdir, values)
  meshes = inputs.meshes
  publishers = publication.make_publishers(meshes.layout, meshes.dtypes, meshes.separate)
  profiler = Profiler(config.profile, workdir / "profile")
  with (
    open_scoring(inputs.rewards, config.constraints, config.reward) as scoring,
    open_engine(config, publishers.load, inputs.tokenizer, workdir, profiler) as engine,
    Writer(workdir, active=hosts.is_first(), wandb=config.wandb, config=values) as writer,
  ):
    evaluator = make_evaluator(inputs, scoring, workdir / "evaluations")
    try_rewards(inputs, scoring)
    for scorer in filter(None, scoring.scorers.values()):
      writer.notes |= scorer.notes
    if hosts.is_first():
      provenance.record(workdir, values, **inputs.origins)
    report = RunningReport(workdir, hosts.is_first())
    yield Run(inputs, scoring, engine, evaluator, writer, report, profiler, publishers)


@contextlib.contextmanager
def open_scoring(
  sections: Mapping[str, RewardConfig], constraints: ConstraintConfig, reward: RewardConfig
) -> Iterator[Scoring]:
  """Opens scorers and signals on the first host.

  Args:
    sections: one section for each verifier of the run and its benchmarks, by the verifier's name.
    constraints: section with the signals.
    reward: section `reward` of the configuration. Signals read its tags, lengths and verifier keys.

  Raises:
    ValueError: a verifier cannot start.
  """
  with (
    hosts.enter_on_first_host(rewards.open_scorers(sections, "reward.name")) as scorers,
    hosts.enter_on_first_host(open_signals(constraints, reward)) as signals,
  ):
    yield Scoring(scorers or dict.fromkeys(sections), signals)


def make_evaluator(inputs: Inputs, scoring: Scoring, directory: Path) -> Evaluator:
  """Builds the evaluator. Its results are written to `directory`."""
  config, tok, benchmarks = inputs.config, inputs.tokenizer, []
  for b in inputs.data.held_out:
    scorer = scoring.scorers[b.config.reward or config.reward.name]
    environment = None if b.config.reward else inputs.environment
    benchmarks.append(Benchmark(b.name, b.config, b.problems, scorer, environment))
  settings = (  # An interrupted evaluation resumes only if these settings are unchanged.
    config.sampler_compute,
    config.reward,
    tok.path,
    config.environment,
    config.engine.name,
    config.engine.cache_dtype,
    config.engine.weights_dtype,
    config.constraints,
  )
  functions = [*sorted(scoring.scorers), config.environment.name]
  return Evaluator(
    config=config.eval,
    model=config.model,
    benchmarks=benchmarks,
    tokenizer=tok,
    prompt_length=config.data.max_prompt_tokens,
    seed=config.seed_of("eval"),
    environment=config.environment,
    stop_strings=config.sampling.stop_strings,
    directory=directory,
    identity=repr(settings) + "".join(map(user_source.checksum, functions)),
    right_from=config.reward.right_from,
    signals=scoring.signals,
  )


@contextlib.contextmanager
def open_engine(
  config: RunConfig,
  publish: Callable[[Any], Any],
  tok: tokenizer.Tokenizer,
  workdir: Path,
  profiler: Profiler,
) -> Iterator[Engine]:
  """Opens the engine: decoding slots on the mesh, or servers.

  Args:
    config: configuration of the run.
    publish: function from the trainer's parameters to the sampler's parameters.
    tok: tokenizer of the policy.
    workdir: directory of the run.
    profiler: profiler that counts decode steps of the local engine.
  """
  text_bytes = stop_strings.text_bytes(tok) if config.sampling.stop_strings else None
  if config.engine.name == "local":
    stepped = functools.partial(profiler.count, "sample")
    yield LocalEngine(
      config.model, config.engine, config.compute, publish, text_bytes, stepped=stepped
    )
    return
  from gspo_jax.sampling.servers.engine import ServerEngine  # Only this branch needs HTTP.

  new = max(config.sampling.max_new_tokens, config.eval.max_new_tokens)
  with ServerEngine(
    config.model,
    config.engine,
    config.compute,
    publish,
    text_bytes,
    workdir=workdir,
    window=config.data.max_prompt_tokens + new,
    temperature=config.sampling.temperature,
    routing=config.has_iterations and config.objective.needs_sampler_routing,
    tokenizer=None if tok.path == "bytes" else hub.directory(tok.path),
  ) as engine:
    yield engine
