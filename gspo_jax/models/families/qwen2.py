"""Qwen2 and Qwen2.5: https://arxiv.org/abs/2412.15115"""

from gspo_jax.models.families.declaration import (
  FIELDS,
  SILU,
  Architecture,
  Family,
  pre_norm,
  pre_norm_table,
)

FAMILY = Family(
  pre_norm_table,
  pre_norm,
  dict(
    qwen2=Architecture(
      "Qwen2ForCausalLM",
      FIELDS,
      implied=dict(qk_norm=False, attention_bias=True),
      fixed=SILU | dict(use_sliding_window=False),
      defaults=dict(num_key_value_heads=32),
    )
  ),
)
