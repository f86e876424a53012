"""config.json <-> ModelConfig, for supported architectures of Hugging Face."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from gspo_jax.models.hf.architectures import ARCHITECTURES, FIXED, Architecture
from gspo_jax.settings import ranges
from gspo_jax.settings.model import ModelConfig
from gspo_jax.system import hub, jsons

TYPES = {field: ranges.plain(kind) for field, kind in ranges.kinds(ModelConfig).items()}


class CheckpointError(ValueError):
  """A directory without exactly one supported model."""


def read_json(path: Path) -> dict[str, Any]:
  """Reads a JSON object; errors name the file."""
  if not path.is_file():
    raise FileNotFoundError(f"{path}: no such file")
  try:
    return jsons.read_object(path)
  except ValueError as error:
    raise CheckpointError(str(error)) from error


def load_config(directory: str | os.PathLike) -> ModelConfig:
  """Reads hyper-parameters from config.json, as published or written by transformers 5.

  Args:
    directory: a path, `gs://` too, or a repository of the Hugging Face hub.

  Raises:
    FileNotFoundError: no config.json.
    CheckpointError: a missing key, a value of the wrong type, or an unsupported value.
    ValueError: a repository that cannot be read.
  """
  path = hub.directory(os.fspath(directory)) / "config.json"
  raw = read_json(path)
  try:
    return _from_hf(raw)
  except ValueError as error:
    raise CheckpointError(f"{path}: {error}") from error
  except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
    raise CheckpointError(f"{path}: a key is of another type than it should be: {error}") from error


def _from_hf(raw: dict[str, Any]) -> ModelConfig:
  architecture = ARCHITECTURES.get(raw.get("model_type"))
  if architecture is None:
    supported = ", ".join(ARCHITECTURES)
    raise ValueError(f"model_type={raw.get('model_type')!r} is not one of {supported}")
  _check_supported(raw, architecture)
  heads = raw.get("num_attention_heads")  # transformers' meaning of null.
  null = dict(num_key_value_heads=heads, attn_logit_softcapping=0.0, final_logit_softcapping=0.0)
  raw = {key: null.get(key) if value is None else value for key, value in raw.items()}
  whole, local = _ropes(raw, architecture)
  raw["rope_theta"] = _one_of("rope_theta", raw, *whole)
  raw["rope_local_base_freq"] = _one_of(
    "rope_local_base_freq", raw, dict(rope_local_base_freq=local.get("rope_theta"))
  )
  raw["num_experts"] = _one_of("num_experts", raw, dict(num_experts=raw.get("num_local_experts")))
  defaults = dict(tie_word_embeddings=False, num_key_value_heads=heads) | architecture.defaults
  raw = defaults | {key: value for key, value in raw.items() if value is not None}
  if "head_dim" not in raw:
    raw["head_dim"] = _take(raw, "hidden_size", int) // _take(raw, "num_attention_heads", int)

  values = {field: _take(raw, key, TYPES[field]) for field, key in architecture.fields.items()}
  config = ModelConfig(**(values | dict(architecture.implied)))
  types = raw.get("layer_types")
  if types is None or types == layer_types(config):
    return config
  # An unusual pattern of layers.
  first = types.index(_GLOBAL) if _GLOBAL in types else len(types)
  if "sliding_window_pattern" in values:
    window = config.sliding_window if first else 0  # 0: every layer is global.
    changes = dict(sliding_window=window, sliding_window_pattern=first + 1)
    config = dataclasses.replace(config, **changes)
  if "sliding_window_pattern" not in values or types != layer_types(config):
    allowed = f"every n-th {_GLOBAL}" if "sliding_window_pattern" in values else f"only {_GLOBAL}"
    raise ValueError(f"layer_types={types} is not supported, {allowed}")
  return config


_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def layer_types(config: ModelConfig) -> list[str]:
  """Returns the kind of attention of each layer, in words of config.json."""
  return [_LOCAL if config.is_local(layer) else _GLOBAL for layer in range(config.num_layers)]


def _ropes(
  raw: dict[str, Any], architecture: Architecture
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
  """Returns rotary parameters of global layers, by place, and local ones.

  If local layers have separate ones, transformers reads them by kind of layer only.
  """
  whole, local = raw.get("rope_parameters") or {}, {}
  if "rope_local_base_freq" in architecture.defaults:
    whole, local = whole.get(_GLOBAL) or {}, whole.get(_LOCAL) or {}
  return [whole, raw.get("rope_scaling") or {}], local


def _check_supported(raw: dict[str, Any], architecture: Architecture) -> None:
  for key, value in (FIXED | dict(architecture.fixed)).items():
    if raw.get(key) not in (None, value):
      raise ValueError(f"{key}={raw[key]!r} is not supported, only {json.dumps(value)}")
  (parameters, scaling), local = _ropes(raw, architecture)
  flat = {k: v for k, v in (raw.get("rope_parameters") or {}).items() if k not in (_LOCAL, _GLOBAL)}
  ropes = [("rope_scaling", scaling), *(("rope_parameters", r) for r in (parameters, local, flat))]
  for key, rope in ropes:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
      raise ValueError(f"{key}.rope_type={kind!r} is not supported, only default")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
      raise ValueError(f"{key}.partial_rotary_factor={rope['partial_rotary_factor']}: only 1")
    unknown = set(rope) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if unknown:
      raise ValueError(f"{key}.{min(unknown)} is not supported")


def _one_of(key: str, *places: dict[str, Any]) -> Any:
  """Returns the value of a key with two spellings; None if missing."""
  values = {place[key] for place in places if place.get(key) is not None}
  if len(values) > 1:
    raise ValueError(f"{key} is given twice, as {' and as '.join(map(str, sorted(values)))}")
  return values.pop() if values else None


def _take(raw: dict[str, Any], key: str, kind: type) -> Any:
  value = raw.get(key)
  if value is None:
    raise ValueError(f"no {key}")
  number = isinstance(value, int | float) and not isinstance(value, bool)
  in_json = list if kind is tuple else kind
  if not (number if kind is float else type(value) is in_json):
    raise ValueError(f"{key}={value!r} is not of type {in_json.__name__}")
  return kind(value)


def to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
  """Returns config.json in published form, readable by transformers 4 and 5.

  Raises:
    ValueError: no supported architecture has this combination of features.
  """
  if config.family == "gemma" and not config.query_pre_attn_scalar:  # Hugging Face divides by it.
    config = dataclasses.replace(config, query_pre_attn_scalar=config.head_dim)
  # Qwen3-MoE comes first and would also take models without experts.
  for model_type, architecture in reversed(ARCHITECTURES.items()):
    content = _write(config, model_type, architecture, dtype)
    try:
      if _from_hf(content) != config:
        continue
    except ValueError:
      continue
    if model_type == "llama" and config.hidden_size % config.num_heads:
      raise ValueError(
        f"Hugging Face's Llama needs hidden_size={config.hidden_size} to be a multiple of "
        f"num_heads={config.num_heads}"
      )
    return content
  features = """num_experts family qk_norm attention_bias sliding_window sliding_window_pattern
    local_rope_theta query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping"""
  values = ", ".join(f"{field}={getattr(config, field)!r}" for field in features.split())
  raise ValueError(f"no Hugging Face architecture has {values} together")


def _write(
  config: ModelConfig, model_type: str, architecture: Architecture, dtype: str
) -> dict[str, Any]:
  values = {key: getattr(config, field) for field, key in architecture.fields.items()}
  if "mlp_only_layers" in values:
    values["mlp_only_layers"] = list(config.mlp_only_layers)
  if "sliding_window" in values:
    values["layer_types"] = layer_types(config)
  content = dict(
    architectures=[architecture.name],
    model_type=model_type,
    **{key: None if key.endswith("softcapping") and not v else v for key, v in values.items()},
    attention_dropout=0.0,
    rope_scaling=None,
    torch_dtype=dtype,
    use_cache=True,
  )
  return content | dict(architecture.fixed)
