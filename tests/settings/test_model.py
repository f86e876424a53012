"""Named sizes against the published figures, and that no hyper-parameter goes unread."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_models import SMALLER_DENSE, initial

from gspo_jax.models import transformer
from gspo_jax.sampling import generate
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.model_groups import (
  LinearConfig,
  MultipliersConfig,
  RopeConfig,
  RouterConfig,
  ScoresConfig,
)
from gspo_jax.settings.sizes import PUBLISHED

# Model: parameters, active ones, without embedding and head. The exact totals are those of the
# published files; the rounded figures (in billions) those of the papers and model cards.
FIGURES = {
  "SmolLM2-135M": (134_515_008, None, 0.106),
  "Llama-3.2-1B": (1_235_814_400, None, 0.97),
  "Llama-3.2-3B": (3_212_749_824, None, 2.8),
  "Llama-3.1-8B": (8_030_261_248, None, 7.0),
  "Qwen2.5-0.5B": (494_032_768, None, 0.36),
  "Qwen2.5-1.5B": (1_543_714_304, None, 1.31),
  "Mistral-7B-v0.3": (7_248_023_552, None, 7.0),
  "SmolLM3-3B": (3_075_098_624, None, 2.8),
  "Mixtral-8x7B-v0.1": (46_702_792_704, 12.9, 46.4),
  "Qwen1.5-MoE-A2.7B": (14_315_784_192, 2.7, 13.7),
  "GLM-4.5-Air": (106_852_251_264, 13.4, 106),  # 12 active ones in its paper, without embedding
  "gpt-oss-20b": (20_914_757_184, 4.2, 19.8),  # 3.6 active ones on its card: one embedding
  "gpt-oss-120b": (116_829_156_672, 5.7, 116),
  "MiniMax-M2": (228_689_764_864, 11.0, 227),  # 230 and 10 on its card
  "OLMo-2-0425-1B": (1_484_916_736, None, 1.07),
  "OLMoE-1B-7B-0924": (6_919_161_856, 1.3, 6.7),
  "granite-3.1-1b-a400m-base": (1_334_625_280, 0.4, 1.3),
  "gemma-3-270m": (268_098_176, None, 0.10),
  "gemma-3-1b": (999_885_952, None, 0.698),
  "Qwen3-0.6B": (596_049_920, None, 0.44),
  "Qwen3-1.7B": (1_720_574_976, None, 1.4),
  "Qwen3-4B": (4_022_468_096, None, 3.6),
  "Qwen3-8B": (8_190_735_360, None, 6.95),
  "Qwen3-14B": (14_768_307_200, None, 13.2),
  "Qwen3-32B": (32_762_123_264, None, 31.2),
  "Qwen3-30B-A3B": (30_532_122_624, 3.35, 29.9),
  "Qwen3-235B-A22B": (235_093_634_560, 22.2, 234),
}


@pytest.mark.parametrize("name", FIGURES)
def test_parameter_counts(name):
  exact, active_billions, body_billions = FIGURES[name]
  variants = [n for n in PUBLISHED if n == name or n.startswith(name + "-")]
  bases = name.startswith("Qwen3") and name != "Qwen3-32B"
  assert len(variants) >= (2 if bases or name == "SmolLM2-135M" else 1)
  for variant in variants:
    config = PUBLISHED[variant]
    total, active = transformer.count(config)
    assert total == exact
    outside = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    assert round_like((total - outside) / 1e9, body_billions) == body_billions
    if active_billions is None:
      assert active == total
    else:
      assert round_like(active / 1e9, active_billions) == active_billions


def round_like(value, figure):
  """Rounds `value` to the decimals of `figure`."""
  decimals = len(str(figure).partition(".")[2])
  return round(value, decimals)


def test_variants_have_the_published_context_and_rope_theta():
  # From their config.json files.
  expected = {
    "Qwen3-30B-A3B-Base": (1e6, 32_768),
    "Qwen3-30B-A3B": (1e6, 40_960),
    "Qwen3-30B-A3B-Instruct-2507": (1e7, 262_144),
    "Qwen3-30B-A3B-Thinking-2507": (1e7, 262_144),
    "Qwen3-235B-A22B": (1e6, 40_960),
    "Qwen3-235B-A22B-Instruct-2507": (5e6, 262_144),
    "Qwen3-235B-A22B-Thinking-2507": (5e6, 262_144),
    "Qwen3-4B-Base": (1e6, 32_768),
    "Qwen3-4B-Instruct-2507": (5e6, 262_144),
  }
  for name, figures in expected.items():
    assert (PUBLISHED[name].rope_theta, PUBLISHED[name].max_position_embeddings) == figures
  vocabularies = {c.vocab_size for c in PUBLISHED.values() if c.family in ("qwen3", "gemma")}
  assert vocabularies == {151_936, 262_144}


# The smallest model in which every hyper-parameter has something to do: layers MoE, dense, MoE.
CONFIG = ModelConfig(
  family="qwen3",
  vocab_size=32,
  hidden_size=16,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  intermediate_size=24,
  num_experts=4,
  experts_per_token=2,
  moe_intermediate_size=8,
  norm_topk_prob=True,
  decoder_sparse_step=1,
  mlp_only_layers=(1,),
  rope_theta=1e6,
  rms_norm_eps=1e-6,
  qk_norm=True,
  attention_bias=False,
  tie_word_embeddings=False,
  max_position_embeddings=24,
  query_pre_attn_scalar=0,
  attn_logit_softcapping=0.0,
  final_logit_softcapping=0.0,
  sliding_window=5,
  sliding_window_pattern=2,
  local_rope_theta=1e4,
)
LINEAR = LinearConfig(pattern=2, key_heads=2, value_heads=4, key_dim=8, value_dim=8)
CHANGED = dict(
  vocab_size=33,
  hidden_size=18,
  num_layers=4,
  num_heads=6,
  num_kv_heads=4,
  head_dim=10,
  intermediate_size=25,
  num_experts=5,
  experts_per_token=3,
  moe_intermediate_size=9,
  norm_topk_prob=False,
  decoder_sparse_step=3,
  mlp_only_layers=(2,),
  rope_theta=1e4,
  rms_norm_eps=1e-2,
  qk_norm=False,
  attention_bias=True,
  tie_word_embeddings=True,
  query_pre_attn_scalar=20,
  attn_logit_softcapping=0.5,
  final_logit_softcapping=1.0,
  sliding_window=3,
  sliding_window_pattern=3,
  local_rope_theta=10.0,
  rope=RopeConfig(layers_without=(0,)),
  router=RouterConfig(scores="sigmoid"),
  scores=ScoresConfig(scale=0.7),
  multipliers=MultipliersConfig(residual=0.5),
  linear=LINEAR,
)


def shapes(config):
  return jax.tree.map(lambda w: w.shape, transformer.table(config))


@pytest.fixture(scope="module")
def params():
  random = np.random.default_rng(0)

  def draw(w):
    return jnp.asarray(random.normal(size=w.shape) * (w.fan_in or 1) ** -0.5, jnp.float32)

  return jax.tree.map(draw, transformer.table(two_layers(CONFIG)))


def two_layers(config):
  """Enough where no shape depends on a field: MoE with a window, dense without one."""
  return dataclasses.replace(config, num_layers=2)


def logits(params, config):
  return jax.jit(transformer.logits, static_argnums=1)(params, config, np.arange(8)[None])


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ModelConfig)])
def test_every_field_has_an_effect(field, params):
  """Changes shapes of parameters, or the logits."""
  if field == "max_position_embeddings":  # A limit of requests.
    model = dataclasses.replace(SMALLER_DENSE, max_position_embeddings=24)
    options = dict(group_size=1, max_new_tokens=4)
    generate(initial(model), model, [[1] * 20], **options)
    with pytest.raises(ValueError, match="max_position_embeddings=24"):
      generate(initial(model), model, [[1] * 21], **options)
    return
  if field == "family":  # tests/models/test_fidelity.py compares their outputs.
    with pytest.raises(
      ValueError, match=r"model\.family='gpt' is not one of llama, qwen2, qwen3, mistral, mixtral, "
    ):
      shapes(dataclasses.replace(CONFIG, family="gpt"))
    with pytest.raises(ValueError, match=r"model\.family='gemma' has no experts"):
      shapes(dataclasses.replace(CONFIG, family="gemma"))
    return
  no_window = dict(sliding_window=0, sliding_window_pattern=1) if field == "linear" else {}
  changed = dataclasses.replace(CONFIG, **{field: CHANGED[field]}, **no_window)
  if shapes(changed) != shapes(CONFIG):
    return
  before, after = (logits(params, two_layers(config)) for config in (CONFIG, changed))
  assert np.abs(before - after).max() > 1e-3 * np.abs(before).max()


def test_sizes_of_linear_attention_are_refused_by_name():
  for changes, message in [
    (dict(value_heads=3), r"linear\.value_heads=3 is not a multiple of model\.linear\.key_heads=2"),
    (dict(key_dim=0), r"linear\.pattern=2, .*model\.linear\.key_dim=0,.*: set all four sizes"),
    (dict(kernel=1), r"model\.linear\.kernel=1 must be"),
  ]:
    with pytest.raises(ValueError, match=message):
      dataclasses.replace(LINEAR, **changes)


def test_inconsistent_sizes_are_refused_by_name():
  for changes, message in [
    (dict(num_kv_heads=3), r"num_heads=4 is not a multiple of model\.num_kv_heads=3"),
    (dict(experts_per_token=5), "experts_per_token=5 must be between 1 and"),
    (dict(head_dim=7), "head_dim=7 must be even"),
    (dict(decoder_sparse_step=100), "no layer has experts with model.num_layers="),
    (dict(sliding_window_pattern=0), "sliding_window_pattern=0 must be at least 1"),
    (dict(sliding_window_pattern=1), "sliding_window=5, model.sliding_window_pattern=1: a window"),
    (dict(sliding_window=0), "sliding_window=0, model.sliding_window_pattern=2"),
    (dict(linear=LINEAR), r"sliding_window=5, model\.linear\.pattern=2: linear attention has no"),
    (dict(linear=dataclasses.replace(LINEAR, pattern=9)), "pattern=9.*no layer has full attention"),
  ]:
    with pytest.raises(ValueError, match=message):
      dataclasses.replace(CONFIG, **changes)
