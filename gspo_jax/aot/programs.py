"""The programs of a run, with the shapes and layouts of their arguments and no values."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from gspo_jax import config as configuration
from gspo_jax import sharding
from gspo_jax.learner import optimizer
from gspo_jax.learner import step as train_step
from gspo_jax.learner.state import abstract_params, abstract_state
from gspo_jax.models import cache as kv_cache
from gspo_jax.models import flops, lora, routing, transformer
from gspo_jax.sampling import slots
from gspo_jax.sharding import BATCH, P
from gspo_jax.structs import TrainBatch

PROGRAMS = ("train", "score", "publish", "prefill", "decode")


@dataclasses.dataclass(frozen=True)
class Case:
  """A configuration at one batch shape."""

  config: configuration.RunConfig
  sequences: int  # per update
  microbatches: int
  length: int

  @property
  def model(self):
    return self.config.model

  @property
  def rows(self) -> int:
    """Sequences at once: of a micro-batch, of a scoring pass and of decoding."""
    return self.sequences // self.microbatches


@dataclasses.dataclass(frozen=True)
class Program:
  function: Callable
  arguments: tuple[Any, ...]
  work: flops.Work | None  # None: moves data only
  trains: bool = False


def make_case(config: configuration.RunConfig, sequences: int = 0, length: int = 0) -> Case:
  """The configured batch, or `sequences` x `length` in one micro-batch."""
  rl = config.rl
  return Case(
    config,
    sequences or rl.prompts * rl.group_size // rl.minibatches,
    1 if sequences else rl.microbatches,
    length or config.data.max_prompt_tokens + config.sampling.max_new_tokens,
  )


def programs(case: Case, mesh, names: list[str]) -> Iterator[tuple[str, Program]]:
  """The jitted functions of a run with the shapes and shardings of their arguments."""
  c = case.config
  adapters = c.rl.lora_rank, c.compute.dtype
  tx = optimizer.make(c.rl_optimizer, c.rl.iterations * c.rl.minibatches)
  state = abstract_state(c.model, mesh, tx, *adapters)
  sample_params = abstract_params(c.model, mesh, sharding.ROLLOUT, c.compute.dtype)
  learner = dataclasses.replace(c.learner("rl"), microbatches=case.microbatches)
  for name in names:
    if name == "train":
      step = train_step.make_rl_step(learner, c.objective, tx)
      work = flops.work(case.model, case.sequences, case.length, case.length)
      yield name, Program(step, (state, batch_of(case, mesh, case.sequences)), work, trains=True)
    if name == "score":
      # Packed, the pass has micro-batches too.
      rows = case.sequences if c.rl.packed else case.rows
      arguments = state.params, batch_of(case, mesh, rows)
      work = flops.work(case.model, rows, case.length, case.length)
      yield name, Program(train_step.make_score(learner), arguments, work)
    if name == "publish":
      layout = transformer.shardings(c.model, sharding.ROLLOUT, mesh)
      read = transformer.dtypes(c.model, c.compute.dtype)
      publish = sharding.publisher(layout, read, lora.merged)
      yield name, Program(publish, (state.params,), None)
    if name in ("prefill", "decode"):
      yield name, sampling_program(name, case, mesh, sample_params)


def sampling_program(name: str, case: Case, mesh, params: Any) -> Program:
  """Prompts into the queue, as many at once as the sampler takes; or decoding steps of all slots,
  in place."""
  c, rows = case.config, case.rows
  prompt = min(c.data.max_prompt_tokens, case.length // 2)
  options = dict(model=c.model, compute=c.compute, record_routing=c.objective.needs_sampler_routing)
  state = jax.eval_shape(
    lambda: slots.new_state(
      c.model,
      tuple(count for _, count in c.model.runs()),
      slots=rows,
      window=case.length,
      queue=max(sharding.batch_shards(mesh), rows // c.rl.group_size),
      queue_window=prompt,
      stop_ids=1,
      dtype=c.engine.cache_dtype,
    )
  )
  split = lambda x: kv_cache.SPEC if x.ndim == 5 else P(BATCH)  # noqa: E731
  state = jax.tree.map(lambda x: shaped(x.shape, x.dtype, mesh, split(x)), state)
  if name == "decode":
    whole = dataclasses.replace(c.sampling, top_k=0, top_p=1.0, min_p=0.0)
    step = functools.partial(slots.decode, steps=1, sampling=whole, **options)
    work = flops.work(case.model, rows, 1, case.length)
    cancelled = shaped((rows,), jnp.int32, mesh, P())
    return Program(jax.jit(step, donate_argnums=1), (params, state, cancelled), work)
  prompts = max(1, c.engine.prefill_tokens // prompt) * sharding.batch_shards(mesh)
  by_row = lambda *shape: shaped((prompts, *shape), jnp.int32, mesh, P(BATCH))  # noqa: E731
  fields = jax.tree.map(
    lambda x: shaped((prompts, *x.shape[1:]), x.dtype, mesh, P(BATCH)), state.queue
  )
  fill = functools.partial(slots.prefill, piece=c.engine.prefill_tokens, **options)
  arguments = params, state, by_row(prompt), fields, by_row(), by_row()
  work = flops.work(case.model, prompts, prompt, prompt, heads=1)
  return Program(jax.jit(fill, donate_argnums=1), arguments, work)


def batch_of(case: Case, mesh, rows: int) -> TrainBatch:
  """A batch without shared prompts, for any length: the most that a run needs."""
  field = lambda dtype, *more: shaped((rows, *more), dtype, mesh, P(BATCH))  # noqa: E731
  tokens, real = field(jnp.int32, case.length), field(jnp.float32, case.length)
  experts, model = None, case.model
  if case.config.objective.replay != "none":
    layers = sum(model.is_moe(layer) for layer in range(model.num_layers))
    stored = routing.storage_dtype(model.num_experts)
    experts = field(stored, case.length, layers, model.experts_per_token)
  place = field(jnp.int32) if case.config.rl.packed else None
  return TrainBatch(
    tokens_BT=tokens,
    segments_BT=tokens,
    mask_BT=real,
    advantage_B=field(jnp.float32),
    old_logp_BT=real,
    sampler_logp_BT=real,
    current_BT=real if case.config.rl.partial else None,
    ref_logp_BT=real if case.config.objective.kl_coef else None,
    first_B=field(jnp.bool_),
    routing_BTlk=experts,
    sampler_routing_BTlk=experts,
    row_B=place,
    start_B=place,
    order_B=place,
  )


def shaped(shape: tuple[int, ...], dtype, mesh, pspec: P) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, pspec))
