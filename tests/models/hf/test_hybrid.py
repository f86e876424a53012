"""Directories of Qwen3-Next and Qwen3.5: keys of config.json, fused experts, other parts."""

import json

import jax
import numpy as np
import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402, after the skip
from support.cases import long  # noqa: E402
from support.hf_models import random_model  # noqa: E402

from gspo_jax import sharding  # noqa: E402
from gspo_jax.models import hf  # noqa: E402
from gspo_jax.models.hf import config as hf_config  # noqa: E402
from gspo_jax.models.hf import convert, peft  # noqa: E402
from gspo_jax.settings.mesh import MeshConfig  # noqa: E402
from gspo_jax.settings.sizes import PUBLISHED  # noqa: E402
from gspo_jax.settings.training import LoraConfig  # noqa: E402

TEXT = dict(
  vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
  num_key_value_heads=2, head_dim=16, max_position_embeddings=64, linear_num_key_heads=2,
  linear_num_value_heads=6, linear_key_head_dim=8, linear_value_head_dim=12, pad_token_id=0,
)  # fmt: skip
EXPERTS = dict(
  num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40
)
VISION = dict(
  depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, out_hidden_size=32,
  num_position_embeddings=4,
)  # fmt: skip
MTP = {"mtp.fc.weight": np.arange(6.0).reshape(2, 3), "mtp.norm.weight": np.ones(3, np.float16)}


def saved(directory, model_type, **keys):
  """Writes a random model of transformers."""
  config = transformers.AutoConfig.for_model(model_type, **TEXT | keys)
  random_model(config).save_pretrained(directory)


def saved_inside(directory, outer, **keys):
  """Writes a random language model inside a multimodal one."""
  text = TEXT | keys | dict(model_type=f"{outer}_text")
  config = transformers.AutoConfig.for_model(outer, text_config=text, vision_config=VISION)
  random_model(config, kind=transformers.AutoModelForImageTextToText).save_pretrained(directory)


def edit_tensors(directory, edit):
  path = directory / "model.safetensors"
  save_file(edit(load_file(path)), path, dict(format="pt"))


def assert_written_back(directory, out):
  """Loads, saves, and compares all tensors and keys of config.json in `directory`."""
  params, config = hf.load(directory)
  hf.save(out, params, config, like=str(directory))
  before, after = (load_file(path / "model.safetensors") for path in (directory, out))
  assert before.keys() == after.keys()
  for name, array in before.items():
    assert array.dtype == after[name].dtype
    np.testing.assert_array_equal(after[name], array, err_msg=name)
  assert hf.load_config(out) == config
  return params, config


def fused(tensors):
  """Fuses the experts of each layer, as published files of Qwen3.5 do."""
  rest = {name: x for name, x in tensors.items() if ".experts." not in name}
  for layer in {name.split(".experts.")[0] for name in tensors.keys() - rest.keys()}:
    down, gate, up = (
      np.stack([tensors[f"{layer}.experts.{e}.{name}_proj.weight"] for e in range(4)])
      for name in ("down", "gate", "up")
    )
    rest[f"{layer}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
    rest[f"{layer}.experts.down_proj"] = down
  return rest


@pytest.mark.parametrize(
  "outer, keys",
  [pytest.param("qwen3_5", {}, marks=pytest.mark.long), ("qwen3_5_moe", EXPERTS)],
)
def test_a_multimodal_directory_is_written_back(outer, keys, tmp_path):
  saved_inside(tmp_path / "in", outer, **keys)
  separate, _ = hf.load(tmp_path / "in")
  edit_tensors(tmp_path / "in", lambda tensors: (fused(tensors) if keys else tensors) | MTP)
  params, _ = assert_written_back(tmp_path / "in", tmp_path / "out")
  jax.tree.map(np.testing.assert_array_equal, params, separate)
  raw, written = (json.loads((tmp_path / x / "config.json").read_text()) for x in ("in", "out"))
  assert raw == written


@pytest.mark.parametrize(
  "outer, keys",
  [("qwen3_5", {}), pytest.param("qwen3_5_moe", EXPERTS, marks=pytest.mark.long)],
)
def test_a_text_model_saved_from_a_multimodal_one(outer, keys, tmp_path):
  """transformers leaves the names of its tensors as they were."""
  saved_inside(tmp_path / "outer", outer, **keys)
  model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "outer")
  model.save_pretrained(tmp_path / "in")
  assert any(x.startswith("model.language") for x in load_file(tmp_path / "in/model.safetensors"))
  params, config = assert_written_back(tmp_path / "in", tmp_path / "out")
  expected, same = hf.load(tmp_path / "outer")
  assert config == same
  jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "float16"])
def test_the_dtype_of_the_language_model_is_that_of_its_weights(dtype, tmp_path):
  """In published files it is in text_config alone."""
  saved_inside(tmp_path / "in", "qwen3_5")
  raw = json.loads((tmp_path / "in/config.json").read_text())
  raw = {key: x for key, x in raw.items() if "dtype" not in key}
  raw["text_config"]["dtype"] = "bfloat16"
  (tmp_path / "in/config.json").write_text(json.dumps(raw))
  params, config = hf.load(tmp_path / "in")
  hf.save(tmp_path / "out", params, config, dtype=dtype, like=str(tmp_path / "in"))
  read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
  assert str(read.dtype) == f"torch.{dtype}"
  written = json.loads((tmp_path / "out/config.json").read_text())
  assert written["vision_config"] == raw["vision_config"]


@pytest.mark.parametrize("model_type, keys", [("qwen3_next", EXPERTS), ("qwen3_5_text", {})])
def test_layers_of_multi_token_prediction_are_written_back(model_type, keys, tmp_path):
  saved(tmp_path / "in", model_type, mtp_num_hidden_layers=1, **keys)
  edit_tensors(tmp_path / "in", lambda tensors: tensors | MTP)
  assert_written_back(tmp_path / "in", tmp_path / "out")
  assert json.loads((tmp_path / "out/config.json").read_text())["mtp_num_hidden_layers"] == 1


@pytest.mark.parametrize(
  "sizes",
  [*long(((1, 4, 1, 2), (1, 8, 1, 1))), (1, 2, 2, 2)],
)
@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe_text"])
def test_a_mesh_reads_the_same_values(model_type, sizes, tmp_path, monkeypatch):
  """Also a few rows at a time, and as remote files are read."""
  saved(tmp_path, model_type, **EXPERTS)
  params, _ = hf.load(tmp_path)
  monkeypatch.setattr(convert, "_READ", 200)
  mesh = sharding.make_mesh(MeshConfig(*sizes))
  jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path, mesh=mesh)[0], params)
  files = convert.hf_files.Files
  opened = files.__init__

  def remote(self, *arguments):
    opened(self, *arguments)
    self.remote = True

  monkeypatch.setattr(files, "__init__", remote)
  jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path, mesh=mesh)[0], params)


PUBLISHED_TEXT = dict(  # Keys of the text_config of Qwen3.5-4B, with smaller sizes.
  TEXT, model_type="qwen3_5_text", attention_bias=False, attention_dropout=0.0,
  attn_output_gate=True, bos_token_id=None, dtype="bfloat16", eos_token_id=248_044,
  full_attention_interval=4, hidden_act="silu", initializer_range=0.02,
  layer_types=["linear_attention"] * 3 + ["full_attention"], linear_conv_kernel_dim=4,
  mamba_ssm_dtype="float32", mlp_only_layers=[], mtp_num_hidden_layers=1,
  mtp_use_dedicated_embeddings=False, rms_norm_eps=1e-6, tie_word_embeddings=True, use_cache=True,
  rope_parameters=dict(
    mrope_interleaved=True, mrope_section=[11, 11, 10], rope_type="default", rope_theta=1e7,
    partial_rotary_factor=0.25,
  ),
)  # fmt: skip


def read(**changes):
  return hf_config._from_hf(PUBLISHED_TEXT | changes)


def test_keys_of_published_files():
  config = read()
  assert (config.rope.share, config.rope_theta, config.linear.pattern) == (0.25, 1e7, 4)
  assert read(layer_types=None) == config
  assert read(partial_rotary_factor=0.25, output_gate_type="swish") == config
  types = ["linear_attention", "full_attention"]
  assert read(layer_types=types * 2).linear.pattern == 2


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(layer_types=["full_attention"] + ["linear_attention"] * 3), "layer_types=.* only full"),
    (dict(layer_types=["linear_attention"] * 4), "layer_types=.* every n-th of 4 layers"),
    (dict(layer_types=["sliding_attention"] * 4), "layer_types=.* is not supported"),
    (dict(layer_types=["linear_attention", "full_attention"]), "layer_types=.* of 4 layers"),
    (dict(attn_output_gate=False), "attn_output_gate=False is not supported, only true"),
    (dict(mamba_ssm_dtype="bfloat16"), "mamba_ssm_dtype='bfloat16' is not supported"),
    (dict(output_gate_type="sigmoid"), "output_gate_type='sigmoid' is not supported"),
    (dict(attention_bias=True), "attention_bias=True is not supported"),
    (dict(mlp_only_layers=[0]), r"mlp_only_layers=\[0\] is not supported"),
    (dict(linear_num_value_heads=5), "linear.value_heads=5 is not a multiple of"),
  ],
)
def test_what_is_not_supported_is_named(changes, message):
  with pytest.raises(ValueError, match=message):
    read(**changes)


def test_adapters_of_a_multimodal_model_are_refused_unless_its_text_model_is_read(tmp_path):
  config = LoraConfig(rank=1, matrices=("o_proj",))
  for outer, family in (("qwen3_5", "Qwen3.5-4B"), ("gemma3", "gemma-3-1b-pt")):
    keys = dict(model_type=outer, text_config={})
    (tmp_path / "config.json").write_text(json.dumps(keys))
    peft.check_readable(PUBLISHED[family], config)
    if outer == "qwen3_5":
      peft.check_readable(PUBLISHED[family], config, str(tmp_path))
      continue
    with pytest.raises(ValueError, match=r"PEFT adapts the whole gemma3 of .*, without --ad"):
      peft.check_readable(PUBLISHED[family], config, str(tmp_path))


@pytest.mark.parametrize("name", ["Qwen3.5-0.8B", "Qwen3.5-35B-A3B", "Qwen3-Next-80B-A3B-Instruct"])
def test_adapters_of_matrices_in_one_tensor_are_refused(name):
  peft.check_readable(PUBLISHED[name], LoraConfig(rank=1, matrices=("o_proj",)))
  for matrix in ("q_proj", "k_proj", "v_proj"):
    with pytest.raises(ValueError, match=r"adapts model\.layers.*_proj.* as a whole, not one of"):
      peft.check_readable(PUBLISHED[name], LoraConfig(rank=1, matrices=(matrix,)))
