"""Clipped policy losses with an importance ratio for each response or segment of a response.

They are GSPO, GSPO-token, LUSPO and `segment_loss`. The module losses.py describes arguments and
symbols that all losses have.
"""

from typing import Literal, Unpack

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from gspo_jax.objectives import checks, ratios, terms
from gspo_jax.objectives.aggregation import aggregate_tokens, at_tokens
from gspo_jax.objectives.checks import Number
from gspo_jax.objectives.clip_ranges import length_factor
from gspo_jax.objectives.reductions import Mean, Metrics
from gspo_jax.objectives.terms import BY_RESPONSE, Batch, Options, Sums, policy_loss


@policy_loss(levels=BY_RESPONSE)
def gspo_loss(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  advantage_B: ArrayLike,
  mask_BT: ArrayLike,
  clip_low: Number = 3e-4,
  clip_high: Number = 4e-4,
  *,
  clip_length: Number | None = None,
  clip_exponent: Number = 0.0,
  length_exponent: Number = 1.0,
  dual_clip: Number | None = None,
  **options: Unpack[Options],
) -> Sums:
  """GSPO: one ratio per response. The tokens of a response are clipped together.

  J = 1/G Σ_i min( s_i Â_i, clip(s_i, 1 − clip_low, 1 + clip_high) Â_i ),
  s_i = exp( 1/|y_i| Σ_t log π_θ(y_it)/π_old(y_it) ).

  Shapes: [B,T] ×2, [B], [B,T] -> scalar. In packed rows (`response_BT`) the advantage may be [B,T],
  constant over each response.
  Reference: arXiv:2507.18071, Eq. 5 and 7. The default ranges are those of §5.1.
  Differs: two exponents are additions. The sum in s_i is divided by |y_i|^α, where α is
  `length_exponent`. If α = 0, s_i is the likelihood ratio of the whole response. The ranges are
  multiplied by (clip_length/|y_i|)^γ, where γ is `clip_exponent` (`length_factor`).

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.2, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> advantage_B, mask_BT = jnp.array([1.0, -1.0]), jnp.ones((2, 3))
    >>> loss, metrics = gspo_loss(logp_BT, old_logp_BT, advantage_B, mask_BT)
    >>> print(f"{loss:.4f}, {metrics['clip_fraction/token']:.2f} clipped")
    -0.0003, 1.00 clipped
  """
  batch = terms.batch(logp_BT, old_logp_BT, advantage_B, mask_BT, by_token=False, **options)
  loss_BU, _, metrics, clipped_BT = _response_loss(
    batch, clip_low, clip_high, dual_clip, clip_length, clip_exponent, length_exponent
  )
  return terms.mean_of_responses(batch, loss_BU), metrics, clipped_BT


@policy_loss(levels=BY_RESPONSE)
def luspo_loss(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  advantage_B: ArrayLike,
  mask_BT: ArrayLike,
  clip_low: Number = 2e-3,
  clip_high: Number = 2.5e-3,
  *,
  dual_clip: Number | None = None,
  **options: Unpack[Options],
) -> Sums:
  """LUSPO: GSPO with each response's loss multiplied by its length.

  J = 1/G Σ_i |y_i| min( s_i Â_i, clip(s_i, 1 − clip_low, 1 + clip_high) Â_i ),
  s_i = exp( 1/|y_i| Σ_t log π_θ(y_it)/π_old(y_it) ).

  If response i is not clipped, its gradient is s_i Â_i Σ_t ∇ log π_θ(y_it). So the weight of a
  token does not depend on the response's length. The KL penalty and the entropy bonus of a response
  are multiplied by its length, too.

  Shapes: [B,T] ×2, [B], [B,T] -> scalar. In packed rows (`response_BT`) the advantage may be [B,T],
  constant over each response.
  Reference: arXiv:2602.05261, Eq. 6 and 7. The default ranges are those of §5.1.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.2, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> advantage_B, mask_BT = jnp.array([1.0, -1.0]), jnp.ones((2, 3))
    >>> loss, metrics = luspo_loss(logp_BT, old_logp_BT, advantage_B, mask_BT)
    >>> print(f"{loss:.4f}, {metrics['clip_fraction/token']:.2f} clipped")
    -0.0068, 1.00 clipped
  """
  batch = terms.batch(logp_BT, old_logp_BT, advantage_B, mask_BT, by_token=False, **options)
  loss_BU, length_BU, metrics, clipped_BT = _response_loss(batch, clip_low, clip_high, dual_clip)
  return terms.mean_of_responses(batch, loss_BU, length_BU), metrics, clipped_BT


@policy_loss(levels=(*BY_RESPONSE, "token"), by_token=True)
def gspo_token_loss(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  advantage_BT: ArrayLike,
  mask_BT: ArrayLike,
  clip_low: Number = 3e-4,
  clip_high: Number = 4e-4,
  *,
  clip_length: Number | None = None,
  clip_exponent: Number = 0.0,
  length_exponent: Number = 1.0,
  dual_clip: Number | None = None,
  **options: Unpack[Options],
) -> Sums:
  """GSPO-token: GSPO's ratio with an advantage for each token.

  J = 1/G Σ_i 1/|y_i| Σ_t min( s_it Â_it, clip(s_it, 1 − clip_low, 1 + clip_high) Â_it ),
  s_it = sg[s_i] · π_θ(y_it) / sg[π_θ(y_it)].

  Here sg stops gradients. The value of s_it is s_i, but its gradient is that of token t alone. If
  all tokens of a response have the same advantage, the loss has the value, the clipping and the
  gradient of `gspo_loss` (Eq. 17).

  Shapes: [B,T] ×2, [B,T] or [B], [B,T] -> scalar.
  Reference: arXiv:2507.18071, Eq. 13 and 14.
  Differs: `length_exponent` and `clip_exponent` are additions, as in `gspo_loss`.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.2, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> advantage_BT, mask_BT = jnp.array([[1.0, 0.0, 2.0], [-1.0, 0.0, 0.0]]), jnp.ones((2, 3))
    >>> loss, metrics = gspo_token_loss(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    >>> print(f"{loss:.4f}, {metrics['clip_fraction/token']:.2f} clipped")
    -0.3336, 0.50 clipped
  """
  batch = terms.batch(logp_BT, old_logp_BT, advantage_BT, mask_BT, **options)
  segment_BT = batch.tokens.response_BT
  loss_BT, _, metrics, clipped_BT = _segment_loss(
    batch, segment_BT, clip_low, clip_high, dual_clip, clip_length, clip_exponent, length_exponent
  )
  return aggregate_tokens(loss_BT, batch.tokens, "sequence"), metrics, clipped_BT


@policy_loss(levels=(*BY_RESPONSE, "token"), by_token=True)
def segment_loss(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  advantage: ArrayLike,
  mask_BT: ArrayLike,
  segment_BT: ArrayLike,
  clip_low: Number = 3e-4,
  clip_high: Number = 4e-4,
  aggregate: Literal["sequence", "segment", "token", "constant"] = "sequence",
  *,
  max_length: Number | None = None,
  clip_length: Number | None = None,
  clip_exponent: Number = 0.0,
  length_exponent: Number = 1.0,
  dual_clip: Number | None = None,
  **options: Unpack[Options],
) -> Sums:
  """GSPO with one ratio per segment of a response.

  J = 1/G Σ_i 1/K_i Σ_k 1/|z_ik| Σ_{t∈z_ik} min( s_it Â_it, clip(s_it) Â_it ),
  s_it = sg[s_ik] · π_θ(y_it) / sg[π_θ(y_it)],
  s_ik = exp( 1/|z_ik| Σ_{t∈z_ik} log π_θ(y_it)/π_old(y_it) ).

  sg stops gradients, and clip(s) is clip(s, 1 − clip_low, 1 + clip_high). Response i has K_i
  segments z_ik, for example turns or lines. `segment_BT` has the segment number of each token, an
  integer in [0, T). All segments of a row must have different numbers, even if the row has several
  responses. If each response is one segment, the loss is that of GSPO-token. If each token is one
  segment, the loss is that of GRPO. If all tokens of a segment have the same advantage Â_ik, the
  loss of response i has the value and the gradient of -1/K_i Σ_k min( s_ik Â_ik, clip(s_ik) Â_ik ).

  `aggregate`: "sequence" is the equation above. "segment" is the mean over all segments of the
  batch. "token" and "constant" are those of `grpo_loss`.

  Shapes: [B,T] ×2, [B] or [B,T], [B,T] ×2 -> scalar.
  Reference: extends Eq. 7 and 14 of arXiv:2507.18071. See also GSsPO, arXiv:2602.01202.
  `length_exponent` and `clip_exponent` are those of `gspo_loss`, for the length of a segment.

  Example:
    >>> logp_BT = jnp.log(jnp.array([[0.5, 0.4, 0.3], [0.2, 0.3, 0.5]]))
    >>> old_logp_BT = jnp.log(jnp.array([[0.4, 0.4, 0.3], [0.3, 0.3, 0.5]]))
    >>> advantage_B, mask_BT = jnp.array([1.0, -1.0]), jnp.ones((2, 3))
    >>> turn_BT = jnp.array([[0, 0, 1], [0, 1, 1]])
    >>> loss, metrics = segment_loss(logp_BT, old_logp_BT, advantage_B, mask_BT, turn_BT)
    >>> print(f"{loss:.4f}, {metrics['clip_fraction/token']:.2f} clipped")
    -0.0002, 0.50 clipped
  """
  batch = terms.batch(logp_BT, old_logp_BT, advantage, mask_BT, **options)
  segment_BT = checks.ids(segment_BT, "segment_BT", batch.tokens.mask_BT)
  loss_BT, length_BX, metrics, clipped_BT = _segment_loss(
    batch, segment_BT, clip_low, clip_high, dual_clip, clip_length, clip_exponent, length_exponent
  )
  if aggregate not in ("sequence", "segment"):
    return aggregate_tokens(loss_BT, batch.tokens, aggregate, max_length), metrics, clipped_BT
  # Each token adds 1/|z_ik|, so the sum is the number of segments.
  segments_BU = jnp.round(batch.tokens.sums(1 / length_BX))
  loss_BU = batch.tokens.sums(loss_BT / length_BX)
  if aggregate == "segment":
    return Mean(loss_BU.sum(), segments_BU.sum()), metrics, clipped_BT
  loss_BU /= jnp.maximum(segments_BU, 1)
  return Mean(loss_BU.sum(), batch.tokens.responses()), metrics, clipped_BT


def _response_loss(
  batch: Batch,
  clip_low: Number,
  clip_high: Number,
  dual_clip: Number | None,
  clip_length: Number | None = None,
  clip_exponent: Number = 0.0,
  length_exponent: Number = 1.0,
) -> tuple[Array, Array, Metrics, Array]:
  """Computes losses and lengths of responses, metrics, and clipped tokens.

  Losses and lengths have shape [B, U], with U as in aggregation.py. The losses are clipped, and do
  not include penalties.
  """
  tokens = batch.tokens
  log_ratio_BU, length_BU = ratios.unit_log_ratio(
    batch.log_ratio_BT, tokens.mask_BT, tokens.response_BT, length_exponent
  )
  advantage_BU, weight_BU = tokens.common(batch.advantage_BX), tokens.common(batch.weight_BX)
  ratio_BU = ratios.bounded_exp(log_ratio_BU)
  factor_BU = length_factor(length_BU, clip_length, clip_exponent)
  ratio_BU, clipped_BU = terms.clip(
    ratio_BU, log_ratio_BU, advantage_BU, clip_low, clip_high, dual_clip, factor_BU
  )
  clipped_BX = jax.tree.map(lambda flag_BU: at_tokens(flag_BU, tokens.response_BT), clipped_BU)
  # The bounds of `finite` and `bounded_exp` are low enough for a product with a length
  # (`luspo_loss`).
  gain_BU = ratios.finite(weight_BU * advantage_BU)
  loss_BU = -gain_BU * ratio_BU
  metrics = terms.update_metrics(batch, log_ratio_BU, length_BU > 0, clipped_BX)
  return loss_BU, length_BU, metrics, terms.either(clipped_BX, tokens)


def _segment_loss(
  batch: Batch,
  segment_BT: Array | None,
  clip_low: Number,
  clip_high: Number,
  dual_clip: Number | None,
  clip_length: Number | None,
  clip_exponent: Number,
  length_exponent: Number,
) -> tuple[Array, Array, Metrics, Array]:
  """Computes losses of tokens, lengths of their segments, metrics, and clipped tokens."""
  log_ratio_BU, length_BU = ratios.unit_log_ratio(
    batch.log_ratio_BT, batch.tokens.mask_BT, segment_BT, length_exponent
  )
  log_ratio_BX = at_tokens(log_ratio_BU, segment_BT)
  length_BX = jnp.maximum(at_tokens(length_BU, segment_BT), 1)
  ratio_BT, clipped_BX = terms.clip(
    ratios.detached_ratio(log_ratio_BX, ratios.scale(length_BX, length_exponent), batch.logp_BT),
    log_ratio_BX,
    batch.advantage_BX,
    clip_low,
    clip_high,
    dual_clip,
    length_factor(length_BX, clip_length, clip_exponent),
  )
  metrics = terms.update_metrics(batch, log_ratio_BU, length_BU > 0, clipped_BX)
  loss_BT = terms.token_loss(batch, batch.advantage_BX * ratio_BT)
  return loss_BT, length_BX, metrics, terms.either(clipped_BX, batch.tokens)
