"""Losses that may learn from responses of any policy: Soft Policy Optimization and imitation.

These losses have no ratio to the policy that sampled the responses, and no clipping. The module
losses.py describes arguments and symbols that all losses have.
"""

from typing import Unpack

import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from gspo_jax.objectives import aggregation, checks, ratios, terms
from gspo_jax.objectives.aggregation import Tokens
from gspo_jax.objectives.checks import Number
from gspo_jax.objectives.reductions import Mean, Metrics, reduced
from gspo_jax.objectives.terms import BY_RESPONSE, BY_TOKEN, Options, Sums, policy_loss


@policy_loss(levels=BY_RESPONSE, advantage="soft", recorded=True, to_reference=True)
def soft_loss(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  advantage_B: ArrayLike,
  mask_BT: ArrayLike,
  beta: Number = 0.1,
  **options: Unpack[Options],
) -> Sums:
  """SPO, Soft Policy Optimization, with the arguments of a policy loss.

  L = 1/B Σ_i ( β Σ_t log π_θ(y_it)/π_ref(y_it) − Â_i )²,  Â_i = r_i − Q̂_0.

  The value is that of `spo_loss`. The argument `old_logp_BT` takes log-probs of the reference
  policy π_ref, which is fixed during a run. The advantages are those of `soft_advantages`.

  Shapes: [B,T] ×2, [B], [B,T], number -> scalar. In packed rows (`response_BT`) the advantage may
  be [B,T], constant over each response.
  Reference: that of `spo_loss`. The default of β is our choice, for rewards between 0 and 1.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.2, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> advantage_B, mask_BT = jnp.array([0.5, -0.5]), jnp.ones((2, 3))
    >>> loss, metrics = soft_loss(logp_BT, old_logp_BT, advantage_B, mask_BT)
    >>> print(f"{loss:.4f}, mean error {metrics['spo/error']:.4f}")
    0.2196, mean error -0.0091
  """
  checks.numbers(beta=beta)
  checks.require(beta > 0, "beta must be positive")
  batch = terms.batch(logp_BT, old_logp_BT, advantage_B, mask_BT, by_token=False, **options)
  tokens = batch.tokens
  advantage_BU, weight_BU = tokens.common(batch.advantage_BX), tokens.common(batch.weight_BX)
  error_BU, metrics = _soft_error(batch.log_ratio_BT, advantage_BU, tokens, beta)
  total = terms.mean_of_responses(batch, weight_BU * error_BU**2)
  return total, batch.metrics | metrics, jnp.zeros_like(tokens.mask_BT)


@reduced
def spo_loss(
  logp_BT: ArrayLike,
  ref_logp_BT: ArrayLike,
  reward_B: ArrayLike,
  value_B: ArrayLike,
  mask_BT: ArrayLike,
  beta: Number,
  *,
  response_BT: ArrayLike | None = None,
) -> tuple[Mean, Metrics]:
  """SPO, Soft Policy Optimization: fits soft values to rewards.

  L = 1/B Σ_i (Q_i − r_i)²,  Q_i = Q̂_0 + β Σ_t log π_θ(y_it)/π_ref(y_it).

  Q_i is the soft value of the state after response i, according to the policy. Q_i is the sum of
  two terms. The first is the soft value Q̂_0 of the prompt (`value_B`, computed by `soft_value`).
  The second is a soft advantage: β times the log-ratio to the reference policy. The loss fits Q_i
  to the reward r_i of the response. The responses may come from any policy.

  Shapes: [B,T] ×2, [B] ×2 ([B,T] in packed rows), [B,T], number -> scalar.
  Reference: arXiv:2405.19107 (DRO), Eq. 2 and 4, multiplied by 2. DRO learns the value of the
  prompt; here the value is estimated. L is also the surrogate loss of arXiv:2501.12599, §2.3.2. SPO
  (arXiv:2503.05453) calls this loss terminal Q-regression. We have read the abstract of that paper,
  and code by other authors, but not the equations.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.2, 0.3, 0.5]]))
    >>> ref_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> reward_B, value_B, mask_BT = jnp.array([1.0, 0.0]), jnp.full(2, 0.5), jnp.ones((2, 3))
    >>> loss, metrics = spo_loss(logp_BT, ref_logp_BT, reward_B, value_B, mask_BT, beta=0.1)
    >>> print(f"{loss:.4f}, mean error {metrics['spo/error']:.4f}")
    0.2196, mean error -0.0091
  """
  checks.numbers(beta=beta)
  checks.require(beta > 0, "beta must be positive")
  logp_BT, tokens = aggregation.tokens(logp_BT, "logp_BT", mask_BT, response_BT)
  mask_BT, dtype = tokens.mask_BT, logp_BT.dtype
  shapes = ("B",) if response_BT is None else ("B", "BT")
  ref_logp_BT = stop_gradient(checks.tokens(ref_logp_BT, "ref_logp_BT", mask_BT, dtype))
  reward_BU = tokens.common(checks.constant(reward_B, "reward_B", mask_BT, dtype, shapes))
  value_BU = tokens.common(checks.constant(value_B, "value_B", mask_BT, dtype, shapes))
  log_ratio_BT = ratios.difference(logp_BT, ref_logp_BT)
  error_BU, metrics = _soft_error(log_ratio_BT, reward_BU - value_BU, tokens, beta)
  return Mean((error_BU**2).sum(), tokens.responses()), metrics


def _soft_error(
  log_ratio_BT: Array, advantage_BU: Array, tokens: Tokens, beta: Number
) -> tuple[Array, Metrics]:
  """Computes Q_i − r_i of each response [B, U], and metrics.

  Q_i − r_i is 0 for empty responses. The metrics are the means of Q_i − Q̂_0 and of Q_i − r_i.
  """
  gain_BU = beta * tokens.sums(log_ratio_BT)
  error_BU = jnp.where(tokens.length_BU > 0, ratios.difference(gain_BU, advantage_BU), 0)
  number = tokens.responses()
  return error_BU, {
    "spo/gain": Mean(stop_gradient(gain_BU).sum(), number),
    "spo/error": Mean(stop_gradient(error_BU).sum(), number),
  }


@policy_loss(levels=BY_TOKEN, advantage="best", recorded=True)
def rft_loss(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  advantage: ArrayLike,
  mask_BT: ArrayLike,
  **options: Unpack[Options],
) -> Sums:
  """Imitation of selected responses: best of n, rejection-sampling fine-tuning.

  L = −(Σ_i w_i Σ_t log π_θ(y_it))/(Σ_i w_i |y_i|),  w_i = max(Â_i, 0).

  This is supervised fine-tuning on responses selected by their rewards (`selection_weights`). With
  weights of 0 and 1, L is a mean over the tokens of selected responses. Responses with a weight of
  0 are excluded from the denominator, and have no penalties. L does not depend on `old_logp_BT`,
  but metrics do.

  Shapes: [B,T] ×2, [B] or [B,T], [B,T] -> scalar.
  Reference: arXiv:2304.06767 (RAFT, best of n), arXiv:2308.01825 (RFT, all right responses),
  arXiv:2203.14465 (STaR).
  Differs: L is one mean over the tokens of a batch, not a mean of the means of responses.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.2, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> weight_B, mask_BT = jnp.array([1.0, 0.0]), jnp.ones((2, 3))
    >>> loss, metrics = rft_loss(logp_BT, old_logp_BT, weight_B, mask_BT)
    >>> print(f"{loss:.4f}, {metrics['rft/chosen']:.2f} chosen")
    0.9378, 0.50 chosen
  """
  batch = terms.batch(logp_BT, old_logp_BT, advantage, mask_BT, **options)
  mask_BT = batch.tokens.mask_BT
  chosen_BT = jnp.where(mask_BT, jnp.maximum(batch.advantage_BX, 0), 0)
  loss_BT = terms.token_loss(batch, ratios.difference(batch.logp_BT, 0))
  total = Mean(ratios.finite(chosen_BT * loss_BT).sum(), chosen_BT.sum())
  live_BT = (chosen_BT > 0).astype(batch.logp_BT.dtype)
  number = batch.tokens.responses()
  metrics: Metrics = {"rft/chosen": Mean(batch.tokens.means(live_BT).sum(), number)}
  metrics |= terms.ratio_metrics(batch.log_ratio_BT, mask_BT)
  return total, batch.metrics | metrics, jnp.zeros_like(mask_BT)
