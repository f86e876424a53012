"""Qwen3 and Qwen3-MoE, with other options Qwen2, Llama and Mixtral: pre-norms, SwiGLU, experts."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax

from gspo_jax.models import weights
from gspo_jax.models.layers import Family, feed_forward, rms_norm
from gspo_jax.models.weights import Attention, Dense
from gspo_jax.settings.model import ModelConfig


@flax.struct.dataclass
class Moe:
  router: Any  # l D E
  gate: Any  # l E D F
  up: Any  # l E D F
  down: Any  # l E F D


@flax.struct.dataclass
class Block:
  attention_norm: Any  # l D
  attention: Attention
  ffn_norm: Any  # l D
  ffn: Dense | Moe


def block_table(c: ModelConfig, is_moe: bool, layers: int) -> Block:
  """Declares the weights of `layers` layers of one kind, stacked."""
  w = weights.weight_factory(
    c, l=layers, F=c.moe_intermediate_size if is_moe else c.intermediate_size
  )
  sparse = Moe(
    # Rounding would change the chosen experts; every device routes its own tokens.
    router=w("lDE", fan_in="D", wide=True, whole=True),
    gate=w("lEDF", fan_in="D"),
    up=w("lEDF", fan_in="D"),
    down=w("lEFD", fan_in="F"),
  )
  return Block(
    attention_norm=w("lD", constant=1.0),
    attention=weights.attention_table(c, w, norm=1.0),
    ffn_norm=w("lD", constant=1.0),
    ffn=sparse if is_moe else weights.dense_table(w),
  )


def layer(x_BTD: jax.Array, block: Block, config: ModelConfig, attend: Callable, experts: Callable):
  """x + attention(norm(x)), then x + ffn(norm(x)); see `Family`."""
  y_BTD = rms_norm(x_BTD, block.attention_norm, config.rms_norm_eps)
  y_BTD, cache = attend(y_BTD, block.attention, rms_norm)
  x_BTD = x_BTD + y_BTD
  y_BTD = rms_norm(x_BTD, block.ffn_norm, config.rms_norm_eps)
  if isinstance(block.ffn, Dense):
    return x_BTD + feed_forward(y_BTD, block.ffn, jax.nn.silu), cache, None, None
  y_BTD, experts_BTk, stats = experts(y_BTD, block.ffn)
  return x_BTD + y_BTD, cache, experts_BTk, stats


FAMILY = Family(block_table, layer, rms_norm, embed_scale=lambda _: 1.0)
