"""`base()`, the default of every key, and parts of configurations. The files next to this one are
differences from it; docs/keys.md has all keys with their reasons, as `gspo_jax.settings` declares
them."""

import dataclasses
from pathlib import Path
from typing import Any

import ml_collections
from ml_collections import config_dict

from gspo_jax.settings import model as sizes
from gspo_jax.settings import ranges
from gspo_jax.settings.evaluation import BenchmarkConfig
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.rewards import CostSignal, RewardSignal
from gspo_jax.settings.run import RunConfig
from gspo_jax.settings.training import OptimizerConfig

ConfigDict = ml_collections.ConfigDict

# The instruction of Qwen's own evaluations for mathematical problems.
BOXED = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."


def base() -> ConfigDict:
  """The default run, with all keys."""
  values = section(RunConfig())
  values.objective.tuned = ConfigDict()  # {loss: {option: value}}, which no class has
  return values


def section(config: Any, **changes: Any) -> ConfigDict:
  """The keys of a section of `gspo_jax.settings`, with these changed; None keeps its type."""
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
  """A section like `rl_optimizer`."""
  return section(OptimizerConfig(learning_rate))


def benchmark(samples: int, **changes: Any) -> ConfigDict:
  """A section of eval.benchmarks; docs/evaluation.md has more."""
  return section(BenchmarkConfig(), samples=samples, **changes)


def extra_reward(**changes: Any) -> ConfigDict:
  """A section of constraints.rewards."""
  return section(RewardSignal(), **changes)


def cost(**changes: Any) -> ConfigDict:
  """A section of constraints.costs."""
  return section(CostSignal(), **changes)


def paper_benchmarks() -> ConfigDict:
  """Evaluations of the paper besides AIME'24 (arXiv:2507.18071, §5.1)."""
  return ConfigDict(
    dict(
      # Average Pass@1 over 8 samplings, 202410-202502. Data: livecodebench@FILES where
      # contest_date>=2024-10-01 and contest_date<2025-03-01
      livecodebench=benchmark(samples=8, reward="code"),
      # Elo rating; the number of samples is a choice. Data: codeforces@FILES where rating>0
      codeforces=benchmark(samples=8, reward="code", rating=True),
    )
  )


def model(size: ModelConfig) -> ConfigDict:
  """A named size as a section; each of its numbers can be overridden."""
  return section(size)


def size(name: str) -> ModelConfig:
  """A published size by its name in `sizes.PUBLISHED`, or that of a Hugging Face directory or
  repository."""
  if "/" in name or Path(name).is_dir():
    from gspo_jax.models import hf  # needs safetensors

    return hf.load_config(name)
  if name not in sizes.PUBLISHED:
    raise ValueError(
      f"{name!r} is neither a directory, a repository nor one of {', '.join(sizes.PUBLISHED)}"
    )
  return sizes.PUBLISHED[name]


def variant(arg: str | None, *allowed: str) -> str | None:
  """The part of --config=file.py:arg after the colon, checked."""
  if arg and arg not in allowed:
    raise ValueError(f"config variant {arg!r} is not one of: {', '.join(allowed) or '(none)'}")
  return arg or None
