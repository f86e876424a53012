"""Sampling of tokens from logits, with their log-probabilities."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.models.head import NO_TOKEN
from gspo_jax.settings.sampling import SamplingConfig
from gspo_jax.sharding import BATCH, P

PRNG = "threefry2x32"  # So tokens do not depend on `jax_default_prng_impl`.


def row_key(seed: jax.Array, prompt: jax.Array, sample: jax.Array) -> jax.Array:
  """Returns a response's PRNG key.

  Args:
    seed: seed of the request.
    prompt: hash of the prompt.
    sample: number of the response among all responses to the prompt, counted from 0.
  """
  key = jax.random.key(seed, impl=PRNG)
  return jax.random.fold_in(jax.random.fold_in(key, prompt), sample)


def temper(logits_BV: jax.Array, config: SamplingConfig) -> jax.Array:
  """Divides logits by the temperature, in float32.

  For greedy decoding, with temperature 0, logits are unchanged.
  """
  return logits_BV.astype(jnp.float32) / (config.temperature or 1.0)


def mask_beyond(logits_BV: jax.Array, vocabulary: int) -> jax.Array:
  """Sets logits of the token ids `vocabulary` and above to -inf.

  Models often have more embeddings than the tokenizer has tokens. If `vocabulary` is 0, all logits
  are unchanged.
  """
  if not 0 < vocabulary < logits_BV.shape[-1]:
    return logits_BV
  return jnp.where(jnp.arange(logits_BV.shape[-1]) < vocabulary, logits_BV, -jnp.inf)


def truncate(logits_BV: jax.Array, config: SamplingConfig) -> jax.Array:
  """Sets logits of tokens outside top-k, top-p and min-p to -inf, in this order.

  Probabilities for top-p are normalised over the tokens inside top-k. Tokens with equal logits are
  either all inside or all outside.
  """
  if config.top_k:
    top_logits = jax.lax.top_k(logits_BV, min(config.top_k, logits_BV.shape[-1]))[0]
    logits_BV = jnp.where(logits_BV < top_logits[:, -1:], -jnp.inf, logits_BV)
  if config.top_p < 1:
    descending = jnp.sort(logits_BV, axis=-1, descending=True)
    p = jax.nn.softmax(descending, axis=-1)
    # A token is inside top-p if the probabilities of all likelier tokens sum to less than top_p.
    inside = jnp.cumsum(p, axis=-1) - p < config.top_p
    least = jnp.min(jnp.where(inside, descending, jnp.inf), axis=-1, keepdims=True)
    logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
  if config.min_p > 0:
    least = jnp.max(logits_BV, axis=-1, keepdims=True) + math.log(config.min_p)
    logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
  return logits_BV


def support(tempered_BV: jax.Array, config: SamplingConfig) -> jax.Array:
  """Returns the token ids inside top-k, top-p and min-p, int32 [B, k].

  k is `config.top_k`, at most V. The ids are in order of falling probability, padded with NO_TOKEN.
  If several tokens tie at rank k, `truncate` keeps all of them, but `support` returns at most k.
  """
  logits_Bk, token_Bk = jax.lax.top_k(tempered_BV, min(config.top_k, tempered_BV.shape[-1]))
  logits_Bk = truncate(logits_Bk, dataclasses.replace(config, top_k=0))
  return jnp.where(logits_Bk > -jnp.inf, token_Bk, NO_TOKEN).astype(jnp.int32)


def mask_outside(logits_BV: jax.Array, support_BX: jax.Array) -> jax.Array:
  """Sets logits of tokens outside the support to -inf.

  Args:
    support_BX: token ids of the support, padded with NO_TOKEN.
  """

  def on_each_device(logits_BV, support_BX):
    B, V = logits_BV.shape
    row_B1 = jnp.arange(B)[:, None]
    logits_BX = logits_BV.at[row_B1, jnp.maximum(support_BX, 0)].get(mode="promise_in_bounds")
    # Index V is out of range, so `set` drops it.
    index_BX = jnp.where(support_BX == NO_TOKEN, V, support_BX)
    return jnp.full_like(logits_BV, -jnp.inf).at[row_B1, index_BX].set(logits_BX, mode="drop")

  run = sharding.shard_map(on_each_device, in_specs=P(BATCH), out_specs=P(BATCH))
  return run(logits_BV, support_BX)


def sample(
  logits_BV: jax.Array,
  keys_B: jax.Array,
  position_B: jax.Array,
  config: SamplingConfig,
  support_BX: jax.Array | None = None,
  vocabulary: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Samples a token for each batch row.

  The random numbers of row b depend only on keys_B[b] and position_B[b]. The method is the
  Gumbel-max trick: the argmax of log-probabilities plus Gumbel noise is a sample. First a block of
  the vocabulary is sampled, and then a token of this block. These two steps take about 2 √V random
  numbers. A single step would take V. Each random number is made from 64 bits. JAX's default of 23
  bits would bound Gumbel noise by 15.94, and the rarest tokens would never be sampled.

  Args:
    logits_BV: logits of the model.
    keys_B: PRNG key of each response.
    position_B: index of the new token among the tokens after the prompt, counted from 0.
    config: temperature and truncation.
    support_BX: token ids to sample from, as returned by `support`. None means that `truncate`
      selects the tokens.
    vocabulary: exclusive upper bound on sampled token ids, the tokenizer's size; 0 for no bound.
      Even with a bound, the log-prob after temperature alone is normalised over all ids, as in the
      trainer.

  Returns:
    Three arrays [B]: the token, int32; its log-prob after temperature and truncation, float32; and
    its log-prob after temperature alone, float32. If nothing is truncated, the two log-probs are
    equal.
  """
  tempered_BV = temper(logits_BV, config)
  if support_BX is None:
    masked_BV = truncate(mask_beyond(tempered_BV, vocabulary), config)
  else:
    masked_BV = mask_outside(tempered_BV, support_BX)
  masked_BJW = _blocks(masked_BV)
  mass_BJ = jax.nn.logsumexp(masked_BJW, axis=-1)
  J, W = masked_BJW.shape[1:]
  if config.temperature > 0:
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, position_B)
    # Gumbel noise with exact tails down to probability 2^-64.
    gumbel = functools.partial(jax.random.gumbel, shape=(J + W,), dtype=jnp.float32, mode="highest")
    noise_BX = jax.vmap(gumbel)(keys_B)
    block_B = jnp.argmax(mass_BJ + noise_BX[:, :J], axis=-1)
    row_BW = _row(masked_BJW, block_B)
    column_B = jnp.argmax(row_BW + noise_BX[:, J:], axis=-1)
  else:
    block_B = jnp.argmax(jnp.max(masked_BJW, axis=-1), axis=-1)
    row_BW = _row(masked_BJW, block_B)
    column_B = jnp.argmax(row_BW, axis=-1)
  chosen_B = _row(row_BW, column_B)
  full_BJ = mass_BJ
  if not config.untruncated or 0 < vocabulary < logits_BV.shape[-1]:
    full_BJ = jax.nn.logsumexp(_blocks(tempered_BV), axis=-1)
  mass_BJ = full_BJ if config.untruncated else mass_BJ
  logp_B, full_logp_B = (chosen_B - jax.nn.logsumexp(x_BJ, axis=-1) for x_BJ in (mass_BJ, full_BJ))
  return (block_B * W + column_B).astype(jnp.int32), logp_B, full_logp_B


def _blocks(x_BV: jax.Array) -> jax.Array:
  """Splits the vocabulary into J blocks of W tokens, [B, J, W], padded with -inf.

  W is the smallest power of two above √V.
  """
  V = x_BV.shape[-1]
  W = 1 << math.isqrt(V).bit_length()
  x_BX = jnp.pad(x_BV, ((0, 0), (0, -V % W)), constant_values=-jnp.inf)
  return x_BX.reshape(len(x_BV), -1, W)


def _row(x_BX: jax.Array, index_B: jax.Array) -> jax.Array:
  """Returns x_BX[b, index_B[b]] for each b."""
  return jax.vmap(lambda x, i: x[i])(x_BX, index_B)
