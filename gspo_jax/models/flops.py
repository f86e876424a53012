"""Floating-point operations of a model by part, and utilisation of the devices."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax.models import transformer
from gspo_jax.settings import passes
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.system.accelerators import peak_flops


@dataclasses.dataclass(frozen=True)
class Work:
  """Floating-point operations of one pass over the whole batch, by part of the model."""

  dense: float  # Projections and dense feed-forward layers.
  experts: float
  attention: float  # Scores and the weighted sum of values.
  head: float

  def forward(self) -> float:
    return self.dense + self.experts + self.attention + self.head

  def training(self) -> float:
    """Forward and backward without recomputation, as counted for utilisation."""
    return 3 * self.forward()

  def executed(self, remat: str) -> float:
    """Forward and backward with recomputation.

    Experts and the head always recompute; attention has two products forward and five backward.
    """
    again = 0 if remat in ("none", "dots", "both") else 1
    scores = 0 if remat in ("none", "attention", "both") else 1
    dense, attention = 3 + again, 3.5 + scores
    return dense * self.dense + 11 / 3 * self.experts + attention * self.attention + 4 * self.head


def work(config: ModelConfig, sequences: int, queries: int, keys: int, heads: int = 0) -> Work:
  """Work of `queries` new tokens per sequence, up to position `keys`.

  `heads`: number of positions with logits; 0: all.
  """
  tokens = sequences * queries
  _, active = transformer.count(config)
  moe_layers = sum(config.is_moe(layer) for layer in range(config.num_layers))
  experts = moe_layers * config.experts_per_token * 3
  experts *= config.hidden_size * config.moe_intermediate_size
  vocabulary = config.vocab_size * config.hidden_size
  dense = active - experts - vocabulary * (1 if config.tie_word_embeddings else 2)
  local = sum(config.is_local(layer) for layer in range(config.num_layers))
  pairs = (config.num_layers - local) * _pairs(queries, keys)
  if local:
    pairs = pairs + local * _pairs(queries, keys, config.sliding_window)
  return Work(
    dense=2 * tokens * dense,
    experts=2 * tokens * experts,
    attention=sequences * 4 * config.num_heads * config.head_dim * pairs,
    head=2 * (heads or tokens) * vocabulary,
  )


def _pairs(queries, keys, window: int | None = None):
  """Counts pairs of query and visible key, for the last queries."""

  def up_to(n):
    near = n if window is None else np.minimum(n, window)  # Later queries see `window` keys each.
    return near * (near + 1) / 2 + (n - near) * near

  return up_to(keys) - up_to(keys - queries)


def forward_flops(
  config: ModelConfig, prompt_P: np.ndarray, prompt_B: np.ndarray, end_B: np.ndarray
) -> float:
  """Model FLOPs of a forward pass over prompts and responses.

  Prompts count once. Responses go from `prompt_B` to `end_B`, without padding, with logits there
  only. An update takes three times as many.
  """
  prompts, responses = work(config, 1, prompt_P, prompt_P), work(config, 1, end_B - prompt_B, end_B)
  return float(np.sum(prompts.forward() - prompts.head) + np.sum(responses.forward()))


class IterationFlops(NamedTuple):
  """Model FLOPs of an iteration."""

  passes: float  # Passes without gradient.
  updates: float


def iteration_flops(
  c: RunConfig, teacher: ModelConfig | None, prompt_B: np.ndarray, end_B: np.ndarray
) -> IterationFlops:
  """Counts the model FLOPs of an iteration; see `forward_flops`."""
  prompt_P = prompt_B[:: c.rl.group_size]
  models = dict(policy=c.model, teacher=teacher)
  without_gradient = sum(
    forward_flops(models[declared.model], prompt_P, prompt_B, end_B)
    for declared in passes.iteration_passes(c)
  )
  forward = forward_flops(c.model, prompt_P, prompt_B, end_B)
  return IterationFlops(without_gradient, 3 * c.rl.epochs * c.models * forward)


def utilisation(
  operations: float, seconds: float, devices: Sequence[jax.Device]
) -> dict[str, float]:
  """Model FLOPs per second of updates, and utilisation if known.

  Recomputation does not count.
  """
  speed = operations / seconds
  row = {"flops_per_second/update": speed}
  peak = peak_flops(devices[0].device_kind)
  return row if peak is None else row | {"mfu/update": speed / (peak * len(devices))}
