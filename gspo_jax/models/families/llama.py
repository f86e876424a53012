"""Llama 2 to 3.3, SmolLM2 and similar models: from Llama 3.1 on, scaled rotary positions.

https://arxiv.org/abs/2407.21783
"""

from gspo_jax.models.families import declaration as base

FAMILY = base.Family(
  dict(
    llama=base.Architecture(
      "LlamaForCausalLM",
      base.FIELDS,
      # If attention_bias were true, the output projection would have a bias, too.
      fixed=base.NO_BIAS | dict(mlp_bias=False),
      defaults=dict(rope_theta=1e4),  # Missing in Llama 1 and 2.
    )
  )
)
