"""Critic: a value head on the policy's trunk or on a separate model."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.models import transformer, weights
from gspo_jax.settings.model import ModelConfig
from gspo_jax.sharding import BATCH, P


@flax.struct.dataclass
class Critic:
  trunk: Any  # Params without a head. None means the policy's trunk.
  weight: Any  # D
  bias: Any  # []


def table(config: ModelConfig, has_trunk: bool) -> Critic:
  """Declares every weight once. The head starts at 0, so the first values are 0."""
  w = weights.weight_factory(config)
  trunk = transformer.table(config).replace(head=None) if has_trunk else None
  return Critic(trunk, w("D", wide=True), w("", wide=True))


def values(critic: Critic, hidden_BTD: jax.Array) -> jax.Array:
  """Values V = w · h + b of hidden states, float32 [B, T]."""
  weight_D = sharding.reshard(critic.weight.astype(jnp.float32), P())
  hidden_BTD = hidden_BTD.astype(jnp.float32)
  value_BT = sharding.einsum("BTD,D->BT", hidden_BTD, weight_D, out=P(BATCH, None))
  return value_BT + critic.bias.astype(jnp.float32)
