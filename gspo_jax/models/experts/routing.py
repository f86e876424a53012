"""Chosen experts as data: which ones a token used, and how far two policies differ in that.

The experts of one token in one layer are k indices; their order means nothing. -1 in all k places
says that none are recorded: padding, or a position that nobody looked at. (Not expert 0, which
would be replayed as if somebody had chosen it.)
"""

import jax
import jax.numpy as jnp
import numpy as np

NO_EXPERT = -1

Array = jax.Array | np.ndarray


def storage_dtype(num_experts: int) -> np.dtype:
  """The smallest signed integer that holds -1 .. num_experts - 1: int8 up to 128 experts."""
  return np.min_scalar_type(-max(num_experts, 1))


def recorded(experts_k: Array) -> Array:
  """True for tokens whose experts are recorded: [..., k] -> bool [...]."""
  return (experts_k >= 0).all(-1)


def changed(experts_k: Array, old_k: Array) -> tuple[jax.Array, jax.Array]:
  """Share of a token's experts that are not among the old ones: 1 - |A ∩ B| / k.

  Shapes: [..., k] ×2 -> float32 [...], 0 where either is not recorded, and bool [...], where both
  are.
  """
  known = recorded(experts_k) & recorded(old_k)
  k = experts_k.shape[-1]
  same_kk = experts_k.astype(jnp.int32)[..., :, None] == old_k.astype(jnp.int32)[..., None, :]
  missing = k - same_kk.any(-1).sum(-1)
  return jnp.where(known, missing / k, 0.0).astype(jnp.float32), known


def volatility_sums(
  new_lBTk: Array, old_lBTk: Array, where_BT: Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Per layer: Σ over tokens of 1 - |A ∩ B| / k, and the number of tokens; see `volatility`."""
  share_lBT, known_lBT = changed(jnp.asarray(new_lBTk), jnp.asarray(old_lBTk))
  if where_BT is not None:
    known_lBT = known_lBT & (where_BT[None] > 0)
  number_l = known_lBT.sum((1, 2)).astype(jnp.float32)
  return jnp.where(known_lBT, share_lBT, 0).sum((1, 2)), number_l


def volatility(new_lBTk: Array, old_lBTk: Array, where_BT: Array | None = None) -> jax.Array:
  """Expert-activation volatility of each layer: share of the activated experts that differ.

  v_l = 1 − 1/(T·k) Σ_t |A_lt ∩ B_lt|

  for T tokens, the experts A that one policy activates for a token and B that another one activates
  for the same token. 0: the same experts everywhere; 1: no expert in common. Two independent
  uniform choices of k out of E differ by 1 - k/E. GSPO, arXiv:2507.18071, §5.3, reports about 0.10
  after one gradient update of a 48-layer model; it gives no formula, this is ours.

  Tokens are compared where both sides are recorded and `where_BT` is not 0; a layer without any
  such token has 0.

  Shapes: [l,B,T,k] ×2, [B,T] -> float32 [l].
  """
  sum_l, number_l = volatility_sums(new_lBTk, old_lBTk, where_BT)
  return sum_l / jnp.maximum(number_l, 1)


def by_layer(experts_BTlk: Array | None) -> Array | None:
  """[B,T,l,k], as batches are split over devices, to [l,B,T,k], as `forward` scans over layers."""
  return None if experts_BTlk is None else jnp.moveaxis(experts_BTlk, 2, 0)


def by_row(experts_lBTk: jax.Array, valid_BT: jax.Array, num_experts: int) -> jax.Array:
  """[l,B,T,k] to [B,T,l,k] in the storage type, -1 where `valid_BT` is 0."""
  experts_BTlk = jnp.moveaxis(experts_lBTk, 0, 2)
  experts_BTlk = jnp.where((valid_BT > 0)[:, :, None, None], experts_BTlk, NO_EXPERT)
  return experts_BTlk.astype(storage_dtype(num_experts))
