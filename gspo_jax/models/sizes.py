"""What a model is: hyper-parameters of the Qwen3 family, and named sizes."""

import dataclasses
from typing import Annotated, Literal

from gspo_jax import ranges
from gspo_jax.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A Qwen3 (dense) or Qwen3-MoE Transformer. Field names follow Hugging Face's config.json."""

  vocab_size: PositiveInt
  hidden_size: PositiveInt
  num_layers: PositiveInt
  num_heads: PositiveInt
  num_kv_heads: PositiveInt
  head_dim: Annotated[int, Range(2)]
  intermediate_size: PositiveInt  # of dense layers
  num_experts: NonNegativeInt  # 0: every layer is dense
  experts_per_token: NonNegativeInt
  moe_intermediate_size: NonNegativeInt  # of one expert
  norm_topk_prob: bool  # gate weights of the chosen experts sum to 1
  decoder_sparse_step: PositiveInt  # every n-th layer is a MoE layer
  mlp_only_layers: tuple[NonNegativeInt, ...]  # dense whatever decoder_sparse_step says
  rope_theta: PositiveFloat
  rms_norm_eps: NonNegativeFloat
  qk_norm: bool  # RMSNorm of each head's query and key (Qwen3)
  attention_bias: bool  # biases on the q, k and v projections (Qwen2)
  tie_word_embeddings: bool
  max_position_embeddings: PositiveInt

  def __post_init__(self):
    ranges.check(self, "model")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"model.num_heads={self.num_heads} is not a multiple of "
        f"model.num_kv_heads={self.num_kv_heads}"
      )
    if self.num_experts and not 0 < self.experts_per_token <= self.num_experts:
      raise ValueError(
        f"model.experts_per_token={self.experts_per_token} must be between 1 and "
        f"model.num_experts={self.num_experts}"
      )
    if self.num_experts and not self.moe_intermediate_size:
      raise ValueError(f"model.moe_intermediate_size=0: model.num_experts={self.num_experts}")
    if self.head_dim % 2:
      raise ValueError(f"model.head_dim={self.head_dim} must be even: RoPE turns pairs")

  def is_moe(self, layer: int) -> bool:
    """Hugging Face's rule for which layers hold experts."""
    sparse = self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
    return sparse and layer not in self.mlp_only_layers

  def runs(self) -> list[tuple[bool, int]]:
    """Consecutive layers of one kind, as (is MoE, number of layers): each run is one scan."""
    runs: list[tuple[bool, int]] = []
    for layer in range(self.num_layers):
      kind = self.is_moe(layer)
      if runs and runs[-1][0] == kind:
        runs[-1] = (kind, runs[-1][1] + 1)
      else:
        runs.append((kind, 1))
    return runs


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
  """How the model is computed; none of it changes what is computed beyond round-off."""

  dtype: Literal["float32", "bfloat16"]  # of activations and matmul inputs
  attention: Literal["auto", "plain", "blockwise", "splash", "cudnn"]  # auto: by length, platform
  experts: Literal["auto", "blocks", "batched", "ragged", "megablox"]  # auto: by platform, load
  expert_chunk: NonNegativeInt  # tokens of a device that go through the experts at once; 0: all
  remat: Literal["none", "full", "attention", "dots"]  # recomputed backwards: transformer.REMAT
  logits_chunk: NonNegativeInt  # time steps whose logits exist at once; 0: all
  unroll: bool  # layers one after the other, not in a loop: faster on CPU, longer to compile

  def __post_init__(self):
    ranges.check(self, "compute")


REFERENCE = ComputeConfig(
  dtype="float32",
  attention="auto",
  experts="auto",
  expert_chunk=0,
  remat="none",
  logits_chunk=0,
  unroll=False,
)


def _qwen3(**sizes) -> ModelConfig:
  shared = dict(
    vocab_size=151_936,
    head_dim=128,
    num_experts=0,
    experts_per_token=0,
    moe_intermediate_size=0,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=(),
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    qk_norm=True,
    attention_bias=False,
    tie_word_embeddings=False,
    max_position_embeddings=32_768,
  )
  return ModelConfig(**(shared | sizes))


def _dense(width: int, layers: int, heads: int, ffn: int, tied: bool) -> ModelConfig:
  return _qwen3(
    hidden_size=width,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=8,
    intermediate_size=ffn,
    tie_word_embeddings=tied,
  )


def _moe(width: int, layers: int, heads: int, ffn: int, expert: int) -> ModelConfig:
  return _qwen3(
    hidden_size=width,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=4,
    intermediate_size=ffn,  # unused: every layer holds experts
    num_experts=128,
    experts_per_token=8,
    moe_intermediate_size=expert,
  )


def _published() -> dict[str, ModelConfig]:
  """By name on the Hugging Face hub, without the organisation.

  The April 2025 models share a shape and rope_theta 1e6 with their Base; the ones of July 2025
  ("2507") have a larger rope_theta, which differs between them, and an eightfold context.
  """
  base = {
    "Qwen3-0.6B": _dense(1024, 28, 16, 3072, tied=True),
    "Qwen3-1.7B": _dense(2048, 28, 16, 6144, tied=True),
    "Qwen3-4B": _dense(2560, 36, 32, 9728, tied=True),
    "Qwen3-8B": _dense(4096, 36, 32, 12_288, tied=False),
    "Qwen3-14B": _dense(5120, 40, 40, 17_408, tied=False),
    "Qwen3-32B": _dense(5120, 64, 64, 25_600, tied=False),
    "Qwen3-30B-A3B": _moe(2048, 48, 32, 6144, 768),
    "Qwen3-235B-A22B": _moe(4096, 94, 64, 12_288, 1536),
  }
  models = {}
  for name, config in base.items():
    if name not in ("Qwen3-32B", "Qwen3-235B-A22B"):  # whose Base was not published
      models[f"{name}-Base"] = config
    models[name] = dataclasses.replace(config, max_position_embeddings=40_960)
  for name, theta in (("Qwen3-4B", 5e6), ("Qwen3-30B-A3B", 1e7), ("Qwen3-235B-A22B", 5e6)):
    for kind in ("Instruct", "Thinking"):
      models[f"{name}-{kind}-2507"] = dataclasses.replace(
        base[name], rope_theta=theta, max_position_embeddings=262_144
      )
  return models


PUBLISHED = _published()


def qwen3_30b_a3b() -> ModelConfig:
  """Qwen3-30B-A3B-Base: 30.5 B parameters, 3.3 B active; the model of the GSPO paper."""
  return PUBLISHED["Qwen3-30B-A3B-Base"]


def qwen3_1_7b() -> ModelConfig:
  """Qwen3-1.7B-Base: dense, tied embeddings."""
  return PUBLISHED["Qwen3-1.7B-Base"]


def tiny_moe(vocab_size: int) -> ModelConfig:
  """The shape of Qwen3-MoE at laptop size: about 3.6 M parameters, 1.2 M active."""
  return _qwen3(
    vocab_size=vocab_size,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=512,
    num_experts=8,
    experts_per_token=2,
    moe_intermediate_size=256,
    max_position_embeddings=2048,
  )


def tiny_dense(vocab_size: int) -> ModelConfig:
  """The shape of Qwen3 (dense) at laptop size: about 1.1 M parameters."""
  return dataclasses.replace(
    tiny_moe(vocab_size), num_experts=0, experts_per_token=0, moe_intermediate_size=0
  )
