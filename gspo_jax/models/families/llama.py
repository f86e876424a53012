"""Llama 2 to 3.3, SmolLM2 and others of this form: scaled positions from 3.1 on.

https://arxiv.org/abs/2407.21783
"""

from gspo_jax.models.families import declaration as base

FAMILY = base.Family(
  dict(
    llama=base.Architecture(
      "LlamaForCausalLM",
      base.FIELDS,
      # With attention_bias=true, the output projection would have a bias too.
      fixed=base.NO_BIAS | dict(mlp_bias=False),
      defaults=dict(rope_theta=1e4),  # Missing in Llama 1 and 2.
    )
  )
)
