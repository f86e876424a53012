"""OLMo 2 and 3: norms after attention and feed-forward layer, q/k norms over all heads.

https://arxiv.org/abs/2501.00656
"""

from typing import Any

import flax.struct

from gspo_jax.models.families import declaration as base
from gspo_jax.models.layers import rms_norm_rounded_once
from gspo_jax.models.weights import Attention, Dense


@flax.struct.dataclass
class Block:
  """Weights of a layer with norms after attention and feed-forward layer."""

  attention: Attention
  attention_post_norm: Any  # l D
  ffn: Dense
  ffn_post_norm: Any  # l D


FAMILY = base.Family(
  dict(
    olmo2=base.Architecture(
      "Olmo2ForCausalLM",
      base.FIELDS,
      implied=dict(qk_norm=True),
      fixed=base.NO_BIAS,
      defaults=dict(rope_theta=1e4),
    ),
    olmo3=base.Architecture(
      "Olmo3ForCausalLM",
      base.FIELDS | base.keys("sliding_window"),
      implied=dict(qk_norm=True),
      fixed=base.NO_BIAS,
      defaults=dict(rope_theta=5e5, sliding_window=4096),
      pattern=4,
      ropes_by_kind=True,
    ),
  ),
  base.WIDE_NORMS | base.POST_NORMS,
  block=Block,
  norm=rms_norm_rounded_once,
  norm_heads=True,
  experts="none",
)
