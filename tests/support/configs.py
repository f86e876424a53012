"""Configurations for the tests."""

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from gspo_jax import config


def values_of(get_config: Callable[[], ConfigDict], **changes: Any) -> dict[str, Any]:
  """The values of a file of configs/ with these keys changed: `rl__packed=True`."""
  values = get_config()
  flat = {key.replace("__", "."): value for key, value in changes.items()}
  values.update_from_flattened_dict(flat)
  return values.to_dict()


def config_of(get_config: Callable[[], ConfigDict], **changes: Any) -> config.RunConfig:
  return config.from_dict(values_of(get_config, **changes))
