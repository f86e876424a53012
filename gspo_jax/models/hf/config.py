"""Conversion of config.json to ModelConfig and back.

An architecture is a model_type of config.json, such as "qwen3_moe". The families of models declare
the supported architectures (`families.declaration.Architecture`).
"""

import dataclasses
import difflib
import json
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gspo_jax.models.families.declaration import Architecture
from gspo_jax.models.hf import ropes
from gspo_jax.models.hf.architectures import (
  ARCHITECTURES,
  FAMILY_OF,
  FIXED,
  WITHOUT_EFFECT,
  language_model,
  relatives,
)
from gspo_jax.models.hf.ropes import GLOBAL, LOCAL
from gspo_jax.settings import ranges
from gspo_jax.settings.model import ModelConfig
from gspo_jax.system import hub, jsons


def _types_of(section: type, path: str = "") -> dict[str, type]:
  """Returns the types of a section's fields.

  A field of a group is named "group.field".
  """
  types = {}
  for field, kind in ranges.kinds(section).items():
    group = dataclasses.is_dataclass(kind)
    types |= _types_of(kind, f"{field}.") if group else {path + field: ranges.plain(kind)}
  return types


TYPES = _types_of(ModelConfig)


class CheckpointError(ValueError):
  """A directory of Hugging Face's layout without a complete, supported model."""


def read_json(path: Path) -> dict[str, Any]:
  """Reads a JSON object. Raises FileNotFoundError or CheckpointError, naming the file."""
  if not path.is_file():
    raise FileNotFoundError(f"{path}: no such file")
  try:
    return jsons.read_object(path)
  except ValueError as error:
    raise CheckpointError(str(error)) from error


def load_config(directory: str | os.PathLike) -> ModelConfig:
  """Reads hyperparameters from config.json, as published or written by transformers 5.

  Args:
    directory: a local path, a path of a bucket (gs://...), or a repository of the Hugging Face hub.

  Raises:
    FileNotFoundError: there is no config.json.
    CheckpointError: a key is missing, or a value has the wrong type or is not supported.
    ValueError: the repository or the bucket cannot be read.
  """
  path = hub.directory(os.fspath(directory)) / "config.json"
  raw = read_json(path)
  try:
    return _from_hf(language_model(raw))
  except ValueError as error:
    raise CheckpointError(f"{path}: {error}") from error
  except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
    raise CheckpointError(f"{path}: the value of a key has a wrong type: {error}") from error


def _from_hf(raw: dict[str, Any]) -> ModelConfig:
  """Converts the content of config.json; ValueError names a missing or unsupported key."""
  model_type = raw.get("model_type")
  architecture = ARCHITECTURES.get(model_type)
  if architecture is None:
    raise ValueError(
      f"model_type={model_type!r} is not one of {', '.join(ARCHITECTURES)}{_nearest(raw)}"
    )
  quantisation = raw.get("quantization_config") or {}
  if quantisation and quantisation.get("quant_method") == architecture.quantised:
    raw = {key: value for key, value in raw.items() if key != "quantization_config"}
  if raw.get("use_sliding_window") and not _has_window(raw, architecture):
    raw = raw | dict(use_sliding_window=False)
  for key, value in _unsupported(raw, architecture).items():
    raise ValueError(f"{key}={raw[key]!r} is not supported, only {json.dumps(value)}")
  heads = raw.get("num_attention_heads", architecture.defaults.get("num_attention_heads"))
  # In these keys, transformers gives null the following meanings.
  null = dict(num_key_value_heads=heads, attn_logit_softcapping=0.0, final_logit_softcapping=0.0)
  null |= dict(sliding_window=0, clip_qkv=0.0)
  raw = {key: null.get(key) if value is None else value for key, value in raw.items()}
  raw |= ropes.read(raw, architecture)
  raw["num_experts"] = ropes.one_of(
    "num_experts", raw, dict(num_experts=raw.get("num_local_experts"))
  )
  defaults = dict(tie_word_embeddings=False, num_key_value_heads=heads) | architecture.defaults
  raw = defaults | {key: value for key, value in raw.items() if value is not None}
  if "head_dim" not in raw:
    raw["head_dim"] = _take(raw, "hidden_size", int) // _take(raw, "num_attention_heads", int)
  if architecture.ropes_by_kind:
    raw.setdefault("rope_local_base_freq", raw.get("rope_theta"))

  values = dict(qk_norm=False, family=FAMILY_OF[model_type], rope=raw["rope"])
  values |= architecture.implied
  for field, key in architecture.fields.items():
    if field not in _ELSEWHERE:
      values[field] = _take(raw, key, TYPES[field])
  if architecture.ropes_by_kind:
    values["local_rope_theta"] = raw["rope_local_base_freq"]
  layers = _take(raw, "num_hidden_layers", int)
  if "linear.kernel" not in architecture.fields:  # Otherwise `architecture.read` reads layer_types.
    values |= _windows(raw, architecture, layers)
  scaled = raw["rope"].rule != "default"
  if scaled and values.get("sliding_window") and not architecture.ropes_by_kind:
    values["rope"] = dataclasses.replace(raw["rope"], local=True)  # All layers share the rule.
  return _grouped(values | architecture.read(raw))


def _unsupported(raw: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
  """Returns a dict from each key with an unsupported value to the supported value."""
  fixed = (FIXED | dict(architecture.fixed)).items()
  declared = {*architecture.fields.values()}
  return {k: v for k, v in fixed if raw.get(k) not in (None, v) and k not in declared}


def _has_window(raw: Mapping[str, Any], architecture: Architecture) -> bool:
  """Whether `use_sliding_window` gives a layer a sliding window.

  In Qwen2 and Qwen3, the first `max_window_layers` layers have full attention.
  """
  if "max_window_layers" not in architecture.defaults:
    return True
  layers, full = (raw.get(key) for key in ("num_hidden_layers", "max_window_layers"))
  full = architecture.defaults["max_window_layers"] if full is None else full
  types = raw.get("layer_types") or _types(range(layers or 0), lambda x: x >= full)
  return LOCAL in types and raw.get("sliding_window", 4096) is not None


def _nearest(raw: Mapping[str, Any]) -> str:
  """Returns advice for an unknown model_type.

  The advice names the architecture with the fewest unsupported keys and values of `raw`. If no
  architecture can read the remaining keys, the advice is a similar name, or "" if there is none.
  """
  wrong, near = str(raw.get("model_type")), []
  close = difflib.get_close_matches(wrong, ARCHITECTURES, n=1, cutoff=0.7)
  for name, architecture in ARCHITECTURES.items():
    declared = {*architecture.fields.values(), *architecture.fixed, *FIXED, *WITHOUT_EFFECT}
    declared |= {"num_local_experts"} if "num_experts" in architecture.fields else set()
    different = sorted(key for key in raw.keys() - declared if raw[key] is not None)
    different += _unsupported(raw, architecture)
    try:
      _from_hf({k: v for k, v in raw.items() if k not in different} | dict(model_type=name))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
      continue
    near.append((len(different), name not in close, name, different))
  if not near:
    return f"; the nearest is {close[0]}" if close else ""
  *_, name, different = min(near, key=lambda entry: entry[:2])
  if not different:
    return f"; its other keys are those of {name}: if it is a {name}, set model_type to {name!r}"
  listed = ", ".join(f"{key}={reprlib.repr(raw[key])}" for key in different[:4])
  more = " and more" if different[4:] else ""
  return f"; the nearest is {name}, without support for {listed}{more}"


def _grouped(values: dict[str, Any]) -> ModelConfig:
  """Builds a configuration from values by field.

  For example, "rope.rule" is the field `rule` of the group `rope`.
  """
  flat = {field: value for field, value in values.items() if "." not in field}
  for group in _GROUPS:
    changes = {
      field.removeprefix(f"{group}."): value
      for field, value in values.items()
      if field.startswith(f"{group}.")
    }
    flat[group] = dataclasses.replace(flat.get(group, getattr(ModelConfig, group)), **changes)
  return ModelConfig(**flat)


# Fields that `_windows` and `ropes.read` read.
_ELSEWHERE = ("sliding_window", "sliding_window_pattern", "rope.query_beta")
_GROUPS = ("rope", "router", "scores", "multipliers", "linear")


def _windows(raw: dict[str, Any], architecture: Architecture, layers: int) -> dict[str, Any]:
  """Reads the fields of sliding windows: width and local layers.

  If every n-th layer is global, `sliding_window_pattern` is n. Else `scores.local_layers` lists
  the local layers.
  """
  types = raw.get("layer_types")
  if types is not None and (len(types) != layers or not {*types} <= {LOCAL, GLOBAL}):
    raise ValueError(f"layer_types={types}: its {layers} entries must be {LOCAL} or {GLOBAL}")
  if architecture.pattern is None:
    if types is not None and LOCAL in types:
      raise ValueError(f"layer_types={types} is not supported, only {GLOBAL}")
    return {}
  pattern = raw.get("sliding_window_pattern") or architecture.pattern or layers + 1
  window = _take(raw, "sliding_window", int)
  by_pattern = _types(range(layers), lambda layer: (layer + 1) % pattern != 0)
  if types is None or types == by_pattern:
    return dict(sliding_window=window, sliding_window_pattern=pattern if window else 1)
  first = types.index(GLOBAL) + 1 if GLOBAL in types else layers + 1
  if first == 1 and LOCAL not in types:
    return {}
  fields = dict(sliding_window=window, sliding_window_pattern=max(first, 2) if window else 1)
  if types != _types(range(layers), lambda layer: (layer + 1) % first != 0):
    local = tuple(layer for layer, kind in enumerate(types) if kind == LOCAL)
    fields["scores.local_layers"] = local if window else ()
  return fields


def _types(layers: Iterable[int], is_local: Callable[[int], bool]) -> list[str]:
  """Returns the entries of layer_types in config.json for the layers."""
  return [LOCAL if is_local(layer) else GLOBAL for layer in layers]


def layer_types(config: ModelConfig) -> list[str]:
  """Returns layer_types of config.json: whether each layer has a sliding window."""
  return _types(range(config.num_layers), config.is_local)


def _take(raw: dict[str, Any], key: str, kind: type) -> Any:
  """Returns a key's value; ValueError if missing or of another type."""
  value = raw.get(key)
  if value is None:
    raise ValueError(f"the key {key} is missing")
  return jsons.typed(key, value, kind)


def to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
  """Returns the content of config.json, readable by transformers 4 and 5.

  dtype: value of torch_dtype.

  Raises ValueError if no supported architecture has this combination of features.
  """
  config = published(config)
  for model_type, content in _candidates(config, dtype):
    if model_type == "llama" and config.hidden_size % config.num_heads:
      raise ValueError(
        f"Hugging Face's Llama needs hidden_size={config.hidden_size} to be a multiple of "
        f"num_heads={config.num_heads}"
      )
    return content
  features = """num_experts family qk_norm attention_bias sliding_window sliding_window_pattern
    local_rope_theta query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping"""
  unusual = [f for f in _GROUPS if getattr(config, f) != getattr(ModelConfig, f)]
  values = ", ".join(f"{f}={getattr(config, f)!r}" for f in features.split() + unusual)
  raise ValueError(f"no Hugging Face architecture has {values} together")


def published(config: ModelConfig) -> ModelConfig:
  """Returns the same model's configuration, with the family of its files.

  Several families have equal layers. For example, a Qwen3 without q/k norms is a Llama in files.
  The result has the first of these families whose files can describe the model, the model's own
  family before others. If there is none, the configuration is returned unchanged.
  """
  scaled = dataclasses.replace(
    config, query_pre_attn_scalar=config.query_pre_attn_scalar or config.head_dim
  )
  for family in relatives(config.family):
    # Gemma's files have the key query_pre_attn_scalar; files of other architectures do not.
    for candidate in (scaled, config):
      renamed = dataclasses.replace(candidate, family=family)
      if any(_candidates(renamed, "float32")):
        return renamed
  return config


def _candidates(config: ModelConfig, dtype: str) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields (model_type, config.json) of the family's architectures with the model's features."""
  for model_type, architecture in ARCHITECTURES.items():
    if FAMILY_OF[model_type] != config.family:
      continue
    content = _write(config, model_type, architecture, dtype)
    try:
      equal = _from_hf(content) == config
    except ValueError:
      continue
    if equal:
      yield model_type, content


# Keys whose value 0 is null in files.
_OFF = ("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv")


def _write(
  config: ModelConfig, model_type: str, architecture: Architecture, dtype: str
) -> dict[str, Any]:
  """Returns config.json for an architecture, possibly without some features of the model."""
  values = {key: ranges.look_up(config, field) for field, key in architecture.fields.items()}
  values = {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}
  values.pop(ropes.BETA, None)
  if architecture.pattern == 0:  # transformers reads a Mistral with layer_types as another model.
    values["sliding_window"] = config.sliding_window or None
  elif architecture.pattern:
    values["layer_types"] = layer_types(config)
  content = dict(
    architectures=[architecture.name],
    model_type=model_type,
    **{key: v or None if key in _OFF else v for key, v in values.items()},
    hidden_act=FIXED["hidden_act"],
    attention_dropout=0.0,
    torch_dtype=dtype,
    use_cache=True,
  )
  content |= ropes.write(config, architecture)
  return content | dict(architecture.fixed) | architecture.write(config)
