"""Estimates of a KL divergence from samples (J. Schulman, "Approximating KL Divergence", 2020).

All three estimate KL(π‖π_ref) = E_{y~π}[log π/π_ref] when the tokens were sampled from π. Equal in
what they estimate, they differ in what their gradient, taken as a loss, is the gradient of.
`logp_BT` is the policy's; the reference is a constant.
"""

import jax
from jax import Array

from gspo_jax.objectives import ratios


def kl_k1(logp_BT: Array, ref_logp_BT: Array) -> Array:
  """The plain estimate: unbiased, of high variance, may be negative. [B,T] ×2 -> [B,T].

  k1 = log π − log π_ref.

  Its gradient is the gradient of nothing: E[∇log π] = 0 on policy, so as a loss it is pure noise.
  Use it to measure, or inside a reward.

  Example:
    >>> logp_BT, ref_logp_BT = jax.numpy.array([[[-0.5, -1.0]], [[-1.0, -1.0]]])
    >>> print([f"{kl:.4f}" for kl in kl_k1(logp_BT, ref_logp_BT)[0]])
    ['0.5000', '0.0000']
  """
  return _log_ratio(logp_BT, ref_logp_BT)


def kl_k2(logp_BT: Array, ref_logp_BT: Array) -> Array:
  """The squared estimate: biased, of low variance. [B,T] ×2 -> [B,T].

  k2 = ½ (log π − log π_ref)².

  Its gradient, E[(log π − log π_ref) ∇log π], is that of KL(π‖π_ref), on policy.

  Example:
    >>> logp_BT, ref_logp_BT = jax.numpy.array([[[-0.5, -1.0]], [[-1.0, -1.0]]])
    >>> print([f"{kl:.4f}" for kl in kl_k2(logp_BT, ref_logp_BT)[0]])
    ['0.1250', '0.0000']
  """
  return 0.5 * _log_ratio(logp_BT, ref_logp_BT) ** 2


def kl_k3(logp_BT: Array, ref_logp_BT: Array) -> Array:
  """The estimate that is unbiased, of low variance, and never negative. [B,T] ×2 -> [B,T].

  k3 = π_ref/π − 1 − log(π_ref/π).

  Its gradient, E[(1 − π_ref/π) ∇log π], is that of the other divergence, KL(π_ref‖π), on policy.

  Example:
    >>> logp_BT, ref_logp_BT = jax.numpy.array([[[-0.5, -1.0]], [[-1.0, -1.0]]])
    >>> print([f"{kl:.4f}" for kl in kl_k3(logp_BT, ref_logp_BT)[0]])
    ['0.1065', '0.0000']
  """
  log_ratio_BT = _log_ratio(logp_BT, ref_logp_BT)
  # exp(x) − 1 − x would have no digits left near 0, where it matters.
  return ratios.bounded_expm1(-log_ratio_BT) + log_ratio_BT


def _log_ratio(logp_BT: Array, ref_logp_BT: Array) -> Array:
  return ratios.difference(logp_BT, jax.lax.stop_gradient(ref_logp_BT))
