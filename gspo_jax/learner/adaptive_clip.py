"""Adaptive clip ranges, adjusted after each iteration so that a target share of tokens is clipped.

The training state has one factor, `clip_factor`, for all clip ranges of the loss.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax.objectives import adapted_factor
from gspo_jax.settings.objective import AdaptiveClipConfig
from gspo_jax.structs import TrainState

METRIC = "clip_fraction/token"  # Share of tokens that an iteration's updates clip.
RANGES = ("clip_low", "clip_high", "clip_range")  # Hyperparameters scaled by the factor.


def begin(state: TrainState, config: AdaptiveClipConfig) -> TrainState:
  """Sets `clip_factor` to 1 if clip ranges are adaptive."""
  return state.replace(clip_factor=jnp.ones((), jnp.float32)) if config.target else state


def scale_ranges(hyperparameters: Mapping[str, Any], factor: jax.Array | None) -> Mapping[str, Any]:
  """Multiplies the clip ranges by `factor`; None leaves them unchanged."""
  if factor is None:
    return hyperparameters
  return {key: n * factor if key in RANGES else n for key, n in hyperparameters.items()}


def adapted(
  state: TrainState, row: Mapping[str, Any], config: AdaptiveClipConfig, on_nonfinite: str
) -> TrainState:
  """Adapts `clip_factor` to an iteration's metrics.

  The factor is unchanged if the iteration's gradients are all 0 or `METRIC` is not finite. If
  on_nonfinite="stop", the factor is also unchanged once an update was skipped. If clip ranges are
  fixed (`clip_factor` is None), the state is unchanged. The computation runs on the devices, and no
  value is fetched to the host.

  Args:
    row: metrics of the iteration, on the devices.
    config: section `objective.adaptive_clip`.
    on_nonfinite: key `on_nonfinite`, "stop" or "skip".
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
