"""Rematerialisation: what the backward pass keeps of each layer besides its input, and what it
computes again.

  full       keeps nothing
  attention  the outputs of attention, whose recomputation costs T²
  dots       every product with a weight outside the experts
  both       the last two

`auto` is the one of these that recomputes least and fits.
"""

import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.models.attention import attention
from gspo_jax.settings.model import ComputeConfig, ModelConfig
from gspo_jax.system import accelerators

_keep = jax.checkpoint_policies.save_only_these_names
POLICIES = dict(
  full=None,
  attention=_keep(attention.RESIDUAL),
  dots=_keep(sharding.PRODUCT),
  both=_keep(sharding.PRODUCT, attention.RESIDUAL),
)
ROOM = 0.6  # of a device's memory, for what lasts; the rest is for what a layer and the head need
STATE = 16  # bytes per parameter: itself, its gradient and Adam's two moments in float32


def choose(config: ModelConfig, compute: ComputeConfig, tokens: int, parameters: float) -> str:
  """The policy that `compute.remat` names; on the mesh in use, each of whose devices has so many
  tokens and parameters.

  auto: the first of both, attention and full with which the training state, the layers' inputs and
  what is kept of the layers take at most `ROOM` of the memory. full, where the memory is unknown.
  """
  if compute.remat != "auto":
    return compute.remat
  memory = accelerators.memory(sharding.device_kind())
  if not memory:
    return "full"
  left = ROOM * memory - STATE * parameters - prefetched(config, compute)
  itemsize = jnp.dtype(compute.dtype).itemsize
  inputs = config.num_layers * config.hidden_size * itemsize
  for policy in ("both", "attention"):
    if tokens * (inputs + kept(config, policy, itemsize)) <= left:
      return policy
  return "full"


def kept(config: ModelConfig, policy: str, itemsize: int) -> float:
  """Bytes that a device keeps of a token, over all layers, besides their inputs."""
  heads = config.num_heads * config.head_dim
  both_ways = 2 * config.num_kv_heads * config.head_dim
  moe_layers = sum(config.is_moe(layer) for layer in range(config.num_layers))
  bytes_ = 0.0
  if policy in ("attention", "both"):
    bytes_ += config.num_layers * (heads * itemsize + config.num_heads * 4)
  if policy in ("dots", "both"):
    bytes_ += config.num_layers * (heads + both_ways) * itemsize
    bytes_ += (config.num_layers - moe_layers) * 2 * config.intermediate_size * itemsize
  bytes_ /= sharding.axis_size("tensor")
  if policy in ("dots", "both"):
    whole = config.num_layers * 2 - moe_layers  # outputs of attention and of dense blocks
    bytes_ += whole * config.hidden_size * itemsize + moe_layers * config.num_experts * 4
  return bytes_


def prefetched(config: ModelConfig, compute: ComputeConfig) -> float:
  """Bytes that a device keeps of the experts' gathered weights, with `compute.prefetch`."""
  if not compute.prefetch:
    return 0.0
  layers = sum(number for kind, number in config.runs() if kind.moe and number > 1)
  weights = 3 * config.num_experts * config.hidden_size * config.moe_intermediate_size
  parts = sharding.axis_size("expert") * sharding.axis_size("tensor")
  return layers * weights / parts * jnp.dtype(compute.dtype).itemsize
