"""OLMo 2 and 3: norms after each part, q/k norms over the width.

https://arxiv.org/abs/2501.00656
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax

from gspo_jax.models import weights
from gspo_jax.models.families import declaration as base
from gspo_jax.models.layers import add, rms_norm
from gspo_jax.models.weights import Attention, Dense
from gspo_jax.settings.model import ModelConfig


@flax.struct.dataclass
class Block:
  attention: Attention
  attention_post_norm: Any  # l D
  ffn: Dense
  ffn_post_norm: Any  # l D


def block_table(c: ModelConfig, is_moe: bool, layers: int) -> Block:
  """Declares the weights of `layers` layers, stacked; ValueError for experts."""
  base.require_dense(c, is_moe)
  w = weights.weight_factory(c, l=layers, F=c.intermediate_size)
  return Block(
    attention=weights.attention_table(c, w, norm=1.0, norm_heads=True),
    attention_post_norm=w("lD", constant=1.0),
    ffn=weights.dense_table(w),
    ffn_post_norm=w("lD", constant=1.0),
  )


def layer(x_BTD: jax.Array, block: Block, config: ModelConfig, attend: Callable, experts: Callable):
  """x + norm(attention(x)), then x + norm(ffn(x)); see `Family`."""
  y_BTD, cache = attend(x_BTD, block.attention, rms_norm)
  y_BTD = rms_norm(y_BTD, block.attention_post_norm, config.rms_norm_eps)
  x_BTD = add(x_BTD, y_BTD, config)
  y_BTD, experts_BTk, stats = base.feed_forward(x_BTD, block.ffn, experts)
  y_BTD = rms_norm(y_BTD, block.ffn_post_norm, config.rms_norm_eps)
  return add(x_BTD, y_BTD, config), cache, experts_BTk, stats


WIDE_NORMS = {
  "attention.q_norm": (base.LAYER + "self_attn.q_norm.weight", "NH"),
  "attention.k_norm": (base.LAYER + "self_attn.k_norm.weight", "KH"),
}

FAMILY = base.Family(
  dict(
    olmo2=base.Architecture(
      "Olmo2ForCausalLM",
      base.FIELDS,
      implied=dict(qk_norm=True),
      fixed=base.SILU | base.NO_BIAS,
      defaults=dict(rope_theta=1e4),
    ),
    olmo3=base.Architecture(
      "Olmo3ForCausalLM",
      base.FIELDS | base.keys("sliding_window"),
      implied=dict(qk_norm=True),
      fixed=base.SILU | base.NO_BIAS,
      defaults=dict(rope_theta=5e5, sliding_window=4096),
      pattern=4,
      ropes_by_kind=True,
    ),
  ),
  WIDE_NORMS
  | {
    "attention_post_norm": (base.LAYER + "post_attention_layernorm.weight", "D"),
    "ffn_post_norm": (base.LAYER + "post_feedforward_layernorm.weight", "D"),
  },
  block_table,
  layer,
)
