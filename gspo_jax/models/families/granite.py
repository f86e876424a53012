"""Granite 3 and Granite-MoE, with four multipliers: https://huggingface.co/ibm-granite"""

from gspo_jax.models.families.declaration import (
  FIELDS,
  LAYER,
  NO_BIAS,
  SILU,
  Architecture,
  Family,
  pre_norm,
  pre_norm_table,
)

MULTIPLIED = FIELDS | {
  "scores.scale": "attention_multiplier",
  "multipliers.embedding": "embedding_multiplier",
  "multipliers.residual": "residual_multiplier",
  "multipliers.logits": "logits_scaling",
}
EXPERTS = LAYER + "block_sparse_moe."
DEFAULTS = dict.fromkeys((key for field, key in MULTIPLIED.items() if "." in field), 1.0)

FAMILY = Family(
  pre_norm_table,
  pre_norm,
  dict(
    granite=Architecture(
      "GraniteForCausalLM",
      MULTIPLIED,
      implied=dict(qk_norm=False),
      fixed=SILU | NO_BIAS | dict(mlp_bias=False),
      defaults=DEFAULTS | dict(rope_theta=1e4),
    ),
    granitemoe=Architecture(
      "GraniteMoeForCausalLM",
      MULTIPLIED
      | dict(
        num_experts="num_local_experts",
        experts_per_token="num_experts_per_tok",
        moe_intermediate_size="intermediate_size",
      ),
      # A softmax over the chosen experts alone.
      implied=dict(qk_norm=False, norm_topk_prob=True),
      fixed=SILU | NO_BIAS,
      defaults=DEFAULTS | dict(rope_theta=1e4, num_local_experts=8, num_experts_per_tok=2),
    ),
  ),
  {
    "Moe.router": (EXPERTS + "router.layer.weight", "E D"),
    "Moe.gate": (EXPERTS + "input_linear.weight", "E 2F D"),
    "Moe.up": (EXPERTS + "input_linear.weight", "E 2F D"),
    "Moe.down": (EXPERTS + "output_linear.weight", "E D F"),
  },
)
