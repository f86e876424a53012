"""Hugging Face directories: exact, streamed, strict. (Against transformers: test_fidelity.py.)"""

import dataclasses
import json
import math
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.cases import long
from support.command_line import on_two_processes

from gspo_jax import sharding
from gspo_jax.models import hf, transformer
from gspo_jax.models.hf import convert
from gspo_jax.models.hf import files as hf_files
from gspo_jax.settings import sizes
from gspo_jax.settings.mesh import MeshConfig

SMALL = dict(hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, moe_intermediate_size=24)
MOE = dataclasses.replace(sizes.tiny_moe(64), **SMALL, mlp_only_layers=(1,), intermediate_size=48)
DENSE = dataclasses.replace(
  sizes.tiny_dense(64), **SMALL | dict(moe_intermediate_size=0), num_layers=2, intermediate_size=40
)
TIED = dataclasses.replace(DENSE, tie_word_embeddings=True)
QWEN2 = dataclasses.replace(TIED, family="qwen2", qk_norm=False, attention_bias=True)
LLAMA = dataclasses.replace(DENSE, family="llama", qk_norm=False)
MIXTRAL = dataclasses.replace(
  MOE,
  family="mixtral",
  qk_norm=False,
  mlp_only_layers=(),
  intermediate_size=24,
  norm_topk_prob=True,
)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def params_of(config, seed=0):
  """Every element different, biases and norms too."""
  random = np.random.default_rng(seed)
  table = transformer.table(config)
  return jax.tree.map(lambda w: jnp.asarray(random.normal(size=w.shape), jnp.float32), table)


def saved(directory, config, **options):
  params = params_of(config)
  hf.save(directory, params, config, **options)
  return params


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(np.testing.assert_array_equal, a, b)


def edit_config(directory, **changes):
  """Sets keys of config.json; ... removes one."""
  path = directory / "config.json"
  content = json.loads(path.read_text()) | changes
  path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def edit_tensors(directory, edit):
  tensors = load_file(directory / SINGLE)
  edit(tensors)
  save_file(tensors, directory / SINGLE)


# Exact


@pytest.mark.parametrize("config", [MOE, DENSE, TIED, QWEN2, LLAMA, MIXTRAL])
@pytest.mark.parametrize("shard_size_bytes", [10**9, 20_000])
def test_what_is_saved_is_loaded(config, shard_size_bytes, tmp_path):
  params = saved(tmp_path, config, shard_size_bytes=shard_size_bytes)
  files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
  assert (files == [SINGLE]) == (shard_size_bytes == 10**9) == (not (tmp_path / INDEX).exists())
  loaded, loaded_config = hf.load(tmp_path)
  assert loaded_config == config
  assert_same(loaded, params)


def test_names_and_shapes_are_those_of_published_checkpoints(tmp_path):
  """The layout of q, o, an expert and the router, spelled out apart from the table."""
  params = saved(tmp_path, MOE)
  tensors = load_file(tmp_path / SINGLE)
  layer2 = params.blocks[2]  # layers 0 | 1 | 2, 3: the MoE layers around the dense one
  prefix = "model.layers.2."
  same = np.testing.assert_array_equal
  q, o = tensors[prefix + "self_attn.q_proj.weight"], tensors[prefix + "self_attn.o_proj.weight"]
  same(q, np.einsum("DNH->NHD", layer2.attention.q[0]).reshape(64, 32))
  same(o, np.einsum("NHD->DNH", layer2.attention.o[0]).reshape(32, 64))
  same(tensors[prefix + "mlp.experts.5.up_proj.weight"], layer2.ffn.up[0, 5].T)
  same(tensors["model.layers.3.mlp.experts.0.down_proj.weight"], layer2.ffn.down[1, 0].T)
  same(tensors["model.layers.3.mlp.gate.weight"], layer2.ffn.router[1].T)
  same(tensors["model.layers.1.mlp.gate_proj.weight"], params.blocks[1].ffn.gate[0].T)
  same(tensors["lm_head.weight"], params.head.T)


def test_dtypes(tmp_path):
  params = saved(tmp_path, MOE, dtype="bfloat16")
  rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
  assert_same(hf.load(tmp_path)[0], jax.tree.map(lambda x: x.astype(jnp.float32), rounded))
  narrow, _ = hf.load(tmp_path, dtype=jnp.bfloat16)
  assert_same(narrow, rounded)
  hf.save(tmp_path / "again", narrow, MOE)  # Default: dtype of the parameters.
  assert (tmp_path / "again" / SINGLE).read_bytes() == (tmp_path / SINGLE).read_bytes()


@pytest.mark.parametrize(
  "mesh_sizes, rules, fused",
  [
    pytest.param((2, 2, 2, 1), sharding.TRAIN, False, marks=pytest.mark.long),
    ((1, 2, 2, 2), sharding.TRAIN, True),
    pytest.param((2, 1, 2, 2), sharding.ROLLOUT, False, marks=pytest.mark.long),
    pytest.param((1, 8, 1, 1), sharding.TRAIN, True, marks=pytest.mark.long),
    pytest.param((8, 1, 1, 1), sharding.TRAIN, False, marks=pytest.mark.long),
  ],
)
def test_a_mesh_changes_nothing_but_the_layout(mesh_sizes, rules, fused, tmp_path, monkeypatch):
  monkeypatch.setattr(convert, "_READ", 100)  # tensors are read in several pieces
  params = saved(tmp_path, MOE)
  if fused:
    edit_tensors(tmp_path, fuse_experts)
  mesh = sharding.make_mesh(MeshConfig(*mesh_sizes))
  loaded, _ = hf.load(tmp_path, mesh=mesh, rules=rules)
  placed = jax.device_put(params, transformer.shardings(MOE, rules, mesh))
  assert jax.tree.map(jax.typeof, loaded) == jax.tree.map(jax.typeof, placed)
  for mine, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(placed)):
    assert mine.sharding == theirs.sharding
    for a, b in zip(mine.addressable_shards, theirs.addressable_shards):
      assert a.device == b.device
      np.testing.assert_array_equal(a.data, b.data)
  hf.save(tmp_path / "again", loaded, MOE)
  assert_same(hf.load(tmp_path / "again")[0], params)


def fuse_experts(tensors):
  """Fuses a layer's experts to one tensor, like transformers 5 in memory."""
  for layer in filter(MOE.is_moe, range(MOE.num_layers)):
    prefix = f"model.layers.{layer}.mlp.experts."
    gate, up, down = (
      np.stack([tensors.pop(f"{prefix}{e}.{name}_proj.weight") for e in range(MOE.num_experts)])
      for name in ("gate", "up", "down")
    )
    tensors[prefix + "gate_up_proj"] = np.concatenate([gate, up], axis=1)
    tensors[prefix + "down_proj"] = down


def test_saving_again_leaves_nothing_of_the_first_time(tmp_path):
  saved(tmp_path, MOE, shard_size_bytes=20_000)
  (tmp_path / "tokenizer.json").write_text("{}")
  params = saved(tmp_path, DENSE)
  assert {p.name for p in tmp_path.iterdir()} == {"config.json", SINGLE, "tokenizer.json"}
  assert_same(hf.load(tmp_path)[0], params)
  params = saved(tmp_path, MOE, shard_size_bytes=20_000)
  assert not (tmp_path / SINGLE).exists()
  assert_same(hf.load(tmp_path)[0], params)


# Streamed


@pytest.mark.parametrize(
  "mesh_sizes",
  [None, *long(((1, 2, 2, 2), (2, 2, 2, 1)))],
)
def test_loading_needs_the_model_and_less_than_one_tensor(mesh_sizes, tmp_path, monkeypatch):
  """On CPU the model's own memory is host memory, and tracemalloc sees it: JAX takes the buffers
  over. A loader that stacked layers or experts would need the largest parameter, 4 MiB, twice; one
  that read whole tensors the largest of them, 2 MiB."""
  monkeypatch.setattr(convert, "_READ", 2**14)
  config = dataclasses.replace(
    MOE, vocab_size=4096, hidden_size=128, moe_intermediate_size=256, mlp_only_layers=()
  )
  params = saved(tmp_path, config, shard_size_bytes=2**22)
  model = sum(x.nbytes for x in jax.tree.leaves(params))
  largest_tensor = config.vocab_size * config.hidden_size * 4  # 2 MiB
  assert max(x.nbytes for x in jax.tree.leaves(params)) == 2 * largest_tensor
  mesh = mesh_sizes and sharding.make_mesh(MeshConfig(*mesh_sizes))
  del params
  hf.load(tmp_path, mesh=mesh)  # imports and caches
  tracemalloc.start()
  before = tracemalloc.get_traced_memory()[0]
  params, _ = hf.load(tmp_path, mesh=mesh)
  peak = tracemalloc.get_traced_memory()[1] - before
  tracemalloc.stop()
  assert 0.9 * model < peak < model + largest_tensor / 4
  del params


def test_saving_needs_one_layer_of_one_parameter(tmp_path):
  config = dataclasses.replace(MOE, vocab_size=1024, hidden_size=128, moe_intermediate_size=256)
  params = params_of(config)
  model = sum(x.nbytes for x in jax.tree.leaves(params))
  hf.save(tmp_path, params, config)
  tracemalloc.start()
  hf.save(tmp_path, params, config)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < model / 3


@pytest.mark.parametrize("mesh_sizes", [None, (1, 2, 2, 2), (4, 2, 1, 1)])
def test_every_element_is_read_once(mesh_sizes, tmp_path, monkeypatch):
  """Also with copies on several devices."""
  params = saved(tmp_path, MOE)
  read = hf_files.Files.read
  elements = []

  def counted(files, name, slices):
    data = read(files, name, slices)
    elements.append(data.size)
    return data

  monkeypatch.setattr(hf_files.Files, "read", counted)
  mesh = mesh_sizes and sharding.make_mesh(MeshConfig(*mesh_sizes))
  hf.load(tmp_path, mesh=mesh)
  assert sum(elements) == sum(x.size for x in jax.tree.leaves(params))


HOST = """
import json, os, sys
import jax
source, target, report = sys.argv[1:]
jax.distributed.initialize(num_processes=2, process_id=int(os.environ["JAX_PROCESS_ID"]))
import safetensors
from gspo_jax import sharding
from gspo_jax.models import hf
from gspo_jax.settings.mesh import MeshConfig
opened = []
safe_open = safetensors.safe_open
def recorded(path, framework):
  opened.append(path.name)
  return safe_open(path, framework=framework)
safetensors.safe_open = recorded
mesh = sharding.make_mesh(MeshConfig(1, 1, 8, 1))
params, config = hf.load(source, mesh=mesh)
hf.save(target, params, config, shard_size_bytes=20_000)
with open(report, "w") as file:
  json.dump(opened, file)
"""


@pytest.mark.long
def test_a_host_opens_only_the_files_that_it_needs(tmp_path):
  """Two processes of four devices; experts over all eight, so each process holds half of them."""
  source, target = tmp_path / "source", tmp_path / "target"
  params = saved(source, MOE, shard_size_bytes=1)  # a file for each tensor
  weight_map = json.loads((source / INDEX).read_text())["weight_map"]
  reports = [tmp_path / "opened0", tmp_path / "opened1"]
  on_two_processes(lambda i: [sys.executable, "-c", HOST, source, target, reports[i]], devices=4)
  opened = [set(json.loads(report.read_text())) for report in reports]
  for process, files in enumerate(opened):
    elsewhere = [f".experts.{e}." for e in range(MOE.num_experts) if e // 4 != process]
    expected = {
      file for name, file in weight_map.items() if not any(part in name for part in elsewhere)
    }
    assert files == expected
  assert opened[0] | opened[1] == set(weight_map.values()) and opened[0] != opened[1]
  assert_same(hf.load(target)[0], params)  # gathered from both processes, written by one


# Strict

FIRST = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
  "edit, message",
  [
    (lambda t: t.pop(FIRST), f"1 tensors are missing: {FIRST}$"),
    (lambda t: t.pop("lm_head.weight"), "missing: lm_head.weight"),
    (lambda t: t.update(extra=t[FIRST]), r"1 tensors belong to no parameter: extra \(model.safe"),
    (lambda t: [t.pop(n) for n in list(t) if ".1." in n], r"11 tensors .*k_norm.* and 3 more$"),
    (
      lambda t: t.update({FIRST: t[FIRST].T}),
      rf"{FIRST} has shape \(32, 64\).*asks for \(64, 32\)",
    ),
    (lambda t: t.update({FIRST: t[FIRST].astype(np.int8)}), f"{FIRST} is of type I8"),
    (lambda t: t.update({FIRST[:-6] + "bias": t[FIRST][:, 0]}), "belong to no.*q_proj.bias"),
  ],
  ids=["missing", "no head", "leftover", "capped list", "shape", "quantised", "bias"],
)
def test_files_that_do_not_fit_the_model(edit, message, tmp_path):
  saved(tmp_path, DENSE)
  edit_tensors(tmp_path, edit)
  with pytest.raises(hf.CheckpointError, match=message) as error:
    hf.load(tmp_path)
  assert isinstance(error.value, ValueError) and str(tmp_path) in str(error.value)


def test_old_rotary_constants_are_ignored(tmp_path):
  params = saved(tmp_path, LLAMA)
  constant = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
  edit_tensors(tmp_path, lambda t: t.update(constant))
  assert_same(hf.load(tmp_path)[0], params)


def test_a_tied_head_may_be_in_the_files_if_it_is_the_embedding(tmp_path):
  params = saved(tmp_path, TIED)
  embed = "model.embed_tokens.weight"
  edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t[embed]}))
  assert_same(hf.load(tmp_path)[0], params)  # both, as Qwen3-0.6B was published
  edit_tensors(tmp_path, lambda t: t.pop(embed))
  assert_same(hf.load(tmp_path)[0], params)  # the head alone
  edit_tensors(tmp_path, lambda t: t.update({embed: t["lm_head.weight"] + np.eye(64, 32) / 2**9}))
  mesh = sharding.make_mesh(MeshConfig(1, 4, 1, 2))
  for layout in (None, mesh):
    with pytest.raises(hf.CheckpointError, match=r"lm_head\.weight differs from model\.embed"):
      hf.load(tmp_path, mesh=layout)
  edit_config(tmp_path, tie_word_embeddings=False)
  assert hf.load(tmp_path)[0].head is not None


def test_a_tied_head_in_the_index_alone_is_ignored(tmp_path):
  params = saved(tmp_path, TIED, shard_size_bytes=20_000)
  index = json.loads((tmp_path / INDEX).read_text())
  index["weight_map"]["lm_head.weight"] = index["weight_map"]["model.embed_tokens.weight"]
  (tmp_path / INDEX).write_text(json.dumps(index))
  assert_same(hf.load(tmp_path)[0], params)


@pytest.mark.parametrize("config", [TIED, DENSE])
def test_a_model_saved_without_its_head(config, tmp_path):
  """transformers begins no name with "model." then."""
  params = saved(tmp_path, config)
  tensors = load_file(tmp_path / SINGLE)
  tensors.pop("lm_head.weight", None)
  save_file({x.removeprefix("model."): t for x, t in tensors.items()}, tmp_path / SINGLE)
  if config == TIED:
    assert_same(hf.load(tmp_path)[0], params)
  else:
    with pytest.raises(hf.CheckpointError, match=r"1 tensors are missing: lm_head\.weight$"):
      hf.load(tmp_path)


def test_broken_directories(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"config\.json"):
    hf.load(tmp_path / "nowhere")
  saved(tmp_path, DENSE, shard_size_bytes=20_000)
  first = sorted(tmp_path.glob("*.safetensors"))[0]
  whole = first.read_bytes()
  first.write_bytes(whole[:-1])
  with pytest.raises(hf.CheckpointError, match=f"{first.name}: not a complete safetensors file"):
    hf.load(tmp_path)
  first.unlink()
  with pytest.raises(FileNotFoundError, match=first.name):
    hf.load(tmp_path)
  first.write_bytes(whole)
  index = json.loads((tmp_path / INDEX).read_text())
  index["weight_map"][FIRST] = sorted(tmp_path.glob("*.safetensors"))[-1].name
  (tmp_path / INDEX).write_text(json.dumps(index))
  with pytest.raises(hf.CheckpointError, match=f"{INDEX} disagree about {FIRST}"):
    hf.load(tmp_path)
  (tmp_path / INDEX).write_text("{}")
  with pytest.raises(hf.CheckpointError, match="no weight_map"):
    hf.load(tmp_path)
  (tmp_path / INDEX).unlink()
  hf.load(tmp_path)  # all the files, where there is no index
  (tmp_path / "model-copy.safetensors").write_bytes(whole)
  with pytest.raises(hf.CheckpointError, match=f"is both in .*{first.name} and in model-copy"):
    hf.load(tmp_path)
  for path in tmp_path.glob("*.safetensors"):
    path.unlink()
  with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
    hf.load(tmp_path)
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(hf.CheckpointError, match="not JSON"):
    hf.load(tmp_path)


DAMAGED = {  # file: contents
  "config.json": [
    b"",
    b"[1]",
    b"[" * 10**5 + b"]" * 10**5,
    b'{"hidden_size": 8, "hidden_size": 8}',
    *(dict(hidden_size=size) for size in (0, -8, 1.5, "8", 10**12, [8], math.nan)),
    *(dict(rope_parameters=rope) for rope in (3, [1], dict(full_attention=3))),
    dict(model_type=[1]),
    dict(layer_types=3),
    dict(mlp_only_layers=["a"]),
  ],
  "model.safetensors": [b"", b"\0" * 4096, b"\xff" * 4096, slice(8), slice(-1), slice(100)],
}


@pytest.mark.parametrize(
  "file, content", [(file, content) for file in DAMAGED for content in DAMAGED[file]]
)
def test_a_damaged_directory_is_found_by_its_headers(file, content, tmp_path):
  saved(tmp_path, MOE)
  assert hf.check(tmp_path) == MOE
  path = tmp_path / file
  if isinstance(content, dict):
    content = json.dumps(json.loads(path.read_text()) | content).encode()
  path.write_bytes(path.read_bytes()[content] if isinstance(content, slice) else content)
  with pytest.raises(hf.CheckpointError, match=f"^{path}: "):
    hf.check(tmp_path)


def test_a_mesh_that_does_not_divide_a_parameter(tmp_path):
  saved(tmp_path, DENSE)
  mesh = sharding.make_mesh(MeshConfig(1, 1, 1, 8))
  with pytest.raises(ValueError, match=r"attention\.q .*N=4 is not divisible by mesh\.tensor=8"):
    hf.load(tmp_path, mesh=mesh)


def test_what_cannot_be_saved(tmp_path):
  params = params_of(DENSE)
  with pytest.raises(ValueError, match="not the parameters of this model_config"):
    hf.save(tmp_path, params, TIED)
  with pytest.raises(ValueError, match=r"params\.embed has shape \(64, 32\).*\(65, 32\)"):
    hf.save(tmp_path, params, dataclasses.replace(DENSE, vocab_size=65))
  with pytest.raises(ValueError, match="dtype=int8 is not one of float32"):
    hf.save(tmp_path, params, DENSE, dtype="int8")
  with pytest.raises(ValueError, match="no Hugging Face architecture has num_experts=8"):
    config = dataclasses.replace(MOE, qk_norm=False)
    hf.save(tmp_path, params_of(config), config)
  with pytest.raises(ValueError, match="multiple of num_heads=5"):
    config = dataclasses.replace(LLAMA, num_heads=5, num_kv_heads=1)
    hf.save(tmp_path, params_of(config), config)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_tensor_that_is_not_finite_is_named(value, tmp_path):
  saved(tmp_path, MIXTRAL)
  name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
  tensors = load_file(tmp_path / SINGLE)
  tensors[name][4, 5:7] = value
  save_file(tensors, tmp_path / SINGLE)
  expected = rf"^{tmp_path}: {name} has 2 values that are NaN or infinite$"
  with pytest.raises(hf.CheckpointError, match=expected):
    hf.load(tmp_path, mesh=sharding.make_mesh(MeshConfig(1, 2, 2, 2)), dtype=jnp.bfloat16)


def test_values_beyond_float16_are_counted_and_nothing_is_written(tmp_path):
  params = params_of(DENSE)
  blocks = params.blocks[0]
  large = blocks.ffn.down.at[1, 2, 3].set(1e5)
  params = params.replace(blocks=(blocks.replace(ffn=blocks.ffn.replace(down=large)),))
  message = (
    "model.layers.1.mlp.down_proj.weight has 1 value that is NaN or beyond float16, whose largest"
  )
  with pytest.raises(ValueError, match=message):
    hf.save(tmp_path / "narrow", params, DENSE, dtype="float16")
  assert not (tmp_path / "narrow").exists()
  hf.save(tmp_path / "wide", params, DENSE, dtype="bfloat16")
  with pytest.raises(hf.CheckpointError, match=message):
    hf.load(tmp_path / "wide", dtype=jnp.float16)
