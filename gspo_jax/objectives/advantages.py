"""Advantages: what a loss multiplies its ratios with. Constants, never differentiated."""

import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient

from gspo_jax.objectives import checks


def group_advantages(reward_PG, normalize="std", epsilon=1e-6, *, valid_PG=None) -> Array:
  """Â_i = (r_i − mean{r}) / std{r} over the responses to a prompt; [P,G] -> [P,G].

  "std": the sample standard deviation (ddof 1), with ε added to it. "none": the numerator alone
  (Dr. GRPO). "leave_one_out": r_i − mean_{j≠i} r_j (RLOO). Members that are not valid are in no
  mean and get 0, whatever their reward. A group without spread, or of one, gets 0.

  Reference: arXiv:2507.18071, Eq. 6 (which does not say which standard deviation); arXiv:2503.20783;
  arXiv:2402.14740.
  """
  reward_PG, valid_PG = _group(reward_PG, valid_PG, "reward_PG")
  size_P1 = valid_PG.sum(axis=1, keepdims=True, dtype=reward_PG.dtype)
  mean_P1 = reward_PG.sum(axis=1, keepdims=True) / jnp.maximum(size_P1, 1)
  deviation_PG = jnp.where(valid_PG, reward_PG - mean_P1, 0)
  if normalize == "std":
    variance_P1 = (deviation_PG**2).sum(axis=1, keepdims=True) / jnp.maximum(size_P1 - 1, 1)
    advantage_PG = deviation_PG / (jnp.sqrt(variance_P1) + epsilon)
  elif normalize == "none":
    advantage_PG = deviation_PG
  elif normalize == "leave_one_out":
    advantage_PG = deviation_PG * size_P1 / jnp.maximum(size_P1 - 1, 1)
  else:
    raise ValueError(f'normalize must be "std", "none" or "leave_one_out", got {normalize!r}')
  # The mean of equal rewards is not exactly their value; what is left of it must not be divided.
  largest_P1 = jnp.where(valid_PG, reward_PG, -jnp.inf).max(axis=1, keepdims=True)
  smallest_P1 = jnp.where(valid_PG, reward_PG, jnp.inf).min(axis=1, keepdims=True)
  return jnp.where(largest_P1 > smallest_P1, advantage_PG, 0)


def _group(value_PG, valid_PG, name) -> tuple[Array, Array]:
  """Numbers [P, G] as float32 or wider, 0 where not valid; and which of them are, as bool."""
  array = jnp.asarray(value_PG)
  if array.ndim != 2 or 0 in array.shape:
    raise ValueError(f"{name} has shape {array.shape}, expected [P, G] with P, G > 0")
  if valid_PG is None:
    valid_PG = jnp.ones(array.shape, bool)
  valid_PG = checks.mask(valid_PG, "valid_PG", array.shape)
  dtype = jnp.promote_types(array.dtype, jnp.float32)
  array = jnp.where(valid_PG, stop_gradient(array).astype(dtype), 0)
  checks.require(jnp.isfinite(array), f"{name} is not finite where valid")
  return array, valid_PG
