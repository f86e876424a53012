"""On-policy distillation: advantages from a teacher's log-probs of the student's responses.

The old policy π_old is the student before the updates.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from gspo_jax.objectives import checks, ratios
from gspo_jax.objectives.checks import Number
from gspo_jax.objectives.gae import gae
from gspo_jax.objectives.reductions import Mean, reduced


def distillation_advantages(
  old_logp_BT: ArrayLike, teacher_logp_BT: ArrayLike, mask_BT: ArrayLike, discount: Number = 0.0
) -> Array:
  """Advantages of tokens, from a teacher instead of rewards. [B,T] ×3 -> [B,T].

  Â_t = −Σ_{u≥t} γ^(u−t) (log π_old(y_u) − log π_teacher(y_u)).

  γ is `discount`. If γ = 0, a token's advantage depends on the log-probs of this token only. If
  γ = 1, the mean of Â_t over responses of π_old is −KL(π_old‖π_teacher), the negative reverse KL
  divergence of the tokens from t on. Masked positions are skipped in the sum, and have an advantage
  of 0. Advantages are not relative to a group.

  Reference: K. Lu, On-Policy Distillation, Thinking Machines Lab, 2025 (γ = 0); arXiv:2306.08543,
  Eq. 2 (MiniLLM, γ = 1); arXiv:2306.13649 (GKD).

  Example:
    >>> old_BT, teacher_BT = jnp.array([[-1.0, -2.0]]), jnp.array([[-3.0, -1.5]])
    >>> print(distillation_advantages(old_BT, teacher_BT, jnp.ones((1, 2))))
    [[-2.   0.5]]
    >>> print(distillation_advantages(old_BT, teacher_BT, jnp.ones((1, 2)), discount=1.0))
    [[-1.5  0.5]]
  """
  gain_BT = -_log_ratio(old_logp_BT, teacher_logp_BT, mask_BT)
  return gae(gain_BT, jnp.zeros_like(gain_BT), mask_BT, discount, 1.0)[0]


@reduced
def reverse_kl(old_logp_BT: ArrayLike, teacher_logp_BT: ArrayLike, mask_BT: ArrayLike) -> Mean:
  """Estimate of KL(π_old‖π_teacher) per token, in nats. [B,T] ×3 -> scalar.

  The estimate is the mean of log π_old(y_t) − log π_teacher(y_t) over unmasked tokens. It may be
  negative.

  Example:
    >>> print(reverse_kl(jnp.array([[-1.0, -2.0]]), jnp.array([[-3.0, -1.5]]), jnp.ones((1, 2))))
    0.75
  """
  log_ratio_BT = _log_ratio(old_logp_BT, teacher_logp_BT, mask_BT)
  return Mean(log_ratio_BT.sum(), jnp.asarray(mask_BT).sum(dtype=log_ratio_BT.dtype))


def _log_ratio(old_logp_BT: ArrayLike, teacher_logp_BT: ArrayLike, mask_BT: ArrayLike) -> Array:
  """Computes log π_old/π_teacher without gradient, finite, and 0 at masked positions."""
  old_logp_BT = checks.log_probs(old_logp_BT, "old_logp_BT")
  dtype = old_logp_BT.dtype
  live_BT = checks.mask(mask_BT, "mask_BT", old_logp_BT.shape)
  old_BT = checks.constant(old_logp_BT, "old_logp_BT", live_BT, dtype, ("BT",))
  teacher_BT = checks.constant(teacher_logp_BT, "teacher_logp_BT", live_BT, dtype, ("BT",))
  return ratios.difference(old_BT, teacher_BT)
