"""Qwen2, Qwen2.5 and Qwen2-MoE: biases of queries, keys and values, shared experts with a gate.

https://arxiv.org/abs/2412.15115
"""

from gspo_jax.models.families import declaration as base

FAMILY = base.Family(
  dict(
    qwen2=base.Architecture(
      "Qwen2ForCausalLM",
      base.FIELDS,
      implied=dict(attention_bias=True),
      fixed=dict(use_sliding_window=False),
      defaults=dict(num_key_value_heads=32, max_window_layers=28),
    ),
    qwen2_moe=base.Architecture(
      "Qwen2MoeForCausalLM",
      base.FIELDS
      | base.MOE_FIELDS
      | base.keys("decoder_sparse_step mlp_only_layers")
      | {"router.shared_width": "shared_expert_intermediate_size", "attention_bias": "qkv_bias"},
      implied={"router.shared_gate": True},
      fixed=dict(use_sliding_window=False),
      defaults=dict(
        num_key_value_heads=16, decoder_sparse_step=1, mlp_only_layers=[], qkv_bias=True
      ),
    ),
  ),
  base.shared_names("shared_expert")
  | {"Moe.shared_gate": (base.LAYER + "mlp.shared_expert_gate.weight", "O D")},
)
