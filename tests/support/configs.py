"""Configurations for the tests."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from configs import common, gsm8k
from gspo_jax.settings import run as config
from gspo_jax.settings.reading import from_dict
from gspo_jax.settings.rewards import RewardConfig

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(path.stem for path in (ROOT / "configs").glob("[!_]*.py") if path.stem != "common")
SMALL = ("tiny", "smollm2")  # Files without a variant `tiny`.
# Every file of configs/ with each of its variants.
VARIANTS = [(file, arg) for file in FILES for arg in (None, "tiny")]
VARIANTS = [(file, arg) for file, arg in VARIANTS if arg is None or not file.startswith(SMALL)]
VARIANTS += [("tiny", "hybrid"), ("smollm2", "svamp")] + [("gsm8k", arg) for arg in gsm8k.VARIANTS]


def values_of(get_config: Callable[[], ConfigDict], **changes: Any) -> dict[str, Any]:
  """The values of a file of configs/ with these keys changed: `rl__packed=True`."""
  values = _file(get_config).copy_and_resolve_references()
  flat = {key.replace("__", "."): value for key, value in changes.items()}
  values.update_from_flattened_dict(flat)
  return values.to_dict()


@functools.cache
def _file(get_config: Callable[[], ConfigDict]) -> ConfigDict:
  return get_config()


def config_of(get_config: Callable[[], ConfigDict], **changes: Any) -> config.RunConfig:
  return from_dict(values_of(get_config, **changes))


def reward_config(name: str = "string", **changes: Any) -> RewardConfig:
  """The section `reward` with one worker, and these keys changed."""
  section = RewardConfig(**common.base().reward)
  return dataclasses.replace(section, **dict(name=name, workers=1, time_limit_s=2.0) | changes)
