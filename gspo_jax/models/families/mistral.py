"""Mistral and Ministral 3: https://arxiv.org/abs/2310.06825"""

from gspo_jax.models.families.declaration import (
  FIELDS,
  SILU,
  Architecture,
  Family,
  keys,
  pre_norm,
  pre_norm_table,
)

WINDOWED = FIELDS | keys("sliding_window", local_rope_theta="rope_theta")

FAMILY = Family(
  pre_norm_table,
  pre_norm,
  dict(
    mistral=Architecture(
      "MistralForCausalLM",
      WINDOWED,
      implied=dict(qk_norm=False),
      fixed=SILU,
      defaults=dict(num_key_value_heads=8, rope_theta=1e4, sliding_window=4096),
      pattern=0,
      outer="mistral3",
    ),
    ministral3=Architecture(
      "Ministral3ForCausalLM",
      FIELDS | {"rope.query_beta": "llama_4_scaling_beta"},  # Among the rotary parameters.
      implied=dict(qk_norm=False),
      fixed=SILU | dict(sliding_window=None),
      defaults=dict(num_key_value_heads=8, head_dim=128),
      outer="mistral3",
    ),
  ),
)
