"""Metrics of routers: how even their choices are, and how far they have moved since the rollout."""

from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax.learner.layout import Rows
from gspo_jax.models import transformer
from gspo_jax.models.experts import moe, routing
from gspo_jax.objectives.reductions import Max, Mean
from gspo_jax.settings.model import ModelConfig

VOLATILITY = "router/volatility"


def router_metrics(stats: moe.RouterStats, config: ModelConfig) -> dict[str, Any]:
  """Router statistics over layers: balance (1 is even), entropy in nats, busiest expert, drops."""
  tokens = stats.tokens.sum()
  share = stats.load_E.max(-1) / jnp.maximum(stats.tokens * config.experts_per_token, 1)
  return {
    "router/load_balance": Mean(moe.load_balance(stats, config) * tokens, tokens),
    "router/entropy": Mean(stats.entropy.sum(), tokens),
    "router/z": Mean(stats.z.sum(), tokens),
    "router/busiest_expert": Max(share.max()),
    "router/dropped_tokens": Max(stats.dropped.sum()),
  }


def volatility_metrics(out: transformer.Output, rows: Rows, replay: str) -> dict[str, Mean]:
  """Measures how far the routing has moved since the rollout, per layer, and sampler to trainer.

  Without replay: the experts that this forward pass used against those on record for the same
  tokens: the trainer's if it recomputed, else the sampler's. With replay: the experts that the
  router would have chosen, on the replayed network's hidden states, against the replayed ones.
  Nothing is computed again; without a record of experts there is no metric.
  """
  if out.routing_lBTk is None:
    return {}
  metrics, sampler_RTlk = {}, rows.sampler_routing_RTlk
  recorded_RTlk = sampler_RTlk if rows.routing_RTlk is None else rows.routing_RTlk
  if replay != "none":
    metrics[VOLATILITY] = Mean(out.stats.overridden, out.stats.replayed)
  elif recorded_RTlk is not None:
    metrics[VOLATILITY] = _volatility(out, recorded_RTlk)
  if sampler_RTlk is not None:
    layers = metrics[VOLATILITY] if replay == "R3" else _volatility(out, sampler_RTlk)
    metrics[f"{VOLATILITY}/sampler"] = Mean(layers.numerator.sum(), layers.denominator.sum())
  return metrics


def _volatility(out: transformer.Output, recorded_RTlk: jax.Array) -> Mean:
  recorded_lRTk = routing.by_layer(recorded_RTlk)
  return Mean(*routing.volatility_sums(out.routing_lBTk, recorded_lRTk))
