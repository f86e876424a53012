"""Importance ratios π_θ/π_old of tokens, responses and segments of responses.

Ratios are computed from differences of log-probs, in float32 or a wider type. Gradients go to π_θ
only. Masked tokens are excluded from sums, and their ratio is 1. In equations, sg stops gradients.
"""

import math

import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from gspo_jax.objectives import checks
from gspo_jax.objectives.aggregation import at_tokens, unit_sum
from gspo_jax.objectives.checks import Number
from gspo_jax.objectives.reductions import Mean

# Bound of log-ratios. Valid log-ratios are much smaller. Because of the bound, sums and squares of
# arbitrary finite inputs stay finite in float32.
_GARBAGE = 1e12
_TAIL = math.log(2)  # Smallest |log-ratio| in the tail.


def token_ratio(logp_BT: ArrayLike, old_logp_BT: ArrayLike, mask_BT: ArrayLike) -> Array:
  """Computes the ratio of each token. [B,T] ×3 -> [B,T].

  w_it = π_θ(y_it)/π_old(y_it).

  Reference: arXiv:2507.18071, Eq. 3 (PPO, GRPO).

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.15, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> print(token_ratio(logp_BT, old_logp_BT, jnp.ones((2, 3))).round(3))
    [[1.25 1.   1.  ]
     [0.5  1.   1.  ]]
  """
  _, log_ratio_BT, _ = _log_ratio(logp_BT, old_logp_BT, mask_BT)
  return bounded_exp(log_ratio_BT)


def sequence_ratio(
  logp_BT: ArrayLike, old_logp_BT: ArrayLike, mask_BT: ArrayLike, length_exponent: Number = 1.0
) -> Array:
  """Computes the ratio of each response. [B,T] ×3 -> [B].

  s_i = exp( 1/|y_i|^α Σ_t log π_θ(y_it)/π_old(y_it) ).

  α is `length_exponent`. If α = 1, s_i is GSPO's ratio, the geometric mean of the tokens' ratios.
  If α = 0, s_i is the likelihood ratio of the whole response. If α = 1/2 and tokens are
  independent, log s_i has the same variance at every length. An empty row has the ratio 1.

  Reference: arXiv:2507.18071, Eq. 7.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.15, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> print(sequence_ratio(logp_BT, old_logp_BT, jnp.ones((2, 3))).round(3))
    [1.077 0.794]
  """
  _, log_ratio_BT, mask_BT = _log_ratio(logp_BT, old_logp_BT, mask_BT)
  log_ratio_B1, _ = unit_log_ratio(log_ratio_BT, mask_BT, None, length_exponent)
  return bounded_exp(log_ratio_B1)[:, 0]


def gspo_token_ratio(
  logp_BT: ArrayLike, old_logp_BT: ArrayLike, mask_BT: ArrayLike, length_exponent: Number = 1.0
) -> Array:
  """Computes GSPO-token's ratio of each token. [B,T] ×3 -> [B,T].

  s_it = sg[s_i] · π_θ(y_it)/sg[π_θ(y_it)].

  s_i is `sequence_ratio`. The value of s_it is s_i, but its gradient is that of token t alone. The
  mean of s_it over t has the gradient of s_i.

  Reference: arXiv:2507.18071, Eq. 14.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.15, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> print(gspo_token_ratio(logp_BT, old_logp_BT, jnp.ones((2, 3))).round(3))
    [[1.077 1.077 1.077]
     [0.794 0.794 0.794]]
  """
  return _detached(*_log_ratio(logp_BT, old_logp_BT, mask_BT), None, length_exponent)


def segment_ratio(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  mask_BT: ArrayLike,
  segment_BT: ArrayLike,
  length_exponent: Number = 1.0,
) -> Array:
  """Computes the ratio of each token's segment, differentiable in this token alone.

  s_it = sg[s_ik] · π_θ(y_it)/sg[π_θ(y_it)],
  s_ik = exp( 1/|z_ik|^α Σ_{t∈z_ik} log π_θ(y_it)/π_old(y_it) ).

  `segment_BT` has the number of each token's segment z_ik, an integer in [0, T). If each token is a
  segment, the result is `token_ratio`. If each row is a segment, the result is `gspo_token_ratio`.
  In packed rows, segments of different responses must have different numbers. α is
  `length_exponent`.

  Shapes: [B,T] ×4 -> [B,T].

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.15, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> turn_BT = jnp.array([[0, 0, 1], [0, 1, 1]])
    >>> print(segment_ratio(logp_BT, old_logp_BT, jnp.ones((2, 3)), turn_BT).round(3))
    [[1.118 1.118 1.   ]
     [0.5   1.    1.   ]]
  """
  logp_BT, log_ratio_BT, mask_BT = _log_ratio(logp_BT, old_logp_BT, mask_BT)
  segment_BT = checks.ids(segment_BT, "segment_BT", mask_BT)
  return _detached(logp_BT, log_ratio_BT, mask_BT, segment_BT, length_exponent)


def unit_log_ratio(
  log_ratio_BT: Array, mask_BT: Array, id_BT: Array | None, length_exponent: Number
) -> tuple[Array, Array]:
  """Computes 1/|u|^α Σ_{t∈u} log w_t and |u| of each unit, [B,U].

  A unit u is a response or a segment of a response. Both results are 0 for an empty unit.

  Args:
    id_BT: unit of each token. None if each row is one unit (U = 1).
    length_exponent: α.
  """
  checks.numbers(length_exponent=length_exponent)
  length_BU = unit_sum(mask_BT.astype(log_ratio_BT.dtype), id_BT)
  scale_BU = jnp.maximum(length_BU, 1) ** length_exponent
  return unit_sum(log_ratio_BT, id_BT) / scale_BU, length_BU


def detached_ratio(log_ratio_BX: Array, scale_BX: ArrayLike, logp_BT: Array) -> Array:
  """Computes sg[s] · (π_θ(y_t) / sg[π_θ(y_t)])^scale for each token, [B,T].

  s is exp(log_ratio_BX). The value of the result is s. Its gradient is that of token t alone, times
  `scale`.
  """
  logp_BT = jnp.maximum(logp_BT, -_GARBAGE)  # The difference of two -inf would be NaN.
  step_BT = scale_BX * (logp_BT - stop_gradient(logp_BT))  # The value is 0, the gradient is not.
  return bounded_exp(stop_gradient(log_ratio_BX)) * jnp.exp(step_BT)


def scale(length_BX: Array, length_exponent: Number) -> Array:
  """Returns `scale` of `detached_ratio`, |u|^(1−α).

  |u| is the length of a unit u, and α is `length_exponent`. A mean over the tokens of u multiplies
  gradients by |u|^−1. The product of both factors is |u|^−α, the derivative of log s with respect
  to a token's log-prob.
  """
  return jnp.maximum(length_BX, 1) ** (1 - length_exponent)


def difference(logp: Array, other_logp: ArrayLike) -> Array:
  """Returns logp − other_logp in float32 or wider.

  The result is finite for infinite log-probs, and 0 if both are −inf.
  """
  dtype = jnp.promote_types(jnp.result_type(logp, other_logp), jnp.float32)
  logp, other_logp = jnp.asarray(logp, dtype), jnp.asarray(other_logp, dtype)
  both_infinite = jnp.isneginf(logp) & jnp.isneginf(other_logp)
  return jnp.clip(jnp.where(both_infinite, 0, logp - other_logp), -_GARBAGE, _GARBAGE)


def finite(x: Array) -> Array:
  """Clips x to ±max^0.8 of its dtype, about 7e30 in float32.

  Sums over a batch then stay finite.
  """
  largest = float(jnp.finfo(x.dtype).max) ** 0.8
  return jnp.clip(x, -largest, largest)


def tail(log_ratio_BT: Array, number: Array) -> Mean:
  """Returns the share of tokens with a ratio above 2 or below 1/2.

  Args:
    number: number of unmasked tokens.
  """
  return Mean((abs(log_ratio_BT) > _TAIL).sum(dtype=number.dtype), number)


def bounded_exp(log_x: Array, share: float = 0.75) -> Array:
  """Returns exp(log_x), at most max^share.

  max is the largest number of the dtype. By default the bound is e^66 in float32 and e^532 in
  float64. Without a bound, exp would be inf above e^88 in float32, and inf · 0 in the backward pass
  would make all gradients NaN. The bound is well below the largest float, so that products with
  advantages and sums stay finite, too.
  """
  return jnp.exp(_bounded(log_x, share))


def bounded_expm1(log_x: Array, share: float = 0.75) -> Array:
  """Returns exp(log_x) − 1, precise near 0, with the bound of `bounded_exp`."""
  return jnp.expm1(_bounded(log_x, share))


def _bounded(log_x: Array, share: float) -> Array:
  """Returns log_x, at most share · log(max)."""
  return jnp.minimum(log_x, share * math.log(jnp.finfo(log_x.dtype).max))


def _log_ratio(
  logp_BT: ArrayLike, old_logp_BT: ArrayLike, mask_BT: ArrayLike
) -> tuple[Array, Array, Array]:
  """Returns the checked log-probs, their log-ratio and the mask."""
  logp_BT = checks.log_probs(logp_BT, "logp_BT")
  mask_BT = checks.mask(mask_BT, "mask_BT", logp_BT.shape)
  logp_BT = checks.tokens(logp_BT, "logp_BT", mask_BT, logp_BT.dtype)
  old_logp_BT = stop_gradient(checks.tokens(old_logp_BT, "old_logp_BT", mask_BT, logp_BT.dtype))
  return logp_BT, difference(logp_BT, old_logp_BT), mask_BT


def _detached(
  logp_BT: Array, log_ratio_BT: Array, mask_BT: Array, id_BT: Array | None, length_exponent: Number
) -> Array:
  """Computes `detached_ratio` of each token's unit, and 1 at masked tokens."""
  log_ratio_BU, length_BU = unit_log_ratio(log_ratio_BT, mask_BT, id_BT, length_exponent)
  scale_BX = scale(at_tokens(length_BU, id_BT), length_exponent)
  ratio_BT = detached_ratio(at_tokens(log_ratio_BU, id_BT), scale_BX, logp_BT)
  return jnp.where(mask_BT, ratio_BT, 1)
