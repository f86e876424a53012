"""Conversion of rotary parameters in config.json to fields of ModelConfig, and back.

Published files have the keys `rope_theta` and `rope_scaling`. transformers 5 writes one key,
`rope_parameters`. For some architectures this key has an object for each of the two kinds of
layers, `LOCAL` (sliding window) and `GLOBAL`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from gspo_jax.models.attention.positions import attention_factor
from gspo_jax.models.families.declaration import Architecture
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.model_groups import RopeConfig
from gspo_jax.system import jsons

LOCAL, GLOBAL = "sliding_attention", "full_attention"
BETA = "llama_4_scaling_beta"
# Fields of RopeConfig -> keys of config.json, where the names differ.
_KEYS = dict(original_length="original_max_position_embeddings", query_beta=BETA)
# Keys permitted for every rule. `finetuned` and the two of mrope have no effect: positions of text
# have one dimension.
_SHARED = """rope_type type rope_theta partial_rotary_factor max_position_embeddings finetuned
  mrope_section mrope_interleaved""".split()
# vLLM multiplies YaRN's default factor by this key, where transformers has `attention_factor`.
VLLM_FACTOR = "attn_factor"
# Optional fields that are always written. vLLM reads the two of YaRN without a default.
WRITTEN = ("original_length", "beta_fast", "beta_slow")
# For each rule, its required fields of RopeConfig, and its optional ones.
RULES = dict(
  default=("", ""),
  linear=("factor", ""),
  llama3=("factor low_freq_factor high_freq_factor", "original_length"),
  yarn=(
    "factor",
    "original_length beta_fast beta_slow attention_factor mscale mscale_all_dim truncate",
  ),
)


def read(raw: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
  """Reads rotary parameters from `rope_parameters`, `rope_scaling`, and top-level keys.

  Raises ValueError for an unknown rule or key, for a missing key of a rule, and for two different
  values of a parameter.
  """
  parameters, scaling, local = raw.get("rope_parameters"), raw.get("rope_scaling") or {}, {}
  if parameters is None:
    parameters = {} if scaling else architecture.defaults.get("rope_parameters", {})
  nested = {key for key in (LOCAL, GLOBAL) if key in parameters}
  if architecture.ropes_by_kind:
    flat = {key: value for key, value in parameters.items() if key not in nested}
    _rule("rope_parameters", flat, raw, architecture)
    parameters, local = parameters.get(GLOBAL) or {}, parameters.get(LOCAL) or {}
    if _rule("rope_parameters", local, raw, architecture) != RopeConfig():
      raise ValueError(f"rope_parameters.{LOCAL} is supported only with rope_type='default'")
  elif nested:
    raise ValueError(
      f"rope_parameters.{min(nested)} is not supported: in {architecture.name} all layers share "
      "rope_parameters"
    )
  places = dict(rope_parameters=parameters, rope_scaling=scaling)
  rules = [_rule(place, rope, raw, architecture) for place, rope in places.items()]
  scaled = [rule for rule in rules if rule != RopeConfig()] or [RopeConfig()]
  if len(set(scaled)) > 1:
    raise ValueError("rope_parameters and rope_scaling differ: remove one of them")
  return dict(
    rope=scaled[0],
    rope_theta=one_of("rope_theta", raw, parameters, scaling),
    partial_rotary_factor=one_of("partial_rotary_factor", raw, parameters, scaling),
    rope_local_base_freq=one_of(
      "rope_local_base_freq", raw, dict(rope_local_base_freq=local.get("rope_theta"))
    ),
  )


def _rule(
  place: str, rope: Mapping[str, Any], raw: Mapping[str, Any], architecture: Architecture
) -> RopeConfig:
  """Reads the rotary parameters in one object of config.json.

  place: key of the object, for messages.
  rope: the object.
  raw: the whole config.json.
  """
  rule = rope.get("rope_type", rope.get("type", "default"))
  if rule not in RULES:
    raise ValueError(f"{place}.rope_type={rule!r} is not supported, only {', '.join(RULES)}")
  required, optional = (part.split() for part in RULES[rule])
  required += ["query_beta"] if rope and "rope.query_beta" in architecture.fields else []
  keys = {field: _KEYS.get(field, field) for field in required + optional}
  unknown = set(rope) - {*keys.values(), *_SHARED, *([VLLM_FACTOR] if rule == "yarn" else ())}
  if unknown:
    raise ValueError(f"{place}.{min(unknown)} is not supported")
  for field in required:
    if rope.get(keys[field]) is None:
      raise ValueError(f"{place}.{keys[field]} is missing, and rope_type={rule!r} needs it")
  values = {field: rope[key] for field, key in keys.items() if rope.get(key) is not None}
  if "original_length" in keys:  # In transformers, a top-level key has priority.
    values.setdefault("original_length", raw.get("max_position_embeddings"))
    length = raw.get(_KEYS["original_length"])
    if length is not None and not architecture.ropes_by_kind:
      values["original_length"] = length
  kinds = {field.name: type(field.default) for field in dataclasses.fields(RopeConfig)}
  values = {
    field: jsons.typed(f"{place}.{keys[field]}", value, kinds[field])
    for field, value in values.items()
  }
  if rule == "yarn" and VLLM_FACTOR in rope and not values.get("attention_factor"):
    factor = jsons.typed(f"{place}.{VLLM_FACTOR}", rope[VLLM_FACTOR], float)
    values["attention_factor"] = factor * _yarn_factor(values["factor"])
  share = rope.get("partial_rotary_factor")
  if share not in (None, 1.0) and "rope.share" not in architecture.fields:
    raise ValueError(f"{place}.partial_rotary_factor={share} is not supported, only 1")
  return RopeConfig(rule=rule, **values)


def _yarn_factor(factor: float) -> float:
  """Returns YaRN's default factor on queries and keys."""
  return attention_factor(RopeConfig(rule="yarn", factor=factor, original_length=1))


def one_of(key: str, *places: Mapping[str, Any]) -> Any:
  """Returns a key's value in one of several places.

  Returns None if the key is missing. Raises ValueError if two places have different values.
  """
  values = {place[key] for place in places if place.get(key) is not None}
  if len(values) > 1:
    raise ValueError(f"{key} is given twice, as {' and as '.join(map(str, sorted(values)))}")
  return values.pop() if values else None


def write(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
  """Returns the rotary keys of a config.json for transformers 4 and 5."""
  rope = config.rope
  required, optional = (part.split() for part in RULES[rope.rule])
  required += ["query_beta"] if rope.query_beta else []
  default = RopeConfig(rule=rope.rule, original_length=1)
  values = {
    _KEYS.get(field, field): getattr(rope, field)
    for field in required + optional
    if field in (*required, *WRITTEN) or getattr(rope, field) != getattr(default, field)
  }
  if rope.rule == "yarn" and rope.attention_factor:
    values[VLLM_FACTOR] = rope.attention_factor / _yarn_factor(rope.factor)
  scaling = dict(rope_type=rope.rule) | values if rope.rule != "default" else None
  content, plain = dict(rope_scaling=scaling), dict(rope_type="default")
  # Without `rope_parameters`, transformers 5 would take its default theta or its default rule.
  if not scaling and "rope_parameters" in architecture.defaults:
    content["rope_parameters"] = plain | dict(rope_theta=config.rope_theta)
  if architecture.ropes_by_kind and "local_rope_theta" not in architecture.fields:
    content["rope_parameters"] = {
      LOCAL: plain | dict(rope_theta=config.local_rope_theta),
      GLOBAL: (scaling or plain) | dict(rope_theta=config.rope_theta),
    }
  return content
