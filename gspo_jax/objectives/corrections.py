"""Corrections for differences between the probabilities of sampler and trainer, and their metrics.

A sampler may round differently than the trainer, or have older weights. All functions below except
`mismatch` return weights of tokens [B, T] or responses [B]. A loss takes these weights as its
argument `weight`. In packed rows, weights of responses have shape [B, T], too. Weights have no
gradient. Tokens with a weight of 0 stay in the loss's denominator. At masked positions, the weights
of `truncated_weight` and `masked_weight` are 0.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient
from jax.nn import logsumexp
from jax.typing import ArrayLike

from gspo_jax.objectives import aggregation, checks, ratios
from gspo_jax.objectives.aggregation import Tokens, at_tokens
from gspo_jax.objectives.checks import Number
from gspo_jax.objectives.reductions import EffectiveSize, Max, Mean, Metrics, reduced


def truncated_weight(
  logp_BT: ArrayLike,
  sampler_logp_BT: ArrayLike,
  mask_BT: ArrayLike,
  level: str = "token",
  cap: Number = 2.0,
  *,
  response_BT: ArrayLike | None = None,
) -> Array:
  """Truncated importance sampling (TIS): min(ρ, cap), with ρ = π_train/π_sampler.

  `level` "token" is the ratio ρ_it of each token. "sequence" is the product Π_t ρ_it over a
  response. Apart from the truncation, the product is an unbiased weight. "geometric" is the
  |y_i|-th root of the product. The deviation of this root from 1 does not grow with the length.

  Shapes: [B,T] ×3 -> [B,T] or [B].
  Reference: fengyao.notion.site/off-policy-rl (token); richardli.xyz/rl-collapse (sequence).

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.1, 0.3, 0.5]]))
    >>> sampler_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> print(truncated_weight(logp_BT, sampler_logp_BT, jnp.ones((2, 3)), cap=1.1).round(3))
    [[1.1   1.    1.   ]
     [0.333 1.    1.   ]]
  """
  checks.numbers(cap=cap)
  checks.require(cap > 0, "cap must be positive")

  def bounded(weight: Array) -> Array:
    return jnp.minimum(weight, cap)

  return _weight(logp_BT, sampler_logp_BT, mask_BT, level, response_BT, bounded)


def masked_weight(
  logp_BT: ArrayLike,
  sampler_logp_BT: ArrayLike,
  mask_BT: ArrayLike,
  level: str = "token",
  low: Number = 0.5,
  high: Number = 5.0,
  *,
  response_BT: ArrayLike | None = None,
) -> Array:
  """Masked importance sampling (MIS): ρ if low ≤ ρ ≤ high, else 0.

  ρ and `level` are those of `truncated_weight`. With level "token", the method is called IcePop.
  The default range is for level "token". Weights of level "geometric" are much closer to 1, and
  need a narrower range.

  Shapes: [B,T] ×3 -> [B,T] or [B].
  Reference: arXiv:2510.18855 (IcePop); richardli.xyz/rl-collapse.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.1, 0.3, 0.5]]))
    >>> sampler_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> print(masked_weight(logp_BT, sampler_logp_BT, jnp.ones((2, 3))).round(3))
    [[1.25 1.   1.  ]
     [0.   1.   1.  ]]
  """
  checks.numbers(low=low, high=high)
  checks.require(low >= 0, "low must not be negative")
  checks.require(high >= low, "high must not be smaller than low")

  def bounded(weight: Array) -> Array:
    return jnp.where((weight >= low) & (weight <= high), weight, 0)

  return _weight(logp_BT, sampler_logp_BT, mask_BT, level, response_BT, bounded)


def off_policy_mask(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  advantage: ArrayLike,
  mask_BT: ArrayLike,
  threshold: Number,
  *,
  response_BT: ArrayLike | None = None,
) -> Array:
  """Off-policy sequence masking: 0 if Â_i < 0 and d_i > threshold, else 1.

  d_i = 1/|y_i| Σ_t log π_old(y_it)/π_θ(y_it).

  The mask excludes bad responses that have become unlikely under the policy, since little can be
  learned from such responses. If advantages are [B,T], the mask is 0 only at tokens with Â_it < 0.

  Shapes: [B,T] ×2, [B] or [B,T], [B,T] -> the shape of the advantage, [B,T] for packed rows.
  Reference: the DeepSeek-V3.2 report (off-policy sequence masking).

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.1, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> advantage_B, mask_BT = jnp.array([1.0, -1.0]), jnp.ones((2, 3))
    >>> print(off_policy_mask(logp_BT, old_logp_BT, advantage_B, mask_BT, threshold=0.1))
    [1. 0.]
  """
  checks.numbers(threshold=threshold)
  log_ratio_BT, tokens = _difference(logp_BT, "old_logp_BT", old_logp_BT, mask_BT, response_BT)
  advantage_BX = checks.constant(advantage, "advantage", tokens.mask_BT, log_ratio_BT.dtype)
  drift_BX = at_tokens(-tokens.means(log_ratio_BT), tokens.response_BT)
  drop_BX = (advantage_BX < 0) & (drift_BX > threshold)
  weight_BX = 1 - drop_BX.astype(log_ratio_BT.dtype)
  return weight_BX[:, 0] if jnp.ndim(advantage) == 1 and response_BT is None else weight_BX


@reduced
def mismatch(
  logp_BT: ArrayLike,
  sampler_logp_BT: ArrayLike,
  mask_BT: ArrayLike,
  *,
  response_BT: ArrayLike | None = None,
) -> Metrics:
  """Mismatch of trainer and sampler, with Δ = log π_train − log π_sampler.

    mismatch/abs/mean, /max      mean and maximum of |Δ| over tokens
    mismatch/tail                share of tokens with a ratio above 2 or below 1/2 (|Δ| > log 2)
    mismatch/k3                  k3 estimate of KL(π_sampler‖π_train)
    mismatch/sequence/mean       mean over responses of the mean Δ of their tokens. A mean far from
                                 0 shows a bias, since random errors cancel out
    mismatch/sequence/abs/mean, /max    mean and maximum over responses of |mean Δ of their tokens|.
                                 If old log-probs are the sampler's, this is GSPO's |log s| before
                                 updates
    mismatch/ess/token, /sequence, /geometric    effective sample size of the weights at each level,
                                 divided by the number of weights

  Shapes: [B,T] ×3 -> dict of scalars; `.sums` returns reductions.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.1, 0.3, 0.5]]))
    >>> sampler_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> metrics = mismatch(logp_BT, sampler_logp_BT, jnp.ones((2, 3)))
    >>> print(f"{metrics['mismatch/abs/max']:.4f}", f"{metrics['mismatch/ess/sequence']:.3f}")
    1.0986 0.749
  """
  log_ratio_BT, tokens = _difference(
    logp_BT, "sampler_logp_BT", sampler_logp_BT, mask_BT, response_BT
  )
  mean_BU, live_BU = tokens.means(log_ratio_BT), tokens.length_BU > 0
  number, responses = tokens.number(), tokens.responses()
  k3_BT = ratios.bounded_expm1(log_ratio_BT) - log_ratio_BT
  return {
    "mismatch/abs/mean": Mean(abs(log_ratio_BT).sum(), number),
    "mismatch/abs/max": _largest(log_ratio_BT, number),
    "mismatch/tail": ratios.tail(log_ratio_BT, number),
    "mismatch/k3": Mean(k3_BT.sum(), number),
    "mismatch/sequence/mean": Mean(mean_BU.sum(), responses),
    "mismatch/sequence/abs/mean": Mean(abs(mean_BU).sum(), responses),
    "mismatch/sequence/abs/max": _largest(mean_BU, responses),
    "mismatch/ess/token": _effective_size(log_ratio_BT, tokens.mask_BT),
    "mismatch/ess/sequence": _effective_size(tokens.sums(log_ratio_BT), live_BU),
    "mismatch/ess/geometric": _effective_size(mean_BU, live_BU),
  }


def _largest(log_ratio: Array, number: Array) -> Max:
  """Returns the maximum of |log-ratio|, empty if `number` is 0."""
  return Max(jnp.where(number > 0, abs(log_ratio).max(), -jnp.inf))


def _effective_size(log_weight: Array, live: Array) -> EffectiveSize:
  """Computes the effective sample size of `live` weights."""
  log_weight = jnp.where(live, log_weight, -jnp.inf)
  number = live.sum(dtype=log_weight.dtype)
  return EffectiveSize(number, logsumexp(log_weight), logsumexp(2 * log_weight))


def _weight(
  logp_BT: ArrayLike,
  sampler_logp_BT: ArrayLike,
  mask_BT: ArrayLike,
  level: str,
  response_BT: ArrayLike | None,
  bounded: Callable[[Array], Array],
) -> Array:
  """Computes ρ at a level, and applies `bounded` to it."""
  log_ratio_BT, tokens = _difference(
    logp_BT, "sampler_logp_BT", sampler_logp_BT, mask_BT, response_BT
  )
  if level == "token":
    return jnp.where(tokens.mask_BT, bounded(ratios.bounded_exp(log_ratio_BT)), 0)
  if level not in ("sequence", "geometric"):
    raise ValueError(f'level must be "token", "sequence" or "geometric", got {level!r}')
  reduce = tokens.sums if level == "sequence" else tokens.means
  weight_BU = bounded(ratios.bounded_exp(reduce(log_ratio_BT)))
  weight_BU = jnp.where(tokens.length_BU > 0, weight_BU, 0)
  if tokens.response_BT is None:
    return weight_BU[:, 0]
  return jnp.where(tokens.mask_BT, at_tokens(weight_BU, tokens.response_BT), 0)


def _difference(
  logp_BT: ArrayLike,
  name: str,
  other_logp_BT: ArrayLike,
  mask_BT: ArrayLike,
  response_BT: ArrayLike | None,
) -> tuple[Array, Tokens]:
  """Computes logp_BT − other_logp_BT without gradient, 0 at masked positions.

  Args:
    name: name of `other_logp_BT` in error messages.
  """
  logp_BT, tokens = aggregation.tokens(logp_BT, "logp_BT", mask_BT, response_BT)
  other_logp_BT = checks.tokens(other_logp_BT, name, tokens.mask_BT, logp_BT.dtype)
  return stop_gradient(ratios.difference(logp_BT, other_logp_BT)), tokens
