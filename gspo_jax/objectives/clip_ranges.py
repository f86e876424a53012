"""Factors of clip ranges, from the length of a unit, or from an iteration's clipped fraction.

A unit is a response or a segment. `clip_low` and `clip_high` are multiplied by the same factor.
`effective_length` is for metrics.
"""

import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient

from gspo_jax.objectives import checks
from gspo_jax.objectives.aggregation import unit_sum
from gspo_jax.objectives.checks import Number


def length_factor(
  length_BU: Array, clip_length: Number | None, clip_exponent: Number
) -> Array | None:
  """Computes the factor (L/|u|)^γ of clip ranges; None if γ = 0.

  A unit u is a response or a segment of |u| tokens. L is `clip_length`, the length at which the
  factor is 1, and γ is `clip_exponent`. GSPO's log s of a unit is a mean over |u| tokens. If tokens
  are independent, the standard deviation of log s is proportional to |u|^(−1/2). With γ = 1/2 the
  range is proportional to |u|^(−1/2), too, and an equal fraction of units is clipped at every
  length. An empty unit has the factor of one token.

  Shapes: [B,U], number, number -> [B,U].
  Raises: ValueError if γ is negative, or if γ is not 0 and L is missing or not positive.

  Example:
    >>> print(length_factor(jnp.array([[100.0], [400.0]]), clip_length=100, clip_exponent=0.5))
    [[1. ]
     [0.5]]
  """
  checks.numbers(clip_length=clip_length, clip_exponent=clip_exponent)
  if isinstance(clip_exponent, int | float) and clip_exponent == 0:
    return None
  checks.require(clip_exponent >= 0, "clip_exponent must not be negative")
  if clip_length is None:
    raise ValueError("clip_exponent needs clip_length")
  checks.require(clip_length > 0, "clip_length must be positive")
  return (clip_length / jnp.maximum(length_BU, 1)) ** clip_exponent


def effective_length(log_ratio_BT: Array, mask_BT: Array, id_BT: Array | None = None) -> Array:
  """Computes the effective length of a unit, (Σ_t |log w_t|)² / Σ_t (log w_t)².

  A unit u is a response or a segment of |u| tokens, and w_t is the importance ratio of token t. The
  effective length is the number of tokens over which the log-ratio of a unit is distributed. It is
  1 if only one token has a nonzero log-ratio, and |u| if all log-ratios have the same absolute
  value. It is 0 if all log-ratios are 0 or the unit is empty. `id_BT` is the unit of each token.
  None means that each row is one unit. The result has no gradient.

  Shapes: [B,T] ×2, [B,T] or None -> [B,U].

  Example:
    >>> log_ratio_BT = jnp.array([[0.25, -0.25, 0.25], [0.5, 0.0, 0.0]])
    >>> print(effective_length(log_ratio_BT, jnp.ones((2, 3))))
    [[3.]
     [1.]]
  """
  size_BT = jnp.where(mask_BT, abs(stop_gradient(log_ratio_BT)), 0)
  first_BU, second_BU = unit_sum(size_BT, id_BT), unit_sum(size_BT**2, id_BT)
  moved_BU = second_BU > 0
  return jnp.where(moved_BU, first_BU**2 / jnp.where(moved_BU, second_BU, 1), 0)


def adapted_factor(
  factor: Number, clipped: Number, target: Number, gain: Number = 1.0, span: Number = 100.0
) -> Array:
  """Adapts the factor of clip ranges to a target clipped fraction.

  k ← min(max( k · exp( gain · (f − f*) ), 1/span ), span).

  k is `factor`, f is `clipped` and f* is `target`. k stays between 1/span and span. The ranges
  become wider if f is above f*, and narrower if f is below f*, by a factor of exp(gain) at most.
  The steps of log k are those of Robbins and Monro, as for quantiles in arXiv:1905.03871. This rule
  is an addition: we know no paper about GSPO that has such a rule.

  Shapes: numbers -> number.

  Example:
    >>> print(f"{adapted_factor(1.0, clipped=0.25, target=0.15):.4f}")
    1.1052
  """
  return jnp.clip(factor * jnp.exp(gain * (clipped - target)), 1 / span, span)
