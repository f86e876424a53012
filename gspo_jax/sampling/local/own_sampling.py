"""`sampler.sample` where every response has a temperature and a truncation of its own.

They are arrays, so that requests of any kind share slots and one compiled program (a server's). All
tokens are sorted in every step in which a row in use leaves some out, and in no other; a workload
with one distribution for all has `sampler`, which XLA knows the numbers of.
"""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.sampling.sampler import _blocks, _noise, _row
from gspo_jax.settings.sampling import SamplingConfig


@flax.struct.dataclass
class OwnSampling:
  """The fields of `SamplingConfig` of each row."""

  temperature_B: Any  # float32; 0: greedy
  top_k_B: Any  # int32; 0: all
  top_p_B: Any  # float32; 1: all
  min_p_B: Any  # float32; 0: all


def stacked(rows: Sequence[SamplingConfig]) -> OwnSampling:
  """Arrays on the host."""
  return OwnSampling(
    np.array([row.temperature for row in rows], np.float32),
    np.array([row.top_k for row in rows], np.int32),
    np.array([row.top_p for row in rows], np.float32),
    np.array([row.min_p for row in rows], np.float32),
  )


def plain(count: int) -> OwnSampling:
  """The whole distribution, at temperature 1."""
  zeros, ones = jnp.zeros(count, jnp.float32), jnp.ones(count, jnp.float32)
  return OwnSampling(ones, jnp.zeros(count, jnp.int32), ones, zeros)


def truncate(logits_BV: jax.Array, own: OwnSampling) -> jax.Array:
  """-inf for the tokens that top-k, then top-p, then min-p leave out, as `sampler.truncate`."""
  V = logits_BV.shape[-1]
  descending = jnp.sort(logits_BV, axis=-1, descending=True)
  by_k_B = _row(descending, jnp.where(own.top_k_B > 0, jnp.minimum(own.top_k_B, V), V) - 1)
  p = jax.nn.softmax(jnp.where(descending < by_k_B[:, None], -jnp.inf, descending), axis=-1)
  inside = jnp.cumsum(p, axis=-1) - p < own.top_p_B[:, None]
  by_p_B = jnp.min(jnp.where(inside, descending, jnp.inf), axis=-1)
  by_p_B = jnp.where(own.top_p_B < 1, by_p_B, -jnp.inf)  # rounded sums are 1 too soon
  by_min_B = descending[:, 0] + jnp.log(own.min_p_B)
  least_B = jnp.maximum(by_k_B, jnp.maximum(by_p_B, by_min_B))
  return jnp.where(logits_BV < least_B[:, None], -jnp.inf, logits_BV)


def sample_own(
  logits_BV: jax.Array,
  keys_B: jax.Array,
  position_B: jax.Array,
  own: OwnSampling,
  active_B: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """A token per row and its two log-probabilities, as `sampler.sample`, with its noise.

  active_B: rows in use; others may have what the last request has left there.
  """
  drawn_B = own.temperature_B > 0
  tempered_BV = logits_BV.astype(jnp.float32) / jnp.where(drawn_B, own.temperature_B, 1.0)[:, None]
  some_B = (own.top_k_B > 0) | (own.top_p_B < 1) | (own.min_p_B > 0)
  kept_BV = jax.lax.cond((some_B & active_B).any(), truncate, lambda x, _: x, tempered_BV, own)
  kept_BJW = _blocks(kept_BV)
  mass_BJ = jax.nn.logsumexp(kept_BJW, axis=-1)
  J, W = kept_BJW.shape[1:]
  noise = jax.vmap(lambda key, i: _noise(jax.random.fold_in(key, i), J + W))
  noise_BX = jnp.where(drawn_B[:, None], noise(keys_B, position_B), 0.0)
  most_BJ = jnp.where(drawn_B[:, None], mass_BJ, jnp.max(kept_BJW, axis=-1))
  block_B = jnp.argmax(most_BJ + noise_BX[:, :J], axis=-1)
  row_BW = _row(kept_BJW, block_B)
  place_B = jnp.argmax(row_BW + noise_BX[:, J:], axis=-1)
  chosen_B = _row(row_BW, place_B)
  full_BJ = jax.nn.logsumexp(_blocks(tempered_BV), axis=-1)
  logp_B, full_logp_B = (chosen_B - jax.nn.logsumexp(x_BJ, axis=-1) for x_BJ in (mass_BJ, full_BJ))
  return (block_B * W + place_B).astype(jnp.int32), logp_B, full_logp_B
