"""Granite 3 and Granite-MoE: four factors on activations. https://huggingface.co/ibm-granite"""

from gspo_jax.models.families import declaration as base

MULTIPLIED = base.FIELDS | {
  "scores.scale": "attention_multiplier",
  "multipliers.embedding": "embedding_multiplier",
  "multipliers.residual": "residual_multiplier",
  "multipliers.logits": "logits_scaling",
}
EXPERTS = base.LAYER + "block_sparse_moe."
DEFAULTS = dict.fromkeys((key for field, key in MULTIPLIED.items() if "." in field), 1.0)

FAMILY = base.Family(
  dict(
    granite=base.Architecture(
      "GraniteForCausalLM",
      MULTIPLIED,
      fixed=base.NO_BIAS | dict(mlp_bias=False),
      defaults=DEFAULTS | dict(rope_theta=1e4),
    ),
    granitemoe=base.Architecture(
      "GraniteMoeForCausalLM",
      MULTIPLIED | base.LOCAL_EXPERTS,
      # A softmax over the chosen experts' logits is a renormalised softmax over all experts.
      implied=dict(norm_topk_prob=True),
      fixed=base.NO_BIAS,
      defaults=DEFAULTS | dict(rope_theta=1e4, num_local_experts=8, num_experts_per_tok=2),
    ),
  ),
  {
    "Moe.router": (EXPERTS + "router.layer.weight", "E D"),
    "Moe.gate": (EXPERTS + "input_linear.weight", "E +F D"),
    "Moe.up": (EXPERTS + "input_linear.weight", "E +F D"),
    "Moe.down": (EXPERTS + "output_linear.weight", "E D F"),
  },
)
