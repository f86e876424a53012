"""Sparse upcycling of a dense model to a Mixture of Experts (arXiv:2212.05055, §2.1)."""

import dataclasses

import jax
import jax.numpy as jnp

from gspo_jax.models import transformer
from gspo_jax.models.families.declaration import Block
from gspo_jax.models.families.lookup import family
from gspo_jax.models.weights import Dense, Moe, Params
from gspo_jax.settings.model import ModelConfig


def upcycle(
  params: Params,
  config: ModelConfig,
  key: jax.Array,
  *,
  experts: int = 8,
  per_token: int = 2,
  noise: float = 0.0,
) -> tuple[Params, ModelConfig]:
  """Copies every feed-forward layer to `experts` experts and adds a random router.

  The gate weights of a token's experts sum to 1. So if there is no noise, the model's outputs are
  unchanged for any choice of experts. Noise lets the experts differ from the start: each weight w
  of each copy becomes w (1 + noise · ε), with ε ~ N(0, 1).

  Args:
    params, config: a dense model without linear attention. Its layers must normalise the inputs of
      attention and feed-forward layer, but not the outputs, as in Llama, Qwen2 and Qwen3.
    key: random key of the router and the noise.
    experts, per_token: E and k.
    noise: relative standard deviation of the noise.

  Returns:
    Parameters and configuration of the new model.

  Raises:
    ValueError: if the model has experts already, normalises outputs, or has linear attention.
  """
  if config.num_experts or family(config).block is not Block or config.linear.pattern > 1:
    raise ValueError(
      f"model.num_experts={config.num_experts}, model.family={config.family!r}: only a dense model "
      "with full attention and norms of inputs alone, such as Llama or Qwen3, can be upcycled"
    )
  sparse = dataclasses.replace(
    config,
    num_experts=experts,
    experts_per_token=per_token,
    moe_intermediate_size=config.intermediate_size,
    norm_topk_prob=True,
  )
  tables = transformer.table(sparse).blocks

  def copy(w_l: jax.Array, key: jax.Array) -> jax.Array:
    w_lE = jnp.repeat(w_l[:, None], experts, axis=1)
    if not noise:
      return w_lE
    return w_lE * (1 + noise * jax.random.normal(key, w_lE.shape, w_lE.dtype))

  def moe(dense: Dense, table: Moe, key: jax.Array) -> Moe:
    router_key, *keys = jax.random.split(key, 4)
    router = table.router.init(router_key, jnp.float32)
    return Moe(router, *map(copy, (dense.gate, dense.up, dense.down), keys))

  keys = jax.random.split(key, len(params.blocks))
  blocks = [
    block.replace(ffn=moe(block.ffn, table.ffn, k))
    for block, table, k in zip(params.blocks, tables, keys, strict=True)
  ]
  return params.replace(blocks=tuple(blocks)), sparse
