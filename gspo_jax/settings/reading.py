"""Builds configurations from nested dicts, and reports unknown keys and invalid values."""

import dataclasses
import difflib
import json
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gspo_jax.settings import other_names, ranges, rules
from gspo_jax.settings.objective import ObjectiveConfig, fill_unset, section_kind
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
  """Builds a configuration, and checks each key, but no rules between keys."""
  if isinstance(values.get("objective"), Mapping):
    kinds, section = ranges.kinds(ObjectiveConfig), values["objective"]
    values = dict(values) | dict(objective=fill_unset(section))
    for loss, options in section.get("tuned", {}).items():
      for option, value in options.items():
        _convert(kinds[option], value, f"objective.tuned.{loss}.{option}")
  return fill_lengths(_build(RunConfig, values, ""))


def default() -> RunConfig:
  """Builds the default configuration."""
  return from_dict(dataclasses.asdict(RunConfig()))


def fill_lengths(config: RunConfig) -> RunConfig:
  """Replaces unset lengths (0) by lengths from other keys."""
  new_tokens = config.sampling.max_new_tokens
  window = config.data.max_prompt_tokens + new_tokens

  def fill(section: Any, **lengths: int) -> Any:
    unset = {key: n for key, n in lengths.items() if getattr(section, key) == 0}
    return dataclasses.replace(section, **unset)

  return dataclasses.replace(
    config,
    sft=fill(config.sft, max_tokens=window),
    reward=fill(config.reward, overlong_max=new_tokens),
    eval=fill(config.eval, max_new_tokens=new_tokens),
  )


def kind_of(key: str) -> Any:
  """Returns the declared type of a dotted key; None for an unknown key."""
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
  """Returns the error message for an unknown key, with suggestions (`suggest`)."""
  near = suggest(path, key, keys)
  hint = f"did you mean {' or '.join(near)}?" if near else None
  hint = hint or f"the section has {', '.join(keys) or 'none'}"
  return f"unknown config key {path}{key}; {hint}"


def suggest(path: str, key: str, keys: Iterable[str]) -> list[str]:
  """Suggests keys for an unknown key; [] if none is similar.

  If TRL or verl has a key of this name, the corresponding keys of this package are suggested.
  Otherwise the key or section of `path` with the most similar name is suggested. If there is none,
  all keys of this name in other sections are suggested.

  If `key` is dotted, its first part is no section. At the top level, the key of this name in the
  section with a similar name is suggested, such as "eval.every" for "evl.every". If there is none,
  all keys of this name in any section are suggested. Below the top level, no other section's keys
  are suggested, except for names of TRL and verl.

  Args:
    path: the part of the key whose sections exist, with a dot at the end; "" for the top level.
    key: the rest of the key.
    keys: keys of the section `path`.
  """
  section, _, name = key.rpartition(".")
  elsewhere = [dotted for dotted in _dotted(RunConfig) if dotted.rpartition(".")[2] == name]
  first = key.partition(".")[0]
  near = [path + match for match in difflib.get_close_matches(first, keys, n=1, cutoff=0.7)]
  if section:
    elsewhere = [] if path else elsewhere
    near = [key for key in elsewhere if key.rpartition(".")[0] in near] or elsewhere or near
  return other_names.keys(name) or near or elsewhere


def _dotted(section: type, path: str = "") -> Iterator[str]:
  """Yields the dotted keys of a section."""
  for key, kind in ranges.kinds(section).items():
    if dataclasses.is_dataclass(kind):
      yield from _dotted(kind, f"{path}{key}.")
    else:
      yield path + key


def _build(cls: type, values: Any, path: str) -> Any:
  """Builds a section and the sections in it.

  Args:
    cls: dataclass of the section.
    values: values by key.
    path: path of the section for error messages, with a dot at the end; "" for the top level.
  """
  cls = section_kind(values) if cls is ObjectiveConfig else cls
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
  # In Python a bool is an int, so bools are excluded explicitly.
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
