"""Responses apart by the age of the weights that sampled them, where sampling is ahead of updates.

The age of a token is the number of iterations whose updates lie between the weights that sampled it
and those that are about to be updated; that of a response is the age of its oldest token. The last
class has all older ones too.
"""

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.objectives import ratios
from gspo_jax.objectives.reductions import Mean, Metrics
from gspo_jax.structs import Rollout, TrainBatch


def ages(rollout: Rollout, version: int) -> np.ndarray:
  """int32 [B]: of each response when weights of `version` are updated; -1 where it has no version,
  as what is on record and padding: it is in no class. On the host."""
  oldest_B = np.where(rollout.version >= 0, rollout.version, version).min(axis=1)
  sampled_B = (rollout.version >= 0).any(axis=1)
  return np.where(sampled_B, version - oldest_B, -1).astype(np.int32)


def lag_metrics(rollout: Rollout, version: int) -> dict[str, float]:
  """The mean and the largest age of the tokens that are trained on. On the host."""
  age_X = version - rollout.version[rollout.version >= 0]
  if not len(age_X):
    return {"lag/mean": 0.0, "lag/max": 0.0}
  return {"lag/mean": float(age_X.mean()), "lag/max": float(age_X.max())}


def metrics(logp_BT: jax.Array, batch: TrainBatch, clipped_BT: jax.Array, classes: int) -> Metrics:
  """Of the responses of each age: their share, the mean of |s_i - 1| with the geometric ratio s_i,
  whatever the loss, the share of their tokens that is clipped, and the mean of |1/|y_i| Σ_t Δ_it|,
  the trainer's log-probabilities less those of what sampled; 0 where there are none."""
  if not classes:
    return {}
  live_BT = batch.mask_BT > 0
  length_B = live_BT.sum(1)
  age_B = jnp.minimum(batch.age_B, classes - 1)
  inside_BX = (age_B[:, None] == np.arange(classes)[None]) & (length_B > 0)[:, None]

  def over(x_B):
    return jnp.where(inside_BX, x_B[:, None], 0).sum(0).astype(jnp.float32)

  def mean_B(old_BT):
    delta_BT = ratios.difference(jax.lax.stop_gradient(logp_BT), old_BT)
    return jnp.where(live_BT, delta_BT, 0).sum(1) / jnp.maximum(length_B, 1)

  count_X = over(jnp.ones_like(length_B))
  deviation_B = abs(ratios.bounded_expm1(mean_B(batch.old_logp_BT)))
  found = {
    "by_age/responses": (count_X, jnp.broadcast_to(count_X.sum(), count_X.shape)),
    "by_age/ratio_deviation": (over(deviation_B), count_X),
    "by_age/clip_fraction": (over((clipped_BT & live_BT).sum(1)), over(length_B)),
    "mismatch/by_age": (over(abs(mean_B(batch.sampler_logp_BT))), count_X),
  }
  return {
    f"{name}/{age}": Mean(numerator_X[age], denominator_X[age])
    for name, (numerator_X, denominator_X) in found.items()
    for age in range(classes)
  }
