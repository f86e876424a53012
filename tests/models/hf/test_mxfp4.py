"""Files in MXFP4 are read as the bfloat16 that transformers makes of them."""

import json

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402, after the skip
from support.hf_models import random_model  # noqa: E402
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

from gspo_jax import sharding  # noqa: E402
from gspo_jax.models import hf  # noqa: E402
from gspo_jax.models.hf import mxfp4  # noqa: E402
from gspo_jax.settings.mesh import MeshConfig  # noqa: E402

SHAPE = dict(
  vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
  num_key_value_heads=2, head_dim=8, max_position_embeddings=64, num_local_experts=4,
  num_experts_per_tok=2, pad_token_id=0, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
EXPERTS = "model.layers.0.mlp.experts."


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
  """A directory of two files, one with scales, and the tensors that it stands for."""
  directory = tmp_path_factory.mktemp("mxfp4")
  model = random_model(transformers.AutoConfig.for_model("gpt_oss", **SHAPE))
  model.save_pretrained(directory)
  whole, rng = load_file(directory / "model.safetensors"), np.random.default_rng(0)
  tensors, scales = dict(whole), {}
  for name, shape in (("gate_up_proj", (4, 192, 64)), ("down_proj", (4, 64, 96))):
    parts = mxfp4.stored(EXPERTS + name, shape)
    del tensors[EXPERTS + name]
    blocks, exponents = (rng.integers(0, 256, s, np.uint8) for s in parts.values())
    exponents = 110 + exponents % 20
    tensors[f"{EXPERTS}{name}_blocks"], scales[f"{EXPERTS}{name}_scales"] = blocks, exponents
    theirs = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(exponents))
    whole[EXPERTS + name] = theirs.float().numpy()
  save_file(tensors, directory / "model.safetensors")
  files = {name: "model.safetensors" for name in tensors} | {name: "scales" for name in scales}
  save_file(scales, directory / "scales")
  (directory / "model.safetensors").rename(directory / "tensors")
  index = {name: file.replace("model.safetensors", "tensors") for name, file in files.items()}
  (directory / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=index)))
  change(directory, quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=[]))
  return directory, whole


def change(directory, **keys):
  path = directory / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_they_are_read_in_parts_and_written_in_bfloat16(packed, tmp_path):
  directory, whole = packed
  params, config = hf.load(directory)
  hf.save(tmp_path / "float32", params, config)
  after = load_file(tmp_path / "float32" / "model.safetensors")
  assert after.keys() == whole.keys()
  for name, array in whole.items():
    np.testing.assert_array_equal(after[name], array, err_msg=name)
  mesh = sharding.make_mesh(MeshConfig(1, 4, 2, 1))  # D of 64 in parts of half a block.
  sharded, _ = hf.load(directory, mesh=mesh)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(sharded), jax.device_get(params))
  hf.save(tmp_path / "bfloat16", params, config, dtype="bfloat16")
  assert "quantization_config" not in (tmp_path / "bfloat16" / "config.json").read_text()
  again, _ = hf.load(tmp_path / "bfloat16")
  np.testing.assert_array_equal(again.blocks[0].ffn.down, params.blocks[0].ffn.down)


def test_other_quantised_files_are_refused(packed, tmp_path):
  directory, _ = packed
  for path in directory.iterdir():
    (tmp_path / path.name).write_bytes(path.read_bytes())
  tensors = load_file(tmp_path / "tensors")
  tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.uint8)
  save_file(tensors, tmp_path / "tensors")
  with pytest.raises(hf.CheckpointError, match=r"norm\.weight is of type U8, not one of F64, F32"):
    hf.load(tmp_path)
  change(tmp_path, quantization_config=dict(quant_method="fp8"))
  with pytest.raises(hf.CheckpointError, match=r"quantization_config=.*fp8.* is not supported"):
    hf.load_config(tmp_path)
