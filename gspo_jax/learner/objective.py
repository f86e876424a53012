"""The policy loss described by section `objective` of a configuration, on one mini-batch.

A loss is a function of `gspo_jax.objectives`, or a user's function. Its arguments and options are
declared (`objectives.terms.policy_loss`). The section (`settings/objective.py`) has a key for each
option of any loss.
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

# Arguments of the KL penalty and the entropy bonus.
PENALTIES = (
  "ref_logp_BT",
  "sampler_logp_BT",
  "kl",
  "kl_coef",
  "kl_mask_BT",
  "entropy_BT",
  "entropy_coef",
)


def configured_loss(
  config: ObjectiveConfig,
  logp_BT: jax.Array,
  entropy_BT: jax.Array,
  batch: TrainBatch,
  max_length: int = 0,
  hyperparameters: Mapping[str, Any] | None = None,
) -> tuple[Mean, Metrics, jax.Array]:
  """Returns the undivided loss, metrics, and the mask of clipped tokens.

  Args:
    config: section `objective`.
    logp_BT: log-probs of the current policy, differentiable.
    entropy_BT: entropy of the current policy's distribution at each token, differentiable.
    batch: mini-batch, or one of its micro-batches.
    max_length: maximum response length. Some losses divide by this number.
    hyperparameters: hyperparameters by name. None means `config.hyperparameters()`.
  """
  loss, parameters = config.loss, inspect.signature(config.loss).parameters
  hyperparameters = config.hyperparameters() if hyperparameters is None else hyperparameters
  options = {key: value for key, value in config.options().items() if key in loss.options}
  options |= {key: value for key, value in hyperparameters.items() if key in options}
  options["entropy_BT"] = entropy_BT
  if config.kl_coef or "ref_logp_BT" in parameters:
    options["ref_logp_BT"] = batch.ref_logp_BT
  # "k3_weighted" has a ratio to the policy that sampled the tokens. Old log-probs cannot be used
  # instead, because later weights may have recomputed them.
  weighted_kl = config.kl_coef and options.get("kl") == "k3_weighted"
  if weighted_kl or "sampler_logp_BT" in parameters:
    options["sampler_logp_BT"] = batch.sampler_logp_BT
  if config.kl_coef and batch.mixed_B is not None:
    options["kl_mask_BT"] = jnp.broadcast_to(batch.mixed_B[:, None], batch.mask_BT.shape)
  old_logp_BT = batch.ref_logp_BT if loss.to_reference else batch.old_logp_BT
  if "max_length" in parameters:
    options["max_length"] = max_length
  if "segment_BT" in parameters:
    whole_BT = jnp.zeros_like(batch.inputs.tokens_BT)
    options["segment_BT"] = whole_BT if batch.unit_BT is None else batch.unit_BT
  advantage = batch.advantage_B
  if loss.by_token:
    advantage = batch.advantage_BT
    if advantage is None:
      advantage = jnp.broadcast_to(batch.advantage_B[:, None], batch.mask_BT.shape)
  weight, metrics = _weight(config, logp_BT, advantage, batch, hyperparameters)
  options |= {} if weight is None else dict(weight=weight)
  options = {key: value for key, value in options.items() if key in loss.arguments}
  undivided = functools.partial(loss.undivided, logp_BT, old_logp_BT, advantage, batch.mask_BT)
  total, loss_metrics, clipped_BT = undivided(**options)
  # `ratio/tail` is about ratios to the old policy. This loss has ratios to the reference policy.
  if loss.to_reference:
    loss_metrics = {name: x for name, x in loss_metrics.items() if name != "ratio/tail"}
  metrics |= loss_metrics | {"loss/policy": total}
  if config.kl_coef or config.entropy_coef:
    penalties = {*PENALTIES} - parameters.keys()
    without_penalties = {key: value for key, value in options.items() if key not in penalties}
    # This metric has no penalties. The compiler reuses nearly all operations of `total`.
    metrics["loss/policy"] = undivided(**without_penalties)[0]
  return total, metrics, clipped_BT


def _weight(
  config: ObjectiveConfig,
  logp_BT: jax.Array,
  advantage: jax.Array,
  batch: TrainBatch,
  hyperparameters: Mapping[str, Any],
) -> tuple[jax.Array | None, Metrics]:
  """Returns the loss's argument `weight` [B] or [B, T], and metrics.

  The weight is the product of the importance correction and the mask of off-policy responses. A
  factor that is not configured is 1. If neither factor is configured, the weight is None.
  """
  factors, metrics, mask_BT = [], {}, batch.mask_BT
  if options := _correction_options(config):
    options |= {key: value for key, value in hyperparameters.items() if key in options}
    name = config.correction.name
    behaviour = config.old_logp == "behaviour"
    trainer_BT = batch.own_logp_BT if behaviour else batch.old_logp_BT
    weight = CORRECTIONS[name](trainer_BT, batch.sampler_logp_BT, mask_BT, **options)
    # The importance ratio already divides by the sampler's probability, so the weight is 0 or 1.
    if behaviour:
      weight = (weight > 0).astype(weight.dtype)
    metrics["correction/weight"] = _mean(weight, mask_BT)
    bounded = weight >= options["cap"] if name == "truncated" else weight == 0
    metrics[f"correction/{name}"] = _mean(bounded, mask_BT)
    factors.append(weight)
  if config.off_policy_threshold is not None:
    threshold = hyperparameters["off_policy_threshold"]
    unmasked = O.off_policy_mask(logp_BT, batch.sampler_logp_BT, advantage, mask_BT, threshold)
    metrics["off_policy/masked"] = _mean(unmasked == 0, mask_BT)
    factors.append(unmasked)
  if any(factor.ndim == 2 for factor in factors):
    factors = [factor if factor.ndim == 2 else factor[:, None] for factor in factors]
  return functools.reduce(operator.mul, factors) if factors else None, metrics


def _mean(x: jax.Array, mask_BT: jax.Array) -> Mean:
  """Averages x [B, T] over trained tokens, or x [B] over trained responses."""
  valid = mask_BT > 0 if x.ndim == 2 else (mask_BT > 0).any(axis=1)
  return Mean(jnp.where(valid, x, 0).sum(dtype=jnp.float32), valid.sum(dtype=jnp.float32))
