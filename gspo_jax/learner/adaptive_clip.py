"""Clip ranges that follow a target for the clipped fraction, from one iteration to the next."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax.objectives import adapted_factor
from gspo_jax.settings.objective import AdaptiveClipConfig
from gspo_jax.structs import TrainState

METRIC = "clip_fraction/token"  # one value for all updates of an iteration
RANGES = ("clip_low", "clip_high", "clip_range")


def begin(state: TrainState, config: AdaptiveClipConfig) -> TrainState:
  """Adds a factor of the clip ranges, 1, if they are adaptive."""
  return state.replace(clip_factor=jnp.ones((), jnp.float32)) if config.target else state


def in_force(hyperparameters: Mapping[str, Any], factor: jax.Array | None) -> Mapping[str, Any]:
  """Returns hyperparameters with clip ranges at this factor; None for the configured ones."""
  if factor is None:
    return hyperparameters
  return {key: n * factor if key in RANGES else n for key, n in hyperparameters.items()}


def adapted(
  state: TrainState, row: Mapping[str, Any], config: AdaptiveClipConfig, on_nonfinite: str
) -> TrainState:
  """Returns the state with the clip ranges that follow from a row of metrics.

  It is computed on the devices: no value is fetched. After an update that was not finite, with
  "stop", the ranges stay as the update met them. They also stay where no token was trained on.
  """
  if state.clip_factor is None:
    return state
  factor = _adapted(
    state.clip_factor,
    row[METRIC],
    row["ratio/mean"],
    state.skipped,
    dict(target=config.target, gain=config.gain),
    stop=on_nonfinite == "stop",
  )
  return state.replace(clip_factor=factor)


@functools.partial(jax.jit, static_argnames="stop")
def _adapted(factor, clipped, ratio, skipped, hyperparameters, *, stop):
  # Ratios are positive: their mean is 0 where there are none.
  sound = jnp.isfinite(clipped) & (ratio > 0) & ((skipped == 0) | (not stop))
  return jnp.where(sound, adapted_factor(factor, clipped, **hyperparameters), factor)
