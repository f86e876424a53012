"""Floating-point operations (FLOPs) of a model, and model FLOPs utilisation (MFU) of the devices.

A multiplication and the addition of its result to a sum are two operations.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax.models import transformer
from gspo_jax.models.attention import delta_rule
from gspo_jax.settings import passes
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.system.accelerators import peak_flops


@dataclasses.dataclass(frozen=True)
class Work:
  """FLOPs of a forward pass over a whole batch, by part of the model."""

  dense: float  # Products with projections, dense and shared feed-forwards, and routers.
  experts: float  # Products of tokens with their chosen experts.
  attention: float  # Scores, and weighted sums of values.
  linear: float  # The gated delta rule (`_rule_products`).
  head: float  # Logits.

  def forward(self) -> float:
    """Returns the sum over the parts."""
    return self.dense + self.experts + self.attention + self.linear + self.head

  def training(self) -> float:
    """Returns the FLOPs of forward and backward pass, as counted for MFU.

    Recomputation does not count.
    """
    return 3 * self.forward()

  def executed(self, remat: str) -> float:
    """Returns the FLOPs of forward and backward pass with recomputation.

    The head recomputes its logits. The experts' gate and up products count as recomputed,
    although `apply_triton` may save them. Attention has two products in the forward pass and five
    in the backward pass, together 3.5 times the forward pass. Linear attention always recomputes
    its chunks in the backward pass. Every policy but "none" recomputes them twice, since their
    states are not saved.

    remat: rematerialisation policy.
    """
    again = 0 if remat in ("none", "dots", "both") else 1
    scores = 0 if remat in ("none", "attention", "both") else 1
    dense, attention, linear = 3 + again, 3.5 + scores, 4 + (remat != "none")
    layers = dense * self.dense + 11 / 3 * self.experts
    return layers + attention * self.attention + linear * self.linear + 4 * self.head


def work(
  config: ModelConfig,
  sequences: int,
  queries: int,
  keys: int,
  heads: int = 0,
  decoding: bool = False,
) -> Work:
  """Returns the work of each sequence's last `queries` tokens, out of `keys`.

  heads: number of positions with logits, over all sequences. 0 means all queries.
  decoding: whether each query has a separate forward pass. If so, linear attention has no chunks.
  """
  tokens = sequences * queries
  _, active = transformer.count(config)
  experts = config.num_moe_layers * config.experts_per_token * 3
  experts *= config.hidden_size * config.moe_intermediate_size
  vocabulary = config.vocab_size * config.hidden_size
  dense = active - experts - vocabulary * (1 if config.tie_word_embeddings else 2)
  local = sum(config.is_local(layer) for layer in range(config.num_layers))
  linear = sum(config.is_linear(layer) for layer in range(config.num_layers))
  pairs = (config.num_layers - local - linear) * _pairs(queries, keys)
  if local:
    pairs = pairs + local * _pairs(queries, keys, config.sliding_window)
  return Work(
    dense=2 * tokens * dense,
    experts=2 * tokens * experts,
    attention=sequences * 4 * config.num_heads * config.head_dim * pairs,
    linear=2 * tokens * linear * _rule_products(config, 0 if decoding else queries),
    head=2 * (heads or tokens) * vocabulary,
  )


def _rule_products(config: ModelConfig, queries):
  """Counts multiplications of the gated delta rule per position of a layer, in chunks of length L.

  products = N (3 H J + 2 L J) + 2 K L H

  for N value heads of width J and K key heads of width H. A position reads the state of a value
  head twice, for its key and for its query, and writes to the state once. Within a chunk, each key
  head has the products k kᵀ and q kᵀ. Each value head has the product (I + A)⁻¹ B (`delta_rule`),
  and a sum of values with weights q kᵀ. The computation of the inverse does not count.

  queries: number of positions, so L is at most this number; 0 if positions are computed one by one.
  """
  c = config.linear
  size = np.minimum(queries, delta_rule.CHUNK)
  states = 3 * c.value_heads * c.key_dim * c.value_dim
  return states + 2 * size * (c.value_heads * c.value_dim + c.key_heads * c.key_dim)


def _pairs(queries, keys, window: int | None = None):
  """Counts pairs of a query and a visible key, for the last queries."""

  def up_to(n):  # Pairs of the first n queries. Query i sees i keys, but at most `window`.
    near = n if window is None else np.minimum(n, window)
    return near * (near + 1) / 2 + (n - near) * near

  return up_to(keys) - up_to(keys - queries)


def forward_flops(
  config: ModelConfig, prompt_P: np.ndarray, prompt_B: np.ndarray, end_B: np.ndarray
) -> float:
  """Returns the model FLOPs of a forward pass over prompts and responses.

  Each prompt counts once, without logits. A response is the tokens from `prompt_B` to `end_B`, with
  logits. Padding does not count. An update takes three times as many FLOPs as a forward pass.

  Args:
    prompt_P: lengths of the prompts.
    prompt_B: length of each response's prompt.
    end_B: number of tokens of prompt and response together.
  """
  # Products with lengths in int32 would overflow.
  prompt_P, prompt_B, end_B = (np.asarray(x, np.int64) for x in (prompt_P, prompt_B, end_B))
  prompts, responses = work(config, 1, prompt_P, prompt_P), work(config, 1, end_B - prompt_B, end_B)
  return float(np.sum(prompts.forward() - prompts.head) + np.sum(responses.forward()))


class IterationFlops(NamedTuple):
  """Model FLOPs of an iteration of training."""

  passes: float  # Passes without gradient, such as that of the reference policy.
  updates: float  # Updates of all epochs.


def iteration_flops(
  c: RunConfig, teacher: ModelConfig | None, prompt_B: np.ndarray, end_B: np.ndarray
) -> IterationFlops:
  """Returns the model FLOPs of an iteration.

  Args:
    c: configuration of the run.
    teacher: hyperparameters of the teacher's model. None if there is no teacher.
    prompt_B, end_B: lengths as in `forward_flops`; the responses of a prompt are consecutive.
  """
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
  """Returns metrics: FLOPs per second, and MFU.

  MFU is absent if the peak FLOPs per second of the device are unknown.

  operations: model FLOPs of updates; recomputation does not count.
  seconds: duration of these updates.
  """
  speed = operations / seconds
  row = {"flops_per_second/update": speed}
  peak = peak_flops(devices[0].device_kind)
  return row if peak is None else row | {"mfu/update": speed / (peak * len(devices))}
