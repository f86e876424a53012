"""Estimates signal, noise and direction of gradients of single groups.

A gradient estimator averages over groups. Sums over N groups are enough, in the memory of one
gradient per loss.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax import objectives as O
from gspo_jax.learner.passes import Learner, accumulate, log_probs, parts
from gspo_jax.models import lora
from gspo_jax.structs import Array, TrainBatch

# Maps logp_BT and the batch of a group to loss and metrics.
GroupLoss = Callable[[jax.Array, TrainBatch], tuple[jax.Array, Mapping[str, jax.Array]]]
METRICS = ("clip_fraction/token", "ratio/deviation", "kl/k3")


@flax.struct.dataclass
class Moments:
  """Sums over groups of their gradients, by loss (the letter X)."""

  groups: Array  # float32 []: the number N of groups.
  total_X: Any  # Σ_j g_j, like the parameters with leaves [X, ...].
  square_X: Array  # float32: Σ_j ‖g_j‖²
  metrics_X: dict[str, Array]  # float32: sums of METRICS; 0 for metrics that a loss lacks.


def make_group_moments(
  learner: Learner, losses: Sequence[GroupLoss]
) -> Callable[[Any, TrainBatch], Moments]:
  """Returns a jitted pass over the groups of a batch, one by one.

  Each group has one forward pass, and a backward pass for each of X losses. Gradients are those of
  the adapters if there are any.

  Raises:
    ValueError: the batch is packed, or is on several devices.
  """

  def moments(params: Any, batch: TrainBatch) -> Moments:
    if batch.inputs.places or jax.sharding.get_abstract_mesh().size > 1:
      raise ValueError("gradients of groups need a batch that is not packed, on one device")
    trained, frozen = lora.split(params)
    number = len(batch.mask_BT) // learner.group_size
    single = dataclasses.replace(learner, microbatches=number)
    _, part = parts(batch, single)

    def group_moments(i: Any) -> Moments:
      group = part(i)

      def logp(trained: Any) -> jax.Array:
        return log_probs(lora.join(trained, frozen), group.inputs, single)[0]

      logp_BT, pull = jax.vjp(logp, trained)
      slopes, values = [], []
      for loss in losses:
        slope_BT, metrics = jax.grad(loss, has_aux=True)(logp_BT, group)
        slopes.append(slope_BT)
        values.append([jnp.float32(metrics.get(name, 0.0)) for name in METRICS])
      gradient_X = jax.lax.map(lambda slope_BT: pull(slope_BT)[0], jnp.stack(slopes))
      metrics = dict(zip(METRICS, jnp.array(values).T))
      return Moments(jnp.float32(1), gradient_X, dot(gradient_X, gradient_X), metrics)

    return accumulate(group_moments, number, add, number)

  return jax.jit(moments)


def add(first: Moments, other: Moments) -> Moments:
  """Adds the moments of two sets of groups."""
  return jax.tree.map(jnp.add, first, other)


def dot(a_X: Any, b_X: Any) -> jax.Array:
  """Returns inner products [X] of gradients by loss; a single loss broadcasts."""
  products = jax.tree.map(lambda a, b: (a * b).sum(axis=range(1, a.ndim)), a_X, b_X)
  return jax.tree.reduce(jnp.add, products)


def signal(moments: Moments) -> jax.Array:
  """Estimates ‖E g‖² [X] from pairs of groups; may be negative."""
  n = moments.groups
  return (dot(moments.total_X, moments.total_X) - moments.square_X) / (n * (n - 1))


def noise(moments: Moments) -> jax.Array:
  """Estimates E ‖g − E g‖² [X], the trace of the covariance."""
  n = moments.groups
  return (moments.square_X - dot(moments.total_X, moments.total_X) / n) / (n - 1)


@jax.jit
def compare(moments: Moments, truth: Moments) -> dict[str, jax.Array]:
  """Estimates [X] from N groups and an independent `truth` of one loss:

  - signal, noise, and snr = signal / noise: the signal-to-noise ratio of a single group;
  - projected: (E g · u)² / noise, where u is the direction of the true gradient g*;
  - cosine of E g and g*, corrected for the noise in both;
  - bias: ‖E g − g*‖² / ‖g*‖², and scale: the length of E g along g*, 1 without bias.

  Estimates are unbiased, or ratios of unbiased ones. With few groups they may lie outside of their
  ranges, and are NaN for negative squares.
  """
  true = signal(truth)
  product = dot(moments.total_X, truth.total_X) / (moments.groups * truth.groups)
  strength, spread = signal(moments), noise(moments)
  return {
    "signal": strength,
    "noise": spread,
    "snr": strength / spread,
    "projected": product * jnp.abs(product) / (true * spread),
    "cosine": product / jnp.sqrt(strength * true),
    "bias": (strength - 2 * product + true) / true,
    "scale": product / true,
    **{name: total_X / moments.groups for name, total_X in moments.metrics_X.items()},
  }


def raw_product_loss(
  logp_BT: jax.Array, batch: TrainBatch
) -> tuple[jax.Array, Mapping[str, jax.Array]]:
  """Computes −1/G Σ_i Â_i / |y_i| Π_t w_it, unclipped.

  Its gradient has the mean of the on-policy one, and a variance that grows exponentially with |y|.
  """
  ratio_B = O.sequence_ratio(logp_BT, batch.old_logp_BT, batch.mask_BT, length_exponent=0.0)
  length_B = batch.mask_BT.sum(axis=1)
  live_B = length_B > 0
  term_B = jnp.where(live_B, batch.advantage_B * ratio_B / jnp.maximum(length_B, 1), 0)
  return -term_B.sum() / jnp.maximum(live_B.sum(), 1), {}
