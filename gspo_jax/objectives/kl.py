"""Estimates of a KL divergence from samples (J. Schulman, "Approximating KL Divergence", 2020).

k1, k2 and k3 estimate KL(π‖π_ref) = E_{y~π}[log π/π_ref] per token, from tokens sampled by π. As
terms of a loss they differ, since their gradients have different means. "On policy" below means
that π has sampled the tokens. `logp_BT` is differentiated, and `ref_logp_BT` is a constant.
"""

import jax
from jax import Array

from gspo_jax.objectives import ratios


def kl_k1(logp_BT: Array, ref_logp_BT: Array) -> Array:
  """Unbiased estimate of high variance, possibly negative. [B,T] ×2 -> [B,T].

  k1 = log π − log π_ref.

  Use k1 as a metric, or inside a reward, but not in a loss. The gradient of k1 is ∇log π. On
  policy, this gradient has the mean 0, so it only adds noise. On tokens of an older policy,
  descending this gradient moves π away from that policy.

  Example:
    >>> logp_BT, ref_logp_BT = jax.numpy.array([[[-0.5, -1.0]], [[-1.0, -1.0]]])
    >>> print([f"{kl:.4f}" for kl in kl_k1(logp_BT, ref_logp_BT)[0]])
    ['0.5000', '0.0000']
  """
  return _log_ratio(logp_BT, ref_logp_BT)


def kl_k2(logp_BT: Array, ref_logp_BT: Array) -> Array:
  """Biased estimate of low variance. [B,T] ×2 -> [B,T].

  k2 = ½ (log π − log π_ref)².

  On policy, the mean gradient of k2, E[(log π − log π_ref) ∇log π], is the gradient of KL(π‖π_ref).

  Example:
    >>> logp_BT, ref_logp_BT = jax.numpy.array([[[-0.5, -1.0]], [[-1.0, -1.0]]])
    >>> print([f"{kl:.4f}" for kl in kl_k2(logp_BT, ref_logp_BT)[0]])
    ['0.1250', '0.0000']
  """
  return 0.5 * _log_ratio(logp_BT, ref_logp_BT) ** 2


def kl_k3(logp_BT: Array, ref_logp_BT: Array) -> Array:
  """Unbiased estimate of low variance, never negative. [B,T] ×2 -> [B,T].

  k3 = π_ref/π − 1 − log(π_ref/π).

  On policy, the mean gradient of k3, E[(1 − π_ref/π) ∇log π], is the gradient of KL(π_ref‖π), the
  divergence in the other direction.

  Example:
    >>> logp_BT, ref_logp_BT = jax.numpy.array([[[-0.5, -1.0]], [[-1.0, -1.0]]])
    >>> print([f"{kl:.4f}" for kl in kl_k3(logp_BT, ref_logp_BT)[0]])
    ['0.1065', '0.0000']
  """
  log_ratio_BT = _log_ratio(logp_BT, ref_logp_BT)
  # For x near 0, exp(x) − 1 would be rounded to a few digits. `bounded_expm1` is precise.
  return ratios.bounded_expm1(-log_ratio_BT) + log_ratio_BT


def kl_k3_weighted(logp_BT: Array, ref_logp_BT: Array, old_logp_BT: Array) -> Array:
  """Estimate k3 for tokens of an older policy, with importance ratios.

  k3_w = π/π_old · k3.

  k3_w is an unbiased estimate of KL(π‖π_ref), at prefixes sampled by π_old. The ratio w = π/π_old
  is differentiated, too. So the gradient of k3_w is an unbiased estimate of the gradient of
  KL(π‖π_ref). In symbols, E_old[∇(w k3)] = ∇ E_π[k3], where E_old is the mean over tokens sampled
  by π_old.

  Shapes: [B,T] ×3 -> [B,T].
  Reference: arXiv:2512.02556 (DeepSeek-V3.2), "unbiased KL estimate"; arXiv:2512.21852 compares
  estimates in rewards and in losses.

  Example:
    >>> logp_BT, ref_logp_BT = jax.numpy.array([[[-0.5, -1.0]], [[-1.0, -1.0]]])
    >>> kl_BT = kl_k3_weighted(logp_BT, ref_logp_BT, jax.numpy.array([[-0.75, -0.5]]))
    >>> print([f"{kl:.4f}" for kl in kl_BT[0]])
    ['0.1368', '0.0000']
  """
  log_ratio_BT = _log_ratio(logp_BT, ref_logp_BT)
  # The bound of each factor is the square root of the default bound, so the product is finite.
  k3_BT = ratios.bounded_expm1(-log_ratio_BT, share=0.375) + log_ratio_BT
  return ratios.bounded_exp(_log_ratio(logp_BT, old_logp_BT), share=0.375) * k3_BT


def _log_ratio(logp_BT: Array, ref_logp_BT: Array) -> Array:
  """Returns log π − log π_ref, differentiable in π alone."""
  return ratios.difference(logp_BT, jax.lax.stop_gradient(ref_logp_BT))
