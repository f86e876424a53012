"""MiniMax-M2: biased sigmoid scores of experts, q/k norms over all heads, RoPE on half a head.

https://huggingface.co/MiniMaxAI/MiniMax-M2
"""

from collections.abc import Mapping
from typing import Any

from gspo_jax.models.families import declaration as base
from gspo_jax.models.families.mixtral import NAMES as MIXTRAL_NAMES
from gspo_jax.settings.model import ModelConfig


def read_share(raw: Mapping[str, Any]) -> dict[str, Any]:
  """Reads the rotated share of a head from `rotary_dim`, if `partial_rotary_factor` is 1."""
  if "rotary_dim" not in raw or raw["partial_rotary_factor"] != 1:
    return {}
  return {"rope.share": raw["rotary_dim"] / raw["head_dim"]}


def write_share(config: ModelConfig) -> dict[str, Any]:
  """Returns `rotary_dim`, the number of rotated dimensions of a head."""
  return dict(rotary_dim=int(config.head_dim * config.rope.share))


FAMILY = base.Family(
  dict(
    minimax_m2=base.Architecture(
      "MiniMaxM2ForCausalLM",
      base.FIELDS | base.LOCAL_EXPERTS | {"rope.share": "partial_rotary_factor"},
      implied={
        "qk_norm": True,
        "norm_topk_prob": True,
        "router.scores": "sigmoid",
        "router.choice_bias": "frozen",
      },
      fixed=dict(router_jitter_noise=0.0, scoring_func="sigmoid", use_routing_bias=True)
      | dict(use_qk_norm=True, qk_norm_type="per_layer"),
      defaults=dict(num_key_value_heads=8, head_dim=128, rope_theta=5e6, partial_rotary_factor=1.0)
      | dict(num_local_experts=256, num_experts_per_tok=8),
      read=read_share,
      write=write_share,
    )
  ),
  MIXTRAL_NAMES
  | base.WIDE_NORMS
  | {"Moe.choice_bias": (base.LAYER + "block_sparse_moe.e_score_correction_bias", "E")},
  norm_heads=True,
)
