"""Named sizes of models: published models, and models at laptop size."""

import dataclasses

from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.model_groups import (
  LinearConfig,
  MultipliersConfig,
  RopeConfig,
  RouterConfig,
  ScoresConfig,
)


def _model(width: int, layers: int, heads: int, kv_heads: int, ffn: int, **more) -> ModelConfig:
  """Configuration with the defaults of Qwen3, overridden by `more`."""
  shared = dict(
    family="qwen3",
    vocab_size=151_936,
    head_dim=128,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    qk_norm=True,
    max_position_embeddings=32_768,
  )
  sizes = dict(
    hidden_size=width,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=kv_heads,
    intermediate_size=ffn,  # Unused if every layer has experts.
  )
  return ModelConfig(**(shared | sizes | more))


_TIED = dict(tie_word_embeddings=True)
_QWEN2 = dict(family="qwen2", qk_norm=False, attention_bias=True)


def _experts(number: int, per_token: int, width: int) -> dict[str, int]:
  return dict(num_experts=number, experts_per_token=per_token, moe_intermediate_size=width)


def _llama(*sizes: int, factor: float, **more) -> ModelConfig:
  rope = RopeConfig(rule="llama3", factor=factor, original_length=8192)
  shared = dict(family="llama", vocab_size=128_256, rope_theta=5e5, rms_norm_eps=1e-5, rope=rope)
  return _model(*sizes, **(shared | dict(qk_norm=False, max_position_embeddings=131_072) | more))


def _gemma(*sizes: int) -> ModelConfig:
  windows = dict(sliding_window=512, sliding_window_pattern=6)
  shared = dict(family="gemma", vocab_size=262_144, head_dim=256, query_pre_attn_scalar=256)
  return _model(*sizes, **shared, **windows, **_TIED)


def _gpt_oss(layers: int, experts: int) -> ModelConfig:
  return _model(
    2880, layers, 64, 8, 2880, family="gpt_oss", vocab_size=201_088, head_dim=64, qk_norm=False,
    attention_bias=True, rms_norm_eps=1e-5, rope_theta=1.5e5, local_rope_theta=1.5e5,
    max_position_embeddings=131_072, sliding_window=128, sliding_window_pattern=2,
    scores=ScoresConfig(sinks=True), **_experts(experts, 4, 2880),
    rope=RopeConfig(rule="yarn", factor=32, original_length=4096, truncate=False, local=True),
  )  # fmt: skip


def _hybrid(*sizes: int, value_heads: int, tied: bool = False, **more) -> ModelConfig:
  """Configuration with the defaults of Qwen3.5.

  The last of `sizes`, the width of dense layers, is unused if there are experts.
  """
  linear = LinearConfig(
    pattern=4, key_heads=16, value_heads=value_heads, key_dim=128, value_dim=128, kernel=4
  )
  shared = dict(
    family="qwen3_5", vocab_size=248_320, head_dim=256, rope_theta=1e7, linear=linear,
    max_position_embeddings=262_144, rope=RopeConfig(share=0.25), tie_word_embeddings=tied,
  )  # fmt: skip
  if "num_experts" in more:  # The shared expert is as wide as a chosen one.
    shared["router"] = RouterConfig(shared_width=more["moe_intermediate_size"], shared_gate=True)
  return _model(*sizes, **(shared | more))


_BIASED = dict(scores="sigmoid", choice_bias="frozen")
_QWEN3 = {
  "Qwen3-0.6B": _model(1024, 28, 16, 8, 3072, **_TIED),
  "Qwen3-1.7B": _model(2048, 28, 16, 8, 6144, **_TIED),
  "Qwen3-4B": _model(2560, 36, 32, 8, 9728, **_TIED),
  "Qwen3-8B": _model(4096, 36, 32, 8, 12_288),
  "Qwen3-14B": _model(5120, 40, 40, 8, 17_408),
  "Qwen3-32B": _model(5120, 64, 64, 8, 25_600),
  "Qwen3-30B-A3B": _model(2048, 48, 32, 4, 6144, **_experts(128, 8, 768)),
  "Qwen3-235B-A22B": _model(4096, 94, 64, 4, 12_288, **_experts(128, 8, 1536)),
}
_OTHERS = {
  "gemma-3-270m": _gemma(640, 18, 4, 1, 2048),
  "gemma-3-1b-pt": _gemma(1152, 26, 4, 1, 6912),
  "SmolLM2-135M": _model(
    576, 30, 9, 3, 1536, family="llama", vocab_size=49_152, head_dim=64, qk_norm=False,
    rope_theta=1e5, rms_norm_eps=1e-5, max_position_embeddings=8192, **_TIED,
  ),
  "Llama-3.2-1B": _llama(2048, 16, 32, 8, 8192, factor=32, head_dim=64, **_TIED),
  "Llama-3.2-3B": _llama(3072, 28, 24, 8, 8192, factor=32, **_TIED),
  "Llama-3.1-8B": _llama(4096, 32, 32, 8, 14_336, factor=8),
  "Qwen2.5-0.5B": _model(896, 24, 14, 2, 4864, head_dim=64, **_QWEN2, **_TIED),
  "Qwen2.5-1.5B": _model(1536, 28, 12, 2, 8960, **_QWEN2, **_TIED),
  "Mistral-7B-v0.3": _model(
    4096, 32, 32, 8, 14_336, family="mistral", vocab_size=32_768, qk_norm=False,
    rms_norm_eps=1e-5, local_rope_theta=1e6,
  ),
  "SmolLM3-3B": _model(
    2048, 36, 16, 4, 11_008, family="smollm3", vocab_size=128_256, qk_norm=False, rope_theta=5e6,
    max_position_embeddings=65_536, rope=RopeConfig(layers_without=(*range(3, 36, 4),)), **_TIED,
  ),
  "OLMo-2-0425-1B": _model(
    2048, 16, 16, 16, 8192, family="olmo", vocab_size=100_352, rope_theta=5e5,
    max_position_embeddings=4096,
  ),
  "Mixtral-8x7B-v0.1": _model(
    4096, 32, 32, 8, 14_336, family="mixtral", vocab_size=32_000, qk_norm=False,
    rms_norm_eps=1e-5, **_experts(8, 2, 14_336),
  ),
  "Qwen1.5-MoE-A2.7B": _model(
    2048, 24, 16, 16, 5632, norm_topk_prob=False, max_position_embeddings=8192, **_QWEN2,
    router=RouterConfig(shared_width=5632, shared_gate=True), **_experts(60, 4, 1408),
  ),
  "OLMoE-1B-7B-0924": _model(
    2048, 16, 16, 16, 1024, family="olmoe", vocab_size=50_304, rope_theta=1e4, rms_norm_eps=1e-5,
    max_position_embeddings=4096, norm_topk_prob=False, **_experts(64, 8, 1024),
  ),
  "granite-3.1-1b-a400m-base": _model(
    1024, 24, 16, 8, 512, family="granite", vocab_size=49_152, head_dim=64, qk_norm=False,
    rope_theta=1.5e6, max_position_embeddings=131_072, scores=ScoresConfig(scale=0.015625),
    multipliers=MultipliersConfig(embedding=12.0, residual=0.22, logits=6.0),
    **_experts(32, 8, 512), **_TIED,
  ),
  "GLM-4.5-Air": _model(
    4096, 46, 96, 8, 10_944, family="glm4_moe", vocab_size=151_552, rms_norm_eps=1e-5,
    qk_norm=False, attention_bias=True, max_position_embeddings=131_072, mlp_only_layers=(0,),
    rope=RopeConfig(share=0.5), router=RouterConfig(**_BIASED, shared_width=1408),
    **_experts(128, 8, 1408),
  ),
  "Qwen3.5-0.8B": _hybrid(1024, 24, 8, 2, 3584, value_heads=16, tied=True),
  "Qwen3.5-2B": _hybrid(2048, 24, 8, 2, 6144, value_heads=16, tied=True),
  "Qwen3.5-4B": _hybrid(2560, 32, 16, 4, 9216, value_heads=32, tied=True),
  "Qwen3.5-9B": _hybrid(4096, 32, 16, 4, 12_288, value_heads=32),
  "Qwen3.5-27B": _hybrid(5120, 64, 24, 4, 17_408, value_heads=48),
  "Qwen3.5-35B-A3B": _hybrid(2048, 40, 16, 2, 512, value_heads=32, **_experts(256, 8, 512)),
  "Qwen3-Next-80B-A3B-Instruct": _hybrid(
    2048, 48, 16, 2, 5120, value_heads=32, family="qwen3_next", vocab_size=151_936,
    **_experts(512, 10, 512),
  ),
  "gpt-oss-20b": _gpt_oss(24, 32),
  "gpt-oss-120b": _gpt_oss(36, 128),
  "MiniMax-M2": _model(
    3072, 62, 48, 8, 1536, family="minimax_m2", vocab_size=200_064, rope_theta=5e6,
    max_position_embeddings=196_608, rope=RopeConfig(share=0.5), router=RouterConfig(**_BIASED),
    **_experts(256, 8, 1536),
  ),
}  # fmt: skip


def _published() -> dict[str, ModelConfig]:
  """Published models by name, from https://huggingface.co/OWNER/NAME/blob/main/config.json.

  Owners: meta-llama, Qwen, mistralai, HuggingFaceTB, google, allenai, ibm-granite, zai-org, openai,
  MiniMaxAI. The sizes of Qwen3.5 and Qwen3-Next are those of their model cards, "Model Overview".
  Those of Qwen3.5-9B are the defaults of transformers' Qwen3_5TextConfig, and of KnowledgeXLab's
  fine-tune ComActor-9B.

  Qwen3 models of April 2025 have the shape and rope_theta, 1e6, of their Base models. Those of July
  2025 ("2507") have a context of 262,144 tokens, and a larger rope_theta that depends on the model.
  """
  models = _OTHERS | {"SmolLM2-135M-Instruct": _OTHERS["SmolLM2-135M"]}
  for name, config in _QWEN3.items():
    if name not in ("Qwen3-32B", "Qwen3-235B-A22B"):  # Without a published Base model.
      models[f"{name}-Base"] = config
    models[name] = dataclasses.replace(config, max_position_embeddings=40_960)
  for name, theta in (("Qwen3-4B", 5e6), ("Qwen3-30B-A3B", 1e7), ("Qwen3-235B-A22B", 5e6)):
    for kind in ("Instruct", "Thinking"):
      models[f"{name}-{kind}-2507"] = dataclasses.replace(
        _QWEN3[name], rope_theta=theta, max_position_embeddings=262_144
      )
  return models


PUBLISHED = _published()


def tiny_moe(vocab_size: int) -> ModelConfig:
  """Qwen3-MoE at laptop size. For vocab_size=264, it has 3.4 M parameters, 1.1 M active."""
  return _model(
    width=128,
    layers=4,
    heads=4,
    kv_heads=2,
    ffn=512,
    vocab_size=vocab_size,
    head_dim=32,
    num_experts=8,
    experts_per_token=2,
    moe_intermediate_size=256,
    max_position_embeddings=2048,
  )


def tiny_dense(vocab_size: int) -> ModelConfig:
  """Qwen3 (dense) at laptop size. For vocab_size=264, it has 1.1 M parameters."""
  return dataclasses.replace(
    tiny_moe(vocab_size), num_experts=0, experts_per_token=0, moe_intermediate_size=0
  )


def tiny_gemma(vocab_size: int) -> ModelConfig:
  """Gemma 3 at laptop size, with windows of 32 tokens."""
  return dataclasses.replace(
    tiny_dense(vocab_size),
    family="gemma",
    tie_word_embeddings=True,
    query_pre_attn_scalar=32,
    sliding_window=32,
    sliding_window_pattern=3,
  )


def tiny_hybrid(vocab_size: int) -> ModelConfig:
  """Qwen3.5-MoE at laptop size: three layers of linear attention, one of gated full attention."""
  return dataclasses.replace(
    tiny_moe(vocab_size),
    family="qwen3_5",
    rope=RopeConfig(share=0.25),
    router=RouterConfig(shared_width=64, shared_gate=True),
    linear=LinearConfig(pattern=4, key_heads=4, value_heads=8, key_dim=32, value_dim=32),
  )
