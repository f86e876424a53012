"""Continuous batching on the device: a fixed number of slots that refill themselves.

Two sets of rows live there. Slots decode, one token per step each. The queue holds prefixes that
are prefilled and wait; a slot whose response has ended takes the next one within the decoding loop
itself, with a copy of the keys and values, so that no slot waits for the host. `scheduler` is the
host's side: it takes out what was sampled and prefills while the devices decode on.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.models import cache as kv_cache
from gspo_jax.models import routing, transformer
from gspo_jax.models.cache import Cache
from gspo_jax.models.sizes import ComputeConfig, ModelConfig
from gspo_jax.sampling.sampler import SamplingConfig, row_key, sample
from gspo_jax.sharding import BATCH, P


@flax.struct.dataclass
class Rows:
  """Responses, or prefixes to start responses from; each has a row of a cache.

  The last token of a prefix is not in the cache: decoding starts by feeding it.
  """

  token_B: Any  # int32: to be fed next
  position_B: Any  # int32: its position, counted from the start of the prompt
  start_B: Any  # int32: position of the first token of the response
  left_B: Any  # int32: tokens that may still be sampled; 0: nothing goes on here
  seed_B: Any  # uint32
  prompt_B: Any  # uint32: hash of the prompt
  sample_B: Any  # int32: its number, of the responses to this prompt
  stop_BX: Any  # int32: tokens that end the response; -1: none
  id_B: Any  # int32: the host's number of the response


@flax.struct.dataclass
class State:
  slots: Rows  # W responses that are being sampled
  key_W2: Any  # uint32: of their noise
  cache: Cache  # W rows of the whole window
  queue: Rows  # R prefixes; `sample` and `id` are those of the next response
  staged: Cache  # R rows of the longest prefix
  waiting_R: Any  # int32: responses that no slot has taken yet


@flax.struct.dataclass
class Sampled:
  """Tokens of n decode steps, whole on every process. Row i, column w: slot w in step i."""

  id_nW: Any  # int32: the response that the token belongs to; -1: the slot was free
  token_nW: Any  # int32
  logp_nW: Any  # float32: under the distribution that it was drawn from
  full_logp_nW: Any  # float32: under the one without truncation
  route_nWlk: Any  # of the token that was fed; None where nobody asked
  steps: Any = None  # int32 []: how many rows are in use
  waiting_R: Any = None  # int32: of the queue, afterwards


@functools.partial(
  jax.jit,
  static_argnames=(
    "model",
    "layers",
    "slots",
    "window",
    "queue",
    "queue_window",
    "stop_ids",
    "dtype",
  ),
)
def new_state(
  model: ModelConfig,
  layers: tuple[int, ...],
  *,
  slots: int,
  window: int,
  queue: int,
  queue_window: int,
  stop_ids: int,
  dtype: Any,
) -> State:
  """Free slots and an empty queue; `layers` as the blocks of the parameters stack them."""

  def rows(count: int) -> Rows:
    fields = {field.name: jnp.zeros(count, jnp.int32) for field in dataclasses.fields(Rows)}
    for name in ("seed_B", "prompt_B"):
      fields[name] = jnp.zeros(count, jnp.uint32)
    return Rows(**fields | dict(stop_BX=jnp.zeros((count, stop_ids), jnp.int32)))

  split = lambda tree: jax.tree.map(lambda x: sharding.reshard(x, P(BATCH)), tree)  # noqa: E731
  return State(
    slots=split(rows(slots)),
    key_W2=split(jnp.zeros((slots, 2), jnp.uint32)),
    cache=kv_cache.allocate(model, slots, window, dtype, layers),
    queue=split(rows(queue)),
    staged=kv_cache.allocate(model, queue, queue_window, dtype, layers),
    waiting_R=split(jnp.zeros(queue, jnp.int32)),
  )


@functools.partial(
  jax.jit, static_argnames=("model", "compute", "piece", "record_routing"), donate_argnames="state"
)
def prefill(
  params: transformer.Params,
  state: State,
  tokens_rT: jax.Array,
  rows: Rows,
  waiting_r: jax.Array,
  entry_r: jax.Array,
  *,
  model: ModelConfig,
  compute: ComputeConfig,
  piece: int,
  record_routing: bool,
) -> tuple[State, jax.Array | None]:
  """Prefills prefixes, right-padded to one length T, and puts them into the queue.

  entry_r: the place in this device's part of the queue; one beyond its end: nowhere. Of rows longer
  than `piece`, so many tokens go through the model at once, and look back at the cache.

  Returns the state and, if `record_routing`, the experts [r, T, l, k], whole on every process.
  """
  (r, T), layers = tokens_rT.shape, _layers(params)
  cache = kv_cache.allocate(model, r, T, state.staged.dtype, layers)
  real_rT = (jnp.arange(T)[None] < rows.position_B[:, None]).astype(jnp.int32)
  run = functools.partial(transformer.forward, params, model, compute=compute)
  if piece >= T:
    out = run(tokens_rT, segments=real_rT, cache=cache)
    cache, routing_lrTk = out.cache, out.routing_lBTk
  else:
    cut = lambda x_rT: jnp.swapaxes(x_rT.reshape(r, T // piece, piece), 0, 1)  # noqa: E731
    positions_rT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (r, T))

    def go_on(cache, part):
      tokens, positions, segments = part
      out = run(tokens, positions=positions, segments=segments, cache=cache)
      return out.cache, out.routing_lBTk

    parts = (cut(tokens_rT), cut(sharding.reshard(positions_rT, P(BATCH))), cut(real_rT))
    cache, routing_jlrpk = jax.lax.scan(go_on, cache, parts)
    routing_lrTk = None
    if record_routing and routing_jlrpk is not None:
      routing_lrTk = jnp.concatenate(list(routing_jlrpk), axis=2)

  def put(queue, staged, waiting_R, rows, waiting_r, entry_r, cache):
    at = lambda old, new: old.at[entry_r].set(new, mode="drop")  # noqa: E731
    queue, staged = jax.tree.map(at, queue, rows), kv_cache.insert(staged, cache, entry_r)
    return queue, staged, at(waiting_R, waiting_r)

  old = (state.queue, state.staged, state.waiting_R)
  new = (rows, waiting_r, entry_r, cache)
  queue, staged, waiting_R = _on_each_device(put, *old, *new, like=old)
  experts = None
  if record_routing and routing_lrTk is not None:
    experts = sharding.reshard(routing.by_row(routing_lrTk, real_rT, model.num_experts), P())
  return state.replace(queue=queue, staged=staged, waiting_R=waiting_R), experts


@functools.partial(
  jax.jit,
  static_argnames=("steps", "sampling", "model", "compute", "record_routing"),
  donate_argnames="state",
)
def decode(
  params: transformer.Params,
  state: State,
  cancelled_W: jax.Array,
  *,
  steps: int,
  sampling: SamplingConfig,
  model: ModelConfig,
  compute: ComputeConfig,
  record_routing: bool,
) -> tuple[State, Sampled]:
  """Up to `steps` tokens in every slot; it ends early when neither slots nor queue hold anything.

  cancelled_W: ids of responses whose slots are to be freed; -1: none.
  """
  W = state.slots.id_B.shape[0]
  slots = state.slots
  cancelled_B = (slots.id_B[:, None] == cancelled_W[None]).any(1)
  state = state.replace(slots=slots.replace(left_B=jnp.where(cancelled_B, 0, slots.left_B)))

  by_step = lambda x: sharding.reshard(x, P(None, BATCH))  # noqa: E731
  out = Sampled(
    id_nW=by_step(jnp.full((steps, W), -1, jnp.int32)),
    token_nW=by_step(jnp.zeros((steps, W), jnp.int32)),
    logp_nW=by_step(jnp.zeros((steps, W), jnp.float32)),
    full_logp_nW=by_step(jnp.zeros((steps, W), jnp.float32)),
    route_nWlk=None,
  )
  if record_routing and model.num_experts:
    moe_layers = sum(map(model.is_moe, range(model.num_layers)))
    shape = (steps, W, moe_layers, model.experts_per_token)
    nothing = jnp.full(shape, routing.NO_EXPERT, routing.storage_dtype(model.num_experts))
    out = out.replace(route_nWlk=by_step(nothing))

  def going_on(carry):
    i, state, _ = carry
    return (i < steps) & ((state.slots.left_B.max() > 0) | (state.waiting_R.max() > 0))

  def step(carry):
    i, state, out = carry
    state = _on_each_device(_refill, state, like=state)
    slots, cache, taken = _next_token(params, state, sampling, model, compute)
    write = lambda x, value: jax.lax.dynamic_update_index_in_dim(x, value, i, 0)  # noqa: E731
    if out.route_nWlk is None:
      taken = taken.replace(route_nWlk=None)
    return i + 1, state.replace(slots=slots, cache=cache), jax.tree.map(write, out, taken)

  i, state, out = jax.lax.while_loop(going_on, step, (jnp.zeros((), jnp.int32), state, out))
  out = out.replace(steps=i, waiting_R=state.waiting_R)
  return state, jax.tree.map(lambda x: sharding.reshard(x, P()), out)


def _next_token(params, state: State, sampling, model, compute) -> tuple[Rows, Cache, Sampled]:
  """One decoding step of all slots."""
  s = state.slots
  active_B = s.left_B > 0
  out = transformer.forward(
    params,
    model,
    s.token_B[:, None],
    positions=s.position_B[:, None],
    segments=active_B[:, None].astype(jnp.int32),
    cache=state.cache,
    compute=compute,
  )
  logits_BV = transformer.head_logits(params, model, out.hidden_BTD, compute)[:, 0]
  logits_BV = sharding.reshard(logits_BV, P(BATCH))
  key_B = jax.random.wrap_key_data(state.key_W2)
  next_B = s.position_B + 1
  token_B, logp_B, full_logp_B = sample(logits_BV, key_B, next_B - s.start_B, sampling)
  stopped_B = (token_B[:, None] == s.stop_BX).any(1)
  route_Blk = None
  if out.routing_lBTk is not None:
    route_Blk = routing.by_row(out.routing_lBTk, active_B[:, None], model.num_experts)[:, 0]
  sampled = Sampled(jnp.where(active_B, s.id_B, -1), token_B, logp_B, full_logp_B, route_Blk)
  slots = s.replace(
    token_B=token_B,
    position_B=jnp.where(active_B, next_B, s.position_B),
    left_B=jnp.where(active_B & ~stopped_B, s.left_B - 1, 0),
  )
  return slots, out.cache, sampled


def _refill(state: State) -> State:
  """Free slots take what waits in the queue; on each device."""

  def take(_, state):
    w, e = jnp.argmin(state.slots.left_B), jnp.argmax(state.waiting_R)
    queue = state.queue
    key = row_key(queue.seed_B[e], queue.prompt_B[e], queue.sample_B[e])
    return State(
      key_W2=state.key_W2.at[w].set(jax.random.key_data(key)),
      slots=jax.tree.map(lambda x, y: x.at[w].set(y[e]), state.slots, queue),
      cache=kv_cache.copy_row(state.cache, w, state.staged, e),
      queue=queue.replace(sample_B=queue.sample_B.at[e].add(1), id_B=queue.id_B.at[e].add(1)),
      staged=state.staged,
      waiting_R=state.waiting_R.at[e].add(-1),
    )

  free = (state.slots.left_B == 0).sum()
  with jax.named_scope("refill"):  # hlo_costs.py counts it by this name
    return jax.lax.fori_loop(0, jnp.minimum(free, state.waiting_R.sum()), take, state)


def _on_each_device(f, *arguments, like):
  """`f` on each device's rows; its results are laid out as `like`."""

  def specs(tree):
    return jax.tree.map(lambda x: kv_cache.SPEC if x.ndim == 5 else P(BATCH), tree)

  return sharding.shard_map(f, in_specs=specs(arguments), out_specs=specs(like))(*arguments)


def _layers(params: transformer.Params) -> tuple[int, ...]:
  return tuple(block.attention_norm.shape[0] for block in params.blocks)
