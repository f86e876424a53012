"""Builds the configuration from nested dicts."""

import dataclasses
import difflib
import json
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from gspo_jax.settings import ranges, rules
from gspo_jax.settings.objective import ObjectiveConfig, effective
from gspo_jax.settings.run import RunConfig

FLOAT_MAX = sys.float_info.max


def from_dict(values: Mapping[str, Any]) -> RunConfig:
  """Builds and checks a configuration.

  Raises:
    ValueError: a key is unknown, missing, of a wrong type or out of range, or a rule (rules.py) is
      broken.
  """
  config = parse(values)
  rules.check(config)
  return config


def parse(values: Mapping[str, Any]) -> RunConfig:
  """Builds a configuration, without checking rules between keys."""
  if isinstance(values.get("objective"), Mapping):
    kinds, section = ranges.kinds(ObjectiveConfig), values["objective"]
    values = dict(values) | dict(objective=effective(section))
    for loss, options in section.get("tuned", {}).items():
      for option, value in options.items():
        _convert(kinds[option], value, f"objective.tuned.{loss}.{option}")
  return derived(_build(RunConfig, values, ""))


def default() -> RunConfig:
  """Builds the default configuration."""
  return from_dict(dataclasses.asdict(RunConfig()))


def derived(config: RunConfig) -> RunConfig:
  """Replaces unset lengths (0) by lengths from other keys."""
  new = config.sampling.max_new_tokens
  window = config.data.max_prompt_tokens + new

  def fill(section: Any, **lengths: int) -> Any:
    unset = {key: n for key, n in lengths.items() if getattr(section, key) == 0}
    return dataclasses.replace(section, **unset)

  return dataclasses.replace(
    config,
    sft=fill(config.sft, max_tokens=window),
    reward=fill(config.reward, overlong_max=new),
    eval=fill(config.eval, max_new_tokens=new),
  )


def kind_of(key: str) -> Any:
  """Declared type of a dotted key; None for an unknown key."""
  if key.startswith("objective.tuned."):  # objective.tuned.LOSS.OPTION: the type of the option.
    key = f"objective.{key.rpartition('.')[2]}"
  kind = RunConfig
  for part in key.split("."):
    if typing.get_origin(kind) is dict:
      kind = typing.get_args(kind)[1]
    else:
      kind = ranges.kinds(kind).get(part) if dataclasses.is_dataclass(kind) else None
  return kind


def unknown_key_message(path: str, key: str, keys: Iterable[str]) -> str:
  """Error message for an unknown key; `path` is its section with a dot, or ""."""
  near = difflib.get_close_matches(key, keys, n=1)
  hint = f"did you mean {path}{near[0]}?" if near else f"there are {', '.join(keys) or 'none'}"
  return f"unknown config key {path}{key}; {hint}"


def _build(cls: type, values: Any, path: str) -> Any:
  """Builds a section, recursively; `path` is the prefix of its keys, for messages."""
  kinds = ranges.kinds(cls)
  key = path.rstrip(".")
  if not isinstance(values, Mapping):
    raise ValueError(f"{key or 'the configuration'}={values!r} must be a section")
  for key in values:
    if key not in kinds:
      raise ValueError(unknown_key_message(path, key, kinds))
  missing = [f"{path}{name}" for name in kinds if name not in values]
  if missing:
    raise ValueError(f"missing config keys: {', '.join(missing)}")
  return cls(**{name: _convert(kinds[name], values[name], path + name) for name in kinds})


def _convert(kind: Any, value: Any, key: str) -> Any:
  """Converts a value to the declared type of its key."""
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if dataclasses.is_dataclass(kind):
    return _build(kind, value, f"{key}.")
  if origin in (typing.Union, types.UnionType):  # An optional value.
    return None if value is None else _convert(arguments[0], value, key)
  plain = ranges.plain(kind)
  accepted = {dict: Mapping, tuple: (tuple, list), float: (int, float)}.get(plain, plain)
  # In Python True is an int, but not here.
  if not isinstance(value, accepted) or (isinstance(value, bool) and plain is not bool):
    raise ValueError(f"{key}={value!r} must be {ranges.describe(kind)}")
  if kind is dict:  # Any JSON object.
    try:
      return json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError) as error:
      raise ValueError(f"{key}={value!r} cannot be written as JSON: {error}") from error
  if plain is dict:
    return {name: _convert(arguments[1], entry, f"{key}.{name}") for name, entry in value.items()}
  if plain is tuple:
    return tuple(_convert(arguments[0], entry, key) for entry in value)
  if plain is float:
    value = float(max(-FLOAT_MAX, min(FLOAT_MAX, value))) if isinstance(value, int) else value
  ranges.check_value(kind, value, key)
  return value
