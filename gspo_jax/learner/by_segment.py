"""Segments apart by their place in the response: how far their ratios are spread, how many of them
are clipped, and what is left of their gradient.

A place is the segment's number, "1" to "4", and the third of the segments in which its middle lies,
"first", "middle" or "last": the only segment of a response is its middle.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from gspo_jax.objectives import ratios
from gspo_jax.objectives.aggregation import unit_sum
from gspo_jax.objectives.reductions import Mean, Metrics, Std
from gspo_jax.structs import TrainBatch

NUMBERED, THIRDS = 4, ("first", "middle", "last")


def gradient(loss: Callable[[jax.Array], Mean], logp_BT: jax.Array) -> jax.Array:
  """The derivative of the undivided loss by each token's log-probability, [B, T]: that of the sum
  over responses."""
  logp_BT = jax.lax.stop_gradient(logp_BT)
  return jax.grad(lambda x_BT: loss(x_BT).numerator)(logp_BT)


def metrics(
  loss: Callable[[jax.Array], Mean],
  logp_BT: jax.Array,
  batch: TrainBatch,
  clipped_BT: jax.Array,
) -> Metrics:
  """Segments of a response and tokens of a segment, in the mean; and of the segments in each place:

  - clip_fraction: the share of their tokens that is clipped, in the mean;
  - gradient: Σ_t |∂L/∂ log π_θ(y_t)| in the mean, with L not yet divided by the number of
    responses: |s_ik Â_i| / K_i for `segment_loss` where it is not clipped, and 0 where it is;
  - ratio_std: the standard deviation of s_ik = exp( 1/|z_ik| Σ_t log w_it ).

  Args:
    loss: of log-probabilities, the rest being what the update has.
    batch: with the number of each token's segment in `unit_BT`, from 0 on.
  """
  live_BT = batch.mask_BT > 0

  def total(x_BT):
    return unit_sum(jnp.where(live_BT, x_BT, 0).astype(jnp.float32), batch.unit_BT)

  old_logp_BT = jax.lax.stop_gradient(batch.old_logp_BT)
  log_ratio_BT = ratios.difference(jax.lax.stop_gradient(logp_BT), old_logp_BT)
  length_BU = total(live_BT)
  tokens_BU = jnp.maximum(length_BU, 1)
  # As in terms.py: cut at what has a finite square.
  deviation_BU = jnp.minimum(ratios.bounded_expm1(total(log_ratio_BT) / tokens_BU), 1e15)
  clipped_BU = total(clipped_BT) / tokens_BU
  gradient_BU = total(abs(gradient(loss, logp_BT)))
  live_BU = length_BU > 0
  number_B = live_BU.sum(1)
  found: Metrics = {
    "segment/count": Mean(_sum(number_B), _sum(number_B > 0)),
    "segment/length": Mean(_sum(length_BU), _sum(number_B)),
  }
  for place, inside_BU in _places(live_BU, number_B).items():

    def over(x_BU, inside_BU=inside_BU):
      return _sum(jnp.where(inside_BU, x_BU, 0))

    number = _sum(inside_BU)
    found[f"segment/clip_fraction/{place}"] = Mean(over(clipped_BU), number)
    found[f"segment/gradient/{place}"] = Mean(over(gradient_BU), number)
    spread = over(deviation_BU), over(deviation_BU**2)
    found[f"segment/ratio_std/{place}"] = Std(number, *spread)
  return found


def _sum(x: jax.Array) -> jax.Array:
  return x.sum(dtype=jnp.float32)


def _places(live_BU: jax.Array, number_B: jax.Array) -> dict[str, jax.Array]:
  """bool [B, U] for each place: which segments are there."""
  number_U = jnp.arange(live_BU.shape[1], dtype=jnp.int32)
  # floor(3 (u + ½) / K), in whole numbers.
  third_BU = 3 * (2 * number_U[None] + 1) // (2 * jnp.maximum(number_B, 1)[:, None])
  places = {str(n + 1): live_BU & (number_U == n)[None] for n in range(NUMBERED)}
  return places | {name: live_BU & (third_BU == i) for i, name in enumerate(THIRDS)}
