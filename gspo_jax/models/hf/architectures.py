"""The supported architectures of Hugging Face: model_types of config.json, from all families."""

from collections.abc import Mapping
from typing import Any

from gspo_jax.models.families.declaration import LAYER, NAMES
from gspo_jax.models.families.lookup import FAMILIES, names, relatives

__all__ = ["ARCHITECTURES", "FAMILY_OF", "OUTER", "language_model", "names", "relatives"]

# model_type -> Architecture.
ARCHITECTURES = {key: value for f in FAMILIES.values() for key, value in f.architectures.items()}
# model_type of an outer model, such as "gemma3" -> model_type of the language model inside it.
OUTER = {a.outer: key for key, a in reversed(ARCHITECTURES.items()) if a.outer}
# model_type -> name of the family.
FAMILY_OF = {key: name for name, f in FAMILIES.items() for key in f.architectures}

# Keys with one supported value, unless the architecture reads them. Other values would change
# logits.
FIXED = dict(
  hidden_act="silu",
  use_sliding_window=False,
  use_bidirectional_attention=False,
  use_mrope=False,
  output_gate_type="swish",  # Of linear attention.
  mlp_bias=False,
  partial_rotary_factor=1.0,
  quantization_config=None,
)
# Keys of any architecture without effect on logits, and keys that `config` and `ropes` read.
WITHOUT_EFFECT = frozenset(
  """_attn_implementation _name_or_path architectures attention_dropout auto_map bos_token_id dtype
  eos_token_id id2label initializer_range is_encoder_decoder label2id layer_types max_window_layers
  full_attention_interval mtp_num_hidden_layers mtp_use_dedicated_embeddings
  model_type output_attentions output_hidden_states output_router_logits
  pad_token_id pretraining_tp problem_type return_dict rope_parameters rope_scaling
  router_aux_loss_coef chunk_size_feed_forward torch_dtype transformers_version use_cache
  _sliding_window_pattern original_max_position_embeddings""".split()
)


def language_model(raw: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the language model's part of config.json, or all if there is no other part."""
  if raw.get("model_type") not in OUTER:
    return dict(raw)
  text = raw.get("text_config")
  if not isinstance(text, dict):
    raise ValueError(f"model_type={raw['model_type']!r} has no text_config")
  shared = {key: raw[key] for key in ("tie_word_embeddings", "quantization_config") if key in raw}
  return dict(model_type=OUTER[raw["model_type"]]) | text | shared


# Names and axes of fused experts. One tensor has gate, then up, of all experts of a layer; another
# tensor has down. transformers 5 has fused experts in memory, and writes such files on request
# (save_original_format=False).
FUSED = {
  "Moe.router": NAMES["Moe.router"],  # In files with fused experts, Mixtral has this name, too.
  "Moe.gate": (LAYER + "mlp.experts.gate_up_proj", "E +F D"),
  "Moe.up": (LAYER + "mlp.experts.gate_up_proj", "E +F D"),
  "Moe.down": (LAYER + "mlp.experts.down_proj", "E D F"),
}
