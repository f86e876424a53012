"""The programs of a run, with the shapes and layouts of their arguments and no values."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from gspo_jax import sharding, teacher
from gspo_jax.aot import lengths
from gspo_jax.learner import packing
from gspo_jax.learner.critic import optimizers
from gspo_jax.learner.passes import learner_of, make_score
from gspo_jax.learner.state import state_of_phase
from gspo_jax.learner.step import make_rl_step
from gspo_jax.models import flops, lora, publication, transformer
from gspo_jax.models.experts import routing
from gspo_jax.models.params import abstract_params
from gspo_jax.models.weights import Params
from gspo_jax.sampling import Workload
from gspo_jax.sampling.local import slots
from gspo_jax.sampling.requests import sizes, workload
from gspo_jax.settings import passes
from gspo_jax.settings import run as configuration
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.sampling import EngineConfig
from gspo_jax.sharding import BATCH, P
from gspo_jax.structs import ModelInputs, TrainBatch, TrainState

PROGRAMS = ("train", "score", "publish", "prefill", "decode")


def of_run(config: configuration.RunConfig) -> tuple[str, ...]:
  """The programs that a run has: none that samples where servers do."""
  return PROGRAMS if config.engine.name == "local" else PROGRAMS[:3]


@dataclasses.dataclass(frozen=True)
class Case:
  """A configuration at one batch shape."""

  config: configuration.RunConfig
  sequences: int  # per update
  microbatches: int
  length: int
  slots: int = 0  # of the sampler, over all devices; 0: as configured
  mean_response: float = 0  # tokens; 0: `lengths.default_mean`
  mean_prompt: float = 0  # tokens; 0: a quarter of the longest

  @property
  def model(self):
    return self.config.model

  @property
  def rows(self) -> int:
    """Sequences at once."""
    return self.sequences // self.microbatches

  @property
  def scored(self) -> int:
    """Sequences of a scoring pass: packed, it has micro-batches too."""
    return self.sequences if self.config.rl.packed else self.rows

  @property
  def engine(self) -> EngineConfig:
    engine = self.config.engine
    return dataclasses.replace(engine, slots=self.slots) if self.slots else engine

  @functools.cached_property
  def lengths(self) -> lengths.Lengths:
    most = self.config.sampling.max_new_tokens
    return lengths.Lengths(self.mean_response or lengths.default_mean(most), most)

  @property
  def prompt(self) -> float:
    """Tokens of a prompt, in the mean."""
    return self.mean_prompt or self.config.data.max_prompt_tokens / 4

  @property
  def filled(self) -> float:
    """Positions of a slot that hold something, in the mean over time."""
    return self.lengths.filled(self.prompt)

  @property
  def configured(self) -> bool:
    """Whether its batch is that of the configuration, and not one given on the command line."""
    rl, window = self.config.rl, self.workload.window
    update = rl.prompts * rl.group_size // rl.minibatches
    return (self.sequences, self.length) == (update, window)

  @property
  def group_size(self) -> int:
    """Sequences that begin with the same prompt; conversations may begin differently."""
    return 1 if self.config.environment.name else self.config.rl.group_size

  @property
  def packed(self) -> bool:
    """Whether micro-batches may be empty, and are left out."""
    return self.config.rl.packed and self.configured

  def pool(self, slots: int, shards: int) -> int:
    """Positions of a cache for so many slots of all devices.

    Of n responses of a device: n times the mean of what they fill and two standard deviations of
    the sum, each response's being its mean, as of exponential lengths; at least one window. In
    whole pages; 0 if that is no less than all windows.
    """
    n, page = slots // shards, self.engine.page_tokens
    window = -(-self.workload.window // page) + 1
    pages = max(window, math.ceil(self.filled * (n + 2 * math.sqrt(n)) / page))
    return 0 if pages >= n * window else pages * page * shards

  @property
  def workload(self) -> Workload:
    turns = bool(self.config.environment.name)
    return workload(self.config, stop_ids=(0,), several_turns=turns)  # the tokenizer says how many


@dataclasses.dataclass(frozen=True)
class Program:
  function: Callable
  arguments: tuple[Any, ...]
  work: flops.Work | None  # None: moves data only
  trains: bool = False
  held: tuple[Any, ...] = ()  # arrays that a run keeps on the devices meanwhile
  rates: Mapping[str, float] = dataclasses.field(default_factory=dict)  # for `hlo_costs.costs`
  of_slots: str = ""  # name of a kernel that reads nothing for slots that are not in use
  turns: int = 1  # of the program's loop, decode steps; its figures are those of one of them


def make_case(
  config: configuration.RunConfig, sequences: int = 0, length: int = 0, **sampling: float
) -> Case:
  """The configured batch, or `sequences` x `length` in one micro-batch; `sampling` as in `Case`."""
  rl = config.rl
  return Case(
    config,
    sequences or rl.prompts * rl.group_size // rl.minibatches,
    1 if sequences else rl.microbatches,
    length or config.data.max_prompt_tokens + config.sampling.max_new_tokens,
    **sampling,
  )


def resolved(case: Case, mesh) -> Case:
  """The case with the `compute.remat` that `auto` comes to in a train step."""
  c = case.config
  with jax.set_mesh(mesh):
    remat = transformer.remat_of(c.model, c.compute, case.rows * case.length)
  compute = dataclasses.replace(c.compute, remat=remat)
  return dataclasses.replace(case, config=dataclasses.replace(c, compute=compute))


def state_of(case: Case, mesh: jax.sharding.Mesh) -> TrainState:
  """Shapes and shardings of the training state."""
  return state_of_phase(case.config, "rl", mesh)


def sampler_params(case: Case, mesh: jax.sharding.Mesh) -> Params:
  """Shapes and shardings of the sampler's weights."""
  rules = sharding.rollout_rules(case.config.mesh, mesh, case.model.num_experts)
  return abstract_params(case.model, mesh, rules, case.config.sampler_compute.dtype)


def frozen_params(
  case: Case, taught: teacher.Teacher | None, mesh: jax.sharding.Mesh
) -> dict[str, Params]:
  """Shapes and shardings of the parameters that passes read and no update changes, by name."""
  c, layout = case.config, sharding.TRAIN
  models = passes.frozen(c, taught and taught.model)
  return {n: abstract_params(model, mesh, layout, c.compute.dtype) for n, model in models.items()}


def programs(case: Case, mesh, names: list[str]) -> Iterator[tuple[str, Program]]:
  """The jitted functions of a run with the shapes and shardings of their arguments."""
  c = case.config
  tx, critic = optimizers(c)
  state, sample_params = state_of(case, mesh), sampler_params(case, mesh)
  taught = teacher.find(c)
  frozen = frozen_params(case, taught, mesh)
  learner = dataclasses.replace(learner_of(c, "rl"), microbatches=case.microbatches)

  def work(model: ModelConfig, sequences: int) -> flops.Work:
    return flops.work(model, sequences, case.length, case.length)

  for name in names:
    if name == "train":
      step = make_rl_step(learner, c.objective, tx, critic)
      arguments = state, batch_of(case, mesh, case.sequences)
      done = work(case.model, case.sequences * c.models)
      yield name, Program(step, arguments, done, trains=True, held=(frozen,))
    if name == "score":
      inputs = batch_of(case, mesh, case.scored).inputs
      held = state.opt_state, sample_params, state.critic, frozen
      done = work(case.model, case.scored)
      yield name, Program(make_score(learner), (state.params, inputs), done, held=held)
      if taught is not None:
        held = state, sample_params, {n: x for n, x in frozen.items() if n != "teacher"}
        score, done = teacher.scoring(taught, learner), work(taught.model, case.scored)
        yield "teacher", Program(score, (frozen["teacher"], inputs), done, held=held)
    if name == "publish":
      layout = jax.tree.map(lambda x: x.sharding, sample_params)
      read = transformer.dtypes(c.model, c.sampler_compute.dtype)
      publish = publication.publisher(layout, read, lora.dithered)
      held = state.opt_state, state.critic, frozen
      yield name, Program(publish, (state.params,), None, held=held)
    if name in ("prefill", "decode"):
      program = sampling_program(name, case, mesh, sample_params)
      yield name, dataclasses.replace(program, held=(state, frozen))


def sampling_program(name: str, case: Case, mesh, params: Any) -> Program:
  """The longest prompts into the queue, as many at once as a run takes; or decode steps of all
  slots, in place."""
  c, engine, workload = case.config, case.engine, case.workload
  shards = sharding.batch_shards(mesh)
  options = dict(model=c.model, compute=c.sampler_compute, record_routing=workload.record_routing)
  with jax.set_mesh(mesh):
    size = sizes(workload, engine, shards)
    state = jax.eval_shape(
      lambda: slots.new_state(
        c.model,
        tuple(block.attention_norm.shape[0] for block in params.blocks),
        size,
        stop_ids=len(workload.stop_ids),
        dtype=engine.cache_dtype,
      )
    )
  state = jax.tree.map(lambda x: shaped(x.shape, x.dtype, mesh, x.sharding.spec), state)
  if name == "decode":
    step = functools.partial(
      slots.decode,
      steps=engine.steps,
      sampling=workload.sampling,
      width=workload.support,
      **options,
    )
    work = flops.work(case.model, size.slots, engine.steps, size.window)
    arguments = params, state, shaped((size.slots,), jnp.int32, mesh, P())
    # How often a slot takes a new prefix, and the share of the windows that is in use, in pages.
    refills = size.slots / shards / case.lengths.mean
    filled = (case.filled + size.page / 2) / size.window
    rates = dict(refill=refills, paged_attention=filled)
    return Program(
      jax.jit(step, donate_argnums=1),
      arguments,
      work,
      rates=rates,
      of_slots="paged_attention",
      turns=engine.steps,
    )
  prompts = size.at_once(size.prompt) * shards
  by_row = shaped((prompts,), jnp.int32, mesh, P(BATCH))
  tokens = shaped((prompts, size.prompt), jnp.int32, mesh, P(BATCH))
  fields = jax.tree.map(
    lambda x: shaped((prompts, *x.shape[1:]), x.dtype, mesh, P(BATCH)), state.queue
  )
  fill = functools.partial(slots.prefill, piece=engine.prefill_tokens, **options)
  arguments = params, state, tokens, fields, by_row, by_row
  work = flops.work(case.model, prompts, size.prompt, size.prompt, heads=1)
  return Program(jax.jit(fill, donate_argnums=1), arguments, work)


def batch_of(case: Case, mesh, rows: int) -> TrainBatch:
  """A batch for any length, without shared prompts but for those of packed rows, whose rows of
  attention are longer: the most that a run needs."""

  def field(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return shaped((rows, *shape), dtype, mesh, P(BATCH))

  c, model, width = case.config, case.model, case.workload.support
  tokens, real = field(jnp.int32, case.length), field(jnp.float32, case.length)
  place = field(jnp.int32) if c.rl.packed else None
  together = math.gcd(case.group_size, rows // sharding.batch_shards(mesh))
  shared = place if packing.shares(case.length, c.sampling.max_new_tokens, together) else None
  experts = None
  if c.objective.replay != "none":
    layers = sum(model.is_moe(layer) for layer in range(model.num_layers))
    stored = routing.storage_dtype(model.num_experts)
    experts = field(stored, case.length, layers, model.experts_per_token)
  filled = {name for declared in passes.of_run(c) for name in declared.fills}
  batch = TrainBatch(
    ModelInputs(
      tokens_BT=tokens,
      segments_BT=tokens,
      sampler_experts_BTlk=experts,
      support_BTX=field(jnp.int32, case.length, width) if width else None,
      prompt_B=shared,
      row_B=place,
      start_B=place,
      trunk_B=shared,
      path_B=shared,
    ),
    mask_BT=real,
    advantage_B=field(jnp.float32),
    old_logp_BT=real,
    sampler_logp_BT=real,
    current_BT=real if c.rl.partial or c.rl.lag or c.job == "offline" else None,
    age_B=field(jnp.int32) if c.rl.lag else None,
    advantage_BT=None if c.estimator.by_response else real,
    return_BT=real if "old_value_BT" in filled else None,
    mixed_B=field(jnp.bool_) if c.objective.kl_groups == "mixed" else None,
    unit_BT=tokens if c.objective.segment_unit else None,
    first_B=field(jnp.bool_),
    old_experts_BTlk=experts,
    order_B=place,
  )
  # Experts are there with replay alone; what a teacher says, and last values, became advantages.
  used = {"old_experts_BTlk", "teacher_logp_BT", "last_value_B"}
  return batch.replace(**dict.fromkeys(filled - used, real))


def shaped(shape: tuple[int, ...], dtype, mesh, pspec: P) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, pspec))
