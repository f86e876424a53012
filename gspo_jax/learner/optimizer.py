"""AdamW with a schedule and a gradient-norm bound, from Optax."""

import dataclasses
from typing import Annotated, Any, Literal

import jax
import numpy as np
import optax

from gspo_jax import ranges
from gspo_jax.ranges import NonNegativeFloat, NonNegativeInt


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  learning_rate: Annotated[float, ranges.Range(0, 1e10, excluded=(0,))]  # peak
  schedule: Literal["constant", "linear", "cosine"]  # after the warm-up, down to final_fraction
  warmup_steps: NonNegativeInt  # gradient updates, linear from 0
  final_fraction: ranges.Fraction  # of the peak, at the last update
  b1: ranges.FractionBelowOne
  b2: ranges.FractionBelowOne
  eps: ranges.PositiveFraction
  weight_decay: NonNegativeFloat  # decoupled; not on norms and biases
  clip_norm: NonNegativeFloat  # global gradient norm; 0: no bound

  def __post_init__(self):
    ranges.check(self, "optimizer")


def schedule(config: OptimizerConfig, updates: int) -> optax.Schedule:
  """Learning rate at each of `updates` gradient updates."""
  peak, warmup = config.learning_rate, config.warmup_steps
  rest = max(1, updates - warmup - 1)  # steps from the first update after it to the last one
  after = {
    "constant": lambda: optax.constant_schedule(peak),
    "linear": lambda: optax.linear_schedule(peak, peak * config.final_fraction, rest),
    "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction),
  }[config.schedule]()
  if not warmup:
    return after
  # From peak/warmup rather than 0: an update of size zero would be a wasted rollout.
  rise = optax.linear_schedule(peak / warmup, peak, warmup)
  return optax.join_schedules([rise, after], [warmup])


def rates(config: OptimizerConfig, updates: int) -> np.ndarray:
  """The schedule as numbers on the host, one per update: reading it costs no device a thing."""
  return np.asarray(jax.vmap(schedule(config, updates))(np.arange(updates)))


def make(config: OptimizerConfig, updates: int) -> optax.GradientTransformation:
  """The chain: bound the global norm, then AdamW on the schedule."""
  adamw = optax.adamw(
    schedule(config, updates),
    b1=config.b1,
    b2=config.b2,
    eps=config.eps,
    weight_decay=config.weight_decay,
    mask=decayed,
  )
  if not config.clip_norm:
    return adamw
  return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def decayed(params: Any) -> Any:
  """True for matrices, False for norms and biases."""

  def one(path, _) -> bool:
    return not path[-1].name.endswith(("norm", "bias"))

  return jax.tree.map_with_path(one, params)
