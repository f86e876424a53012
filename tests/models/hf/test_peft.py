"""Adapters in PEFT's files: what lies where, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import fake_hub
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


@pytest.mark.parametrize("model", [SMALLER_DENSE, GEMMA, MOE], ids=["dense", "gemma", "moe"])
def test_a_matrix_of_hugging_face_is_w_and_the_scaled_product_of_its_two_tensors(model, tmp_path):
  params = adapted(model)
  hf.save(tmp_path / "plain", initial(model), model)
  hf.save(tmp_path / "merged", params, model)
  peft.save(tmp_path / "adapter", params, model, CONFIG, base="plain")
  adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
  plain, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "merged"))
  for name, total in merged.items():
    stem = f"base_model.model.{name.removesuffix('.weight')}"
    if name.split(".")[-2] in CONFIG.matrices:
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
  assert settings["target_modules"] == list(CONFIG.matrices)


def test_what_was_written_is_read_on_another_mesh(tmp_path):
  params = adapted(MOE)
  peft.save(tmp_path, params, MOE, CONFIG)
  loaded = adapted(MOE, dataclasses.replace(CONFIG, adapter=str(tmp_path)), (1, 2, 2, 2), seed=0)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


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


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(r=4, lora_alpha=8), r"other adapters: set lora.rank=4, lora.alpha=8$"),
    (dict(use_dora=True), r"adapter_config.json: use_dora=True, and only False is read"),
    (dict(rank_pattern={"q_proj": 1}), r"rank_pattern={'q_proj': 1}, and only {} is read"),
  ],
)
def test_adapters_of_another_kind_are_refused(changes, message, tmp_path):
  peft.save(tmp_path, adapted(SMALLER_DENSE), SMALLER_DENSE, CONFIG)
  path = tmp_path / "adapter_config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))
  with pytest.raises(hf.CheckpointError, match=message):
    peft.check(tmp_path, SMALLER_DENSE, CONFIG)


def test_adapters_of_other_matrices_or_another_model_are_refused(tmp_path):
  peft.save(tmp_path, adapted(SMALLER_DENSE), SMALLER_DENSE, CONFIG)
  every = dataclasses.replace(CONFIG, matrices=LoraConfig().matrices)
  with pytest.raises(hf.CheckpointError, match=r"set lora.matrices=\['down_proj', 'k_proj'"):
    peft.check(tmp_path, SMALLER_DENSE, every)
  with pytest.raises(hf.CheckpointError, match=r"1\.self_attn.k_proj\.lora_A\.weight"):
    peft.check(tmp_path, dataclasses.replace(SMALLER_DENSE, num_layers=2), CONFIG)
