"""Groups of a model's hyperparameters: positions, router, scores, linear attention, factors.

The default of each hyperparameter has no effect.
"""

import dataclasses
from typing import Annotated, Literal

from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import (
  INT32,
  NonNegativeFloat,
  NonNegativeInt,
  PositiveInt,
  Range,
  key,
)


@ranges.section("model.rope", kw_only=True)
class RopeConfig:
  """Rotary positions, in addition to `rope_theta` (models/attention/positions.py)."""

  rule: Literal["default", "linear", "llama3", "yarn"] = key(
    "default", "rule that scales frequencies for longer contexts"
  )
  factor: Annotated[float, Range(1, 1e6)] = key(
    1.0, "length of the extended context divided by that of the original one"
  )
  original_length: Annotated[int, Range(0, INT32)] = key(
    0, "length of the original context in tokens, for the rules llama3 and yarn and for query_beta"
  )
  low_freq_factor: NonNegativeFloat = key(
    1.0,
    "rule llama3: waves with fewer turns than this within original_length have their frequency "
    "divided by factor",
  )
  high_freq_factor: NonNegativeFloat = key(
    4.0, "rule llama3: waves with more turns than this within original_length are unchanged"
  )
  beta_fast: NonNegativeFloat = key(
    32.0, "rule yarn: waves with more turns than this within original_length are unchanged"
  )
  beta_slow: NonNegativeFloat = key(
    1.0,
    "rule yarn: waves with fewer turns than this within original_length have their frequency "
    "divided by factor",
  )
  attention_factor: NonNegativeFloat = key(
    0.0, "rule yarn: factor on queries and keys; 0: computed from mscale and mscale_all_dim"
  )
  mscale: NonNegativeFloat = key(
    0.0,
    "rule yarn: m in the numerator 1 + 0.1 m log(factor) of attention_factor. If mscale or "
    "mscale_all_dim is 0, m is 1.",
  )
  mscale_all_dim: NonNegativeFloat = key(
    0.0,
    "rule yarn: m in the denominator 1 + 0.1 m log(factor) of attention_factor. If mscale or "
    "mscale_all_dim is 0, the denominator is 1.",
  )
  truncate: bool = key(
    True,
    "rule yarn: whether the frequency indices of beta_fast and beta_slow are rounded to whole "
    "numbers",
  )
  share: ranges.PositiveFraction = key(1.0, "share of a head's dimensions that are rotated")
  local: bool = key(False, "True: the rule also scales frequencies of local layers")
  layers_without: tuple[NonNegativeInt, ...] = key(
    (), "indices, from 0, of layers without rotary positions (SmolLM3)"
  )
  query_beta: NonNegativeFloat = key(
    0.0,
    "β of the factor 1 + β log(1 + ⌊position / original_length⌋) on queries (Ministral 3); 0: no "
    "factor",
  )

  def __post_init__(self):
    lengths = self.rule in ("llama3", "yarn") or self.query_beta
    wrong = [
      (
        lengths and not self.original_length,
        "{original_length} must be above 0 with {rule}, {query_beta}",
      ),
      (
        self.high_freq_factor <= self.low_freq_factor,
        "{high_freq_factor} must be above {low_freq_factor}",
      ),
    ]
    ranges.refuse(self, "model.rope", wrong)


@ranges.section("model.router", kw_only=True)
class RouterConfig:
  """Choice of experts, in addition to `experts_per_token` and `norm_topk_prob`
  (models/experts/moe.py)."""

  scores: Literal["softmax", "sigmoid"] = key(
    "softmax", "function from logits to scores of experts"
  )
  choice_bias: Literal["none", "frozen"] = key(
    "none",
    "none: no bias | frozen: experts are chosen by scores plus a bias, which has its published "
    "value and is never updated. Gate weights exclude the bias.",
  )
  groups: PositiveInt = key(
    1, "number of groups of neighbouring experts. A token's experts are in its chosen groups."
  )
  groups_per_token: PositiveInt = key(
    1, "number of groups chosen per token, by the sum of each group's two highest scores"
  )
  scale: ranges.PositiveFloat = key(1.0, "factor on gate weights")
  shared_width: NonNegativeInt = key(
    0, "F, total width of shared experts, which all tokens use; 0: none"
  )
  shared_gate: bool = key(
    False, "True: multiply the output of shared experts by a sigmoid gate (Qwen2-MoE)"
  )

  def __post_init__(self):
    wrong = [(self.groups_per_token > self.groups, "{groups_per_token} must be at most {groups}")]
    ranges.refuse(self, "model.router", wrong)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoresConfig:
  """Attention scores, in addition to `query_pre_attn_scalar`, soft cap and window."""

  scale: NonNegativeFloat = key(
    0.0, "factor on q kᵀ (Granite); 0: the factor of query_pre_attn_scalar"
  )
  clip_qkv: NonNegativeFloat = key(
    0.0, "largest absolute value in queries, keys and values (OLMoE); 0: no bound"
  )
  sinks: bool = key(
    False, "True: each head has a learned logit in the denominator of its softmax (GPT-OSS)"
  )
  local_layers: tuple[NonNegativeInt, ...] = key(
    (), "indices, from 0, of layers with the sliding window; (): layers by sliding_window_pattern"
  )


@ranges.section("model.linear", kw_only=True)
class LinearConfig:
  """Layers of linear attention, a gated delta rule (models/gated_delta.py)."""

  pattern: PositiveInt = key(
    1, "n, if every n-th layer has full attention and all other layers have linear attention"
  )
  key_heads: NonNegativeInt = key(0, "K, number of heads of queries and keys in linear layers")
  value_heads: NonNegativeInt = key(
    0, "number of heads of values in linear layers; a multiple of key_heads"
  )
  key_dim: NonNegativeInt = key(0, "H, width of a query and of a key in linear layers")
  value_dim: NonNegativeInt = key(0, "J, width of a value in linear layers")
  kernel: Annotated[int, Range(2, 64)] = key(
    4, "C, number of positions that the causal convolution of a linear layer reads"
  )

  def __post_init__(self):
    sizes = (self.key_heads, self.value_heads, self.key_dim, self.value_dim)
    wrong = [
      (
        self.pattern > 1 and not all(sizes),
        "{pattern}, {key_heads}, {value_heads}, {key_dim}, {value_dim}: set all four sizes of "
        "linear layers",
      ),
      (
        self.key_heads and self.value_heads % self.key_heads,
        "{value_heads} is not a multiple of {key_heads}",
      ),
    ]
    ranges.refuse(self, "model.linear", wrong)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultipliersConfig:
  """Factors on activations (Granite)."""

  embedding: ranges.PositiveFloat = key(1.0, "factor on rows of the embedding")
  residual: ranges.PositiveFloat = key(
    1.0, "factor on outputs of attention and feed-forward layers"
  )
  logits: ranges.PositiveFloat = key(1.0, "divisor of logits")
