"""Qwen3 and Qwen3-MoE: q/k norms. https://arxiv.org/abs/2505.09388"""

from gspo_jax.models.families import declaration as base

FIXED = base.NO_BIAS | dict(use_sliding_window=False)

FAMILY = base.Family(
  dict(
    qwen3=base.Architecture(
      "Qwen3ForCausalLM",
      base.FIELDS,
      implied=dict(qk_norm=True),
      fixed=FIXED,
      defaults=dict(num_key_value_heads=32, head_dim=128, max_window_layers=28),
    ),
    qwen3_moe=base.Architecture(
      "Qwen3MoeForCausalLM",
      base.FIELDS | base.MOE_FIELDS | base.keys("decoder_sparse_step mlp_only_layers"),
      implied=dict(qk_norm=True),
      fixed=FIXED,
      defaults=dict(num_key_value_heads=4, mlp_only_layers=[], decoder_sparse_step=1),
    ),
  )
)
