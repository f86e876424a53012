"""Adaptive clip ranges: each iteration's clipped fraction moves them towards a target."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax.objectives import adapted_factor
from gspo_jax.settings.objective import AdaptiveClipConfig
from gspo_jax.structs import TrainState

METRIC = "clip_fraction/token"  # One value for all updates of an iteration.
RANGES = ("clip_low", "clip_high", "clip_range")


def begin(state: TrainState, config: AdaptiveClipConfig) -> TrainState:
  """Adds a factor of 1 for the clip ranges, if they are adaptive."""
  return state.replace(clip_factor=jnp.ones((), jnp.float32)) if config.target else state


def scale_ranges(hyperparameters: Mapping[str, Any], factor: jax.Array | None) -> Mapping[str, Any]:
  """Scales the clip ranges by `factor`; None leaves them unchanged."""
  if factor is None:
    return hyperparameters
  return {key: n * factor if key in RANGES else n for key, n in hyperparameters.items()}


def adapted(
  state: TrainState, row: Mapping[str, Any], config: AdaptiveClipConfig, on_nonfinite: str
) -> TrainState:
  """Returns the state with clip ranges adapted to an iteration's metrics.

  The computation runs on the devices; no value is fetched. The ranges stay unchanged without a
  gradient, and after a non-finite update with on_nonfinite="stop".
  """
  if state.clip_factor is None:
    return state
  factor = _adapt(
    state.clip_factor,
    row[METRIC],
    row["grad_norm"],
    state.skipped,
    dict(target=config.target, gain=config.gain),
    stop=on_nonfinite == "stop",
  )
  return state.replace(clip_factor=factor)


@functools.partial(jax.jit, static_argnames="stop")
def _adapt(factor, clipped, grad_norm, skipped, hyperparameters, *, stop):
  usable = jnp.isfinite(clipped) & (grad_norm != 0) & ((skipped == 0) | (not stop))
  return jnp.where(usable, adapted_factor(factor, clipped, **hyperparameters), factor)
