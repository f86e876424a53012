"""From logits to a token and its log-probability."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """The sampling distribution and when to end."""

  temperature: float  # 0: greedy
  top_k: int  # keep the k likeliest tokens; 0: all
  top_p: float  # keep the smallest set of probability >= top_p; 1: all
  max_new_tokens: int  # per response

  def __post_init__(self):
    if self.temperature < 0:
      raise ValueError(f"sampling.temperature={self.temperature} must be >= 0 (0 is greedy)")
    if self.top_k < 0:
      raise ValueError(f"sampling.top_k={self.top_k} must be >= 0 (0 keeps all tokens)")
    if not 0 < self.top_p <= 1:
      raise ValueError(f"sampling.top_p={self.top_p} must be in (0, 1] (1 keeps all tokens)")
    if self.max_new_tokens < 1:
      raise ValueError(f"sampling.max_new_tokens={self.max_new_tokens} must be at least 1")


def row_keys(seed: int, prompt_B: jax.Array, sample_B: jax.Array) -> jax.Array:
  """One PRNG key per response, from the seed, a hash of its prompt and its index in the group."""
  key = jax.random.key(seed)
  one = lambda prompt, sample: jax.random.fold_in(jax.random.fold_in(key, prompt), sample)  # noqa: E731
  return jax.vmap(one)(prompt_B, sample_B)


def distribution(logits_BV: jax.Array, config: SamplingConfig) -> jax.Array:
  """log-probabilities that tokens are drawn from: tempered, truncated, renormalised; -inf: never.

  At temperature 0 the tempered distribution of temperature 1: greedy decoding has no other.
  """
  logits_BV = logits_BV.astype(jnp.float32) / (config.temperature or 1.0)
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
  return jax.nn.log_softmax(logits_BV, axis=-1)


def sample(
  logits_BV: jax.Array, keys_B: jax.Array, position_B: jax.Array, config: SamplingConfig
) -> tuple[jax.Array, jax.Array]:
  """A token per row and its log-probability under the distribution it was drawn from.

  Row b's noise depends on (keys_B[b], position_B[b]) alone: the same token whatever else is in the
  batch. Drawn by the Gumbel-max trick, which needs no cumulative sum over V.
  """
  logp_BV = distribution(logits_BV, config)
  score_BV = logp_BV
  if config.temperature > 0:
    noise = lambda key, i: jax.random.gumbel(jax.random.fold_in(key, i), logp_BV.shape[-1:])  # noqa: E731
    score_BV = logp_BV + jax.vmap(noise)(keys_B, position_B)
  token_B = jnp.argmax(score_BV, axis=-1).astype(jnp.int32)
  chosen = jnp.arange(logp_BV.shape[-1])[None] == token_B[:, None]
  return token_B, jnp.sum(jnp.where(chosen, logp_BV, 0), axis=-1)
