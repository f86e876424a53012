"""Configurations for the tests."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from configs import common
from gspo_jax.settings import run as config
from gspo_jax.settings.reading import from_dict
from gspo_jax.settings.rewards import RewardConfig


def values_of(get_config: Callable[[], ConfigDict], **changes: Any) -> dict[str, Any]:
  """The values of a file of configs/ with these keys changed: `rl__packed=True`."""
  values = get_config()
  flat = {key.replace("__", "."): value for key, value in changes.items()}
  values.update_from_flattened_dict(flat)
  return values.to_dict()


def config_of(get_config: Callable[[], ConfigDict], **changes: Any) -> config.RunConfig:
  return from_dict(values_of(get_config, **changes))


def reward_config(name: str = "string", **changes: Any) -> RewardConfig:
  """The section `reward` with one worker, and these keys changed."""
  section = RewardConfig(**common.base().reward)
  return dataclasses.replace(section, **dict(name=name, workers=1, time_limit_s=2.0) | changes)
