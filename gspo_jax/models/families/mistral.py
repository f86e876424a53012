"""Mistral and Ministral 3: sliding windows, queries scaled by position.

https://arxiv.org/abs/2310.06825
"""

from gspo_jax.models.families import declaration as base

WINDOWED = base.FIELDS | base.keys("sliding_window", local_rope_theta="rope_theta")

FAMILY = base.Family(
  dict(
    mistral=base.Architecture(
      "MistralForCausalLM",
      WINDOWED,
      defaults=dict(num_key_value_heads=8, rope_theta=1e4, sliding_window=4096),
      pattern=0,
      outer="mistral3",
    ),
    ministral3=base.Architecture(
      "Ministral3ForCausalLM",
      base.FIELDS | {"rope.query_beta": "llama_4_scaling_beta"},  # A key of rope_parameters.
      fixed=dict(sliding_window=None),
      defaults=dict(num_key_value_heads=8, head_dim=128),
      outer="mistral3",
    ),
  )
)
