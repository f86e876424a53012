"""Qwen3.5: the layers of Qwen3-Next, with experts or without. https://qwen.ai/blog?id=qwen3.5"""

from collections.abc import Mapping
from typing import Any

from gspo_jax.models.families import declaration as base
from gspo_jax.models.families import qwen3_next
from gspo_jax.settings.model import ModelConfig


def read_layers(raw: Mapping[str, Any]) -> dict[str, Any]:
  """Reads the pattern of layers, and the width of dense layers.

  The width has no effect, since all layers have experts.
  """
  width = raw.get("intermediate_size", raw["moe_intermediate_size"])
  return qwen3_next.read_pattern(raw) | dict(intermediate_size=width)


def write_layers(config: ModelConfig) -> dict[str, Any]:
  """Returns the keys of `read_layers`."""
  return qwen3_next.write_pattern(config) | dict(intermediate_size=config.intermediate_size)


# transformers' classes ignore mlp_only_layers and norm_topk_prob.
FIXED = qwen3_next.FIXED | dict(mamba_ssm_dtype="float32", mlp_only_layers=[])
EXPERT_FIELDS = {**qwen3_next.FIELDS, **qwen3_next.EXPERTS}
for field in ("intermediate_size", "norm_topk_prob"):
  del EXPERT_FIELDS[field]
PROJECTION = qwen3_next.LINEAR_LAYER + "in_proj_"

FAMILY = base.Family(
  dict(
    qwen3_5_text=base.Architecture(
      "Qwen3_5ForCausalLM",
      qwen3_next.FIELDS,
      implied=dict(qk_norm=True),
      fixed=FIXED,
      defaults=qwen3_next.DEFAULTS | dict(num_key_value_heads=4),
      outer="qwen3_5",
      read=qwen3_next.read_pattern,
      write=qwen3_next.write_pattern,
    ),
    qwen3_5_moe_text=base.Architecture(
      "Qwen3_5MoeForCausalLM",
      EXPERT_FIELDS,
      implied={"qk_norm": True, "norm_topk_prob": True, "router.shared_gate": True},
      fixed=FIXED | dict(norm_topk_prob=True),
      defaults=qwen3_next.DEFAULTS | dict(num_key_value_heads=2),
      outer="qwen3_5_moe",
      read=read_layers,
      write=write_layers,
    ),
  ),
  qwen3_next.NAMES
  | {
    "GatedDelta.q": (PROJECTION + "qkv.weight", "+KH D"),
    "GatedDelta.k": (PROJECTION + "qkv.weight", "+KH D"),
    "GatedDelta.v": (PROJECTION + "qkv.weight", "+KRJ D"),
    "GatedDelta.z": (PROJECTION + "z.weight", "KRJ D"),
    "GatedDelta.b": (PROJECTION + "b.weight", "KR D"),
    "GatedDelta.a": (PROJECTION + "a.weight", "KR D"),
  },
  **qwen3_next.HYBRID,
)
