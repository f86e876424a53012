"""GLM-4 MoE (GLM-4.5-Air): biased sigmoid scores of experts, shared experts, dense first layers.

https://arxiv.org/abs/2508.06471
"""

from collections.abc import Mapping
from typing import Any

from gspo_jax.models.families import declaration as base
from gspo_jax.settings.model import ModelConfig


def read_layers(raw: Mapping[str, Any]) -> dict[str, Any]:
  """Reads the dense first layers, and the total width of shared experts."""
  shared = raw.get("n_shared_experts", 1) * raw["moe_intermediate_size"]
  dense = min(raw.get("first_k_dense_replace", 1), raw["num_hidden_layers"])
  return {"mlp_only_layers": tuple(range(dense)), "router.shared_width": shared}


def write_layers(config: ModelConfig) -> dict[str, Any]:
  """Returns the keys of `read_layers`; {} if the width is not a multiple of an expert's."""
  shared, rest = divmod(config.router.shared_width, config.moe_intermediate_size or 1)
  if rest:
    return {}
  return dict(n_shared_experts=shared, first_k_dense_replace=len(config.mlp_only_layers))


FAMILY = base.Family(
  dict(
    glm4_moe=base.Architecture(
      "Glm4MoeForCausalLM",
      base.FIELDS
      | base.MOE_FIELDS
      | base.keys("attention_bias", num_experts="n_routed_experts", qk_norm="use_qk_norm")
      | {
        "rope.share": "partial_rotary_factor",
        "router.groups": "n_group",
        "router.groups_per_token": "topk_group",
        "router.scale": "routed_scaling_factor",
      },
      implied={"router.scores": "sigmoid", "router.choice_bias": "frozen"},
      defaults=dict(num_key_value_heads=8, norm_topk_prob=True, attention_bias=False)
      | dict(use_qk_norm=False, partial_rotary_factor=0.5)
      | dict(n_group=1, topk_group=1, routed_scaling_factor=1.0),
      read=read_layers,
      write=write_layers,
    )
  ),
  base.shared_names("shared_experts"),
)
