"""GGUF files: what transformers makes of them, and what it would leave out."""

import dataclasses

import gguf
import jax
import numpy as np
import pytest
from support.small_models import DENSE, MOE, initial, logits

from experiments import gguf_header, smollm2
from gspo_jax.models import hf, transformer
from gspo_jax.models.hf import leaves

MODEL = dataclasses.replace(DENSE, head_dim=128)  # The only width of transformers' GGUF reader.
SPARSE = dataclasses.replace(MOE, intermediate_size=16)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 9)).astype(np.int32)
NUMBERS = dict(int=gguf.GGUFWriter.add_uint32, float=gguf.GGUFWriter.add_float32)
NUMBERS |= dict(str=gguf.GGUFWriter.add_string)


def write(path, model, architecture, without=(), tensors=(), **keys):
  """A GGUF file of random weights, without some tensors and with others; returns the weights."""
  file, params = gguf.GGUFWriter(path, architecture), initial(model)
  values = {key: getattr(model, field) for key, field in gguf_header._FIELDS.items()}
  values = {key: value for key, value in values.items() if value} | keys
  for key, value in values.items():
    NUMBERS[type(value).__name__](file, f"{architecture}.{key}", value)
  file.add_tokenizer_model("gpt2")
  file.add_token_list(["a", "b", "ab", *map(str, range(3, model.vocab_size))])
  file.add_token_merges(["a b"])
  table = transformer.table(model)
  in_file = {key: (name, "") for key, name in gguf_header._TENSORS.items()}
  names = leaves.leaves_of(model, table, in_file)
  shapes = leaves.leaves_of(model, table, hf.architectures.names(model))
  for named, leaf, array in zip(names, shapes, jax.tree.leaves(params), strict=True):
    for position in named.positions(leaves.whole(named)):
      value = np.asarray(array[position] if position else array)
      if "E" not in leaf.stacked:
        value = value.transpose(leaf.order).reshape(leaf.tensor_shape)
      if (name := named.tensor(position)) not in without:
        file.add_tensor(name, np.ascontiguousarray(value))
  for name in tensors:
    file.add_tensor(name, np.ones(4, np.float32))
  file.write_header_to_file()
  file.write_kv_data_to_file()
  file.write_tensors_to_file()
  file.close()
  return params


def test_a_plain_file_becomes_a_directory_of_the_same_model(tmp_path):
  params = write(tmp_path / "a.gguf", MODEL, "qwen3")
  smollm2.convert(tmp_path / "a.gguf", tmp_path / "out")
  loaded, config = hf.load(tmp_path / "out")
  assert config == dataclasses.replace(MODEL, rms_norm_eps=config.rms_norm_eps)
  expected, converted = (logits(p, MODEL, TOKENS) for p in (params, loaded))
  np.testing.assert_allclose(converted, expected, atol=1e-5)


@pytest.mark.parametrize("model, architecture", [(MODEL, "llama"), (SPARSE, "qwen3moe")])
def test_a_file_of_the_model_has_no_faults(model, architecture, tmp_path):
  more = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}
  write(tmp_path / "a.gguf", model, architecture, **more)
  gguf_header.check(tmp_path / "a.gguf", model)


@pytest.mark.parametrize(
  "model, changes, message",
  [
    (MODEL, dict(tensors=["rope_freqs.weight"]), "no parameter takes rope_freqs.weight "),
    (MODEL, {"rope.scaling.type": "yarn"}, "llama.rope.scaling.type=yarn is not supported"),
    (MODEL, {"rope.scaling.factor": 8.0}, "llama.rope.scaling.factor=8.0 is not supported"),
    (MODEL, {"attention.sliding_window": 7}, "sliding_window=7, and sliding_window=0"),
    (MODEL, {"final_logit_softcapping": 30.0}, "=30.0, and final_logit_softcapping=0.0"),
    (MODEL, {"expert_count": 4}, "llama.expert_count=4, and num_experts=0"),
    (MODEL, {"a.key.of.tomorrow": 1}, "llama.a.key.of.tomorrow=1 is not supported"),
    (MODEL, dict(tensors=["blk.0.attn_q.bias"]), r"no parameter takes blk.0.attn_q.bias"),
    (MODEL, dict(without=["blk.1.ffn_up.weight"]), r"no tensor gives blk.1.ffn_up.weight \(1 par"),
    (SPARSE, dict(without=["blk.0.ffn_gate_inp.weight"]), "no tensor gives blk.0.ffn_gate_inp"),
  ],
)
def test_parts_that_transformers_drops_or_invents_are_refused(model, changes, message, tmp_path):
  write(tmp_path / "a.gguf", model, "llama", **changes)
  with pytest.raises(ValueError, match=message):
    gguf_header.check(tmp_path / "a.gguf", model)


def test_experts_of_a_dense_model_are_refused(tmp_path):
  """As transformers reads a Mixtral: a dense model with random weights."""
  write(tmp_path / "a.gguf", SPARSE, "llama")
  dense = dataclasses.replace(SPARSE, num_experts=0, experts_per_token=0, moe_intermediate_size=0)
  with pytest.raises(ValueError, match=r"blk.0.ffn_down_exps.weight, .* no tensor gives blk.0.ffn"):
    gguf_header.check(tmp_path / "a.gguf", dense)
