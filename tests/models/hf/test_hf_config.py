"""config.json: both forms, what published files leave out, and what is refused by name."""

import dataclasses
import json

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from configs import dense_math
from gspo_jax.models import hf
from gspo_jax.models.hf import architectures as hf_architectures
from gspo_jax.models.hf import config as hf_config
from gspo_jax.models.hf.architectures import ARCHITECTURES
from gspo_jax.settings import sizes
from gspo_jax.settings.model_groups import MultipliersConfig, ScoresConfig
from gspo_jax.settings.reading import from_dict

MOE = dataclasses.replace(sizes.tiny_moe(64), mlp_only_layers=(1,))
DENSE = sizes.tiny_dense(64)
QWEN2 = dataclasses.replace(
  DENSE, family="qwen2", qk_norm=False, attention_bias=True, tie_word_embeddings=True
)
LLAMA = dataclasses.replace(DENSE, family="llama", qk_norm=False)
MIXTRAL = dataclasses.replace(
  sizes.tiny_moe(64),
  family="mixtral",
  qk_norm=False,
  intermediate_size=48,
  moe_intermediate_size=48,
)
GRANITE = dataclasses.replace(
  LLAMA,
  family="granite",
  scores=ScoresConfig(scale=0.1),
  multipliers=MultipliersConfig(embedding=12.0),
)
GEMMA3 = dataclasses.replace(sizes.tiny_gemma(64), num_layers=7)
GEMMA2 = dataclasses.replace(
  GEMMA3,
  qk_norm=False,
  sliding_window_pattern=2,
  local_rope_theta=GEMMA3.rope_theta,
  attn_logit_softcapping=50.0,
  final_logit_softcapping=30.0,
)
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def write(directory, config, **changes):
  """config.json of a model with some keys changed; ... leaves one out."""
  content = hf_config.to_hf(config, "float32") | changes
  content = {key: value for key, value in content.items() if value is not ...}
  (directory / "config.json").write_text(json.dumps(content))


def test_a_factor_of_yarn_is_read_and_written_as_vllm_does(tmp_path):
  """As in DeepSeek-R1-0528-Qwen3-8B: 0.878 times 1 + 0.1 log(4) is 1."""
  published = 0.8782488562869419
  scaling = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)

  def read(scaling):
    return hf_config._from_hf(hf_config.to_hf(DENSE, "float32") | dict(rope_scaling=scaling))

  config = read(scaling | dict(attn_factor=published))
  assert config.rope.attention_factor == pytest.approx(1, abs=1e-9)
  written = hf_config.to_hf(config, "float32")["rope_scaling"]
  assert written["attn_factor"] == pytest.approx(published)
  assert (written["beta_fast"], written["beta_slow"]) == (32.0, 1.0)
  assert read(written) == config
  assert "attn_factor" not in hf_config.to_hf(read(scaling), "float32")["rope_scaling"]


@pytest.mark.parametrize(
  "config, changes, message",
  [
    (
      DENSE,
      dict(model_type="gpt2"),
      "model_type='gpt2' is not one of llama, qwen2, qwen2_moe, qwen3, qwen3_moe",
    ),
    (DENSE, dict(model_type=...), "model_type=None"),
    (
      DENSE,
      dict(model_type="qwen4"),
      "model_type='qwen4' is not one .*; its other keys are those of qwen",
    ),
    (LLAMA, dict(model_type="yi"), "; its other keys are those of llama: if it is a llama, set"),
    (
      LLAMA,
      dict(model_type="yi", attention_bias=True),
      "nearest is llama, without support for attention_bias=T",
    ),
    (
      LLAMA,
      dict(model_type="yi", hidden_act="gelu"),
      "nearest is llama, without support for hidden_act='gelu'$",
    ),
    (
      LLAMA,
      dict(model_type="yi", a=1, b=[2], c=3, d="4", e=5),
      r"nearest is llama, without support for a=1, b=\[2\], c=3, d='4' and more$",
    ),
    (GRANITE, dict(model_type="yi"), "its other keys are those of granite: "),
    (MIXTRAL, dict(model_type="yi"), "its other keys are those of mixtral: "),
    (DENSE, dict(hidden_size=...), "key hidden_size is missing"),
    (DENSE, dict(rope_theta=...), "key rope_theta is missing"),
    (
      MOE,
      dict(norm_topk_prob=...),
      "norm_topk_prob is missing",
    ),  # transformers' default is not Qwen's
    (MOE, dict(num_experts=...), "key num_experts is missing"),
    (DENSE, dict(num_hidden_layers="2"), "num_hidden_layers='2' is not of type int"),
    (DENSE, dict(vocab_size=True), "vocab_size=True is not of type int"),
    (DENSE, dict(num_key_value_heads=3), "num_kv_heads=3"),
    (DENSE, dict(hidden_act="gelu"), "hidden_act='gelu' is not supported, only \"silu\""),
    (DENSE, dict(use_sliding_window=True, max_window_layers=1), "use_sliding_window=True"),
    (MOE, dict(use_sliding_window=True, max_window_layers=9), "use_sliding_window=True"),
    (DENSE, dict(layer_types=["sliding_attention"] * 2), "layer_types"),
    (DENSE, dict(attention_bias=True), "attention_bias=True"),
    (LLAMA, dict(mlp_bias=True), "mlp_bias=True"),
    (DENSE, dict(quantization_config={"bits": 4}), "quantization_config"),
    (DENSE, dict(rope_scaling={"type": "longrope"}), "rope_scaling.rope_type='longrope'"),
    (DENSE, dict(rope_scaling={"type": "yarn"}), "rope_scaling.factor is missing"),
    (
      DENSE,
      dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
      "low_freq_factor is missing",
    ),
    (DENSE, dict(rope_scaling={"rope_type": "linear", "factor": "2"}), "factor='2' is not of type"),
    (DENSE, dict(rope_scaling={"rope_type": "linear", "factor": 0.5}), "rope.factor=0.5 must be"),
    (DENSE, dict(rope_scaling=dict(rope_type="yarn", factor=2, beta=1)), "rope_scaling.beta is"),
    (DENSE, dict(rope_parameters={"factor": 2.0}), "rope_parameters.factor"),
    (DENSE, dict(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5"),
    (DENSE, dict(rope_parameters={"rope_theta": 1e4}), "rope_theta is given twice"),
    (MOE, dict(num_local_experts=4), "num_experts is given twice, as 4 and as 8"),
    (GEMMA3, dict(layer_types=[LOCAL, GLOBAL]), "layer_types=.*7 entries must be"),
    (GEMMA3, dict(layer_types=["chunked_attention"] * 7), "7 entries must be sliding_attention or"),
    (GEMMA3, dict(hidden_activation="gelu"), "hidden_activation='gelu'"),
    (GEMMA3, dict(use_bidirectional_attention=True), "use_bidirectional_attention=True"),
    # transformers reads it and leaves it out of what Gemma 3 computes.
    (GEMMA3, dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0 is not supported"),
    (GEMMA3, dict(rope_scaling=dict(rope_type="dynamic", factor=8.0)), "rope_type='dynamic'"),
    (GEMMA3, dict(rope_parameters={LOCAL: {"factor": 8.0}}), "rope_parameters.factor"),
    (GEMMA2, dict(sliding_window=...), "key sliding_window is missing"),
  ],
)
def test_what_is_not_supported_is_named(config, changes, message, tmp_path):
  write(tmp_path, config, **changes)
  with pytest.raises(hf.CheckpointError, match=message) as error:
    hf.load_config(tmp_path)
  assert "config.json" in str(error.value)


def test_both_forms_of_config_json(tmp_path):
  """Published with Qwen3, and written by transformers 5."""
  write(tmp_path, MOE)
  assert hf.load_config(tmp_path) == MOE
  theta = dict(rope_type="default", rope_theta=MOE.rope_theta)
  renamed = dict(num_experts=..., num_local_experts=8, rope_theta=..., rope_scaling=...)
  write(tmp_path, MOE, **renamed, rope_parameters=theta)
  assert hf.load_config(tmp_path) == MOE
  spellings = dict(num_local_experts=8, rope_parameters=theta, rope_theta=1_000_000)
  write(tmp_path, MOE, **spellings, decoder_sparse_step=...)
  assert hf.load_config(tmp_path) == MOE
  assert isinstance(hf.load_config(tmp_path).rope_theta, float)


def test_keys_that_published_files_leave_out(tmp_path):
  llama = dataclasses.replace(LLAMA, rope_theta=1e4, num_heads=8, num_kv_heads=8, head_dim=16)
  write(tmp_path, llama, rope_theta=..., num_key_value_heads=..., head_dim=..., mlp_bias=...)
  assert hf.load_config(tmp_path) == llama
  theta = dict(rope_type="default", rope_theta=5e5)
  write(tmp_path, llama, rope_theta=..., rope_parameters=theta)  # the default gives way
  assert hf.load_config(tmp_path) == dataclasses.replace(llama, rope_theta=5e5)
  qwen2 = dataclasses.replace(QWEN2, num_heads=8, head_dim=16)
  write(tmp_path, qwen2, head_dim=..., sliding_window=131_072, max_window_layers=28)
  assert hf.load_config(tmp_path) == qwen2


@pytest.mark.parametrize("full", [0, 1, 2, 3, ...])
@pytest.mark.parametrize("config", [DENSE, QWEN2])
def test_a_window_without_layers_is_none(config, full, tmp_path):
  """In transformers, layers from max_window_layers on have it."""
  two, window = dict(num_hidden_layers=2, max_window_layers=full), dict(use_sliding_window=True)
  for keys in (
    {},
    dict(sliding_window=8),
    dict(sliding_window=None),
    dict(layer_types=[GLOBAL] * 2),
  ):
    write(tmp_path, config, **two | window | keys)
    content = json.loads((tmp_path / "config.json").read_text())
    theirs = transformers.CONFIG_MAPPING[content["model_type"]].from_dict(content)
    if LOCAL in theirs.layer_types:
      with pytest.raises(hf.CheckpointError, match="use_sliding_window=True is not supported"):
        hf.load_config(tmp_path)
    else:
      assert hf.load_config(tmp_path) == dataclasses.replace(config, num_layers=2)


def test_keys_of_gemma_that_published_files_leave_out(tmp_path):
  plain = dataclasses.replace(GEMMA3, sliding_window_pattern=6, rope_theta=1e6)
  write(tmp_path, plain, layer_types=..., rope_theta=..., tie_word_embeddings=..., hidden_act=...)
  assert hf.load_config(tmp_path) == plain
  ropes = {GLOBAL: dict(rope_theta=1e6), LOCAL: dict(rope_type="default", rope_theta=3e4)}
  new = dict(rope_theta=..., rope_local_base_freq=..., rope_scaling=..., rope_parameters=ropes)
  write(tmp_path, plain, **new)
  assert hf.load_config(tmp_path) == dataclasses.replace(plain, local_rope_theta=3e4)
  write(tmp_path, plain, layer_types=[LOCAL] * 3 + [GLOBAL] + [LOCAL] * 3)
  assert hf.load_config(tmp_path) == dataclasses.replace(plain, sliding_window_pattern=4)
  write(tmp_path, GEMMA2, layer_types=..., sliding_window_pattern=..., rope_theta=...)
  assert hf.load_config(tmp_path) == dataclasses.replace(
    GEMMA2, rope_theta=1e4, local_rope_theta=1e4
  )


# Keys with a reader in their family.
READ = """no_rope_layers no_rope_layer_interval n_shared_experts first_k_dense_replace
  num_nextn_predict_layers num_local_experts""".split()


def as_transformers_computes(content):
  """Values of ModelConfig from transformers' class for a config.json."""
  theirs = transformers.CONFIG_MAPPING[content["model_type"]].from_dict(content)
  rope = theirs.rope_parameters
  types = getattr(theirs, "layer_types", None) or []
  values = {
    field: getattr(theirs, key)
    for field, key in ARCHITECTURES[content["model_type"]].fields.items()
    if hasattr(theirs, key)
  }
  values |= dict(
    head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
    rope_theta=rope.get(GLOBAL, rope)["rope_theta"],
    local_rope_theta=rope.get(LOCAL, rope)["rope_theta"] if LOCAL in types else 1e4,
    sliding_window_pattern=types.index(GLOBAL) + 1 if LOCAL in types else 1,
  )
  for name in "attn_logit_softcapping", "final_logit_softcapping":
    if name in values:
      values[name] = values[name] or 0.0
  if "mlp_only_layers" in values:
    values["mlp_only_layers"] = tuple(values["mlp_only_layers"])
  return values


@pytest.mark.parametrize("config", [MOE, DENSE, QWEN2, LLAMA, MIXTRAL, GEMMA3, GEMMA2])
def test_a_key_left_out_or_null_means_what_it_means_to_transformers(config, tmp_path):
  whole = hf_config.to_hf(config, "float32")
  loaded = 0
  for key in whole.keys() - {"model_type"}:
    for change in ..., None:
      write(tmp_path, config, **{key: change})
      content = json.loads((tmp_path / "config.json").read_text())
      try:
        ours, theirs = hf.load_config(tmp_path), as_transformers_computes(content)
      except (hf.CheckpointError, StrictDataclassError):  # one of them takes no such file
        continue
      if None in theirs.values():  # no model can be made of it
        continue
      assert {name: getattr(ours, name) for name in theirs} == theirs, (key, change)
      loaded += 1
  assert loaded > 10


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_key_of_transformers_is_known(name):
  """Each is read, has its only supported value, or has no effect."""
  architecture = ARCHITECTURES[name]
  fixed = hf_architectures.FIXED | dict(architecture.fixed)
  keys = {*architecture.fields.values()}
  for key, value in transformers.CONFIG_MAPPING[name]().to_dict().items():
    if key in fixed:
      assert value in (None, fixed[key]), key
    elif key == "sliding_window" and "use_sliding_window" in fixed:
      continue  # not used then
    else:
      assert key in keys or key in hf_architectures.WITHOUT_EFFECT or key in READ, key
    if key in architecture.defaults:
      if key == "rope_parameters":
        assert value.pop("rope_theta") == architecture.defaults["rope_theta"]
      assert (value or 0) == (architecture.defaults[key] or 0), key


@pytest.mark.parametrize("ropes", [dict(rope_theta=5e5), {GLOBAL: dict(rope_theta=5e5)}])
@pytest.mark.parametrize("config", [DENSE, GEMMA3, GEMMA2])
def test_rotary_parameters_by_kind_of_layer_and_not(config, ropes, tmp_path):
  """Gemma 3 reads only those by kind, the others none of them."""
  write(tmp_path, config, rope_theta=..., rope_scaling=..., rope_parameters=ropes)
  content = json.loads((tmp_path / "config.json").read_text())
  if config != GEMMA3 and GLOBAL in ropes:
    with pytest.raises(
      hf.CheckpointError, match=r"rope_theta is (missing|given twice)|rope_parameters\.full"
    ):
      hf.load_config(tmp_path)
  else:
    theirs = as_transformers_computes(content)
    assert hf.load_config(tmp_path).rope_theta == theirs["rope_theta"]


def test_the_default_scale_of_gemma_is_written_out(tmp_path):
  """transformers divides by its root."""
  for config in (GEMMA2, GEMMA3):
    content = hf_config.to_hf(dataclasses.replace(config, query_pre_attn_scalar=0), "float32")
    assert content["query_pre_attn_scalar"] == config.head_dim


def test_what_no_architecture_has_is_not_written():
  for config, change in (
    (GEMMA2, dict(local_rope_theta=3e4)),
    (GEMMA3, dict(attn_logit_softcapping=50.0)),
    (DENSE, dict(sliding_window=8, sliding_window_pattern=2)),
    (DENSE, dict(query_pre_attn_scalar=8)),
  ):
    with pytest.raises(ValueError, match="no Hugging Face architecture has num_experts=0, family="):
      hf_config.to_hf(dataclasses.replace(config, **change), "float32")


def test_a_directory_names_the_model_of_a_run(tmp_path):
  write(tmp_path, GEMMA3)
  for argument, expected in (
    (str(tmp_path), GEMMA3),
    ("gemma-3-1b-pt", sizes.PUBLISHED["gemma-3-1b-pt"]),
    (None, sizes.PUBLISHED["Qwen3-1.7B-Base"]),
  ):
    values = dense_math.get_config(argument).to_dict()
    assert from_dict(values).model == expected
  with pytest.raises(
    ValueError, match="'gemma-9' is neither a directory, a repository nor one of gemma-3-270m"
  ):
    dense_math.get_config("gemma-9")
