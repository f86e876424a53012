"""Rotary parameters in config.json <-> fields of ModelConfig.

Published files have `rope_theta` and `rope_scaling`; transformers 5 writes `rope_parameters`, for
some architectures by kind of layer.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from gspo_jax.models.families.declaration import Architecture
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.model_groups import RopeConfig
from gspo_jax.system import jsons

LOCAL, GLOBAL = "sliding_attention", "full_attention"
BETA = "llama_4_scaling_beta"
_KEYS = dict(original_length="original_max_position_embeddings", query_beta=BETA)
_SHARED = "rope_type type rope_theta partial_rotary_factor max_position_embeddings".split()
# Keys of each rule: required ones, and optional ones.
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
  """Returns rotary parameters of config.json, under one spelling.

  Raises ValueError for an unknown rule or key, and for a rule without its keys.
  """
  parameters, local = raw.get("rope_parameters") or {}, {}
  nested = {key for key in (LOCAL, GLOBAL) if key in parameters}
  if architecture.ropes_by_kind:
    flat = {key: value for key, value in parameters.items() if key not in nested}
    _rule("rope_parameters", flat, raw, architecture)
    parameters, local = parameters.get(GLOBAL) or {}, parameters.get(LOCAL) or {}
    if _rule("rope_parameters", local, raw, architecture) != RopeConfig():
      raise ValueError(f"rope_parameters.{LOCAL}: only rope_type 'default' is read")
  elif nested:
    raise ValueError(f"rope_parameters.{min(nested)}: {architecture.name} reads one for all layers")
  scaling = raw.get("rope_scaling") or {}
  places = dict(rope_parameters=parameters, rope_scaling=scaling)
  rules = [_rule(place, rope, raw, architecture) for place, rope in places.items()]
  scaled = [rule for rule in rules if rule != RopeConfig()] or [RopeConfig()]
  if len(set(scaled)) > 1:
    raise ValueError("rope_parameters and rope_scaling differ")
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
  """Reads one set of parameters."""
  rule = rope.get("rope_type", rope.get("type", "default"))
  if rule not in RULES:
    raise ValueError(f"{place}.rope_type={rule!r} is not supported, only {', '.join(RULES)}")
  required, optional = (part.split() for part in RULES[rule])
  required += ["query_beta"] if rope and "rope.query_beta" in architecture.fields else []
  keys = {field: _KEYS.get(field, field) for field in required + optional}
  unknown = set(rope) - {*keys.values(), *_SHARED}
  if unknown:
    raise ValueError(f"{place}.{min(unknown)} is not supported")
  for field in required:
    if rope.get(keys[field]) is None:
      raise ValueError(f"no {place}.{keys[field]}, which rope_type={rule!r} needs")
  values = {field: rope[key] for field, key in keys.items() if rope.get(key) is not None}
  if "original_length" in keys:  # The default of transformers.
    values.setdefault("original_length", raw.get("max_position_embeddings"))
  kinds = {field.name: type(field.default) for field in dataclasses.fields(RopeConfig)}
  values = {
    field: jsons.typed(f"{place}.{keys[field]}", value, kinds[field])
    for field, value in values.items()
  }
  share = rope.get("partial_rotary_factor")
  if share not in (None, 1.0) and "rope.share" not in architecture.fields:
    raise ValueError(f"{place}.partial_rotary_factor={share}: only 1")
  return RopeConfig(rule=rule, **values)


def one_of(key: str, *places: Mapping[str, Any]) -> Any:
  """Returns the value of a key with two spellings; None if missing."""
  values = {place[key] for place in places if place.get(key) is not None}
  if len(values) > 1:
    raise ValueError(f"{key} is given twice, as {' and as '.join(map(str, sorted(values)))}")
  return values.pop() if values else None


def write(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
  """Returns rotary keys of a published config.json."""
  rope = config.rope
  required, optional = (part.split() for part in RULES[rope.rule])
  required += ["query_beta"] if rope.query_beta else []
  default = RopeConfig(rule=rope.rule, original_length=1)
  values = {
    _KEYS.get(field, field): getattr(rope, field)
    for field in required + optional
    if field in (*required, "original_length") or getattr(rope, field) != getattr(default, field)
  }
  scaling = dict(rope_type=rope.rule) | values if rope.rule != "default" else None
  content = dict(rope_scaling=scaling)
  if architecture.ropes_by_kind and "local_rope_theta" not in architecture.fields:
    plain = dict(rope_type="default")  # Otherwise transformers 5 sets its own theta locally.
    content["rope_parameters"] = {
      LOCAL: plain | dict(rope_theta=config.local_rope_theta),
      GLOBAL: (scaling or plain) | dict(rope_theta=config.rope_theta),
    }
  return content
