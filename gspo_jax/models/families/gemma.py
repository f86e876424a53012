"""Gemma 2 and 3: norms before and after attention and feed-forward layer, GeGLU, scaled embedding.

https://arxiv.org/abs/2503.19786
"""

import functools
import math
from typing import Any

import flax.struct
import jax

from gspo_jax.models.families import declaration as base
from gspo_jax.models.layers import rms_norm_around_one
from gspo_jax.models.weights import Attention, Dense
from gspo_jax.settings.model import ModelConfig


@flax.struct.dataclass
class Block:
  """Weights of a layer with norms before and after attention and feed-forward layer."""

  attention_norm: Any  # l D
  attention: Attention
  attention_post_norm: Any  # l D
  ffn_norm: Any  # l D
  ffn: Dense
  ffn_post_norm: Any  # l D


def embed_scale(config: ModelConfig) -> float:
  """Returns √D, times the configured multiplier."""
  return math.sqrt(config.hidden_size) * config.multipliers.embedding


GELU = "gelu_pytorch_tanh"
WINDOWED = base.FIELDS | base.keys(
  "query_pre_attn_scalar final_logit_softcapping sliding_window sliding_window_pattern"
)
DEFAULTS = dict(num_key_value_heads=4, head_dim=256, tie_word_embeddings=True)
FIXED = base.NO_BIAS | dict(hidden_activation=GELU, hidden_act=GELU)

FAMILY = base.Family(
  dict(
    gemma2=base.Architecture(
      "Gemma2ForCausalLM",
      WINDOWED | base.keys("attn_logit_softcapping", local_rope_theta="rope_theta"),
      # transformers' class ignores the pattern, and reads layer_types.
      fixed=FIXED | dict(sliding_window_pattern=2),
      defaults=DEFAULTS
      | dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0, rope_theta=1e4),
      pattern=2,
    ),
    gemma3_text=base.Architecture(
      "Gemma3ForCausalLM",
      WINDOWED | dict(local_rope_theta="rope_local_base_freq"),
      implied=dict(qk_norm=True),
      # transformers' class ignores this soft cap.
      fixed=FIXED | dict(attn_logit_softcapping=None),
      defaults=DEFAULTS
      | dict(final_logit_softcapping=0.0, rope_theta=1e6, rope_local_base_freq=1e4)
      # The text_config of gemma-3-4b lacks the following keys.
      | dict(num_attention_heads=8, vocab_size=262_208, max_position_embeddings=131_072)
      | dict(query_pre_attn_scalar=256, rms_norm_eps=1e-6),
      pattern=6,
      ropes_by_kind=True,
      outer="gemma3",
    ),
  ),
  base.POST_NORMS | {"ffn_norm": (base.LAYER + "pre_feedforward_layernorm.weight", "D")},
  block=Block,
  norm=rms_norm_around_one,
  norm_scale=dict(constant=0.0, wide=True),  # Factors are 1 + scale, in float32.
  experts="none",
  dense_activation=functools.partial(jax.nn.gelu, approximate=True),  # The tanh form.
  embed_scale=embed_scale,
)
