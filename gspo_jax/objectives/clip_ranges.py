"""Clip ranges that depend on the length of a response, or on how much was clipped before.

Both are factors of `clip_low` and `clip_high` alike, so their ratio stays as it is.
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
  """Factor (L/|u|)^γ of clip ranges for |u| tokens; None if γ = 0.

  L is `clip_length`, the length at which the ranges are what they say, γ `clip_exponent`. log s of
  a unit is a mean over |u| tokens: if these are independent, its noise goes with |u|^(−1/2), and
  γ = 1/2 clips as much at every length: c/√|u| with c = clip_low √L. An empty unit has the factor
  of one token.

  Shapes: [B,U], number, number -> [B,U].
  Raises: ValueError for γ below 0, or other than 0 without L above 0.

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
  """Effective length of a unit's log-ratio, (Σ_t |log w_t|)² / Σ_t (log w_t)².

  From 1 (one token) to |u| (all alike); 0 where nothing has moved, or the unit is empty.

  Shapes: [B,T] ×2, ids [B,T] or None -> [B,U]. Detached.

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
  """Adapts the factor of clip ranges to a target f* of the clipped fraction f.

  k ← min(max( k · exp( gain · (f − f*) ), 1/span ), span).

  Where more than the target is clipped the ranges grow, where less they shrink, by a factor of
  exp(gain) at most. The logarithm makes Robbins-Monro steps, as for quantiles in arXiv:1905.03871.
  Ours: no GSPO paper has it.

  Shapes: numbers -> number.

  Example:
    >>> print(f"{adapted_factor(1.0, clipped=0.25, target=0.15):.4f}")
    1.1052
  """
  return jnp.clip(factor * jnp.exp(gain * (clipped - target)), 1 / span, span)
