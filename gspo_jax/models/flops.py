"""Floating-point operations of a model, by part, and how much of the devices' speed they use."""

import dataclasses
from collections.abc import Sequence

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

  dense: float  # projections and dense feed-forward layers
  experts: float
  attention: float  # scores and their sum over values
  head: float

  def forward(self) -> float:
    return self.dense + self.experts + self.attention + self.head

  def training(self) -> float:
    """Forward and backward without recomputation, as utilisation counts them."""
    return 3 * self.forward()

  def executed(self, remat: str) -> float:
    """With recomputation. Experts and the head recompute their own; attention's backward pass has
    five products to the forward pass's two."""
    again = 0 if remat in ("none", "dots", "both") else 1
    scores = 0 if remat in ("none", "attention", "both") else 1
    dense, attention = 3 + again, 3.5 + scores
    return dense * self.dense + 11 / 3 * self.experts + attention * self.attention + 4 * self.head


def work(config: ModelConfig, sequences: int, queries: int, keys: int, heads: int = 0) -> Work:
  """Work for `queries` new tokens of each sequence, the last of which sees `keys` positions.

  `heads`: at how many positions logits are needed; 0: at all.
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
  """Pairs of a query and a key that it sees, of the last `queries` of `keys` positions."""

  def up_to(n):
    near = n if window is None else np.minimum(n, window)  # from there on as many for each query
    return near * (near + 1) / 2 + (n - near) * near

  return up_to(keys) - up_to(keys - queries)


def forward_flops(
  config: ModelConfig, prompt_P: np.ndarray, prompt_B: np.ndarray, end_B: np.ndarray
) -> float:
  """Model FLOPs of a forward pass over responses from `prompt_B` to `end_B` and each prompt once,
  without padding; logits are those of responses. An update takes three times as many."""
  prompts, responses = work(config, 1, prompt_P, prompt_P), work(config, 1, end_B - prompt_B, end_B)
  return float(np.sum(prompts.forward() - prompts.head) + np.sum(responses.forward()))


def of_passes(
  c: RunConfig,
  teacher: ModelConfig | None,
  prompt_P: np.ndarray,
  prompt_B: np.ndarray,
  end_B: np.ndarray,
) -> float:
  """Model FLOPs of an iteration's passes without gradient, as `forward_flops` counts them."""
  models = dict(policy=c.model, teacher=teacher)
  return sum(
    forward_flops(models[declared.model], prompt_P, prompt_B, end_B)
    for declared in passes.of_run(c)
  )


def utilisation(
  operations: float, seconds: float, devices: Sequence[jax.Device]
) -> dict[str, float]:
  """Model FLOPs per second of the updates, and their share of the devices' peak where it is
  known; what is calculated twice counts once."""
  speed = operations / seconds
  row = {"flops_per_second/update": speed}
  peak = peak_flops(devices[0].device_kind)
  return row if peak is None else row | {"mfu/update": speed / (peak * len(devices))}
