"""Opens a run: everything that can fail before training, cheap checks first."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from gspo_jax import rewards
from gspo_jax import teacher as teachers
from gspo_jax.data import growing, recorded, tokenizer
from gspo_jax.evaluation.benchmarks import Benchmark
from gspo_jax.evaluation.evaluator import Evaluator
from gspo_jax.inputs import Inputs, check, read, reward_configs
from gspo_jax.models import lora, publication, transformer
from gspo_jax.rewards import user_function
from gspo_jax.rewards.signals import Signals, open_signals
from gspo_jax.rollouts.collector import Collector, Stages
from gspo_jax.rollouts.pipeline import Pipeline
from gspo_jax.runs import provenance, start
from gspo_jax.runs.checkpoint import Checkpointer
from gspo_jax.runs.goodput import Goodput
from gspo_jax.runs.metrics import Writer
from gspo_jax.runs.mirror import Mirror
from gspo_jax.runs.nonfinite import Guard
from gspo_jax.runs.phase import Phase
from gspo_jax.runs.profiler import Profiler
from gspo_jax.runs.weights import initial
from gspo_jax.sampling import Engine, LocalEngine, delimiters
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import Prompt
from gspo_jax.system import hosts, hub, lock
from gspo_jax.system.files import WriteError
from gspo_jax.tasks import environments


def _as_it_is(params: Any) -> Any:
  return params


@dataclasses.dataclass(frozen=True)
class Run:
  """The parts of an open run, from which its phases are made; each hands on what its parts need."""

  config: RunConfig
  workdir: Path
  mesh: jax.sharding.Mesh
  tokenizer: tokenizer.Tokenizer
  train_prompts: Sequence[Prompt]
  demonstrations: Sequence[Prompt]  # of the cold start
  score: rewards.Scorer | None  # None on other hosts than the first, which judges
  environment: environments.Make | None  # None: a response is one turn, and `score` judges it
  engine: Engine
  evaluate: Evaluator
  writer: Writer
  profiler: Profiler
  shared_prompts: int = 0  # held-out problems that are among the prompts that are trained on
  records: recorded.Recordings | None = None  # responses that job=offline learns from
  signals: Signals | None = None  # further rewards, and costs; on the first host
  teacher: teachers.Teacher | None = None  # of distillation
  rollout_mesh: jax.sharding.Mesh | None = None  # of the engine alone; None: it is on `mesh`
  goodput: Goodput = dataclasses.field(default_factory=Goodput)
  # The trainer's parameters as such an engine loads them, in arrays that no update changes.
  publish: Callable[[Any], Any] = _as_it_is

  @functools.cached_property
  def line_breaks(self) -> np.ndarray:
    """int32 [V]: line breaks in the text of each token."""
    return tokenizer.line_breaks(self.tokenizer)

  @functools.cached_property
  def delimiters(self) -> delimiters.Delimiters:
    """Texts that end a step."""
    return delimiters.delimiters(self.config.objective.segment_delimiters, self.tokenizer)

  def initial_params(self) -> Any:
    """The configured weights, or random ones, in the training layout."""
    return initial(self.config, self.mesh, self.workdir)

  def collector(self) -> Collector:
    """Source of the groups that RL trains on."""
    return Collector(
      self.config,
      self.engine,
      self.tokenizer,
      self.train_prompts,
      self.score,
      self.environment,
      writer=self.writer,
      records=self.records,
      signals=self.signals,
      shared_prompts=self.shared_prompts,
    )

  def pipeline(self, collector: Collector, stages: Stages, last: int = 0) -> Pipeline:
    """Batches of such a collector; `last`: the iteration that is done."""
    return Pipeline(
      collector,
      self.engine,
      self.config.rl,
      stages,
      last,
      batches=self.workdir / "batches",
      mesh=self.rollout_mesh,
      publish=self.publish,
    )

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
      Guard(home, values, c.on_nonfinite, updates=updates, keep=keep, limit=c.nonfinite_limit),
      self.goodput,
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
  with lock.alone_in(workdir, config.checkpoint.directory), _opened(config, workdir, inputs) as run:
    yield run


def rehearse(config: RunConfig, workdir: Path | None) -> Inputs:
  """Goes through all that `open_run` does before it writes anything, and leaves nothing. Raises
  ValueError as it does."""
  inputs = check(config, workdir)
  if workdir is not None:
    hosts.run_on_first_host(lambda: lock.check(workdir, config.checkpoint.directory))
  place = workdir or Path()
  profiler = Profiler(config.profile, place / "profile")
  with (
    jax.set_mesh(inputs.mesh),
    open_judges(config),
    open_engine(config, _as_it_is, inputs.tokenizer, place, profiler),
  ):
    return inputs


@contextlib.contextmanager
def open_judges(
  config: RunConfig,
) -> Iterator[tuple[Mapping[str, rewards.Scorer | None], Signals | None]]:
  """Verifiers by name, and what measures signals, with their processes; on other hosts than the
  first, which judges, there are none. ValueError: one of them cannot be started."""
  sections = reward_configs(config)
  with (
    hosts.enter_on_first_host(rewards.open_scorers(sections, "reward.name")) as scorers,
    hosts.enter_on_first_host(open_signals(config.constraints, config.reward)) as signals,
  ):
    yield scorers or dict.fromkeys(sections), signals


@contextlib.contextmanager
def _opened(config: RunConfig, workdir: Path, inputs: Inputs) -> Iterator[Run]:
  if hosts.run_on_first_host(Mirror(workdir, config.checkpoint.directory).back, WriteError):
    if hosts.is_first():
      sys.stderr.write(f"{workdir} is filled again from {config.checkpoint.directory}\n")
    inputs = read(config, workdir)  # only now is it known which weights the run began with
  tok, problems = inputs.tokenizer, inputs.problems
  values = dataclasses.asdict(config)
  provenance.check(workdir, values)
  if isinstance(inputs.train_prompts, growing.Growing):
    inputs.train_prompts.keep(workdir / growing.JOURNAL)
  # The sampler's layout and types are made by the engine as it loads; for a mesh of its own, by
  # `publish`, in arrays that no update changes.
  load = publish = _as_it_is
  dtypes = transformer.dtypes(config.model, config.sampler_compute.dtype)
  if config.rollout_mesh.on:
    publish = publication.publisher_to(inputs.layout, dtypes, lora.dithered)
  else:
    load = publication.publisher(inputs.layout, dtypes, lora.dithered)
  profiler = Profiler(config.profile, workdir / "profile")
  with (
    jax.set_mesh(inputs.mesh),
    open_judges(config) as (scorers, signals),
    open_engine(config, load, tok, workdir, profiler) as engine,
    Writer(workdir, active=hosts.is_first(), wandb=config.wandb, config=values) as writer,
  ):
    for scorer in filter(None, scorers.values()):
      writer.notes |= scorer.notes
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
    depends_on = (
      config.sampler_compute,
      config.reward,
      tok.path,
      config.environment,
      config.engine.name,
      config.constraints,
    )
    evaluator = Evaluator(
      config=config.eval,
      model=config.model,
      benchmarks=benchmarks,
      tokenizer=tok,
      prompt_length=config.data.max_prompt_tokens,
      seed=config.seed_of("eval"),
      environment=config.environment,
      stop_strings=config.sampling.stop_strings,
      directory=workdir / "evaluations",
      identity=repr(depends_on)
      + "".join(map(user_function.checksum, [*sorted(scorers), config.environment.name])),
      signals=signals,
    )
    begins_with = provenance.origin(workdir, values, "start")
    if hosts.is_first():
      if not begins_with and config.weights != "random":
        origin = start.find(config.weights)
        begins_with = origin.about if origin else dict(directory=inputs.weights)
      taught = inputs.teacher and inputs.teacher.about
      provenance.record(workdir, values, begins_with, taught, tok.path)
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
      profiler=profiler,
      demonstrations=inputs.demonstrations,
      shared_prompts=sum(inputs.in_both.values()),
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
  tok: tokenizer.Tokenizer,
  workdir: Path,
  profiler: Profiler,
) -> Iterator[Engine]:
  """What samples: slots on the mesh, or servers. `publish` is from the trainer's parameters to the
  sampler's."""
  common = config.model, config.engine, config.compute, publish, tok.decode
  if config.engine.name == "local":
    yield LocalEngine(*common, stepped=functools.partial(profiler.count, "sample"))
    return
  from gspo_jax.sampling.servers.engine import ServerEngine  # an HTTP client is only needed here

  new = max(config.sampling.max_new_tokens, config.eval.max_new_tokens)
  with ServerEngine(
    *common,
    workdir=workdir,
    window=config.data.max_prompt_tokens + new,
    temperature=config.sampling.temperature,
    routing=config.has_iterations and config.objective.needs_sampler_routing,
    tokenizer=None if tok.path == "bytes" else hub.directory(tok.path),
  ) as engine:
    yield engine
