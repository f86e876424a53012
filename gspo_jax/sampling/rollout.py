"""Prompts × group -> Rollout: one prefill per prompt, then a jitted decoding loop."""

import dataclasses
import functools
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import sharding
from gspo_jax.models import cache as kv_cache
from gspo_jax.models import routing, transformer
from gspo_jax.models.sizes import REFERENCE, ComputeConfig, ModelConfig
from gspo_jax.sampling.sampler import SamplingConfig, row_keys, sample
from gspo_jax.sharding import BATCH, P
from gspo_jax.structs import Rollout


def generate(
  params: transformer.Params,
  model_config: ModelConfig,
  prompts: Sequence[Sequence[int]],
  *,
  group_size: int,
  max_new_tokens: int,
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
  stop_ids: tuple[int, ...] = (),
  seed: int = 0,
  pad_id: int = 0,
  prompt_length: int | None = None,
  record_routing: bool = False,
  compute: ComputeConfig = REFERENCE,
) -> Rollout:
  """Samples `group_size` responses to every prompt; rows in the prompts' order, G per prompt.

  A token depends on the weights, `seed`, its prompt's tokens, its index in the group and its
  position, and on nothing else that is in the batch. Under a mesh (`jax.set_mesh`) the rows are
  split over its batch axes.

  Args:
    prompts: token ids, none empty.
    temperature: 0 is greedy.
    stop_ids: tokens that end a response; they belong to it.
    prompt_length: pad prompts to this length, so that batches of several lengths share one
      compilation. Default: the longest of these.
    record_routing: keep the experts that prefill and decoding used, in `Rollout.routing`: one or
      two bytes per token, layer and chosen expert.

  Raises:
    ValueError: an empty prompt, one longer than `prompt_length`, or more positions than the model
      was made for.
  """
  config = SamplingConfig(temperature, top_k, top_p, max_new_tokens)
  lengths_P = np.array([len(p) for p in prompts], np.int32)
  prompt_length = int(lengths_P.max(initial=1)) if prompt_length is None else prompt_length
  _check(lengths_P, prompt_length, group_size, max_new_tokens, model_config)

  rows = _padded_rows(len(prompts))
  tokens_PT = np.full((rows, prompt_length), pad_id, np.int32)
  for row, prompt in enumerate(prompts):
    tokens_PT[row, : len(prompt)] = prompt
  hash_P = np.array([zlib.crc32(np.asarray(p, "<i4").tobytes()) for p in prompts], np.uint32)
  pad = rows - len(prompts)
  lengths = np.pad(lengths_P, (0, pad), constant_values=1)
  out = _generate(
    params,
    _put_rows(tokens_PT),
    _put_rows(lengths),
    _put_rows(np.pad(hash_P, (0, pad))),
    seed,
    model_config=model_config,
    compute=compute,
    config=config,
    group_size=group_size,
    stop_ids=tuple(stop_ids),
    record_routing=record_routing,
  )
  sampled, routes = sharding.fetch(out)
  B = len(prompts) * group_size
  rollout = _assemble(prompts, lengths_P, group_size, *(x[:B] for x in sampled), pad_id)
  if routes is None:
    return rollout
  return dataclasses.replace(rollout, routing=_assemble_routing(rollout, group_size, *routes))


def _check(lengths_P, prompt_length, group_size, max_new_tokens, model_config):
  if not len(lengths_P) or group_size < 1:
    raise ValueError(f"{len(lengths_P)} prompts × group_size={group_size}: nothing to sample")
  if lengths_P.min() < 1:
    raise ValueError(f"prompt {int(lengths_P.argmin())} is empty: a prompt has at least one token")
  if lengths_P.max() > prompt_length:
    raise ValueError(
      f"prompt {int(lengths_P.argmax())} has {lengths_P.max()} tokens, more than the window of "
      f"prompt_length={prompt_length}"
    )
  if prompt_length + max_new_tokens > model_config.max_position_embeddings:
    raise ValueError(
      f"prompt_length={prompt_length} + max_new_tokens={max_new_tokens} exceed the model's "
      f"max_position_embeddings={model_config.max_position_embeddings}"
    )


def _padded_rows(rows: int) -> int:
  """Rows, rounded up to what the mesh's batch axes divide."""
  if sharding.without_mesh():
    return rows
  shards = sharding.batch_shards(jax.sharding.get_mesh())
  return -(-rows // shards) * shards


def _put_rows(x: np.ndarray) -> jax.Array:
  if sharding.without_mesh():
    return jnp.asarray(x)
  return sharding.put_batch(x, jax.sharding.get_mesh())


STATIC = ("model_config", "compute", "config", "group_size", "stop_ids", "record_routing")


@functools.partial(jax.jit, static_argnames=STATIC)
def _generate(
  params,
  tokens_PT,
  lengths_P,
  hash_P,
  seed,
  *,
  model_config,
  compute,
  config,
  group_size,
  stop_ids,
  record_routing,
):
  """Sampled tokens [B, n], their log-probs, how many are real, and whether they stopped; and, where
  asked for, the routes [P, T, l, k] of the prompts and [B, n, l, k] of what was sampled."""
  P_, T = tokens_PT.shape
  B, n = P_ * group_size, config.max_new_tokens
  by_row = P(BATCH)

  # Prefill each prompt once; its group shares the outcome.
  cache = kv_cache.allocate(model_config, P_, T + n, jnp.dtype(compute.dtype))
  segments = (jnp.arange(T)[None] < lengths_P[:, None]).astype(jnp.int32)
  out = transformer.forward(
    params, model_config, tokens_PT, segments=segments, cache=cache, compute=compute
  )
  last = jnp.arange(T)[None, :, None] == lengths_P[:, None, None] - 1
  hidden_PD = jnp.sum(jnp.where(last, out.hidden_BTD, 0), axis=1)
  logits_PV = _logits(params, hidden_PD, compute)

  def to_group(x):
    grouped = jnp.broadcast_to(x[:, None], (P_, group_size, *x.shape[1:]))
    return grouped.reshape(B, *x.shape[1:])

  cache = kv_cache.repeat(out.cache, group_size)
  lengths_B = to_group(lengths_P)
  sample_B = sharding.reshard(jnp.arange(B) % group_size, by_row)
  keys_B = row_keys(seed, to_group(hash_P), sample_B)
  is_stop = lambda token: jnp.isin(token, jnp.array(stop_ids, jnp.int32))  # noqa: E731

  token_B, logp_B = sample(to_group(logits_PV), keys_B, jnp.zeros_like(lengths_B), config)
  zeros = lambda dtype: sharding.reshard(jnp.zeros((B, n), dtype), by_row)  # noqa: E731
  write = lambda x, value, i: jax.lax.dynamic_update_slice(x, value[:, None], (0, i))  # noqa: E731
  state = dict(
    i=jnp.ones((), jnp.int32),
    cache=cache,
    token=token_B,
    done=is_stop(token_B),
    tokens=write(zeros(jnp.int32), token_B, 0),
    logp=write(zeros(jnp.float32), logp_B, 0),
    count=jnp.ones_like(lengths_B),
    routing=None,
  )
  prompt_routing = None
  if record_routing and out.routing_lBTk is not None:
    prompt_routing = routing.by_row(out.routing_lBTk, segments, model_config.num_experts)
    _, _, l, k = prompt_routing.shape
    nothing = jnp.full((B, n, l, k), routing.NO_ROUTE, prompt_routing.dtype)
    state["routing"] = sharding.reshard(nothing, by_row)

  def running(s):
    return (s["i"] < n) & ~jnp.all(s["done"])

  def step(s):
    position_B = lengths_B + s["i"] - 1
    out = transformer.forward(
      params,
      model_config,
      s["token"][:, None],
      positions=position_B[:, None],
      cache=s["cache"],
      compute=compute,
    )
    logits_BV = _logits(params, out.hidden_BTD[:, 0], compute)
    token_B, logp_B = sample(logits_BV, keys_B, jnp.full_like(lengths_B, s["i"]), config)
    active = ~s["done"]
    routes = s["routing"]
    if routes is not None:  # of the token that was fed: the one before token i
      route_B1lk = routing.by_row(out.routing_lBTk, None, model_config.num_experts)
      routes = jax.lax.dynamic_update_slice(routes, route_B1lk, (0, s["i"] - 1, 0, 0))
    return dict(
      i=s["i"] + 1,
      cache=out.cache,
      token=token_B,
      done=s["done"] | is_stop(token_B),
      tokens=write(s["tokens"], token_B, s["i"]),
      logp=write(s["logp"], logp_B, s["i"]),
      count=s["count"] + active.astype(jnp.int32),
      routing=routes,
    )

  s = jax.lax.while_loop(running, step, state)
  routes = None if prompt_routing is None else (prompt_routing, s["routing"])
  return (s["tokens"], s["logp"], s["count"], s["done"]), routes


def _logits(params, hidden_BD, compute):
  logits_BTV = transformer.head_logits(params, hidden_BD[:, None], compute)
  return sharding.reshard(logits_BTV, P(BATCH))[:, 0]


def _assemble(
  prompts, lengths_P, group_size, sampled_BT, logp_BT, count_B, stopped_B, pad_id
) -> Rollout:
  """Prompt then response in one row, right-padded."""
  B, n = sampled_BT.shape
  lengths_B = np.repeat(lengths_P, group_size)
  L = int(lengths_P.max()) + n
  tokens = np.full((B, L), pad_id, np.int32)
  for row, prompt in enumerate(prompts):
    tokens[row * group_size : (row + 1) * group_size, : len(prompt)] = prompt
  column = np.arange(L)[None] - lengths_B[:, None]  # index within the response
  inside = (column >= 0) & (column < count_B[:, None])
  source = np.clip(column, 0, n - 1)
  tokens = np.where(inside, np.take_along_axis(sampled_BT, source, 1), tokens)
  logp = np.where(inside, np.take_along_axis(logp_BT, source, 1), 0).astype(np.float32)
  return Rollout(
    tokens=tokens,
    mask=inside.astype(np.float32),
    logp=logp,
    prompt_lengths=lengths_B,
    lengths=count_B.astype(np.int32),
    stopped=stopped_B.astype(bool),
  )


def _assemble_routing(
  rollout: Rollout, group_size: int, prompt_PTlk: np.ndarray, sampled_BTlk: np.ndarray
) -> np.ndarray:
  """The routes of prompt and response, laid out as `rollout.tokens`.

  The last token of a response was never fed to the sampler: it has no route, and needs none, since
  nothing is predicted from it.
  """
  shape = (*rollout.tokens.shape, *sampled_BTlk.shape[2:])
  out = np.full(shape, routing.NO_ROUTE, sampled_BTlk.dtype)
  for row, (start, length) in enumerate(zip(rollout.prompt_lengths, rollout.lengths)):
    out[row, :start] = prompt_PTlk[row // group_size, :start]
    out[row, start : start + length - 1] = sampled_BTlk[row, : length - 1]
  return out
