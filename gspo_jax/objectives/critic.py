"""The loss of a critic (the value model of PPO), and a metric of its quality.

gae.py computes advantages from the critic's values.
"""

import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from gspo_jax.objectives import aggregation, checks, ratios
from gspo_jax.objectives.aggregation import aggregate_tokens
from gspo_jax.objectives.checks import Number
from gspo_jax.objectives.reductions import Explained, Mean, Metrics, reduced


@reduced
def value_loss(
  value_BT: ArrayLike,
  old_value_BT: ArrayLike,
  return_BT: ArrayLike,
  mask_BT: ArrayLike,
  clip: Number = 0.2,
  aggregate: str = "token",
  *,
  max_length: Number | None = None,
  response_BT: ArrayLike | None = None,
) -> tuple[Mean, Metrics]:
  """Clipped squared error of a value model.

  L = ½ mean max( (V − R)², (clip(V, V_old − clip, V_old + clip) − R)² ).

  V are the current values (differentiated), V_old the values before the updates, and R the returns.
  If `clip` is None, the loss is ½ mean (V − R)². `aggregate` is that of `grpo_loss`.

  Shapes: [B,T] ×4 -> scalar.
  Reference: arXiv:2005.12729, among the code-level optimisations. arXiv:1707.06347 (PPO) does not
  clip values.

  Example:
    >>> value_BT = jnp.array([[0.9, 0.5, 0.2], [0.1, 0.0, 0.3]])
    >>> old_value_BT, return_BT = jnp.full((2, 3), 0.5), jnp.ones((2, 3))
    >>> loss, metrics = value_loss(value_BT, old_value_BT, return_BT, jnp.ones((2, 3)))
    >>> print(f"{loss:.4f}, {metrics['clip_fraction/value']:.2f} clipped")
    0.2733, 0.17 clipped
  """
  value_BT, tokens = aggregation.tokens(value_BT, "value_BT", mask_BT, response_BT)
  dtype = value_BT.dtype
  old_value_BT = checks.constant(old_value_BT, "old_value_BT", tokens.mask_BT, dtype, ("BT",))
  return_BT = checks.constant(return_BT, "return_BT", tokens.mask_BT, dtype, ("BT",))
  error_BT = ratios.difference(value_BT, return_BT)
  clipped_BT = jnp.zeros_like(tokens.mask_BT)
  if clip is not None:
    checks.numbers(clip=clip)
    checks.require(clip >= 0, "clip must not be negative")
    bounded_BT = jnp.clip(value_BT, old_value_BT - clip, old_value_BT + clip)
    bounded_error_BT = ratios.difference(bounded_BT, return_BT)
    clipped_BT = abs(bounded_error_BT) > abs(error_BT)
    error_BT = jnp.where(clipped_BT, bounded_error_BT, error_BT)
  metrics: Metrics = {
    "clip_fraction/value": Mean(clipped_BT.sum(dtype=dtype), tokens.number()),
    "value/mean": Mean(stop_gradient(value_BT).sum(), tokens.number()),
    "return/mean": Mean(return_BT.sum(), tokens.number()),
  }
  return aggregate_tokens(0.5 * error_BT**2, tokens, aggregate, max_length), metrics


@reduced
def explained_variance(value_BT: ArrayLike, return_BT: ArrayLike, mask_BT: ArrayLike) -> Explained:
  """Explained variance of returns by values, 1 − Var(R − V)/Var(R) over tokens.

  The explained variance is at most 1. It is 0 if values are constant or returns do not vary. It is
  negative if a constant would predict better than the values. Use returns from rewards alone, since
  the returns of `gae` include the values. If the mean of values or returns is many standard
  deviations from 0, subtract this mean first, since float32 sums of squares would be too coarse.

  Shapes: [B,T] ×3 -> scalar.

  Example:
    >>> return_BT = jnp.array([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    >>> value_BT = jnp.array([[0.5, 0.75, 1.0], [0.5, 0.25, 0.0]])
    >>> print(f"{explained_variance(value_BT, return_BT, jnp.ones((2, 3))):.4f}")
    0.5833
  """
  value_BT, tokens = aggregation.tokens(value_BT, "value_BT", mask_BT, None)
  mask_BT, dtype = tokens.mask_BT, value_BT.dtype
  value_BT = checks.constant(value_BT, "value_BT", mask_BT, dtype, ("BT",))
  return_BT = checks.constant(return_BT, "return_BT", mask_BT, dtype, ("BT",))
  error_BT = return_BT - value_BT
  return Explained(
    weight=mask_BT.sum(dtype=dtype),
    error=error_BT.sum(),
    error_square=(error_BT**2).sum(),
    target=return_BT.sum(),
    target_square=(return_BT**2).sum(),
    low=jnp.where(mask_BT, return_BT, jnp.inf).min(),
    high=jnp.where(mask_BT, return_BT, -jnp.inf).max(),
  )
