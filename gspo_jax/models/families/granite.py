"""Granite 3, with four multipliers: https://huggingface.co/ibm-granite"""

from gspo_jax.models.families.declaration import (
  FIELDS,
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
    )
  ),
)
