"""`base()`, a configuration with the default of every key, and helpers for other configurations.

Each other file of this folder changes some values of `base()`. docs/keys.md lists all keys, which
`gspo_jax.settings` declares.
"""

import dataclasses
from pathlib import Path
from typing import Any

import ml_collections
from ml_collections import config_dict

from gspo_jax.settings import ranges, sizes
from gspo_jax.settings.evaluation import BenchmarkConfig
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.rewards import CostSignal, RewardSignal
from gspo_jax.settings.run import RunConfig
from gspo_jax.settings.training import OptimizerConfig

ConfigDict = ml_collections.ConfigDict

# The prompt for mathematical problems in Qwen's own evaluations.
BOXED = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."


def base() -> ConfigDict:
  """Returns the default configuration, with all keys."""
  values = section(RunConfig())
  # `tuned` is no declared key. It is a dict {loss: {option: value}} with values for unset options.
  values.objective.tuned = ConfigDict()
  return values


def section(config: Any, **changes: Any) -> ConfigDict:
  """Converts a section of `gspo_jax.settings` to a ConfigDict.

  Args:
    config: the section, as a dataclass. If a key has the value None, it can later be set to a value
      of its declared type.
    changes: values that replace those of the section.
  """
  values = {}
  for name, kind in ranges.kinds(type(config)).items():
    value = getattr(config, name)
    if value is None:
      value = config_dict.placeholder(ranges.plain(kind))
    elif dataclasses.is_dataclass(value):
      value = section(value)
    elif isinstance(value, dict):
      value = {entry: section(part) for entry, part in value.items()}
    values[name] = value
  values = ConfigDict(values)
  values.update(changes)
  return values


def optimizer(learning_rate: float) -> ConfigDict:
  """Returns an optimizer's section, such as `rl_optimizer`."""
  return section(OptimizerConfig(learning_rate))


def benchmark(samples: int, **changes: Any) -> ConfigDict:
  """Returns the section of one benchmark in eval.benchmarks (docs/evaluation.md)."""
  return section(BenchmarkConfig(), samples=samples, **changes)


def extra_reward(**changes: Any) -> ConfigDict:
  """Returns the section of one reward in constraints.rewards."""
  return section(RewardSignal(), **changes)


def cost(**changes: Any) -> ConfigDict:
  """Returns the section of one cost in constraints.costs."""
  return section(CostSignal(), **changes)


def paper_benchmarks() -> ConfigDict:
  """Returns the paper's benchmarks other than AIME'24 (arXiv:2507.18071, §5.1)."""
  return ConfigDict(
    dict(
      # The paper averages Pass@1 over 8 samplings, on the problems of 202410-202502. These are
      # livecodebench@FILES where contest_date>=2024-10-01 and contest_date<2025-03-01.
      livecodebench=benchmark(samples=8, reward="code"),
      # The paper reports the Elo rating, and no number of samples. The problems with a rating are
      # codeforces@FILES where rating>0.
      codeforces=benchmark(samples=8, reward="code", rating=True),
    )
  )


def model(size: ModelConfig) -> ConfigDict:
  """Converts a model's configuration to a section, in which each value can be changed."""
  return section(size)


def size(name: str) -> ModelConfig:
  """Returns the configuration of a published model.

  Args:
    name: name in `sizes.PUBLISHED`, or a Hugging Face directory or repository.

  Raises:
    ValueError: the name is none of these.
  """
  if "/" in name or Path(name).is_dir():
    from gspo_jax.models import hf  # This import needs safetensors, and published sizes do not.

    return hf.load_config(name)
  if name not in sizes.PUBLISHED:
    raise ValueError(
      f"{name!r} is neither a directory, a repository nor one of {', '.join(sizes.PUBLISHED)}"
    )
  return sizes.PUBLISHED[name]


def variant(arg: str | None, *allowed: str) -> str | None:
  """Returns `arg` of --config=file.py:arg; None if it is empty.

  Raises ValueError if `arg` is neither empty nor one of `allowed`.
  """
  if arg and arg not in allowed:
    raise ValueError(f"config variant {arg!r} is not one of: {', '.join(allowed) or '(none)'}")
  return arg or None
