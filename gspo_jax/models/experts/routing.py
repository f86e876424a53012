"""Records of chosen experts: storage, and differences between the choices of two policies.

For each token and layer, the indices of the k chosen experts are recorded, in any order. All k are
-1 if there is no record: for padding, and for a position without a forward pass.
"""

import jax
import jax.numpy as jnp
import numpy as np

NO_EXPERT = -1

Array = jax.Array | np.ndarray


def storage_dtype(num_experts: int) -> np.dtype:
  """Returns the smallest signed integer dtype for -1 to num_experts - 1."""
  return np.min_scalar_type(-max(num_experts, 1))


def recorded(experts_k: Array) -> Array:
  """Whether a token has recorded experts: [..., k] -> bool [...]."""
  return (experts_k >= 0).all(-1)


def changed(experts_k: Array, old_k: Array) -> tuple[jax.Array, jax.Array]:
  """Compares each token's experts A with its old experts B.

  Returns:
    1 - |A ∩ B| / k, float32 [...]; 0 unless both are recorded.
    Whether both are recorded, bool [...].
  """
  valid = recorded(experts_k) & recorded(old_k)
  k = experts_k.shape[-1]
  same_kk = experts_k.astype(jnp.int32)[..., :, None] == old_k.astype(jnp.int32)[..., None, :]
  missing = k - same_kk.any(-1).sum(-1)
  return jnp.where(valid, missing / k, 0.0).astype(jnp.float32), valid


def volatility_sums(
  new_lBTk: Array, old_lBTk: Array, where_BT: Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Sums 1 - |A ∩ B| / k over tokens, per layer.

  Returns the sums and the numbers of tokens, float32 [l]; the arguments are those of `volatility`.
  """
  difference_lBT, both_lBT = changed(jnp.asarray(new_lBTk), jnp.asarray(old_lBTk))
  if where_BT is not None:
    both_lBT = both_lBT & (where_BT[None] > 0)
  number_l = both_lBT.sum((1, 2)).astype(jnp.float32)
  return jnp.where(both_lBT, difference_lBT, 0).sum((1, 2)), number_l


def volatility(new_lBTk: Array, old_lBTk: Array, where_BT: Array | None = None) -> jax.Array:
  """Expert-activation volatility by layer: the share of differing experts.

  v_l = 1 − 1/(T·k) Σ_t |A_lt ∩ B_lt|

  for T tokens, and the experts A_lt and B_lt chosen by two policies for token t in layer l. If
  A_lt = B_lt for all tokens, v_l is 0. If A_lt and B_lt are disjoint for all tokens, v_l is 1. Two
  independent uniform choices of k out of E experts differ by 1 - k/E on average. GSPO
  (arXiv:2507.18071, §5.3) reports about 0.10 after one gradient update of a 48-layer model. The
  paper gives no formula, so the formula above is our interpretation.

  Tokens count if the experts of both policies are recorded and `where_BT` is above 0. If `where_BT`
  is None, all tokens with recorded experts count. A layer in which no token counts has 0.

  Shapes: [l,B,T,k] ×2, [B,T] -> float32 [l].
  """
  sum_l, number_l = volatility_sums(new_lBTk, old_lBTk, where_BT)
  return sum_l / jnp.maximum(number_l, 1)


def by_layer(experts_BTlk: Array | None) -> Array | None:
  """Transposes experts [B,T,l,k] to [l,B,T,k] for `forward`; None stays None."""
  return None if experts_BTlk is None else jnp.moveaxis(experts_BTlk, 2, 0)


def by_row(experts_lBTk: jax.Array, num_experts: int) -> jax.Array:
  """Transposes experts [l,B,T,k] to [B,T,l,k] for storage."""
  return jnp.moveaxis(experts_lBTk, 0, 2).astype(storage_dtype(num_experts))
