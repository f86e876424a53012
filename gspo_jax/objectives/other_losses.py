"""Policy losses that limit updates in other ways than the clipped objective of PPO.

The module losses.py describes arguments and symbols that all losses have.
"""

from typing import Literal, Unpack

import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient
from jax.nn import sigmoid
from jax.typing import ArrayLike

from gspo_jax.objectives import checks, ratios, terms
from gspo_jax.objectives.aggregation import aggregate_tokens, at_tokens
from gspo_jax.objectives.checks import Number
from gspo_jax.objectives.reductions import Mean
from gspo_jax.objectives.terms import BY_RESPONSE, BY_TOKEN, Clipped, Options, Sums, policy_loss


@policy_loss(levels=BY_TOKEN)
def cispo_loss(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  advantage: ArrayLike,
  mask_BT: ArrayLike,
  clip_low: Number | None = None,
  clip_high: Number = 0.27,
  **options: Unpack[Options],
) -> Sums:
  """CISPO: REINFORCE with clipped importance weights.

  J = 1/Σ_i|y_i| Σ_i Σ_t sg[ clip(w_it, 1 − clip_low, 1 + clip_high) ] Â_it log π_θ(y_it),
  w_it = π_θ(y_it)/π_old(y_it).

  sg stops gradients. The gradient of a token outside the range is bounded, but not 0. If `clip_low`
  is None, there is no lower bound. Clip fractions count all tokens outside the range, whatever the
  signs of their advantages.

  Shapes: [B,T] ×2, [B] or [B,T], [B,T] -> scalar.
  Reference: arXiv:2506.13585, Eq. 4 and 5. In practice, the authors have no lower bound.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.2, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> advantage_B, mask_BT = jnp.array([1.0, -1.0]), jnp.ones((2, 3))
    >>> loss, metrics = cispo_loss(logp_BT, old_logp_BT, advantage_B, mask_BT)
    >>> print(f"{loss:.4f}, {metrics['clip_fraction/token']:.2f} clipped")
    0.0028, 0.00 clipped
  """
  batch = terms.batch(logp_BT, old_logp_BT, advantage, mask_BT, **options)
  log_ratio_BT = stop_gradient(batch.log_ratio_BT)
  clip_high = checks.bound(clip_high, "clip_high", log_ratio_BT)
  high_BT = log_ratio_BT > jnp.log1p(clip_high)
  low_BT = jnp.zeros_like(high_BT)
  ratio_BT = jnp.where(high_BT, 1 + clip_high, ratios.bounded_exp(log_ratio_BT))
  if clip_low is not None:
    clip_low = checks.bound(clip_low, "clip_low", log_ratio_BT)
    low_BT = log_ratio_BT < jnp.log1p(-jnp.minimum(clip_low, 1))
    ratio_BT = jnp.where(low_BT, 1 - clip_low, ratio_BT)
  objective_BT = ratios.finite(ratio_BT * batch.advantage_BX) * ratios.difference(batch.logp_BT, 0)
  return terms.token_sums(batch, objective_BT, Clipped(high_BT, low_BT), "token")


@policy_loss(levels=BY_RESPONSE)
def gmpo_loss(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  advantage: ArrayLike,
  mask_BT: ArrayLike,
  clip_low: Number = 0.4,
  clip_high: Number = 0.4,
  **options: Unpack[Options],
) -> Sums:
  """GMPO: one ratio per response, from bounded ratios of its tokens.

  J = 1/G Σ_i Â_i exp( 1/|y_i| Σ_t c_it ),
  c_it = min(log w_it, clip_high) for Â > 0, max(log w_it, −clip_low) for Â < 0,
  w_it = π_θ(y_it)/π_old(y_it).

  GSPO bounds the geometric mean of the tokens' ratios, and GMPO bounds each of these ratios. So a
  token outside the range loses its gradient, and the other tokens of the response keep theirs.
  `clip_low` and `clip_high` are bounds of log-ratios.

  Shapes: [B,T] ×2, [B] or [B,T], [B,T] -> scalar.
  Reference: arXiv:2507.20673v3, Eq. 4, computed in log space as in Algorithm 1. The default range
  of ratios, (e^−0.4, e^0.4), is that of §3.
  Differs: each token may have an advantage. Then the bound of a token depends on the sign of its
  advantage, and Â_i is the mean of the tokens' advantages.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.2, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> advantage_B, mask_BT = jnp.array([1.0, -1.0]), jnp.ones((2, 3))
    >>> loss, metrics = gmpo_loss(logp_BT, old_logp_BT, advantage_B, mask_BT)
    >>> print(f"{loss:.4f}, {metrics['clip_fraction/token']:.2f} clipped")
    -0.1010, 0.17 clipped
  """
  batch = terms.batch(logp_BT, old_logp_BT, advantage, mask_BT, **options)
  tokens, log_ratio_BT = batch.tokens, batch.log_ratio_BT
  clip_low = checks.bound(clip_low, "clip_low", log_ratio_BT)
  clip_high = checks.bound(clip_high, "clip_high", log_ratio_BT)
  clipped_BT = Clipped(
    high=(batch.advantage_BX > 0) & (log_ratio_BT > clip_high),
    low=(batch.advantage_BX < 0) & (log_ratio_BT < -clip_low),
  )
  bounded_BT = jnp.where(clipped_BT.high, clip_high, log_ratio_BT)
  bounded_BT = jnp.where(clipped_BT.low, -clip_low, bounded_BT)
  log_ratio_BU = tokens.means(bounded_BT)
  advantage_BU, weight_BU = tokens.common(batch.advantage_BX), tokens.common(batch.weight_BX)
  loss_BU = -weight_BU * advantage_BU * ratios.bounded_exp(log_ratio_BU)
  metrics = terms.update_metrics(batch, log_ratio_BU, tokens.length_BU > 0, clipped_BT)
  return terms.mean_of_responses(batch, loss_BU), metrics, terms.either(clipped_BT, tokens)


@policy_loss(levels=BY_TOKEN)
def sapo_loss(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  advantage: ArrayLike,
  mask_BT: ArrayLike,
  tau_pos: Number = 1.0,
  tau_neg: Number = 1.05,
  **options: Unpack[Options],
) -> Sums:
  """SAPO: a soft gate on the ratio instead of clipping.

  J = 1/G Σ_i 1/|y_i| Σ_t f(w_it) Â_it,  f(w) = 4/τ σ( τ (w − 1) ),
  τ = tau_pos for Â > 0 and tau_neg otherwise,
  w_it = π_θ(y_it)/π_old(y_it).

  σ is the logistic function. The slope f' = 4 σ (1 − σ) is 1 at w = 1 and decreases on both sides.
  The metrics have no clip fractions. The value of J is not an estimate of the reward, since f(1) is
  2/τ and not 1.

  Shapes: [B,T] ×2, [B] or [B,T], [B,T] -> scalar.
  Reference: arXiv:2511.20347, Eq. 5 and 6. We know the equations from quotations, and have not read
  the paper.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.2, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> advantage_B, mask_BT = jnp.array([1.0, -1.0]), jnp.ones((2, 3))
    >>> loss, metrics = sapo_loss(logp_BT, old_logp_BT, advantage_B, mask_BT)
    >>> print(f"{loss:.4f}, ratios up to {metrics['ratio/max']:.2f}")
    -0.1441, ratios up to 1.25
  """
  checks.numbers(tau_pos=tau_pos, tau_neg=tau_neg)
  checks.require(tau_pos > 0, "tau_pos must be positive")
  checks.require(tau_neg > 0, "tau_neg must be positive")
  batch = terms.batch(logp_BT, old_logp_BT, advantage, mask_BT, **options)
  positive_BX = batch.advantage_BX > 0
  tau_BX = jnp.where(positive_BX, tau_pos, tau_neg).astype(batch.logp_BT.dtype)
  scale_BX = jnp.where(positive_BX, 4 / tau_pos, 4 / tau_neg).astype(batch.logp_BT.dtype)
  # σ(x) is written as 1 − σ(−x). The gradient of σ(x) would be computed with 1 − σ(x), which is
  # rounded to 0 for large x.
  gate_BT = 1 - sigmoid(tau_BX * (1 - ratios.bounded_exp(batch.log_ratio_BT)))
  loss_BT = terms.token_loss(batch, scale_BX * gate_BT * batch.advantage_BX)
  metrics = batch.metrics | terms.ratio_metrics(batch.log_ratio_BT, batch.tokens.mask_BT)
  clipped_BT = jnp.zeros_like(batch.tokens.mask_BT)
  return aggregate_tokens(loss_BT, batch.tokens, "sequence"), metrics, clipped_BT


@policy_loss(levels=BY_TOKEN)
def dppo_loss(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  advantage: ArrayLike,
  mask_BT: ArrayLike,
  clip_low: Number = 0.15,
  clip_high: Number = 0.15,
  divergence: Literal["tv", "kl"] = "tv",
  aggregate: Literal["constant", "token", "sequence"] = "constant",
  *,
  max_length: Number | None = None,
  **options: Unpack[Options],
) -> Sums:
  """DPPO: a trust region for the divergence of token probabilities.

  J = 1/(G L) Σ_i Σ_t M_it w_it Â_it,
  w_it = π_θ(y_it)/π_old(y_it),
  M_it = 0 where Â > 0, w > 1 and D_it > clip_high, or Â < 0, w < 1 and D_it > clip_low; else 1.

  D is the divergence between two distributions over the events "y_t" and "another token", with the
  probabilities p = π_old(y_t) and q = π_θ(y_t) of y_t. `divergence` "tv" is |p − q|, and "kl" is
  p log(p/q) + (1 − p) log((1 − p)/(1 − q)). For example, a token whose probability rises from 1e-5
  to 1e-3 has a ratio of 100 but a small D, and keeps its gradient. A token with Â < 0 whose
  probability falls from 0.99 to 0.8 has a ratio of 0.8 but a large D, and loses its gradient. L is
  `max_length`, and `aggregate` is that of `grpo_loss`.

  Shapes: [B,T] ×2, [B] or [B,T], [B,T] -> scalar.
  Reference: arXiv:2602.04879, Eq. 11 to 14. The default thresholds are those of the authors' script
  for "tv". For "kl", the script has 0.05. The script takes π_old from the sampler, and does not
  recompute it in the trainer.
  Differs: the authors' approximation by the K likeliest tokens is not included.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.1, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.3, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> advantage_B, mask_BT = jnp.array([1.0, -0.5]), jnp.ones((2, 3))
    >>> loss, metrics = dppo_loss(logp_BT, old_logp_BT, advantage_B, mask_BT, max_length=3)
    >>> print(f"{loss:.4f}, {metrics['clip_fraction/token']:.2f} clipped")
    -0.1667, 0.33 clipped
  """
  batch = terms.batch(logp_BT, old_logp_BT, advantage, mask_BT, **options)
  log_ratio_BT = stop_gradient(batch.log_ratio_BT)
  divergence_BT = _divergence(divergence, stop_gradient(batch.logp_BT), log_ratio_BT)
  high_BT = divergence_BT > checks.bound(clip_high, "clip_high", log_ratio_BT)
  low_BT = divergence_BT > checks.bound(clip_low, "clip_low", log_ratio_BT)
  clipped_BT = Clipped(
    high=(batch.advantage_BX > 0) & (log_ratio_BT > 0) & high_BT,
    low=(batch.advantage_BX < 0) & (log_ratio_BT < 0) & low_BT,
  )
  ratio_BT = ratios.bounded_exp(batch.log_ratio_BT)
  ratio_BT = jnp.where(clipped_BT.high | clipped_BT.low, 0, ratio_BT)
  return terms.token_sums(batch, batch.advantage_BX * ratio_BT, clipped_BT, aggregate, max_length)


@policy_loss(levels=BY_RESPONSE, advantage="none")
def vespo_loss(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  advantage_B: ArrayLike,
  mask_BT: ArrayLike,
  k_pos: Number = 2.0,
  lambda_pos: Number = 3.0,
  k_neg: Number = 3.0,
  lambda_neg: Number = 2.0,
  **options: Unpack[Options],
) -> Sums:
  """VESPO: REINFORCE, weighted by a smooth function of the response's ratio.

  J = 1/Σ_i|y_i| Σ_i Σ_t sg[ φ(W_i) ] Â_i log π_θ(y_it),
  φ(W) = W^k exp( λ (1 − W) ),  W_i = exp( Σ_t log π_θ(y_it)/π_old(y_it) ),
  k = k_pos for Â ≥ 0 and k_neg otherwise,  λ = lambda_pos for Â ≥ 0 and lambda_neg otherwise.

  sg stops gradients. W is the likelihood ratio of the whole response, without normalisation by
  length. φ is 1 at W = 1, and goes to 0 for very small and very large W. A larger k makes φ smaller
  for W < 1, and a larger λ makes φ smaller for W > 1. The metrics have no clip fractions.

  Shapes: [B,T] ×2, [B], [B,T] -> scalar. In packed rows (`response_BT`) the advantage may be [B,T],
  constant over each response.
  Reference: arXiv:2602.10693v3, Eq. 20. The defaults of k and λ are those of c_1 and c_2 in §4.1.
  The paper takes π_old from the sampler, and does not recompute it in the trainer.
  Differs: Eq. 20 sums over the tokens of a response. J is a mean over all tokens of the batch, as
  in the authors' code.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.2, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> advantage_B, mask_BT = jnp.array([1.0, -1.0]), jnp.ones((2, 3))
    >>> loss, metrics = vespo_loss(logp_BT, old_logp_BT, advantage_B, mask_BT)
    >>> print(f"{loss:.4f}, mean weight {metrics['vespo/weight']:.2f}")
    0.0088, mean weight 0.66
  """
  named = dict(k_pos=k_pos, lambda_pos=lambda_pos, k_neg=k_neg, lambda_neg=lambda_neg)
  checks.numbers(**named)
  for name, value in named.items():
    checks.require(value > 0, f"{name} must be positive")
  batch = terms.batch(logp_BT, old_logp_BT, advantage_B, mask_BT, by_token=False, **options)
  tokens, dtype = batch.tokens, batch.logp_BT.dtype
  nonnegative_BU = tokens.common(batch.advantage_BX) >= 0
  k_BU = jnp.where(nonnegative_BU, k_pos, k_neg).astype(dtype)
  lambda_BU = jnp.where(nonnegative_BU, lambda_pos, lambda_neg).astype(dtype)
  log_ratio_BU = stop_gradient(tokens.sums(batch.log_ratio_BT))
  log_phi_BU = k_BU * log_ratio_BU - lambda_BU * ratios.bounded_expm1(log_ratio_BU)
  phi_BU = ratios.bounded_exp(log_phi_BU)
  phi_BX = at_tokens(phi_BU, tokens.response_BT)
  objective_BT = ratios.finite(phi_BX * batch.advantage_BX) * ratios.difference(batch.logp_BT, 0)
  total = aggregate_tokens(terms.token_loss(batch, objective_BT), tokens, "token")
  live_BU = tokens.length_BU > 0
  metrics = batch.metrics | terms.ratio_metrics(log_ratio_BU, live_BU)
  metrics["vespo/weight"] = Mean(jnp.where(live_BU, phi_BU, 0).sum(), tokens.responses())
  return total, metrics, jnp.zeros_like(tokens.mask_BT)


@policy_loss(levels=BY_RESPONSE, advantage="none")
def opmd_loss(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  advantage_B: ArrayLike,
  mask_BT: ArrayLike,
  beta: Number = 1.0,
  **options: Unpack[Options],
) -> Sums:
  """OPMD (online policy mirror descent): REINFORCE with a squared log-ratio penalty.

  J = 1/G Σ_i ( Â_i Σ_t log π_θ(y_it) − β/2 ( Σ_t log w_it )² ),
  w_it = π_θ(y_it)/π_old(y_it).

  The squared log-ratio is that of the whole response. J is largest if this log-ratio is Â_i/β. If
  Â_i = r_i − β log Z with a normalising constant Z, the policy with these log-ratios maximises the
  mean of r − β KL(π_θ‖π_old). The gradient is that of `soft_loss` divided by 2β, with the old
  policy instead of the reference policy. The metrics have no clip fractions.

  Shapes: [B,T] ×2, [B], [B,T], number -> scalar. In packed rows (`response_BT`) the advantage may
  be [B,T], constant over each response.
  Reference: arXiv:2501.12599 (Kimi k1.5), Eq. 3, where β is called τ, and Â is r − mean r.
  arXiv:2405.19107 (DRO), Eq. 8, has the same objective with a fixed reference policy and a learned
  value. The default of β is DRO's, for rewards of variance 1.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.2, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> advantage_B, mask_BT = jnp.array([0.5, -0.5]), jnp.ones((2, 3))
    >>> loss, metrics = opmd_loss(logp_BT, old_logp_BT, advantage_B, mask_BT)
    >>> print(f"{loss:.4f}, ratios up to {metrics['ratio/max']:.2f}")
    -0.1197, ratios up to 1.25
  """
  checks.numbers(beta=beta)
  checks.require(beta > 0, "beta must be positive")
  batch = terms.batch(logp_BT, old_logp_BT, advantage_B, mask_BT, by_token=False, **options)
  tokens = batch.tokens
  advantage_BU, weight_BU = tokens.common(batch.advantage_BX), tokens.common(batch.weight_BX)
  log_ratio_BU = tokens.sums(batch.log_ratio_BT)
  logp_BU = tokens.sums(ratios.difference(batch.logp_BT, 0))
  objective_BU = advantage_BU * logp_BU - beta / 2 * log_ratio_BU**2
  total = terms.mean_of_responses(batch, -weight_BU * objective_BU)
  metrics = batch.metrics | terms.ratio_metrics(log_ratio_BU, tokens.length_BU > 0)
  return total, metrics, jnp.zeros_like(tokens.mask_BT)


def _divergence(kind: str, logp_BT: Array, log_ratio_BT: Array) -> Array:
  """Computes the divergence D of `dppo_loss`, [B, T]."""
  old_logp_BT = jnp.minimum(logp_BT - log_ratio_BT, 0)
  logp_BT = jnp.minimum(logp_BT, 0)
  old_BT = jnp.exp(old_logp_BT)
  if kind == "tv":
    return abs(jnp.exp(logp_BT) - old_BT)
  if kind != "kl":
    raise ValueError(f'divergence must be "tv" or "kl", got {kind!r}')
  # The binary KL divergence has two terms: one of the token, and one of all other tokens.
  token_part_BT = jnp.where(old_BT > 0, old_BT * (old_logp_BT - logp_BT), 0)
  others_BT = -jnp.expm1(old_logp_BT)
  others_part_BT = others_BT * (jnp.log(others_BT) - jnp.log(-jnp.expm1(logp_BT)))
  return token_part_BT + jnp.where(others_BT > 0, others_part_BT, 0)
