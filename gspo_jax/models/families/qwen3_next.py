"""Qwen3-Next: linear attention, gated full attention, shared experts with a gate.

https://arxiv.org/abs/2412.06464 describes the linear layers.
"""

from collections.abc import Mapping
from typing import Any

from gspo_jax.models.families import declaration as base
from gspo_jax.models.layers import rms_norm_around_one
from gspo_jax.settings.model import ModelConfig

FULL, LINEAR = "full_attention", "linear_attention"


def layer_types(layers: int, pattern: int) -> list[str]:
  """Returns layer_types of config.json: every n-th layer (n = `pattern`) has full attention."""
  return [LINEAR if (layer + 1) % pattern else FULL for layer in range(layers)]


def read_pattern(raw: Mapping[str, Any]) -> dict[str, Any]:
  """Reads the pattern of linear layers from `layer_types`, else `full_attention_interval`."""
  types, layers = raw.get("layer_types"), raw["num_hidden_layers"]
  pattern = raw.get("full_attention_interval", 4)
  if types is not None:
    pattern = types.index(FULL) + 1 if FULL in types else layers
    if types != layer_types(layers, pattern):
      raise ValueError(
        f"layer_types={types} is not supported, only {FULL} in every n-th of {layers} layers, and "
        f"{LINEAR} in the others"
      )
  return {"linear.pattern": pattern}


def write_pattern(config: ModelConfig) -> dict[str, Any]:
  """Returns the keys of `read_pattern`."""
  pattern = config.linear.pattern
  return dict(layer_types=layer_types(config.num_layers, pattern), full_attention_interval=pattern)


FIELDS = base.FIELDS | {
  "rope.share": "partial_rotary_factor",
  "linear.key_heads": "linear_num_key_heads",
  "linear.value_heads": "linear_num_value_heads",
  "linear.key_dim": "linear_key_head_dim",
  "linear.value_dim": "linear_value_head_dim",
  "linear.kernel": "linear_conv_kernel_dim",
}
EXPERTS = base.MOE_FIELDS | {"router.shared_width": "shared_expert_intermediate_size"}
DEFAULTS = dict(
  head_dim=256,
  partial_rotary_factor=0.25,
  linear_num_key_heads=16,
  linear_num_value_heads=32,
  linear_key_head_dim=128,
  linear_value_head_dim=128,
  linear_conv_kernel_dim=4,
)
FIXED = base.NO_BIAS | dict(attn_output_gate=True)

LINEAR_LAYER = base.LAYER + "linear_attn."
QKVZ, BA = LINEAR_LAYER + "in_proj_qkvz.weight", LINEAR_LAYER + "in_proj_ba.weight"
CONVOLUTION = LINEAR_LAYER + "conv1d.weight"
QUERY_AND_GATE = (base.LAYER + "self_attn.q_proj.weight", "N+H D")
NAMES = base.shared_names("shared_expert") | {
  "Moe.shared_gate": (base.LAYER + "mlp.shared_expert_gate.weight", "O D"),
  "attention.q": QUERY_AND_GATE,
  "attention.q_gate": QUERY_AND_GATE,
  "GatedDelta.q_conv": (CONVOLUTION, "+KH O C"),
  "GatedDelta.k_conv": (CONVOLUTION, "+KH O C"),
  "GatedDelta.v_conv": (CONVOLUTION, "+KRJ O C"),
  "GatedDelta.log_decay": (LINEAR_LAYER + "A_log", "KR"),
  "GatedDelta.decay_bias": (LINEAR_LAYER + "dt_bias", "KR"),
  "GatedDelta.norm": (LINEAR_LAYER + "norm.weight", "J"),
  "GatedDelta.o": (LINEAR_LAYER + "out_proj.weight", "D KRJ"),
}
HYBRID = dict(
  norm=rms_norm_around_one,
  norm_scale=dict(constant=0.0, wide=True),  # Factors are 1 + scale, in float32.
  attention_gate=True,
  prediction=("mtp.",),
)
FAMILY = base.Family(
  dict(
    qwen3_next=base.Architecture(
      "Qwen3NextForCausalLM",
      FIELDS | EXPERTS | base.keys("decoder_sparse_step mlp_only_layers"),
      implied={"qk_norm": True, "router.shared_gate": True},
      fixed=FIXED,
      defaults=DEFAULTS
      | dict(num_key_value_heads=2, decoder_sparse_step=1, mlp_only_layers=[])
      | dict(norm_topk_prob=True),
      read=read_pattern,
      write=write_pattern,
    )
  ),
  NAMES
  | {
    "GatedDelta.q": (QKVZ, "K+H D"),
    "GatedDelta.k": (QKVZ, "K+H D"),
    "GatedDelta.v": (QKVZ, "K+RJ D"),
    "GatedDelta.z": (QKVZ, "K+RJ D"),
    "GatedDelta.b": (BA, "K+R D"),
    "GatedDelta.a": (BA, "K+R D"),
  },
  **HYBRID,
)
