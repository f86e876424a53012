"""Continuous batching on the device: a fixed number of self-refilling slots.

A slot is one row of the decoding batch. It holds a response, and decodes one token of this response
in each step. A queue on the device holds *prefixes*. A prefix is a prompt, or the tokens of a
trajectory so far. Its keys and values are computed in advance. Once a response ends, the slot takes
the next response to a prefix in the queue (refill.py). This happens inside the decoding loop,
without the host. While the devices decode, `scheduler` collects sampled tokens on the host, and
starts the prefill of further prefixes.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.models import transformer
from gspo_jax.models.attention import cache as kv_cache
from gspo_jax.models.attention import pages
from gspo_jax.models.attention.cache import Cache
from gspo_jax.models.attention.pages import Pages
from gspo_jax.models.experts import routing
from gspo_jax.models.head import NO_TOKEN
from gspo_jax.sampling.local.refill import refill, release
from gspo_jax.sampling.requests import Sizes
from gspo_jax.sampling.sampler import PRNG, mask_beyond, sample, support, temper
from gspo_jax.settings.model import ComputeConfig, ModelConfig
from gspo_jax.settings.sampling import SamplingConfig
from gspo_jax.sharding import BATCH, P


@flax.struct.dataclass
class Rows:
  """State of B responses in slots, or of B prefixes in the queue.

  The row of a prefix has the values with which its next response starts. The last token of a prefix
  is not in the cache, since decoding starts with this token as input.
  """

  token_B: Any  # Next input token, int32.
  position_B: Any  # Position of the next input token from the start of the prompt, int32.
  start_B: Any  # Position of the first token after the prompt, int32.
  remaining_B: Any  # Maximum number of tokens still to sample, int32; 0 for a free slot.
  seed_B: Any  # Seed of the request, uint32. Seed, prompt and sample determine the PRNG key.
  prompt_B: Any  # Hash of the prompt, uint32.
  sample_B: Any  # Number of the response among those to the prompt, int32.
  stop_BX: Any  # Token ids that end the response, int32, padded with -1.
  id_B: Any  # The scheduler's id of the response, int32.

  @classmethod
  def zeros(cls, count: int, stop_ids: int, np: Any) -> "Rows":
    """Returns `count` rows of zeros, as arrays of module `np` (numpy or `jax.numpy`)."""
    rows = {field.name: np.zeros(count, np.int32) for field in dataclasses.fields(cls)}
    rows |= {name: np.zeros(count, np.uint32) for name in ("seed_B", "prompt_B")}
    return cls(**rows | dict(stop_BX=np.zeros((count, stop_ids), np.int32)))


@flax.struct.dataclass
class State:
  """State of decoding: W slots, and a queue of R prefixes. Both are split over the devices."""

  slots: Rows  # W responses, one in each slot.
  key_W2: Any  # Key data of the responses' PRNG keys, uint32.
  cache: Cache | Pages  # Keys and values of W windows.
  queue: Rows  # R prefixes; `sample_B` and `id_B` belong to the next response.
  staged: Any  # Dense cache of the R prefixes, or their page table if the cache is paged.
  staged_states: Any  # States of R prefixes in linear layers, if the cache is paged; else ().
  waiting_R: Any  # Number of each prefix's responses still to start, int32; 0 for a free entry.


@flax.struct.dataclass
class Sampled:
  """Results of a `decode` call of up to n steps in W slots, replicated on all hosts.

  `waiting_R`, `live_W` and `free_d` describe the state after the last step.
  """

  id_nW: Any  # Id of the response in the slot, int32; -1 for a free slot.
  token_nW: Any  # Sampled token, int32.
  logp_nW: Any  # Log-prob under the sampling distribution, float32.
  full_logp_nW: Any  # Log-prob without top-k, top-p and min-p, float32.
  experts_nWlk: Any  # Experts chosen for the step's input token; None if not recorded.
  support_nWX: Any = None  # Tokens in the sampling distribution, int32; None if not recorded.
  steps: Any = None  # Number of steps run, int32 []; below n if all responses ended.
  waiting_R: Any = None  # `State.waiting_R`.
  # Ids of the unfinished responses in slots, int32, -1 for a free slot; None for a dense cache.
  live_W: Any = None
  free_d: Any = None  # Number of free pages of each shard, int32; None for a dense cache.


@functools.partial(jax.jit, static_argnames=("model", "layers", "size", "stop_ids", "dtype"))
def new_state(
  model: ModelConfig, layers: tuple[int, ...], size: Sizes, *, stop_ids: int, dtype: Any
) -> State:
  """Returns a state with free slots and an empty queue.

  Args:
    model: configuration of the model.
    layers: number of layers in each stacked block of the parameters.
    size: shapes of slots, queue and cache.
    stop_ids: maximum number of stop token ids of a response.
    dtype: dtype of cached keys and values.
  """

  def split(tree: Any) -> Any:
    return jax.tree.map(lambda x: sharding.reshard(x, P(BATCH)), tree)

  slots, queue = size.slots, size.entries * size.shards
  if size.pages:
    pool = size.pages * size.shards
    cache = pages.allocate(model, slots, size.window, pool, size.page, dtype, layers)
    staged = pages.no_pages(queue, -(-size.prefix // size.page))
    blocks = kv_cache.blocks(model, layers)
    states = tuple(kv_cache.allocate_states(model, l, queue) for kind, l in blocks if kind.linear)
  else:
    cache = kv_cache.allocate(model, slots, size.window, dtype, layers)
    staged, states = kv_cache.allocate(model, queue, size.prefix, dtype, layers), ()
  return State(
    slots=split(Rows.zeros(slots, stop_ids, jnp)),
    key_W2=split(jnp.zeros((slots, 2), jnp.uint32)),
    cache=cache,
    queue=split(Rows.zeros(queue, stop_ids, jnp)),
    staged=staged,
    staged_states=states,
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
  """Prefills prefixes and adds them to the queue.

  Args:
    tokens_rT: r prefixes without their last tokens, right-padded.
    rows: the prefixes' entries in the queue.
    waiting_r: number of responses to each prefix.
    entry_r: index of each prefix's entry in the device's part of the queue. An index beyond the
      end of this part marks a padding row, without a prefix.
    piece: maximum number of a prefix's tokens in one forward pass. Longer prefixes take several
      passes.
    record_routing: whether to return the chosen experts.

  Returns:
    The new state, and the experts [r, T, l, k] of `tokens_rT`, replicated on all hosts. The experts
    are None if `record_routing` is False, or if the model has no experts.
  """
  (r, T), layers = tokens_rT.shape, params.depths
  cache = kv_cache.allocate(model, r, T, state.cache.dtype, layers)
  real_rT = (jnp.arange(T)[None] < rows.position_B[:, None]).astype(jnp.int32)
  run = functools.partial(transformer.forward, params, model, compute=compute)
  if piece >= T:
    out = run(tokens_rT, segments=real_rT, cache=cache)
    cache, experts_lrTk = out.cache, out.routing_lBTk
  else:
    positions_rT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (r, T))

    def split_pieces(x_rT):
      return jnp.swapaxes(x_rT.reshape(r, T // piece, piece), 0, 1)

    def prefill_piece(cache, part):
      tokens, positions, segments = part
      out = run(tokens, positions=positions, segments=segments, cache=cache)
      return out.cache, out.routing_lBTk

    positions_rT = sharding.reshard(positions_rT, P(BATCH))
    parts = tuple(map(split_pieces, (tokens_rT, positions_rT, real_rT)))
    cache, experts_jlrpk = jax.lax.scan(prefill_piece, cache, parts)
    experts_lrTk = None
    if record_routing and experts_jlrpk is not None:
      experts_lrTk = jnp.concatenate(list(experts_jlrpk), axis=2)

  state = _on_each_device(_stage, state, rows, waiting_r, entry_r, cache, like=state)
  experts = None
  if record_routing and experts_lrTk is not None:
    experts = sharding.reshard(routing.by_row(experts_lrTk, model.num_experts), P())
  return state, experts


def _stage(state: State, rows: Rows, waiting_r, entry_r, cache: Cache) -> State:
  """Adds prefilled prefixes to the queue, in one device's part of the state."""

  def set_rows(old, new):
    return old.at[entry_r].set(new, mode="drop")

  if isinstance(state.cache, Pages):
    state = release(state)
    length_r = jnp.where(entry_r < len(state.waiting_R), rows.position_B, 0)
    pool, table_rn, fits_r = pages.insert(state.cache, cache, length_r, state.staged)
    missing = state.staged.shape[1] - table_rn.shape[1]
    table_rn = jnp.pad(table_rn, ((0, 0), (0, missing)), constant_values=pages.NONE)
    # A prefix that does not fit into the free pages is displaced, and the host submits it again.
    waiting_r = jnp.where(fits_r, waiting_r, 0)
    states = kv_cache.insert(state.staged_states, pages.states_of(cache.blocks), entry_r)
    state = state.replace(cache=pool, staged=set_rows(state.staged, table_rn), staged_states=states)
  else:
    state = state.replace(staged=kv_cache.insert(state.staged, cache, entry_r))
  return state.replace(
    queue=jax.tree.map(set_rows, state.queue, rows), waiting_R=set_rows(state.waiting_R, waiting_r)
  )


@functools.partial(
  jax.jit,
  static_argnames=(
    "steps",
    "sampling",
    "model",
    "compute",
    "record_routing",
    "width",
    "vocabulary",
  ),
  donate_argnames="state",
)
def decode(
  params: transformer.Params,
  state: State,
  cancelled_W: jax.Array,  # Ids of responses to end before the first step, padded with -1.
  *,
  steps: int,
  sampling: SamplingConfig,
  model: ModelConfig,
  compute: ComputeConfig,
  record_routing: bool,
  width: int = 0,  # Maximum number of tokens of a recorded support; 0 to record no support.
  vocabulary: int = 0,  # Exclusive upper bound on sampled token ids; 0 for no bound.
) -> tuple[State, Sampled]:
  """Decodes up to `steps` tokens in every slot; ends early once slots and queue are empty."""
  W = state.slots.id_B.shape[0]
  slots = state.slots
  cancelled_B = (slots.id_B[:, None] == cancelled_W[None]).any(1)
  state = state.replace(
    slots=slots.replace(remaining_B=jnp.where(cancelled_B, 0, slots.remaining_B))
  )

  def full_steps(value, dtype, *shape):
    return sharding.reshard(jnp.full((steps, W, *shape), value, dtype), P(None, BATCH))

  out = Sampled(
    id_nW=full_steps(-1, jnp.int32),
    token_nW=full_steps(0, jnp.int32),
    logp_nW=full_steps(0, jnp.float32),
    full_logp_nW=full_steps(0, jnp.float32),
    experts_nWlk=None,
  )
  if record_routing and model.num_experts:
    dtype, k = routing.storage_dtype(model.num_experts), model.experts_per_token
    out = out.replace(experts_nWlk=full_steps(routing.NO_EXPERT, dtype, model.num_moe_layers, k))
  if width:
    out = out.replace(support_nWX=full_steps(NO_TOKEN, jnp.int32, width))

  def continues(carry):
    i, state, _ = carry
    return (i < steps) & ((state.slots.remaining_B.max() > 0) | (state.waiting_R.max() > 0))

  def step(carry):
    i, state, out = carry
    state = _on_each_device(refill, state, like=state)
    slots, cache, sampled = _next_token(params, state, sampling, model, compute, width, vocabulary)
    if out.experts_nWlk is None:
      sampled = sampled.replace(experts_nWlk=None)

    def write(x, value):
      return jax.lax.dynamic_update_index_in_dim(x, value, i, 0)

    return i + 1, state.replace(slots=slots, cache=cache), jax.tree.map(write, out, sampled)

  i, state, out = jax.lax.while_loop(continues, step, (jnp.zeros((), jnp.int32), state, out))
  out = out.replace(steps=i, **_report(state))
  return state, jax.tree.map(lambda x: sharding.reshard(x, P()), out)


def _next_token(
  params, state: State, sampling, model, compute, width, vocabulary
) -> tuple[Rows, Cache, Sampled]:
  """Runs one decode step of all slots; returns slots, cache and results."""
  s = state.slots
  active_B = s.remaining_B > 0
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
  key_B = jax.random.wrap_key_data(state.key_W2, impl=PRNG)
  next_B = s.position_B + 1
  support_BX = None
  if width:
    support_BX = support(mask_beyond(temper(logits_BV, sampling), vocabulary), sampling)
  token_B, logp_B, full_logp_B = sample(
    logits_BV, key_B, next_B - s.start_B, sampling, support_BX, vocabulary
  )
  stopped_B = (token_B[:, None] == s.stop_BX).any(1)
  experts_Blk = None
  if out.routing_lBTk is not None:
    experts_Blk = routing.by_row(out.routing_lBTk, model.num_experts)[:, 0]
  id_B = jnp.where(active_B, s.id_B, -1)
  sampled = Sampled(id_B, token_B, logp_B, full_logp_B, experts_Blk, support_BX)
  slots = s.replace(
    token_B=token_B,
    position_B=jnp.where(active_B, next_B, s.position_B),
    remaining_B=jnp.where(active_B & ~stopped_B, s.remaining_B - 1, 0),
  )
  return slots, out.cache, sampled


def _report(state: State) -> dict[str, Any]:
  """Returns the fields of `Sampled` about the state after the steps."""
  if not isinstance(state.cache, Pages):
    return dict(waiting_R=state.waiting_R)

  def free(state):
    state = release(state)
    return pages.free(state.cache, state.staged).sum(keepdims=True)

  live_W = jnp.where(state.slots.remaining_B > 0, state.slots.id_B, -1)
  free_d = _on_each_device(free, state, like=state.waiting_R)
  return dict(waiting_R=state.waiting_R, live_W=live_W, free_d=free_d)


def specs(tree: Any) -> Any:
  """Returns the PartitionSpec of each array. Only a cache has arrays with more than four axes."""
  return jax.tree.map(lambda x: kv_cache.spec(x) if x.ndim > 4 else P(BATCH), tree)


def _on_each_device(f, *arguments, like):
  """Applies `f` to each device's part of the arguments.

  Results have the structure and layout of `like`.
  """
  return sharding.shard_map(f, in_specs=specs(arguments), out_specs=specs(like))(*arguments)
