"""Groups of a model's hyperparameters, neutral by default: positions, router, scores, factors."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
  """Rotary positions beyond `rope_theta` (models/attention/positions.py)."""

  rule: Literal["default", "linear", "llama3", "yarn"] = key("default", "scaling of frequencies")
  factor: Annotated[float, Range(1, 1e6)] = key(1.0, "extended context over the original one")
  original_length: Annotated[int, Range(0, INT32)] = key(0, "original context (llama3, yarn)")
  low_freq_factor: NonNegativeFloat = key(
    1.0, "llama3: waves with fewer turns in original_length are scaled by factor"
  )
  high_freq_factor: NonNegativeFloat = key(
    4.0, "llama3: waves with more turns in original_length are unscaled"
  )
  beta_fast: NonNegativeFloat = key(
    32.0, "yarn: waves with more turns in original_length are unscaled"
  )
  beta_slow: NonNegativeFloat = key(
    1.0, "yarn: waves with fewer turns in original_length are scaled by factor"
  )
  attention_factor: NonNegativeFloat = key(0.0, "yarn: factor on queries and keys; 0: by mscale")
  mscale: NonNegativeFloat = key(
    0.0,
    "yarn: m in attention_factor, 1 + 0.1 m log(factor); m is 1 unless mscale_all_dim is set too",
  )
  mscale_all_dim: NonNegativeFloat = key(
    0.0, "yarn: m of a divisor of attention_factor, of the same form; 0: no divisor"
  )
  truncate: bool = key(True, "yarn: bounds of the ramp are whole numbers")
  share: ranges.PositiveFraction = key(1.0, "rotated share of a head")
  local: bool = key(False, "True: the rule is for local layers too")
  layers_without: tuple[NonNegativeInt, ...] = key((), "layers without positions (SmolLM3)")
  query_beta: NonNegativeFloat = key(
    0.0, "queries times 1 + β log(1 + ⌊position / original_length⌋) (Ministral 3)"
  )

  def __post_init__(self):
    ranges.check(self, "model.rope")
    lengths = self.rule in ("llama3", "yarn") or self.query_beta
    wrong = [
      (lengths and not self.original_length, "{original_length} must be set: {rule}, {query_beta}"),
      (
        self.high_freq_factor <= self.low_freq_factor,
        "{high_freq_factor} must be above {low_freq_factor}",
      ),
    ]
    ranges.refuse(self, "model.rope", wrong)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
  """Choice of experts beyond `experts_per_token` and `norm_topk_prob` (models/experts/moe.py)."""

  scores: Literal["softmax", "sigmoid"] = key("softmax", "scores of experts, from logits")
  choice_bias: Literal["none", "frozen"] = key(
    "none",
    "bias on scores, used only to choose experts; frozen: the published values, never updated",
  )
  groups: PositiveInt = key(1, "groups of neighbouring experts")
  groups_per_token: PositiveInt = key(1, "groups chosen per token, by their two best experts")
  scale: ranges.PositiveFloat = key(1.0, "factor on gate weights")
  shared_width: NonNegativeInt = key(0, "F, total width of shared experts; 0: none")
  shared_gate: bool = key(False, "a sigmoid gate on shared experts (Qwen2-MoE)")

  def __post_init__(self):
    ranges.check(self, "model.router")
    wrong = [(self.groups_per_token > self.groups, "{groups_per_token} must be at most {groups}")]
    ranges.refuse(self, "model.router", wrong)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoresConfig:
  """Attention scores beyond `query_pre_attn_scalar`, softcap and window."""

  scale: NonNegativeFloat = key(0.0, "factor on q kᵀ (Granite); 0: by query_pre_attn_scalar")
  clip_qkv: NonNegativeFloat = key(0.0, "bound on queries, keys and values (OLMoE); 0: none")
  sinks: bool = key(False, "a learned logit in the denominator of each head (GPT-OSS)")
  local_layers: tuple[NonNegativeInt, ...] = key(
    (), "layers with the sliding window; (): by sliding_window_pattern"
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig:
  """Layers of linear attention, a gated delta rule (models/gated_delta.py)."""

  pattern: PositiveInt = key(1, "every n-th layer has full attention, the others linear attention")
  key_heads: NonNegativeInt = key(0, "K, heads of queries and keys in linear layers")
  value_heads: NonNegativeInt = key(0, "heads of values in linear layers; a multiple of key_heads")
  key_dim: NonNegativeInt = key(0, "H, width of a query and key in linear layers")
  value_dim: NonNegativeInt = key(0, "J, width of a value in linear layers")
  kernel: Annotated[int, Range(2, 64)] = key(4, "C, positions that a causal convolution reads")

  def __post_init__(self):
    ranges.check(self, "model.linear")
    sizes = (self.key_heads, self.value_heads, self.key_dim, self.value_dim)
    wrong = [
      (
        self.pattern > 1 and not all(sizes),
        "{pattern}, {key_heads}, {value_heads}, {key_dim}, {value_dim}: set the sizes of linear "
        "layers",
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

  embedding: ranges.PositiveFloat = key(1.0, "on rows of the embedding")
  residual: ranges.PositiveFloat = key(1.0, "on outputs of attention and feed-forward layers")
  logits: ranges.PositiveFloat = key(1.0, "divisor of logits")
