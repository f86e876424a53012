"""All families of models by name."""

import dataclasses
import importlib
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np

from gspo_jax.models.families.declaration import NAMES, Family
from gspo_jax.settings import ranges
from gspo_jax.settings.model import ModelConfig

FAMILIES: dict[str, Family] = {
  name: importlib.import_module(f"gspo_jax.models.families.{name}").FAMILY
  for name in typing.get_args(ranges.kinds(ModelConfig)["family"])
}


def family(config: ModelConfig) -> Family:
  """Returns the declaration of the model's family."""
  return FAMILIES[config.family]


def names(config: ModelConfig) -> dict[str, tuple[str, str]]:
  """Returns a dict: parameter -> (name, axes) of its tensor in Hugging Face's files."""
  return NAMES | dict(family(config).names)


def relatives(name: str) -> list[str]:
  """Returns the families with the same layers, beginning with family `name`."""
  layers = {x: dataclasses.replace(f, architectures={}, names={}) for x, f in FAMILIES.items()}
  same = [x for x in layers if layers[x] == layers.get(name)]
  return sorted(same, key=lambda x: x != name)


def differences(stored: Mapping[str, Any], model: ModelConfig) -> list[str]:
  """Lists differences of a model from stored hyperparameters, for an error message.

  stored: fields of ModelConfig, from JSON. A rounding of numbers to float32 is no difference.
  """
  if model.family in relatives(stored.get("family")):
    stored = dict(stored) | dict(family=model.family)
  old, new = _flat(stored), _flat(dataclasses.asdict(model))
  return [
    f"model.{key}={new[key]!r} and not {old[key]!r}"
    for key in old
    if key in new and old[key] != new[key] and not _rounded(old[key], new[key])
  ]


def _flat(section: Mapping[str, Any], path: str = "") -> dict[str, Any]:
  """Returns a section's values by name.

  A value inside a group has the name "group.field". Lists become tuples.
  """
  values = {}
  for key, value in section.items():
    value = tuple(value) if isinstance(value, list) else value
    values |= _flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {path + key: value}
  return values


def _rounded(a: Any, b: Any) -> bool:
  """Whether two numbers are equal after rounding to float32."""
  return isinstance(a, float) and np.float32(a) == np.float32(b)
