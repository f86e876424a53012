"""Responses apart by their length: what holds for short ones need not hold for long ones.

The classes are powers of two, so that their number does not depend on what was sampled: "le_64" has
the responses of 33 to 64 tokens, and the first class the shorter ones too.
"""

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.objectives import ratios
from gspo_jax.objectives.reductions import Mean, Metrics, Std

CLASSES = 6


def limits(longest: int) -> list[int]:
  """The largest length of each class: six powers of two at most, from 4 on, of which the last one
  is no less than `longest`."""
  last = max(2, (longest - 1).bit_length())
  return [2**n for n in range(max(2, last - CLASSES + 1), last + 1)]


def reward_metrics(
  reward_B: np.ndarray, known_B: np.ndarray, length_B: np.ndarray, longest: int
) -> dict[str, float]:
  """The share of the responses that are so long, and the mean reward of those among them that have
  a verdict (`known_B`); 0 where there are none. On the host."""
  row = {}
  for limit, inside_B in zip(limits(longest), _classes(length_B, longest).T):
    judged_B = inside_B & known_B
    row[f"by_length/responses/le_{limit}"] = float(inside_B.sum() / max(1, (length_B > 0).sum()))
    row[f"by_length/reward/le_{limit}"] = float(reward_B[judged_B].sum() / max(1, judged_B.sum()))
  return row


def ratio_metrics(
  logp_BT: jax.Array,
  old_logp_BT: jax.Array,
  mask_BT: jax.Array,
  clipped_BT: jax.Array,
  longest: int,
) -> Metrics:
  """The standard deviation of log s_i = 1/|y_i| Σ_t log w_it over the responses that are so long,
  whatever the loss, and the share of their tokens that is clipped; 0 where there are none."""
  live_BT = mask_BT > 0
  length_B = live_BT.sum(1)
  log_ratio_BT = ratios.difference(jax.lax.stop_gradient(logp_BT), old_logp_BT)
  log_ratio_B = jnp.where(live_BT, log_ratio_BT, 0).sum(1) / jnp.maximum(length_B, 1)
  inside_BX = _classes(length_B, longest)

  def over(x_B):
    return jnp.where(inside_BX, x_B[:, None], 0).sum(0).astype(jnp.float32)

  metrics = {
    "log_ratio_std": Std(over(jnp.ones_like(length_B)), over(log_ratio_B), over(log_ratio_B**2)),
    "clip_fraction": Mean(over((clipped_BT & live_BT).sum(1)), over(length_B)),
  }
  return {
    f"by_length/{name}/le_{limit}": type(found)(*(x_X[i] for x_X in found))
    for name, found in metrics.items()
    for i, limit in enumerate(limits(longest))
  }


def _classes(length_B, longest: int):
  """bool [B, classes]: which class a response is in; an empty one is in none."""
  upper = np.array(limits(longest))
  lower = np.array([0, *upper[:-1]])
  return (length_B[:, None] > lower[None]) & (length_B[:, None] <= upper[None])
