"""What config files share: every key with its unit or reason, and the sections of named models."""

import dataclasses

import ml_collections

from gspo_jax.models.sizes import ModelConfig

ConfigDict = ml_collections.ConfigDict

# What Qwen's own evaluations ask of a mathematical problem.
BOXED = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."


def model(sizes: ModelConfig) -> ConfigDict:
  """A named size as a section; each of its numbers can be overridden."""
  return ConfigDict(dataclasses.asdict(sizes))


def optimizer(learning_rate: float, **changes) -> ConfigDict:
  """AdamW as RL of language models commonly uses it."""
  section = ConfigDict(
    dict(
      learning_rate=learning_rate,  # peak
      schedule="constant",  # after the warm-up: constant | linear | cosine
      warmup_steps=10,  # gradient updates
      final_fraction=0.1,  # of the peak at the end; constant ignores it
      b1=0.9,
      b2=0.95,  # shorter memory than 0.999: RL gradients change quickly
      eps=1e-8,
      weight_decay=0.0,  # RL moves little; decay would pull towards zero instead
      clip_norm=1.0,  # global gradient norm; 0: no bound
    )
  )
  section.update(changes)
  return section


def variant(arg: str | None, *allowed: str) -> str | None:
  """The part of --config=file.py:arg after the colon, checked."""
  if arg and arg not in allowed:
    raise ValueError(f"config variant {arg!r} is not one of: {', '.join(allowed) or '(none)'}")
  return arg or None
