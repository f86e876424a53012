"""Gemma 2 and 3: norms before and after each part of a layer, GeGLU, a scaled embedding.

Sliding windows, their rotary base, the scale of queries and soft bounds are fields of
`ModelConfig`, read by attention and head for every family.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax

from gspo_jax.models import weights
from gspo_jax.models.layers import Family, feed_forward, rms_norm_around_one
from gspo_jax.models.weights import Attention, Dense
from gspo_jax.settings.model import ModelConfig


@flax.struct.dataclass
class Block:
  attention_norm: Any  # l D
  attention: Attention
  attention_post_norm: Any  # l D
  ffn_norm: Any  # l D
  ffn: Dense
  ffn_post_norm: Any  # l D


def block_table(c: ModelConfig, is_moe: bool, layers: int) -> Block:
  """Declares the weights of `layers` layers, stacked; ValueError for experts."""
  if is_moe:
    raise ValueError(f"model.num_experts={c.num_experts}: model.family='gemma' has no experts")
  w = weights.weight_factory(c, l=layers, F=c.intermediate_size)
  norm = w("lD", constant=0.0, wide=True)  # Scales are 1 + weight, in float32.
  return Block(
    attention_norm=norm,
    attention=weights.attention_table(c, w, norm=0.0, wide_norm=True),
    attention_post_norm=norm,
    ffn_norm=norm,
    ffn=weights.dense_table(w),
    ffn_post_norm=norm,
  )


def layer(x_BTD: jax.Array, block: Block, config: ModelConfig, attend: Callable, experts: Callable):
  """x + norm(attention(norm(x))), then x + norm(ffn(norm(x))); see `Family`."""
  norm = functools.partial(rms_norm_around_one, eps=config.rms_norm_eps)
  y_BTD, cache = attend(norm(x_BTD, block.attention_norm), block.attention, rms_norm_around_one)
  x_BTD = x_BTD + norm(y_BTD, block.attention_post_norm)
  gelu = functools.partial(jax.nn.gelu, approximate=True)  # The tanh form.
  y_BTD = feed_forward(norm(x_BTD, block.ffn_norm), block.ffn, gelu)
  return x_BTD + norm(y_BTD, block.ffn_post_norm), cache, None, None


FAMILY = Family(
  block_table, layer, rms_norm_around_one, embed_scale=lambda c: math.sqrt(c.hidden_size)
)
