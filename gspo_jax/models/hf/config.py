"""config.json <-> ModelConfig, for the Hugging Face architectures that the model here computes."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from gspo_jax.models.sizes import ModelConfig


class CheckpointError(ValueError):
  """A directory that does not hold exactly a model that can be computed here."""


@dataclasses.dataclass(frozen=True)
class _Family:
  """What `model_type` implies without a key of its own, and what transformers takes as default."""

  architecture: str
  moe: bool
  qk_norm: bool
  attention_bias: bool
  defaults: dict[str, Any]


_FAMILIES = {
  "qwen3_moe": _Family("Qwen3MoeForCausalLM", True, True, False, {}),
  "qwen3": _Family("Qwen3ForCausalLM", False, True, False, dict(head_dim=128)),
  "qwen2": _Family("Qwen2ForCausalLM", False, False, True, {}),
  # Llama 1 and 2 were published without a rope_theta.
  "llama": _Family("LlamaForCausalLM", False, False, False, dict(rope_theta=1e4)),
}
# ModelConfig field -> key of config.json, type
_FIELDS = dict(
  vocab_size=("vocab_size", int),
  hidden_size=("hidden_size", int),
  num_layers=("num_hidden_layers", int),
  num_heads=("num_attention_heads", int),
  num_kv_heads=("num_key_value_heads", int),
  head_dim=("head_dim", int),
  intermediate_size=("intermediate_size", int),
  rope_theta=("rope_theta", float),
  rms_norm_eps=("rms_norm_eps", float),
  tie_word_embeddings=("tie_word_embeddings", bool),
  max_position_embeddings=("max_position_embeddings", int),
)
_MOE_FIELDS = dict(
  num_experts=("num_experts", int),
  experts_per_token=("num_experts_per_tok", int),
  moe_intermediate_size=("moe_intermediate_size", int),
  norm_topk_prob=("norm_topk_prob", bool),
  decoder_sparse_step=("decoder_sparse_step", int),
  mlp_only_layers=("mlp_only_layers", list),
)
_DENSE = dict(
  num_experts=0,
  experts_per_token=0,
  moe_intermediate_size=0,
  norm_topk_prob=True,
  decoder_sparse_step=1,
  mlp_only_layers=(),
)
# Keys that change what is computed, with the one value under which they do not.
_MUST_BE = dict(
  hidden_act="silu",
  use_sliding_window=False,
  use_mrope=False,
  mlp_bias=False,
  partial_rotary_factor=1.0,
  quantization_config=None,
)


def read_json(path: Path) -> dict[str, Any]:
  """A JSON object from a file; errors name the file."""
  if not path.is_file():
    raise FileNotFoundError(f"{path}: no such file")
  try:
    content = json.loads(path.read_text())
  except ValueError as error:
    raise CheckpointError(f"{path}: not JSON: {error}") from error
  if not isinstance(content, dict):
    raise CheckpointError(f"{path}: not a JSON object")
  return content


def load_config(directory: str | os.PathLike) -> ModelConfig:
  """The hyper-parameters in `directory`/config.json, as published or as transformers 5 writes it.

  Raises:
    FileNotFoundError: no config.json.
    CheckpointError: a key that is missing, of the wrong type, or asks for what is not supported.
  """
  path = Path(directory) / "config.json"
  raw = read_json(path)
  try:
    return _from_hf(raw)
  except ValueError as error:
    raise CheckpointError(f"{path}: {error}") from error


def _from_hf(raw: dict[str, Any]) -> ModelConfig:
  family = _FAMILIES.get(raw.get("model_type"))
  if family is None:
    raise ValueError(f"model_type={raw.get('model_type')!r} is not one of {', '.join(_FAMILIES)}")
  _check_supported(raw, family)
  raw = {key: value for key, value in raw.items() if value is not None}
  ropes = (raw.get(key, {}) for key in ("rope_parameters", "rope_scaling"))
  raw["rope_theta"] = _one_of("rope_theta", raw, *ropes)
  raw["num_experts"] = _one_of("num_experts", raw, dict(num_experts=raw.get("num_local_experts")))
  # Where transformers' configuration classes have these defaults and published files use them.
  raw = family.defaults | {key: value for key, value in raw.items() if value is not None}
  raw.setdefault("tie_word_embeddings", False)
  raw.setdefault("mlp_only_layers", [])
  raw.setdefault("decoder_sparse_step", 1)
  raw.setdefault("num_key_value_heads", raw.get("num_attention_heads"))
  if "head_dim" not in raw:
    raw["head_dim"] = _take(raw, "hidden_size", int) // _take(raw, "num_attention_heads", int)

  fields = _FIELDS | (_MOE_FIELDS if family.moe else {})
  values = {field: _take(raw, key, kind) for field, (key, kind) in fields.items()}
  if family.moe:
    values["mlp_only_layers"] = tuple(values["mlp_only_layers"])
  implied = dict(qk_norm=family.qk_norm, attention_bias=family.attention_bias)
  return ModelConfig(**(_DENSE | values | implied))


def _check_supported(raw: dict[str, Any], family: _Family) -> None:
  must_be = dict(_MUST_BE)
  if not family.attention_bias:
    must_be["attention_bias"] = False  # would also be on the output projection; Qwen2's are not
  for key, value in must_be.items():
    if raw.get(key) not in (None, value):
      raise ValueError(f"{key}={raw[key]!r} is not supported, only {json.dumps(value)}")
  if set(raw.get("layer_types") or ()) - {"full_attention"}:
    raise ValueError(f"layer_types={raw['layer_types']} is not supported, only full_attention")
  for key in ("rope_scaling", "rope_parameters"):
    rope = raw.get(key) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
      raise ValueError(f"{key}.rope_type={kind!r} is not supported, only default")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
      raise ValueError(f"{key}.partial_rotary_factor={rope['partial_rotary_factor']}: only 1")
    unknown = set(rope) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if unknown:
      raise ValueError(f"{key}.{min(unknown)} is not supported")


def _one_of(key: str, *places: dict[str, Any]) -> Any:
  """The value of a key that is spelled in one of two ways; None if in neither."""
  values = {place[key] for place in places if place.get(key) is not None}
  if len(values) > 1:
    raise ValueError(f"{key} is given twice, as {' and as '.join(map(str, sorted(values)))}")
  return values.pop() if values else None


def _take(raw: dict[str, Any], key: str, kind: type) -> Any:
  value = raw.get(key)
  if value is None:
    raise ValueError(f"no {key}")
  number = isinstance(value, int | float) and not isinstance(value, bool)
  if not (number if kind is float else type(value) is kind):
    raise ValueError(f"{key}={value!r} is not of type {kind.__name__}")
  return kind(value)


def to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
  """config.json in the form in which Qwen3 was published, which transformers 4 and 5 both read.

  ValueError for a combination of features that no supported architecture has.
  """
  moe = config.num_experts > 0
  implied = (moe, config.qk_norm, config.attention_bias)
  matching = [t for t, f in _FAMILIES.items() if (f.moe, f.qk_norm, f.attention_bias) == implied]
  if not matching:
    raise ValueError(
      f"no Hugging Face architecture has num_experts={config.num_experts}, "
      f"qk_norm={config.qk_norm} and attention_bias={config.attention_bias} together"
    )
  model_type = matching[0]
  if model_type == "llama" and config.hidden_size % config.num_heads:
    raise ValueError(
      f"Hugging Face's Llama needs hidden_size={config.hidden_size} to be a multiple of "
      f"num_heads={config.num_heads}"
    )
  fields = _FIELDS | (_MOE_FIELDS if moe else {})
  values = {key: getattr(config, field) for field, (key, _) in fields.items()}
  if moe:
    values["mlp_only_layers"] = list(config.mlp_only_layers)
  return dict(
    architectures=[_FAMILIES[model_type].architecture],
    model_type=model_type,
    **values,
    attention_dropout=0.0,
    hidden_act="silu",
    rope_scaling=None,
    torch_dtype=dtype,
    use_cache=True,
    **({} if model_type == "qwen2" else dict(attention_bias=False)),
    **(dict(mlp_bias=False) if model_type == "llama" else dict(use_sliding_window=False)),
  )
