"""Clipped policy losses with an importance ratio for each token: GRPO, DAPO, Dr. GRPO and PPO.

A loss is called as `loss, metrics = grpo_loss(...)`. The functions below return sums that are not
yet divided, and the decorator `terms.policy_loss` adds the division. For all policy losses of this
package:

- The loss is the negative of the objective J, and is to be minimised. Equations have the symbols of
  the publications: G responses y_i of one group, with advantages Â_i, or Â_it by token. The loss
  includes all responses of a batch, whatever their groups. sg(x) is x without gradient.
- logp_BT is differentiated. Old log-probs, advantages and weights are constants.
- Values at masked positions are ignored. Responses without unmasked tokens are excluded from means.
- `Options` (terms.py) lists further keyword arguments: weights, packed rows, KL penalty, entropy.
- `dual_clip` c: the objective of a token or response with Â < 0 is at least c·Â (arXiv:1912.09729).
  None means no such bound.
- If an argument has a wrong shape, dtype or value, ValueError or TypeError names it.
"""

from typing import Literal, Unpack

from jax.lax import stop_gradient
from jax.typing import ArrayLike

from gspo_jax.objectives import ratios, terms
from gspo_jax.objectives.checks import Number
from gspo_jax.objectives.terms import BY_TOKEN, Batch, Options, Sums, policy_loss


@policy_loss(levels=BY_TOKEN)
def grpo_loss(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  advantage: ArrayLike,
  mask_BT: ArrayLike,
  clip_low: Number = 0.2,
  clip_high: Number = 0.27,
  aggregate: Literal["sequence", "token", "constant"] = "sequence",
  *,
  max_length: Number | None = None,
  dual_clip: Number | None = None,
  **options: Unpack[Options],
) -> Sums:
  """GRPO: a ratio for each token.

  J = 1/G Σ_i 1/|y_i| Σ_t min( w_it Â_it, clip(w_it, 1 − clip_low, 1 + clip_high) Â_it ),
  w_it = π_θ(y_it)/π_old(y_it).

  `aggregate`: "sequence" is the equation above: the mean over responses of means over tokens.
  "token" is the mean over all tokens. "constant" is the sum over all tokens, divided by the number
  of responses times `max_length`.

  Shapes: [B,T] ×2, [B] or [B,T], [B,T] -> scalar.
  Reference: arXiv:2402.03300, as restated in arXiv:2507.18071, Eq. 2 and 3. The default ranges are
  those of arXiv:2507.18071, §5.1.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.2, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> advantage_B, mask_BT = jnp.array([1.0, -1.0]), jnp.ones((2, 3))
    >>> loss, metrics = grpo_loss(logp_BT, old_logp_BT, advantage_B, mask_BT)
    >>> print(f"{loss:.4f}, {metrics['clip_fraction/token']:.2f} clipped")
    -0.0750, 0.17 clipped
  """
  batch = terms.batch(logp_BT, old_logp_BT, advantage, mask_BT, **options)
  return _token_loss(batch, clip_low, clip_high, dual_clip, aggregate, max_length)


@policy_loss(levels=BY_TOKEN)
def dapo_loss(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  advantage: ArrayLike,
  mask_BT: ArrayLike,
  clip_low: Number = 0.2,
  clip_high: Number = 0.28,
  *,
  dual_clip: Number | None = None,
  **options: Unpack[Options],
) -> Sums:
  """DAPO: GRPO with a mean over tokens and a wider upper range.

  J = 1/Σ_i|y_i| Σ_i Σ_t min( w_it Â_it, clip(w_it, 1 − clip_low, 1 + clip_high) Â_it ),
  w_it = π_θ(y_it)/π_old(y_it).

  DAPO also has dynamic sampling, which is left to the caller, and a soft overlong punishment
  (`overlong_penalty`).

  Shapes: [B,T] ×2, [B] or [B,T], [B,T] -> scalar.
  Reference: arXiv:2503.14476.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.2, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> advantage_B, mask_BT = jnp.array([1.0, -1.0]), jnp.ones((2, 3))
    >>> loss, metrics = dapo_loss(logp_BT, old_logp_BT, advantage_B, mask_BT)
    >>> print(f"{loss:.4f}, {metrics['clip_fraction/token']:.2f} clipped")
    -0.0750, 0.17 clipped
  """
  batch = terms.batch(logp_BT, old_logp_BT, advantage, mask_BT, **options)
  return _token_loss(batch, clip_low, clip_high, dual_clip, "token")


@policy_loss(levels=BY_TOKEN, advantage="none")
def dr_grpo_loss(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  advantage: ArrayLike,
  mask_BT: ArrayLike,
  clip_low: Number = 0.2,
  clip_high: Number = 0.2,
  *,
  max_length: Number,
  dual_clip: Number | None = None,
  **options: Unpack[Options],
) -> Sums:
  """Dr. GRPO: GRPO with a constant denominator in place of lengths.

  J = 1/(G L) Σ_i Σ_t min( w_it Â_it, clip(w_it, 1 − clip_low, 1 + clip_high) Â_it ),
  w_it = π_θ(y_it)/π_old(y_it).

  L is `max_length`. Division by |y_i| instead of L would favour short right and long wrong answers.
  The paper's advantages are `group_advantages(normalize="none")`.

  Shapes: [B,T] ×2, [B] or [B,T], [B,T] -> scalar.
  Reference: arXiv:2503.20783.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.2, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> advantage_B, mask_BT = jnp.array([1.0, -1.0]), jnp.ones((2, 3))
    >>> loss, metrics = dr_grpo_loss(logp_BT, old_logp_BT, advantage_B, mask_BT, max_length=3)
    >>> print(f"{loss:.4f}, {metrics['clip_fraction/token']:.2f} clipped")
    -0.0667, 0.33 clipped
  """
  batch = terms.batch(logp_BT, old_logp_BT, advantage, mask_BT, **options)
  return _token_loss(batch, clip_low, clip_high, dual_clip, "constant", max_length)


@policy_loss(levels=BY_TOKEN, by_token=True)
def ppo_loss(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  advantage_BT: ArrayLike,
  mask_BT: ArrayLike,
  clip_low: Number = 0.2,
  clip_high: Number = 0.2,
  aggregate: Literal["sequence", "token", "constant"] = "sequence",
  *,
  max_length: Number | None = None,
  dual_clip: Number | None = None,
  **options: Unpack[Options],
) -> Sums:
  """PPO: `grpo_loss` with an advantage for each token.

  The default of `clip_high` is smaller than that of `grpo_loss`.

  J = E[ 1/|y| Σ_t min( w_t Â_t, clip(w_t, 1 − clip_low, 1 + clip_high) Â_t ) ],
  w_t = π_θ(y_t)/π_old(y_t).

  PPO's advantages are those of `gae`, from a value model. `aggregate` is that of `grpo_loss`.

  Shapes: [B,T] ×2, [B,T] or [B], [B,T] -> scalar.
  Reference: arXiv:1707.06347, as restated in arXiv:2507.18071, Eq. 1, with a mean per response.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.2, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> advantage_BT, mask_BT = jnp.array([[1.0, 0.5, 0.2], [-1.0, 0.1, 0.0]]), jnp.ones((2, 3))
    >>> loss, metrics = ppo_loss(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    >>> print(f"{loss:.4f}, {metrics['clip_fraction/token']:.2f} clipped")
    -0.2000, 0.33 clipped
  """
  batch = terms.batch(logp_BT, old_logp_BT, advantage_BT, mask_BT, **options)
  return _token_loss(batch, clip_low, clip_high, dual_clip, aggregate, max_length)


def _token_loss(
  batch: Batch,
  clip_low: Number,
  clip_high: Number,
  dual_clip: Number | None,
  aggregate: str,
  max_length: Number | None = None,
) -> Sums:
  """Computes the clipped loss with a ratio for each token."""
  ratio_BT, clipped_BT = terms.clip(
    ratios.bounded_exp(batch.log_ratio_BT),
    stop_gradient(batch.log_ratio_BT),
    batch.advantage_BX,
    clip_low,
    clip_high,
    dual_clip,
  )
  objective_BT = batch.advantage_BX * ratio_BT
  return terms.token_sums(batch, objective_BT, clipped_BT, aggregate, max_length)
