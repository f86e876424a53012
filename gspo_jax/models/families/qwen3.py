"""Qwen3 and Qwen3-MoE: https://arxiv.org/abs/2505.09388"""

from gspo_jax.models.families.declaration import (
  FIELDS,
  MOE_FIELDS,
  NO_BIAS,
  SILU,
  Architecture,
  Family,
  keys,
  pre_norm,
  pre_norm_table,
)

FIXED = SILU | NO_BIAS | dict(use_sliding_window=False)

FAMILY = Family(
  pre_norm_table,
  pre_norm,
  dict(
    qwen3=Architecture(
      "Qwen3ForCausalLM",
      FIELDS,
      implied=dict(qk_norm=True),
      fixed=FIXED,
      defaults=dict(num_key_value_heads=32, head_dim=128),
    ),
    qwen3_moe=Architecture(
      "Qwen3MoeForCausalLM",
      FIELDS | MOE_FIELDS | keys("decoder_sparse_step mlp_only_layers"),
      implied=dict(qk_norm=True),
      fixed=FIXED,
      defaults=dict(num_key_value_heads=4, mlp_only_layers=[], decoder_sparse_step=1),
    ),
  ),
)
