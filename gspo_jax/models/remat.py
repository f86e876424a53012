"""Rematerialisation: which activations of a layer are saved for the backward pass.

Each layer's input is always saved. `compute.remat` names the policy for all other activations:

  none       saves all: JAX's default, without rematerialisation
  full       saves none, so the backward pass recomputes the layer
  attention  saves outputs of attention, since recomputing them costs T²
  dots       saves products with weights outside the experts; with `experts=triton` also experts'
             products with gate and up
  both       saves what `attention` and `dots` save
  auto       chooses `both` if its activations fit in memory, else `attention` if its activations
             fit, else `full` (see `choose`)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.models.attention import attention, blocks
from gspo_jax.models.experts import groups
from gspo_jax.settings.model import ComputeConfig, ModelConfig, Scan
from gspo_jax.system import accelerators


def _keep(*names: str) -> Callable[..., bool]:
  """Returns a policy of `jax.checkpoint` for saving values by name.

  The name `blocks.RESIDUAL` also saves the results of cuDNN's kernel, which have no names.
  """
  by_name = jax.checkpoint_policies.save_only_these_names(*names)

  def saves(primitive: Any, *avals: Any, **params: Any) -> bool:
    fused = blocks.RESIDUAL in names and primitive.name == attention.CUDNN
    return fused or by_name(primitive, *avals, **params)

  return saves


POLICIES = dict(
  full=None,
  attention=_keep(blocks.RESIDUAL),
  dots=_keep(sharding.PRODUCT, groups.HIDDEN),
  both=_keep(sharding.PRODUCT, groups.HIDDEN, blocks.RESIDUAL),
)
# Share of a device's memory for the three terms in `choose`; a layer and the head need the rest.
ROOM = 0.6
STATE = 16  # Bytes per parameter: the value, its gradient and Adam's two moments, in float32.


def choose(config: ModelConfig, compute: ComputeConfig, tokens: int, parameters: float) -> str:
  """Returns the policy for `compute.remat` on the mesh in use.

  "auto" means the first of "both" and "attention" for which three terms take at most `ROOM` of a
  device's memory: the training state, the prefetched weights of experts, and the layers' inputs
  with the saved activations. If neither fits, or if the memory is unknown, "auto" means "full".

  tokens: number of tokens of a pass on each device.
  parameters: number of parameters on each device.
  """
  if compute.remat != "auto":
    return compute.remat
  memory = accelerators.memory(sharding.device_kind())
  if not memory:
    return "full"
  available = ROOM * memory - STATE * parameters - prefetched(config, compute)
  itemsize = jnp.dtype(compute.dtype).itemsize
  inputs = config.num_layers * config.hidden_size * itemsize
  for policy in ("both", "attention"):
    if tokens * (inputs + saved_bytes(config, policy, itemsize)) <= available:
      return policy
  return "full"


def saved_bytes(config: ModelConfig, policy: str, itemsize: int) -> float:
  """Returns the bytes of saved activations per token and device.

  The inputs of layers do not count.
  """
  heads = config.num_heads * config.head_dim  # Elements of a token's queries.
  keys_values = 2 * config.num_kv_heads * config.head_dim
  gate = heads if config.linear.pattern > 1 else 0  # Full attention beside linear layers is gated.
  linear_layers = sum(config.is_linear(layer) for layer in range(config.num_layers))
  full_layers = config.num_layers - linear_layers
  c = config.linear
  values, keys = c.value_heads * c.value_dim, c.key_heads * c.key_dim  # In linear layers.
  moe_layers = config.num_moe_layers
  bytes_ = 0.0
  if policy in ("attention", "both"):
    copies = 2 if sharding.platform() == "gpu" else 1  # One per branch of `attend_cudnn`.
    bytes_ += copies * full_layers * (heads * itemsize + config.num_heads * 4)
    bytes_ += linear_layers * values * itemsize
  if policy in ("dots", "both"):
    bytes_ += full_layers * (heads + keys_values + gate) * itemsize
    # Queries, keys, values and gates; write strengths and decays in float32.
    bytes_ += linear_layers * (2 * (keys + values) * itemsize + 2 * c.value_heads * 4)
    widths = (config.num_layers - moe_layers) * config.intermediate_size
    bytes_ += 2 * (widths + moe_layers * config.router.shared_width) * itemsize
    if sharding.platform() == "gpu":  # Gate and up for the rows of a piece in `apply_triton`.
      slack = groups.SLACK if sharding.axis_size("expert") > 1 else 1
      chosen = slack * config.experts_per_token * config.moe_intermediate_size
      bytes_ += 2 * moe_layers * chosen * itemsize
  bytes_ /= sharding.axis_size("tensor")
  if policy in ("dots", "both"):
    whole = config.num_layers * 2 - moe_layers  # Outputs of attention and of dense feed-forwards.
    bytes_ += whole * config.hidden_size * itemsize + moe_layers * config.num_experts * 4
    if config.router.shared_gate:  # The shared experts' output, and its gate.
      bytes_ += moe_layers * (config.hidden_size + 1) * itemsize
  return bytes_


def prefetches(scan: Scan) -> bool:
  """Whether `compute.prefetch` applies: the scan has several steps, and experts in all layers."""
  return scan.steps > 1 and all(stack.kind.moe for stack in scan.stacks)


def prefetched(config: ModelConfig, compute: ComputeConfig) -> float:
  """Returns the bytes of experts' weights gathered by `compute.prefetch`, per device."""
  if not compute.prefetch:
    return 0.0
  scans = filter(prefetches, config.scans())
  layers = sum(len(stack.layers) for scan in scans for stack in scan.stacks)
  weights = 3 * config.num_experts * config.hidden_size * config.moe_intermediate_size
  parts = sharding.axis_size("expert") * sharding.axis_size("tensor")
  return layers * weights / parts * jnp.dtype(compute.dtype).itemsize
