"""Adapters in PEFT's files: what lies where, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import fake_hub
from support.cases import long
from support.small_models import GEMMA, MOE, SMALLER_DENSE, initial

from gspo_jax import sharding
from gspo_jax.models import hf, lora
from gspo_jax.models.hf import peft
from gspo_jax.models.params import with_adapters
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.training import LoraConfig

CONFIG = LoraConfig(rank=3, alpha=12.0, matrices=("k_proj", "o_proj", "up_proj", "down_proj"))


def adapted(model, config=CONFIG, mesh=(1, 1, 1, 1), seed=1):
  """Random weights with random adapters."""
  mesh = sharding.make_mesh(MeshConfig(*mesh), jax.devices()[: np.prod(mesh)])
  with jax.set_mesh(mesh):
    trained, frozen = lora.split(
      with_adapters(initial(model), model, config, "float32", mesh, seed)
    )
    return lora.join(jax.tree.map(lambda x: x + 0.1 * seed, trained), frozen)


MIXTRAL = dataclasses.replace(MOE, qk_norm=False, intermediate_size=MOE.moe_intermediate_size)
MODELS = dict(dense=SMALLER_DENSE, gemma=GEMMA, moe=MOE, mixtral=MIXTRAL)
MODULES = dict(mixtral=["k_proj", "o_proj", "w3", "w2"])  # Hugging Face's names.


@pytest.mark.parametrize(
  "name",
  ["mixtral", *long(("dense", "gemma", "moe"))],
)
def test_a_matrix_of_hugging_face_is_w_and_the_scaled_product_of_its_two_tensors(name, tmp_path):
  model = MODELS[name]
  params = adapted(model)
  modules = MODULES.get(name, list(CONFIG.matrices))
  hf.save(tmp_path / "plain", initial(model), model)
  hf.save(tmp_path / "merged", params, model)
  peft.save(tmp_path / "adapter", params, model, CONFIG, base="plain")
  adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
  plain, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "merged"))
  for name, total in merged.items():
    stem = f"base_model.model.{name.removesuffix('.weight')}"
    if name.split(".")[-2] in modules:
      a, b = (adapter.pop(f"{stem}.lora_{side}.weight") for side in "AB")
      assert (a.shape[0], b.shape[1]) == (3, 3)
      np.testing.assert_allclose(total, plain[name] + 12 / 3 * b @ a, atol=1e-5)
    else:
      np.testing.assert_array_equal(total, plain[name])
  assert not adapter, "nothing else is in the file"
  settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
  assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (
    3,
    12.0,
    "plain",
  )
  assert settings["target_modules"] == modules


@pytest.mark.parametrize(
  "model", [MOE, pytest.param(MIXTRAL, marks=pytest.mark.long)], ids=["moe", "mixtral"]
)
def test_what_was_written_is_read_on_another_mesh(model, tmp_path):
  params = adapted(model)
  peft.save(tmp_path, params, model, CONFIG)
  loaded = adapted(model, dataclasses.replace(CONFIG, adapter=str(tmp_path)), (1, 2, 2, 2), seed=0)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize(
  "base, name, revision",
  [("org/model@0123abc", "org/model", "0123abc"), ("/a/b@c", "/a/b@c", None), ("", None, None)],
)
def test_the_base_model_is_named_as_peft_does(base, name, revision, tmp_path):
  peft.save(tmp_path, adapted(SMALLER_DENSE), SMALLER_DENSE, CONFIG, base=base)
  settings = json.loads((tmp_path / "adapter_config.json").read_text())
  assert (settings["base_model_name_or_path"], settings["revision"]) == (name, revision)


def test_of_a_repository_and_of_a_bucket(tmp_path, monkeypatch):
  params = adapted(SMALLER_DENSE)
  peft.save(tmp_path / "bucket/adapter", params, SMALLER_DENSE, CONFIG)
  server = fake_hub.FakeHub()
  server.use(monkeypatch, tmp_path / "cache")
  name = f"org/adapter@{server.push('org/adapter', tmp_path / 'bucket/adapter')}"

  def same(name):
    loaded = adapted(SMALLER_DENSE, dataclasses.replace(CONFIG, adapter=name), seed=0)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)

  peft.check(name, SMALLER_DENSE, CONFIG)
  assert not list((tmp_path / "cache").rglob("*.safetensors"))  # headers are enough
  same("org/adapter")
  server.close()
  same(name)  # without the network it is in the cache
  fake_hub.bucket(monkeypatch, tmp_path)
  same("gs://bucket/adapter")


OTHER = dict(
  peft_type="ADALORA", task_type="SEQ_CLS", bias="lora_only", use_dora=True, use_rslora=True,
  use_qalora=True, lora_bias=True, fan_in_fan_out=True, ensure_weight_tying=True,
  rank_pattern={"q_proj": 1}, alpha_pattern={"q_proj": 1}, modules_to_save=["lm_head"],
  target_parameters=["experts.down_proj"], trainable_token_indices=[1], layer_replication=[[0, 1]],
  alora_invocation_tokens=[5], megatron_config={"a": 1}, monteclora_config={"num_samples": 2},
  arrow_config={"top_k": 2}, use_bdlora={"nblocks": 2}, kasa_config={"beta": 1.0},
  a_key_of_tomorrow=3,
)  # fmt: skip
CHANGES_W = ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "something_new")
SHAPES = (
  dict(r=4, lora_alpha=8),
  r"differ from this configuration: set lora.rank=4, lora.alpha=8$",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """A directory with adapters of SMALLER_DENSE."""
  directory = tmp_path_factory.mktemp("saved")
  peft.save(directory, adapted(SMALLER_DENSE), SMALLER_DENSE, CONFIG)
  return directory


def changed(saved, tmp_path, **changes):
  """A copy of the directory with other keys."""
  settings = json.loads((saved / "adapter_config.json").read_text()) | changes
  (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
  (tmp_path / "adapter_model.safetensors").symlink_to(saved / "adapter_model.safetensors")
  return tmp_path


@pytest.mark.parametrize(
  "changes, message",
  [
    SHAPES,
    *(
      (dict(init_lora_weights=name), f"init_lora_weights='{name}' is not supported, only")
      for name in CHANGES_W
    ),
    *(
      ({key: value}, rf"adapter_config.json: {key}=.* is not supported, only ")
      for key, value in OTHER.items()
    ),
    (dict(use_dora=True), r"use_dora=True is not supported, only False"),
    (dict(rank_pattern={"q_proj": 1}), r"rank_pattern={'q_proj': 1} is not supported, only {}"),
  ],
)
def test_adapters_of_another_kind_are_refused(changes, message, saved, tmp_path):
  with pytest.raises(hf.CheckpointError, match=message):
    peft.check(changed(saved, tmp_path, **changes), SMALLER_DENSE, CONFIG)


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "eva", "mica"])
def test_keys_without_effect_on_the_sum_are_read(start, saved, tmp_path):
  """PEFT 0.21 writes all of these, and most keys as null or false."""
  changes = dict.fromkeys(OTHER, None) | dict(peft_type="LORA", bias="none")
  changes |= dict(init_lora_weights=start, lora_dropout=0.1, qalora_group_size=16, revision="main")
  changes |= dict(megatron_core="megatron.core", peft_version="0.21.2", eva_config={"rho": 2.0})
  peft.check(changed(saved, tmp_path, **changes), SMALLER_DENSE, CONFIG)


@pytest.mark.parametrize(
  "name", ["lm_head.lora_A.weight", "model.layers.0.self_attn.k_proj.lora_magnitude_vector", "odd"]
)
def test_tensors_beside_the_two_of_a_matrix_are_refused(name, saved, tmp_path):
  changed(saved, tmp_path)
  path = tmp_path / "adapter_model.safetensors"
  tensors = load_file(path)
  path.unlink()
  save_file(tensors | {f"base_model.model.{name}": np.zeros((3, 3), np.float32)}, path)
  with pytest.raises(hf.CheckpointError, match=f"1 tensors belong to no parameter: .*{name}"):
    peft.check(tmp_path, SMALLER_DENSE, CONFIG)


def test_adapters_with_nan_are_refused_with_the_tensor(saved, tmp_path):
  changed(saved, tmp_path)
  path = tmp_path / "adapter_model.safetensors"
  tensors, name = load_file(path), "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
  path.unlink()
  tensors[name][1, 2] = np.nan
  save_file(tensors, path)
  with pytest.raises(hf.CheckpointError, match=rf"{name} has 1 value that is NaN or infinite"):
    adapted(SMALLER_DENSE, dataclasses.replace(CONFIG, adapter=str(tmp_path)))


def test_adapters_that_peft_would_lose_are_refused():
  """PEFT 0.21 with transformers 5 was tried with all four."""
  both = dataclasses.replace(MOE, intermediate_size=48, mlp_only_layers=(0,))
  peft.check_readable(both, LoraConfig(rank=1, matrices=("q_proj",)))
  peft.check_readable(MOE, LoraConfig(rank=1, matrices=("down_proj",)))
  with pytest.raises(ValueError, match="ignores adapters of dense layers"):
    peft.check_readable(both, LoraConfig(rank=1))
  with pytest.raises(ValueError, match="gate_proj and up_proj of experts together, not up_proj"):
    peft.check_readable(MIXTRAL, CONFIG)


def test_adapters_of_other_matrices_or_another_model_are_refused(tmp_path):
  peft.save(tmp_path, adapted(SMALLER_DENSE), SMALLER_DENSE, CONFIG)
  every = dataclasses.replace(CONFIG, matrices=LoraConfig().matrices)
  with pytest.raises(hf.CheckpointError, match=r"set lora.matrices=\['down_proj', 'k_proj'"):
    peft.check(tmp_path, SMALLER_DENSE, every)
  with pytest.raises(hf.CheckpointError, match=r"1\.self_attn.k_proj\.lora_A\.weight"):
    peft.check(tmp_path, dataclasses.replace(SMALLER_DENSE, num_layers=2), CONFIG)
