"""OLMoE: experts, q/k norms over all heads. https://arxiv.org/abs/2409.02060"""

from gspo_jax.models.families import declaration as base

FAMILY = base.Family(
  dict(
    olmoe=base.Architecture(
      "OlmoeForCausalLM",
      base.FIELDS
      | base.MOE_FIELDS
      | {"moe_intermediate_size": "intermediate_size", "scores.clip_qkv": "clip_qkv"},
      implied=dict(qk_norm=True),
      fixed=base.NO_BIAS,
      defaults=dict(rope_theta=1e4, norm_topk_prob=False, clip_qkv=0.0),
    )
  ),
  base.WIDE_NORMS,
  norm_heads=True,
)
