"""A run's jitted programs with abstract arguments: shapes, dtypes and shardings without values.

The programs can be compiled on a machine without the run's devices and weights.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gspo_jax import sharding, teacher
from gspo_jax.aot import lengths
from gspo_jax.learner import packing
from gspo_jax.learner.critic import optimizers
from gspo_jax.learner.passes import learner_of, make_score
from gspo_jax.learner.state import state_of_phase
from gspo_jax.learner.step import make_rl_step
from gspo_jax.models import flops, publication, transformer, weights
from gspo_jax.models.attention import blocks
from gspo_jax.models.experts import routing
from gspo_jax.models.params import abstract_params, abstract_table
from gspo_jax.models.weights import Params
from gspo_jax.sampling import Workload
from gspo_jax.sampling.local import slots
from gspo_jax.sampling.requests import sizes, workload
from gspo_jax.settings import passes
from gspo_jax.settings import run as configuration
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.sampling import EngineConfig
from gspo_jax.sharding import BATCH, P
from gspo_jax.structs import (
  CriticTargets,
  MetricInputs,
  ModelInputs,
  Places,
  TrainBatch,
  TrainState,
)
from gspo_jax.system.meshes import use_mesh

PROGRAMS = ("train", "score", "publish", "prefill", "decode")


def program_names(config: configuration.RunConfig) -> tuple[str, ...]:
  """Returns the names of a run's programs.

  Excludes prefill and decode if servers sample, since servers have their own programs.
  """
  return PROGRAMS if config.engine.name == "local" else PROGRAMS[:3]


@dataclasses.dataclass(frozen=True)
class Case:
  """A configuration, its batch shape, and assumed lengths of prompts and responses."""

  config: configuration.RunConfig
  sequences: int  # Sequences per update.
  microbatches: int  # Micro-batches per update.
  length: int  # Tokens per sequence, padding included.
  slots: int = 0  # Responses that the sampler decodes at once, over all devices; 0: engine.slots.
  mean_response: float = 0  # Mean tokens of a response; 0: `lengths.default_mean`.
  mean_prompt: float = 0  # Mean tokens of a prompt; 0: a quarter of data.max_prompt_tokens.
  one_batch: bool = False  # Whether --sequences replaces the configured micro-batches by one.

  @property
  def model(self):
    return self.config.model

  @property
  def rows(self) -> int:
    """Sequences of a micro-batch."""
    return self.sequences // self.microbatches

  @property
  def scored(self) -> int:
    """Sequences of a scoring pass: a micro-batch, or the whole update if it is packed.

    A pass over packed sequences loops over the micro-batches itself.
    """
    return self.sequences if self.config.rl.packed else self.rows

  @property
  def engine(self) -> EngineConfig:
    """Section `engine` of the configuration, with the case's slots."""
    engine = self.config.engine
    return dataclasses.replace(engine, slots=self.slots) if self.slots else engine

  @functools.cached_property
  def lengths(self) -> lengths.Lengths:
    """Assumed distribution of response lengths."""
    most = self.config.sampling.max_new_tokens
    return lengths.Lengths(self.mean_response or lengths.default_mean(most), most)

  @property
  def prompt(self) -> float:
    """Mean tokens of a prompt."""
    return self.mean_prompt or self.config.data.max_prompt_tokens / 4

  @property
  def filled(self) -> float:
    """Mean over time of a slot's filled cache positions."""
    return self.lengths.filled(self.prompt)

  @property
  def configured(self) -> bool:
    """Whether the command line leaves sequences and length as configured."""
    rl = self.config.rl
    return (self.sequences, self.length) == (rl.rows // rl.minibatches, self.workload.window)

  @property
  def group_size(self) -> int:
    """Number of consecutive sequences with a common prompt.

    It is 1 if the run has an environment: conversations may differ from their first token on.
    """
    return 1 if self.config.environment.name else self.config.rl.group_size

  @property
  def packed(self) -> bool:
    """Whether updates are packed, and thus skip empty micro-batches.

    Also False if the batch has another shape than configured, since then all rows count as full.
    """
    return self.config.rl.packed and self.configured

  def work(self, model: ModelConfig, sequences: int) -> flops.Work:
    """Returns the work of a pass over rows of a batch.

    Attention of long packed rows skips blocks of keys from other sequences, so these rows count as
    filled with sequences of the assumed lengths.
    """
    work = flops.work(model, sequences, self.length, self.length)
    if not self.packed or self.length <= blocks.SHORT:
      return work
    tokens_X = np.array(self.lengths.sample(self.workload.trajectories)) + round(self.prompt)
    per_token = flops.work(model, 1, tokens_X, tokens_X).attention.sum() / tokens_X.sum()
    return dataclasses.replace(work, attention=float(sequences * self.length * per_token))

  def pool(self, slots: int, shards: int) -> int:
    """Returns an estimated size of the paged cache, in positions over all devices.

    The n slots of a device share its pages. The sum of their filled positions has the mean
    n·`filled`. The sum's standard deviation is taken as √n·`filled`, since the standard deviation
    of an exponential length equals the mean. The size is the mean plus two standard deviations and
    half a page per slot, as last pages are half empty; at least a page per slot and one window. If
    full windows do not take more pages, 0 is returned, which means a full window per slot.

    Args:
      slots: slots over all devices.
      shards: number of parts into which the mesh splits the slots.
    """
    n, page = slots // shards, self.engine.page_tokens
    window_pages = -(-self.workload.window // page) + 1
    filled_pages = (n + 2 * math.sqrt(n)) * self.filled / page
    pages = max(window_pages, n, math.ceil(filled_pages + n / 2))
    return 0 if pages >= n * window_pages else pages * page * shards

  @property
  def workload(self) -> Workload:
    """Workload of the sampler, with a single stop token.

    A real tokenizer may have more stop tokens, with hardly any effect on the compiled programs.
    """
    several_turns = bool(self.config.environment.name)
    return workload(self.config, stop_ids=(0,), several_turns=several_turns)


@dataclasses.dataclass(frozen=True)
class Program:
  """A jitted function, its abstract arguments, and assumptions about its costs."""

  function: Callable
  arguments: tuple[Any, ...]
  work: flops.Work | None  # Operations of a forward pass; None for a program without one.
  trains: bool = False  # Whether the program also has a backward pass.
  resident: tuple[Any, ...] = ()  # Other arrays in device memory while a run calls the program.
  # Assumed trip counts of loops and fractions of kernels' bytes, by name (see `hlo_costs.costs`).
  rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
  slot_kernel: str = ""  # Kernel that reads nothing for idle slots; "" if there is none.
  steps: int = 1  # Decode steps per call. Reported costs are divided by this number.


def make_case(
  config: configuration.RunConfig, sequences: int = 0, length: int = 0, **sampling: float
) -> Case:
  """Builds a case of the configured batch, or of another batch shape.

  Args:
    config: configuration of the run.
    sequences: sequences per update, in one micro-batch; 0 for the configured sequences and
      micro-batches.
    length: tokens per sequence; 0 for the longest prompt and response together.
    **sampling: `slots`, `mean_response` and `mean_prompt` of `Case`.
  """
  rl = config.rl
  return Case(
    config,
    sequences or rl.rows // rl.minibatches,
    1 if sequences else rl.microbatches,
    length or config.data.max_prompt_tokens + config.sampling.max_new_tokens,
    one_batch=sequences > 0,
    **sampling,
  )


def resolve_remat(case: Case, mesh) -> Case:
  """Replaces `compute.remat=auto` by the policy of the train step."""
  c = case.config
  with use_mesh(mesh):
    remat = transformer.remat_of(c.model, c.compute, case.rows * case.length)
  compute = dataclasses.replace(c.compute, remat=remat)
  return dataclasses.replace(case, config=dataclasses.replace(c, compute=compute))


def state_of(case: Case, mesh: jax.sharding.Mesh) -> TrainState:
  """Returns shapes and shardings of the training state."""
  return state_of_phase(case.config, "rl", mesh)


def sampler_params(case: Case, mesh: jax.sharding.Mesh) -> Params:
  """Returns shapes and shardings of the sampler's weights."""
  rules = sharding.rollout_rules(case.config.mesh, mesh, case.model.num_experts)
  table = transformer.sampler_table(case.model, case.engine.weights_dtype)
  return abstract_table(table, mesh, rules, case.config.sampler_compute.dtype)


def frozen_params(
  case: Case, taught: teacher.Teacher | None, mesh: jax.sharding.Mesh
) -> dict[str, Params]:
  """Returns shapes and shardings of frozen models' weights, by name.

  A frozen model is a reference policy or a teacher. A pass reads its weights, and no update changes
  them.

  taught: the teacher; None for a run without a teacher.
  """
  c, layout = case.config, sharding.TRAIN
  models = passes.frozen_models(c, taught and taught.model)
  return {n: abstract_params(model, mesh, layout, c.compute.dtype) for n, model in models.items()}


def programs(case: Case, mesh, names: list[str]) -> Iterator[tuple[str, Program]]:
  """Yields the programs of the given names.

  In a run with a teacher, "score" is followed by "teacher", the teacher's scoring pass.
  """
  c = case.config
  tx, critic = optimizers(c)
  state, sample_params = state_of(case, mesh), sampler_params(case, mesh)
  taught = teacher.find_teacher(c)
  frozen = frozen_params(case, taught, mesh)
  learner = dataclasses.replace(learner_of(c, "rl"), microbatches=case.microbatches)

  for name in names:
    if name == "train":
      step = make_rl_step(learner, c.objective, tx, critic)
      arguments = state, batch_of(case, mesh, case.sequences)
      work = case.work(case.model, case.sequences * c.models)
      yield name, Program(step, arguments, work, trains=True, resident=(frozen,))
    if name == "score":
      inputs = batch_of(case, mesh, case.scored).inputs
      resident = state.opt_state, sample_params, state.critic, frozen
      work = case.work(case.model, case.scored)
      yield name, Program(make_score(learner), (state.params, inputs), work, resident=resident)
      if taught is not None:
        resident = state, sample_params, {n: x for n, x in frozen.items() if n != "teacher"}
        score, work = teacher.scoring(taught, learner), case.work(taught.model, case.scored)
        yield "teacher", Program(score, (frozen["teacher"], inputs), work, resident=resident)
    if name == "publish":
      layout = jax.tree.map(lambda x: x.sharding, sample_params)
      table = transformer.sampler_table(c.model, case.engine.weights_dtype)
      read = weights.dtypes(table, c.sampler_compute.dtype)
      publish = publication.publisher(layout, read)
      resident = state.opt_state, state.critic, frozen
      yield name, Program(publish, (state.params,), None, resident=resident)
    if name in ("prefill", "decode"):
      program = sampling_program(name, case, mesh, sample_params)
      yield name, dataclasses.replace(program, resident=(state, frozen))


def sampling_state(case: Case, load: Workload, mesh: jax.sharding.Mesh, params: Any) -> Any:
  """Returns shapes and shardings of (decoding parameters, cache with queue and slots).

  params: shapes and shardings of the sampler's weights.
  """
  model, engine, stop_ids = case.model, case.engine, len(load.stop_ids)
  size = sizes(load, engine, sharding.batch_shards(mesh))
  with use_mesh(mesh):
    params = jax.eval_shape(lambda p: transformer.decoding_params(p, model), params)
    create = functools.partial(slots.new_state, model, params.depths, size)
    state = jax.eval_shape(lambda: create(stop_ids=stop_ids, dtype=engine.cache_dtype))
  return jax.tree.map(lambda x: shaped(x.shape, x.dtype, mesh, x.sharding.spec), (params, state))


def sampling_program(name: str, case: Case, mesh, params: Any) -> Program:
  """Returns the program "prefill" for the longest prompts, or "decode" for all slots.

  params: shapes and shardings of the sampler's weights.
  """
  c, engine, workload = case.config, case.engine, case.workload
  shards = sharding.batch_shards(mesh)
  options = dict(model=c.model, compute=c.sampler_compute, record_routing=workload.record_routing)
  size = sizes(workload, engine, shards)
  params, state = sampling_state(case, workload, mesh, params)
  if name == "decode":
    sampled = dict(steps=engine.steps, sampling=workload.sampling, width=workload.support)
    step = functools.partial(slots.decode, **sampled, **options)
    # On GPUs, the compiled products are those of whole windows.
    keys = size.window if sharding.platform() == "gpu" else round(case.filled)
    work = flops.work(case.model, size.slots * engine.steps, 1, keys, decoding=True)
    arguments = params, state, shaped((size.slots,), jnp.int32, mesh, P())
    # Mean number of a device's slots that take a new prefix in a step. A slot takes one prefix per
    # response.
    refills = size.slots / shards / case.lengths.mean
    # Fraction of a slot's window that attention reads; the last page is half full in the mean.
    filled = (case.filled + size.page / 2) / size.window
    rates = dict(refill=refills, paged_attention=filled, cache_attention=filled)
    return Program(
      jax.jit(step, donate_argnums=1),
      arguments,
      work,
      rates=rates,
      slot_kernel="paged_attention",
      steps=engine.steps,
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
  """Returns the abstract batch of an update.

  The batch has the arrays that the run's passes fill, except those that are merged into the
  advantages. The sequences of a group may share their prompt (`packing.shares`).

  rows: number of sequences.
  """

  def field(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return shaped((rows, *shape), dtype, mesh, P(BATCH))

  c, model, width = case.config, case.model, case.workload.support
  tokens, real = field(jnp.int32, case.length), field(jnp.float32, case.length)
  place = field(jnp.int32) if c.rl.packed else None
  together = math.gcd(case.group_size, rows // sharding.batch_shards(mesh))
  shared = place if packing.shares(case.length, c.sampling.max_new_tokens, together) else None
  experts = None
  if c.objective.replay != "none":
    layers = model.num_moe_layers
    stored = routing.storage_dtype(model.num_experts)
    experts = field(stored, case.length, layers, model.experts_per_token)
  filled = {name for declared in passes.iteration_passes(c) for name in declared.fills}
  batch = TrainBatch(
    ModelInputs(
      tokens_BT=tokens,
      segments_BT=tokens,
      sampler_experts_BTlk=experts,
      support_BTX=field(jnp.int32, case.length, width) if width else None,
      prompt_B=shared,
      places=Places(place, place, place, shared, shared) if c.rl.packed else None,
    ),
    mask_BT=real,
    advantage_B=field(jnp.float32),
    old_logp_BT=real,
    sampler_logp_BT=real,
    advantage_BT=None if c.estimator.by_response else real,
    mixed_B=field(jnp.bool_) if c.kl_by_group else None,
    unit_BT=tokens if c.objective.segment_unit else None,
    first_B=field(jnp.bool_),
    old_experts_BTlk=experts,
    critic_targets=CriticTargets(return_BT=real if "old_value_BT" in filled else None),
    metric_inputs=MetricInputs(
      current_BT=real if c.rl.partial or c.rl.lag or c.job == "offline" else None,
      age_B=field(jnp.int32) if c.rl.lag else None,
    ),
  )
  # The experts are set above if the objective replays them. A teacher's log-probs and the values of
  # last states are merged into the advantages before an update.
  excluded = {"old_experts_BTlk", "teacher_logp_BT", "last_value_B"}
  return batch.with_fields(**dict.fromkeys(filled - excluded, real))


def shaped(shape: tuple[int, ...], dtype, mesh, pspec: P) -> jax.ShapeDtypeStruct:
  """Returns an abstract array with a sharding."""
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, pspec))
