"""Tables of the Hugging Face architectures: keys of config.json, names and axes of tensors."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from gspo_jax.settings.model import ModelConfig


def _keys(alike: str, **renamed: str) -> dict[str, str]:
  """Maps ModelConfig fields to keys of config.json; `alike` names are equal."""
  return dict(zip(alike.split(), alike.split())) | renamed


_FIELDS = _keys(
  "vocab_size hidden_size head_dim intermediate_size rope_theta rms_norm_eps tie_word_embeddings "
  "max_position_embeddings",
  num_layers="num_hidden_layers",
  num_heads="num_attention_heads",
  num_kv_heads="num_key_value_heads",
)
_MOE_FIELDS = _keys(
  "num_experts moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers",
  experts_per_token="num_experts_per_tok",
)
_GEMMA_FIELDS = _keys(
  "query_pre_attn_scalar final_logit_softcapping sliding_window sliding_window_pattern"
)
_GEMMA_DEFAULTS = dict(num_key_value_heads=4, head_dim=256, tie_word_embeddings=True)
_SILU, _GELU = "silu", "gelu_pytorch_tanh"
_NO_BIAS = dict(attention_bias=False)


@dataclasses.dataclass(frozen=True)
class Architecture:
  """An architecture of transformers: keys of its config.json, and what its name implies."""

  name: str
  fields: Mapping[str, str]
  implied: Mapping[str, Any]  # ModelConfig fields without a key, unless default.
  fixed: Mapping[str, Any]  # Keys with a single supported value.
  # Defaults of optional keys, from transformers' configuration class.
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


ARCHITECTURES = {  # Keys are values of model_type.
  "qwen3_moe": Architecture(
    "Qwen3MoeForCausalLM",
    _FIELDS | _MOE_FIELDS,
    implied=dict(family="qwen3", qk_norm=True),
    fixed=dict(hidden_act=_SILU, use_sliding_window=False) | _NO_BIAS,
    defaults=dict(num_key_value_heads=4, mlp_only_layers=[], decoder_sparse_step=1),
  ),
  "mixtral": Architecture(
    "MixtralForCausalLM",
    _FIELDS
    | dict(
      num_experts="num_local_experts",
      experts_per_token="num_experts_per_tok",
      moe_intermediate_size="intermediate_size",
    ),
    implied=dict(family="qwen3", qk_norm=False, norm_topk_prob=True),
    fixed=dict(hidden_act=_SILU, sliding_window=None, router_jitter_noise=0.0),
    defaults=dict(
      rope_theta=1e6, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2
    ),
  ),
  "qwen3": Architecture(
    "Qwen3ForCausalLM",
    _FIELDS,
    implied=dict(family="qwen3", qk_norm=True),
    fixed=dict(hidden_act=_SILU, use_sliding_window=False) | _NO_BIAS,
    defaults=dict(num_key_value_heads=32, head_dim=128),
  ),
  "qwen2": Architecture(
    "Qwen2ForCausalLM",
    _FIELDS,
    implied=dict(family="qwen3", qk_norm=False, attention_bias=True),
    fixed=dict(hidden_act=_SILU, use_sliding_window=False),
    defaults=dict(num_key_value_heads=32),
  ),
  "llama": Architecture(
    "LlamaForCausalLM",
    _FIELDS,
    implied=dict(family="qwen3", qk_norm=False),
    # With this key the output projection has a bias too, unlike Qwen2's.
    fixed=dict(hidden_act=_SILU, mlp_bias=False) | _NO_BIAS,
    defaults=dict(rope_theta=1e4),  # Missing in Llama 1 and 2.
  ),
  "gemma3_text": Architecture(
    "Gemma3ForCausalLM",
    _FIELDS | _GEMMA_FIELDS | dict(local_rope_theta="rope_local_base_freq"),
    implied=dict(family="gemma", qk_norm=True),
    # transformers reads a bound on scores and ignores it.
    fixed=dict(hidden_activation=_GELU, hidden_act=_GELU, attn_logit_softcapping=None) | _NO_BIAS,
    defaults=_GEMMA_DEFAULTS
    | dict(
      final_logit_softcapping=0.0,
      rope_theta=1e6,
      rope_local_base_freq=1e4,
      sliding_window_pattern=6,
    ),
  ),
  "gemma2": Architecture(
    "Gemma2ForCausalLM",
    _FIELDS | _GEMMA_FIELDS | _keys("attn_logit_softcapping", local_rope_theta="rope_theta"),
    implied=dict(family="gemma", qk_norm=False),
    # Its class reads the pattern from layer_types only.
    fixed=dict(hidden_activation=_GELU, hidden_act=_GELU, sliding_window_pattern=2) | _NO_BIAS,
    defaults=_GEMMA_DEFAULTS
    | dict(
      attn_logit_softcapping=50.0,
      final_logit_softcapping=30.0,
      rope_theta=1e4,
      sliding_window_pattern=2,
    ),
  ),
}
# Keys of any architecture that would change the computation, with their neutral values.
FIXED = dict(
  use_sliding_window=False,
  use_bidirectional_attention=False,
  use_mrope=False,
  mlp_bias=False,
  partial_rotary_factor=1.0,
  quantization_config=None,
)

_LAYER = "model.layers.{l}."
# Parameter -> (name in the files, axes there). Letters of one axis are merged, such as N and H in
# q_proj; a letter in braces is part of the name: one tensor per layer and expert.
_NAMES = {
  "embed": ("model.embed_tokens.weight", "V D"),
  "attention_norm": (_LAYER + "input_layernorm.weight", "D"),
  "attention.q": (_LAYER + "self_attn.q_proj.weight", "NH D"),
  "attention.k": (_LAYER + "self_attn.k_proj.weight", "KH D"),
  "attention.v": (_LAYER + "self_attn.v_proj.weight", "KH D"),
  "attention.o": (_LAYER + "self_attn.o_proj.weight", "D NH"),
  "attention.q_norm": (_LAYER + "self_attn.q_norm.weight", "H"),
  "attention.k_norm": (_LAYER + "self_attn.k_norm.weight", "H"),
  "attention.q_bias": (_LAYER + "self_attn.q_proj.bias", "NH"),
  "attention.k_bias": (_LAYER + "self_attn.k_proj.bias", "KH"),
  "attention.v_bias": (_LAYER + "self_attn.v_proj.bias", "KH"),
  "ffn_norm": (_LAYER + "post_attention_layernorm.weight", "D"),
  "Dense.gate": (_LAYER + "mlp.gate_proj.weight", "F D"),
  "Dense.up": (_LAYER + "mlp.up_proj.weight", "F D"),
  "Dense.down": (_LAYER + "mlp.down_proj.weight", "D F"),
  "Moe.router": (_LAYER + "mlp.gate.weight", "E D"),
  "Moe.gate": (_LAYER + "mlp.experts.{E}.gate_proj.weight", "F D"),
  "Moe.up": (_LAYER + "mlp.experts.{E}.up_proj.weight", "F D"),
  "Moe.down": (_LAYER + "mlp.experts.{E}.down_proj.weight", "D F"),
  "final_norm": ("model.norm.weight", "D"),
  "head": ("lm_head.weight", "V D"),
}
_MIXTRAL = _LAYER + "block_sparse_moe."
NAMES = dict(
  qwen3=_NAMES,
  mixtral=_NAMES
  | {
    "Moe.router": (_MIXTRAL + "gate.weight", "E D"),
    "Moe.gate": (_MIXTRAL + "experts.{E}.w1.weight", "F D"),
    "Moe.up": (_MIXTRAL + "experts.{E}.w3.weight", "F D"),
    "Moe.down": (_MIXTRAL + "experts.{E}.w2.weight", "D F"),
  },
  gemma=_NAMES
  | {
    "attention_post_norm": (_LAYER + "post_attention_layernorm.weight", "D"),
    "ffn_norm": (_LAYER + "pre_feedforward_layernorm.weight", "D"),
    "ffn_post_norm": (_LAYER + "post_feedforward_layernorm.weight", "D"),
  },
)


def names(config: ModelConfig) -> dict[str, tuple[str, str]]:
  """Returns names and axes of a model's parameters in published files."""
  is_mixtral = config.num_experts and not config.qk_norm
  return NAMES["mixtral" if is_mixtral else config.family]


# Experts in memory in transformers 5, and in its files on request (save_original_format=False): one
# tensor per layer, gate and up as the halves of one axis, "2".
FUSED = {
  "Moe.router": _NAMES["Moe.router"],  # Mixtral's has this name too.
  "Moe.gate": (_LAYER + "mlp.experts.gate_up_proj", "E 2F D"),
  "Moe.up": (_LAYER + "mlp.experts.gate_up_proj", "E 2F D"),
  "Moe.down": (_LAYER + "mlp.experts.down_proj", "E D F"),
}
EMBED, HEAD = _NAMES["embed"][0], _NAMES["head"][0]
