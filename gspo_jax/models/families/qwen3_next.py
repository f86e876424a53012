"""Qwen3-Next: linear attention, gated full attention, shared experts.

https://arxiv.org/abs/2412.06464 has the linear layers.
"""

from gspo_jax.models.families import declaration as base
from gspo_jax.models.layers import rms_norm_around_one

HYBRID = dict(
  norm=rms_norm_around_one,
  norm_scale=dict(constant=0.0, wide=True),  # Factors are 1 + scale, in float32.
  attention_gate=True,
)
FAMILY = base.Family({}, {}, **HYBRID)
