"""Weights that are not on this machine: of the Hugging Face hub, and of a bucket."""

import json
import math
import sys

import jax
import numpy as np
import pytest
from models.hf.test_convert import DAMAGED, MOE, TIED, assert_same, fuse_experts, saved
from models.hf.test_convert import edit_tensors as edited
from safetensors.numpy import load_file, save_file
from support import fake_hub
from support.command_line import on_two_processes

from gspo_jax import sharding
from gspo_jax.models import hf, transformer
from gspo_jax.models.hf import architectures, convert
from gspo_jax.models.hf.ranges import RangedFile
from gspo_jax.settings import sizes
from gspo_jax.settings.mesh import MeshConfig

ID = "org/model"


@pytest.fixture
def server():
  opened = fake_hub.FakeHub()
  yield opened
  opened.close()


def tensor_bytes(directory):
  return sum(x.nbytes for path in directory.glob("*.safetensors") for x in load_file(path).values())


@pytest.mark.parametrize("mesh_sizes", [None, (1, 2, 2, 2)])
@pytest.mark.parametrize("shard_size_bytes", [pytest.param(10**9, marks=pytest.mark.long), 20_000])
def test_a_repository_is_downloaded_once(
  shard_size_bytes, mesh_sizes, server, tmp_path, monkeypatch
):
  cache = tmp_path / "cache"
  params = saved(tmp_path / "source", MOE, shard_size_bytes=shard_size_bytes)
  server.use(monkeypatch, cache)
  commit = server.push(ID, tmp_path / "source")
  mesh = mesh_sizes and sharding.make_mesh(MeshConfig(*mesh_sizes))
  assert hf.check(ID) == MOE  # From the headers.
  assert server.read() < 2**18 * len(list((tmp_path / "source").glob("*.safetensors"))) + 1
  assert not list(cache.rglob("*.safetensors"))
  loaded, config = hf.load(ID, mesh=mesh)
  assert config == MOE
  assert_same(loaded, params)
  server.use(monkeypatch, cache, offline=True)
  server.requests.clear()
  assert_same(hf.load(f"{ID}@{commit}")[0], params)
  assert not server.requests


@pytest.mark.parametrize("config, fused", [(MOE, False), (MOE, True), (TIED, False)])
@pytest.mark.parametrize(
  "mesh_sizes", [None, (1, 2, 2, 2), pytest.param((2, 4, 1, 1), marks=pytest.mark.long)]
)
def test_of_a_bucket_every_byte_is_read_once(config, fused, mesh_sizes, tmp_path, monkeypatch):
  """For any layout: parts of split rows come from other devices."""
  monkeypatch.setattr(convert, "_READ", 400)  # tensors are read in several pieces
  source = tmp_path / "bucket/model"
  params = saved(source, config)
  if fused:
    edited(source, fuse_experts)
  ranges = fake_hub.bucket(monkeypatch, tmp_path)
  mesh = mesh_sizes and sharding.make_mesh(MeshConfig(*mesh_sizes))
  loaded, _ = hf.load("gs://bucket/model", mesh=mesh)
  assert_same(loaded, params)
  if mesh:
    shardings = transformer.shardings(config, sharding.TRAIN, mesh)
    assert jax.tree.map(lambda x: x.sharding, loaded) == shardings
  headers = [r for r in ranges if r[1] == 0]
  read = sum(stop - start for _, start, stop in ranges if start)
  copies = 2 if fused else 1  # gate and up lie in the same rows
  assert len(headers) == 1 and tensor_bytes(source) <= read <= copies * tensor_bytes(source)


@pytest.mark.parametrize("content", DAMAGED["model.safetensors"])
def test_a_damaged_file_of_a_bucket(content, tmp_path, monkeypatch):
  saved(tmp_path / "bucket/model", MOE)
  path = tmp_path / "bucket/model/model.safetensors"
  path.write_bytes(path.read_bytes()[content] if isinstance(content, slice) else content)
  fake_hub.bucket(monkeypatch, tmp_path)
  with pytest.raises(hf.CheckpointError, match=r"^gs://bucket/model/model\.safetensors: not "):
    hf.check("gs://bucket/model")


@pytest.mark.parametrize(
  "file, message", [("pytorch_model.bin", "save_pretrained"), ("model.Q4_1.gguf", "GGUF")]
)
def test_weights_of_another_format(file, message, server, tmp_path, monkeypatch):
  saved(tmp_path / "source", TIED)
  (tmp_path / "source/model.safetensors").rename(tmp_path / "source" / file)
  server.use(monkeypatch, tmp_path / "cache")
  server.push(ID, tmp_path / "source")
  with pytest.raises(FileNotFoundError, match=f"{ID}@.*: no .*safetensors file.*{message}"):
    hf.load(ID)


HOST = """
import os, sys
process = int(os.environ["JAX_PROCESS_ID"])
cache, source, target, *sizes = sys.argv[1:]
os.environ["HF_HUB_CACHE"] = f"{cache}{process}"
import jax
jax.distributed.initialize(num_processes=2, process_id=process)
from gspo_jax import sharding
from gspo_jax.models import hf
from gspo_jax.settings.mesh import MeshConfig
mesh = sharding.make_mesh(MeshConfig(*map(int, sizes)))
params, config = hf.load(source, mesh=mesh)
hf.save(target, params, config)
"""


@pytest.mark.parametrize("mesh_sizes", [(1, 1, 8, 1), (1, 8, 1, 1)])
@pytest.mark.long
def test_two_hosts_read_half_each(mesh_sizes, server, tmp_path):
  """With experts over all devices, and with every parameter split within its rows."""
  params = saved(tmp_path / "source", MOE)
  server.push(ID, tmp_path / "source")
  argv = [sys.executable, "-c", HOST, tmp_path / "cache", ID, tmp_path / "out", *mesh_sizes]
  variables = server.environment(tmp_path)
  on_two_processes(lambda _: list(map(str, argv)), devices=4, **variables)
  assert_same(hf.load(tmp_path / "out")[0], params)
  assert not list(tmp_path.glob("cache*/**/*.safetensors"))
  total, headers = tensor_bytes(tmp_path / "source"), 2 * 2**18
  assert total <= server.read() - headers < 1.05 * total


def test_the_index_is_enough_to_know_the_names(server, tmp_path, monkeypatch):
  """The repository lacks a file of the index."""
  saved(tmp_path / "source", MOE, shard_size_bytes=20_000)
  index = tmp_path / "source/model.safetensors.index.json"
  file = max(json.loads(index.read_text())["weight_map"].values())
  (tmp_path / "source" / file).unlink()
  server.use(monkeypatch, tmp_path / "cache")
  server.push(ID, tmp_path / "source")
  with pytest.raises(ValueError, match=f"{ID}@.* has no {file}"):
    hf.check(ID)


def test_numbers_of_all_types(tmp_path, monkeypatch):
  saved(tmp_path / "bucket/model", TIED, dtype="bfloat16")
  edited(
    tmp_path / "bucket/model",
    lambda t: t.update({k: v.astype(np.float16) for k, v in t.items() if "mlp" in k}),
  )
  local = hf.load(tmp_path / "bucket/model")[0]
  fake_hub.bucket(monkeypatch, tmp_path)
  assert_same(hf.load("gs://bucket/model")[0], local)


def test_a_scalar_has_no_rows(tmp_path):
  save_file({"scale": np.array(2.5, np.float32), "bias": np.arange(3)}, tmp_path / "file")
  content = (tmp_path / "file").read_bytes()
  file = RangedFile(len(content), lambda start, stop: content[start:stop])
  value = file.get_slice("scale")[()]
  assert value.shape == () and value == 2.5


@pytest.mark.parametrize("mesh_sizes", [(1, 8, 1, 1), (2, 2, 1, 2), (1, 1, 8, 1)])
def test_of_a_published_model_a_device_reads_an_eighth(mesh_sizes):
  """For each parameter, by sizes alone."""
  config = sizes.PUBLISHED["Qwen3-30B-A3B-Base"]
  mesh = sharding.make_mesh(MeshConfig(*mesh_sizes))
  for leaf in convert.leaves_of(config, transformer.table(config), architectures.names(config)):
    part = convert._reading(leaf, mesh).shard_shape(leaf.shape)
    assert 8 * math.prod(part) == math.prod(leaf.shape), leaf.name
