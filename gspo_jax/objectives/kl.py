"""Estimates of a KL divergence from samples (J. Schulman, "Approximating KL Divergence", 2020).

k1, k2 and k3 estimate KL(π‖π_ref) = E_{y~π}[log π/π_ref] when the tokens were sampled from π. Equal
in what they estimate, they differ in what their gradient, taken as a loss, is the gradient of.
`logp_BT` is the policy's; the reference is a constant.
"""

import jax
from jax import Array

from gspo_jax.objectives import ratios


def kl_k1(logp_BT: Array, ref_logp_BT: Array) -> Array:
  """The plain estimate: unbiased, of high variance, may be negative. [B,T] ×2 -> [B,T].

  k1 = log π − log π_ref.

  Its gradient is the gradient of nothing: E[∇log π] = 0 on policy, so as a loss it is pure noise.
  Of tokens that an older policy sampled it is E_old[∇log π], whose descent takes π away from that
  policy. Use it to measure, or inside a reward, where it is right.

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
  """The unbiased estimate of low variance, never negative. [B,T] ×2 -> [B,T].

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


def kl_k3_weighted(logp_BT: Array, ref_logp_BT: Array, old_logp_BT: Array) -> Array:
  """k3 for tokens of an older policy, weighted by the importance ratio. [B,T] ×3 ->
  [B,T].

  k3_w = π/π_old · k3.

  Unbiased for KL(π‖π_ref) at the states that π_old came to, and so is its gradient for that of
  KL(π‖π_ref), since the ratio is differentiated too: E_old[∇(w k3)] = ∇ E_π[k3].

  Reference: arXiv:2512.02556 (DeepSeek-V3.2), "unbiased KL estimate"; arXiv:2512.21852 compares
  estimates in rewards and in losses.

  Example:
    >>> logp_BT, ref_logp_BT = jax.numpy.array([[[-0.5, -1.0]], [[-1.0, -1.0]]])
    >>> kl_BT = kl_k3_weighted(logp_BT, ref_logp_BT, jax.numpy.array([[-0.75, -0.5]]))
    >>> print([f"{kl:.4f}" for kl in kl_BT[0]])
    ['0.1368', '0.0000']
  """
  log_ratio_BT = _log_ratio(logp_BT, ref_logp_BT)
  # Half of the exponents for each of both factors: garbage may not make their product infinite.
  k3_BT = ratios.bounded_expm1(-log_ratio_BT, share=0.375) + log_ratio_BT
  return ratios.bounded_exp(_log_ratio(logp_BT, old_logp_BT), share=0.375) * k3_BT


def _log_ratio(logp_BT: Array, ref_logp_BT: Array) -> Array:
  return ratios.difference(logp_BT, jax.lax.stop_gradient(ref_logp_BT))
