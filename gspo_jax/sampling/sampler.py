"""From logits to a token and its log-probability."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from gspo_jax import ranges
from gspo_jax.ranges import NonNegativeInt, PositiveInt, Temperature


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """The sampling distribution and when to end."""

  temperature: Temperature  # 0: greedy
  top_k: NonNegativeInt  # keep the k likeliest tokens; 0: all
  top_p: ranges.PositiveFraction  # keep the smallest set of probability >= top_p; 1: all
  min_p: ranges.FractionBelowOne  # keep tokens so much as likely as the likeliest; 0: all
  max_new_tokens: PositiveInt  # per response

  def __post_init__(self):
    ranges.check(self, "sampling")

  @property
  def whole(self) -> bool:
    """Whether no token is left out."""
    return self.top_k == 0 and self.top_p == 1 and self.min_p == 0


def row_key(seed: jax.Array, prompt: jax.Array, sample: jax.Array) -> jax.Array:
  """The PRNG key of a response: from the seed, a hash of its prompt and its index in the group."""
  return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), prompt), sample)


def temper(logits_BV: jax.Array, config: SamplingConfig) -> jax.Array:
  """float32 logits at the configured temperature; at 1 for greedy decoding, which has no other."""
  return logits_BV.astype(jnp.float32) / (config.temperature or 1.0)


def truncate(logits_BV: jax.Array, config: SamplingConfig) -> jax.Array:
  """-inf for the tokens that top-k, then top-p, then min-p leave out."""
  if config.top_k:
    kept = jax.lax.top_k(logits_BV, min(config.top_k, logits_BV.shape[-1]))[0]
    logits_BV = jnp.where(logits_BV < kept[:, -1:], -jnp.inf, logits_BV)
  if config.top_p < 1:
    descending = jnp.sort(logits_BV, axis=-1, descending=True)
    p = jax.nn.softmax(descending, axis=-1)
    # A token stays while the mass before it is short of top_p, so the likeliest one always does.
    inside = jnp.cumsum(p, axis=-1) - p < config.top_p
    least = jnp.min(jnp.where(inside, descending, jnp.inf), axis=-1, keepdims=True)
    logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
  if config.min_p > 0:
    least = jnp.max(logits_BV, axis=-1, keepdims=True) + math.log(config.min_p)
    logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
  return logits_BV


def sample(
  logits_BV: jax.Array, keys_B: jax.Array, position_B: jax.Array, config: SamplingConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """A token per row, and its log-probability under the distribution it was drawn from (tempered,
  truncated, renormalised) and under the one that is only tempered.

  Row b's noise depends on (keys_B[b], position_B[b]) alone: the same token whatever else is in the
  batch. Drawn by the Gumbel-max trick, which needs no cumulative sum over V.
  """
  tempered_BV = temper(logits_BV, config)
  kept_BV = truncate(tempered_BV, config)
  score_BV = kept_BV
  if config.temperature > 0:
    noise = lambda key, i: jax.random.gumbel(jax.random.fold_in(key, i), kept_BV.shape[-1:])  # noqa: E731
    score_BV = kept_BV + jax.vmap(noise)(keys_B, position_B)
  # The first of the largest: as argmax, which on CPU goes through them one by one.
  index_V = jnp.arange(kept_BV.shape[-1], dtype=jnp.int32)[None]
  largest_B1 = jnp.max(score_BV, axis=-1, keepdims=True)
  token_B = jnp.min(jnp.where(score_BV == largest_B1, index_V, kept_BV.shape[-1] - 1), axis=-1)
  chosen_BV = index_V == token_B[:, None]
  chosen_B = jnp.sum(jnp.where(chosen_BV, tempered_BV, 0), axis=-1)
  logp_B = chosen_B - jax.nn.logsumexp(kept_BV, axis=-1)
  return token_B, logp_B, chosen_B - jax.nn.logsumexp(tempered_BV, axis=-1)
