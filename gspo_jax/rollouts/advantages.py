"""Advantages of responses, from the rewards of their groups."""

import functools
from typing import Any

import jax
import numpy as np

from gspo_jax import objectives as O
from gspo_jax.settings.objective import ObjectiveConfig, options_of


def advantages(config: ObjectiveConfig, reward_PG: np.ndarray, valid_PG: np.ndarray) -> np.ndarray:
  """What the loss multiplies with, or is to come to, of the responses of each group."""
  beta, value = (options_of(config.name) | config.options()).get("beta"), config.soft_value
  return np.asarray(_advantages(config.advantage_kind, reward_PG, valid_PG, beta, value))


@functools.partial(jax.jit, static_argnums=0)  # one small program instead of twenty
def _advantages(kind: str, reward_PG: Any, valid_PG: Any, beta: Any, value: Any) -> jax.Array:
  if kind == "soft":
    return O.soft_advantages(reward_PG, beta, value, valid_PG=valid_PG)
  if kind in ("best", "reward"):
    return O.selection_weights(reward_PG, kind, valid_PG=valid_PG)
  return O.group_advantages(reward_PG, normalize=kind, valid_PG=valid_PG)
