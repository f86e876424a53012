"""Builds configurations from nested dicts, and reports unknown keys and invalid values."""

import dataclasses
import difflib
import json
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gspo_jax.settings import ranges, rules
from gspo_jax.settings.objective import ObjectiveConfig, fill_unset, section_kind
from gspo_jax.settings.run import RunConfig

FLOAT_MAX = sys.float_info.max

# Keys of TRL (GRPOConfig) and verl, each with the corresponding keys of this package. These are
# suggested in error messages about unknown keys.
OTHER_NAMES = dict(
  adv_estimator="objective.advantage",
  batch_size="rl.prompts",
  bf16="compute.dtype engine.dtype",
  beta="objective.kl_coef",
  clip_ratio_high="objective.clip_high",
  clip_ratio_low="objective.clip_low",
  entropy_coeff="objective.entropy_coef",
  epsilon="objective.clip_low",
  epsilon_high="objective.clip_high",
  eval_steps="eval.every",
  generation_batch_size="rl.prompts",
  gradient_accumulation_steps="rl.microbatches",
  gradient_checkpointing="compute.remat",
  importance_sampling_level="objective.name",
  kl_loss_coef="objective.kl_coef",
  learning_rate="rl_optimizer.learning_rate sft_optimizer.learning_rate",
  logging_steps="sft.log_every",
  loss_agg_mode="objective.aggregate",
  lora_alpha="lora.alpha",
  lora_r="lora.rank",
  lora_rank="lora.rank",
  loss_mode="objective.name",
  loss_type="objective.name",
  lr="rl_optimizer.learning_rate sft_optimizer.learning_rate",
  lr_scheduler_type="rl_optimizer.schedule",
  mask_truncated_completions="rl.mask_truncated",
  max_completion_length="sampling.max_new_tokens",
  max_grad_norm="rl_optimizer.clip_norm",
  max_prompt_length="data.max_prompt_tokens",
  max_response_length="sampling.max_new_tokens",
  max_steps="rl.iterations",
  model_name_or_path="weights",
  n="rl.group_size",
  num_generations="rl.group_size",
  num_iterations="rl.epochs",
  num_train_epochs="rl.iterations",
  per_device_train_batch_size="rl.prompts",
  path="weights",
  ppo_epochs="rl.epochs",
  ppo_mini_batch_size="rl.minibatches",
  report_to="wandb",
  reward_funcs="reward.name",
  rollout_n="rl.group_size",
  save_freq="checkpoint.every",
  save_steps="checkpoint.every",
  scale_rewards="objective.advantage",
  system_prompt="data.system",
  test_freq="eval.every",
  total_epochs="rl.iterations",
  total_training_steps="rl.iterations",
  train_batch_size="rl.prompts",
  train_files="data.train",
  use_vllm="engine.name",
  val_files="data.eval",
  warmup_ratio="rl_optimizer.warmup_steps",
  weight_decay="rl_optimizer.weight_decay sft_optimizer.weight_decay",
)


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
  """Returns the error message for an unknown key, with suggestions.

  If TRL or verl has a key of this name, the message suggests the corresponding key of this package.
  Otherwise it suggests a key or section of `path` with a similar name. If there is none, it
  suggests keys of this name in other sections. If there are none, it lists the keys of `path`.

  If `key` is dotted, its section is unknown. At the top level, the message then prefers keys of
  this name to sections with a similar name: for "evl.every" it suggests "eval.every" instead of
  "eval". Within a section, it suggests no other section's keys.

  Args:
    path: path of the key's section, with a dot at the end; "" for the top level.
    key: the part of the key after `path`; dotted if a flag names a key of an unknown section.
    keys: keys of the section.
  """
  section, _, name = key.rpartition(".")
  elsewhere = [dotted for dotted in _dotted(RunConfig) if dotted.rpartition(".")[2] == name]
  first = key.partition(".")[0]
  near = [path + match for match in difflib.get_close_matches(first, keys, n=1, cutoff=0.7)]
  if section:
    elsewhere = [] if path else elsewhere
    near = [key for key in elsewhere if key.rpartition(".")[0] in near] or elsewhere or near
  if near := OTHER_NAMES.get(name, "").split() or near or elsewhere:
    hint = f"did you mean {' or '.join(near)}?"
  else:
    hint = f"the section has {', '.join(keys) or 'none'}"
  return f"unknown config key {path}{key}; {hint}"


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
