"""Section `objective` of a configuration, and the policy loss that it describes.

What a loss can be told is what it declares (`objectives.terms.policy_loss`): every option that one
of them declares is a key of the section, and a loss that does not have it refuses it.
"""

import functools
import inspect
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax import objectives as O
from gspo_jax.objectives.reductions import Mean, Metrics
from gspo_jax.settings.objective import CORRECTIONS, ObjectiveConfig, _correction_options
from gspo_jax.structs import TrainBatch

PENALTIES = ("ref_logp_BT", "kl", "kl_coef", "kl_mask_BT", "entropy_BT", "entropy_coef")


def policy_loss(
  config: ObjectiveConfig,
  logp_BT: jax.Array,
  entropy_BT: jax.Array,
  batch: TrainBatch,
  max_length: int = 0,
  numbers: Mapping[str, Any] | None = None,
) -> tuple[Mean, Metrics, jax.Array]:
  """The configured objective undivided, its metrics, and the tokens it has clipped, bool [B, T].

  Args:
    max_length: tokens that a response has at most, by which some aggregations divide.
    numbers: what to take instead of the configuration's own `numbers()`.
  """
  loss, takes = config.loss, inspect.signature(config.loss).parameters
  numbers = config.numbers() if numbers is None else numbers
  options = {key: value for key, value in config.options().items() if key in loss.options}
  options |= {key: value for key, value in numbers.items() if key in options}
  options["entropy_BT"] = entropy_BT
  if config.kl_coef:
    options["ref_logp_BT"] = batch.ref_logp_BT
    if batch.mixed_B is not None:
      options["kl_mask_BT"] = jnp.broadcast_to(batch.mixed_B[:, None], batch.mask_BT.shape)
  old_logp_BT = batch.ref_logp_BT if loss.to_reference else batch.old_logp_BT
  if "max_length" in takes:
    options["max_length"] = max_length
  if "segment_BT" in takes:
    whole_BT = jnp.zeros_like(batch.inputs.tokens_BT)
    options["segment_BT"] = whole_BT if batch.unit_BT is None else batch.unit_BT
  advantage = batch.advantage_B
  if loss.by_token:
    advantage = batch.advantage_BT
    if advantage is None:
      advantage = jnp.broadcast_to(batch.advantage_B[:, None], batch.mask_BT.shape)
  weight, metrics = _weight(config, logp_BT, advantage, batch, numbers)
  undivided = functools.partial(
    loss.undivided, logp_BT, old_logp_BT, advantage, batch.mask_BT, weight=weight
  )
  total, of_loss, clipped_BT = undivided(**options)
  metrics |= of_loss | {"loss/policy": total}
  if config.kl_coef or config.entropy_coef:
    plain = {key: value for key, value in options.items() if key not in PENALTIES}
    metrics["loss/policy"] = undivided(**plain)[0]  # compiled, it shares nearly all of `total`
  return total, metrics, clipped_BT


def _weight(
  config: ObjectiveConfig,
  logp_BT: jax.Array,
  advantage: jax.Array,
  batch: TrainBatch,
  numbers: Mapping[str, Any],
) -> tuple[jax.Array | None, Metrics]:
  """Weight of the objective, [B] or [B, T], None for 1, and metrics of it."""
  factors, metrics, mask_BT = [], {}, batch.mask_BT
  if options := _correction_options(config):
    options |= {key: value for key, value in numbers.items() if key in options}
    name = config.correction.name
    behaviour = config.old_logp == "behaviour"
    trainer_BT = batch.own_logp_BT if behaviour else batch.old_logp_BT
    weight = CORRECTIONS[name](trainer_BT, batch.sampler_logp_BT, mask_BT, **options)
    if behaviour:  # its ratio is to the sampler, so that what is left in counts once
      weight = (weight > 0).astype(weight.dtype)
    metrics["correction/weight"] = _mean(weight, mask_BT)
    cut = weight >= options["cap"] if name == "truncated" else weight == 0
    metrics[f"correction/{name}"] = _mean(cut, mask_BT)
    factors.append(weight)
  if config.off_policy_threshold is not None:
    threshold = numbers["off_policy_threshold"]
    kept = O.off_policy_mask(logp_BT, batch.sampler_logp_BT, advantage, mask_BT, threshold)
    metrics["off_policy/masked"] = _mean(kept == 0, mask_BT)
    factors.append(kept)
  if any(factor.ndim == 2 for factor in factors):
    factors = [factor if factor.ndim == 2 else factor[:, None] for factor in factors]
  return functools.reduce(operator.mul, factors) if factors else None, metrics


def _mean(x: jax.Array, mask_BT: jax.Array) -> Mean:
  """Over tokens of [B, T]; of [B] over responses that have any."""
  live = mask_BT > 0 if x.ndim == 2 else (mask_BT > 0).any(axis=1)
  return Mean(jnp.where(live, x, 0).sum(dtype=jnp.float32), live.sum(dtype=jnp.float32))
