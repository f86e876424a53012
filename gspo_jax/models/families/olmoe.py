"""OLMoE: https://arxiv.org/abs/2409.02060"""

import functools

from gspo_jax.models.families.declaration import (
  FIELDS,
  NO_BIAS,
  SILU,
  Architecture,
  Family,
  keys,
  pre_norm,
  pre_norm_table,
)
from gspo_jax.models.families.olmo import WIDE_NORMS

FAMILY = Family(
  functools.partial(pre_norm_table, norm_heads=True),
  pre_norm,
  dict(
    olmoe=Architecture(
      "OlmoeForCausalLM",
      FIELDS
      | keys("num_experts norm_topk_prob", experts_per_token="num_experts_per_tok")
      | {"moe_intermediate_size": "intermediate_size", "scores.clip_qkv": "clip_qkv"},
      implied=dict(qk_norm=True),
      fixed=SILU | NO_BIAS,
      defaults=dict(rope_theta=1e4, norm_topk_prob=False, clip_qkv=0.0),
    )
  ),
  WIDE_NORMS,
)
