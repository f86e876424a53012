"""Repositories of the Hugging Face hub, from a server in this process that speaks its API."""

import json
import os
import re
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from fsspec.implementations import local
from huggingface_hub import constants
from safetensors.numpy import save_file
from support import fake_hub

from gspo_jax.system import hub

ID, FILE = "org/model", "model.safetensors"


@pytest.fixture
def server(monkeypatch):
  opened = fake_hub.FakeHub()
  monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
  for module in "file_download", "utils._http":
    monkeypatch.setattr(f"huggingface_hub.{module}.time.sleep", lambda _: None)
  yield opened
  opened.close()


@pytest.fixture
def source(tmp_path):
  """A repository's files."""
  path = tmp_path / "source"
  path.mkdir()
  (path / "config.json").write_text('{"model_type": "llama"}')
  (path / "tokenizer.json").write_text("{}")
  (path / "README.md").write_text("not needed")
  save_file({"a": np.arange(200_000, dtype=np.float32)}, path / FILE)
  return path


@pytest.fixture
def repository(server, source, tmp_path, monkeypatch):
  """It, as it was pushed, and in use with an empty cache."""
  server.use(monkeypatch, tmp_path / "cache")
  server.push(ID, source)
  return hub.Repository.from_name(ID)


def arrived(repository, source):
  return (repository.directory / FILE).read_bytes() == (source / FILE).read_bytes()


def test_what_is_a_repository_and_what_a_path(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "org/model").mkdir(parents=True)
  for name in "org/small", "HuggingFaceTB/SmolLM2-135M-Instruct", "org/model@v1", "a/b@refs/pr/1":
    assert hub.is_id(name), name
  for name in "org/model", "random", "/a/b", "./a/b", "a/b/c", "gs://a/b", "~/a", "a/b@", "":
    assert not hub.is_id(name), name


@pytest.mark.parametrize("name", ["https://huggingface.co/org/model", "s3://bucket/model"])
def test_an_address_is_no_directory(name):
  with pytest.raises(ValueError, match=f"^{name}: .*is not supported.*gs://BUCKET.*OWNER/NAME"):
    hub.directory(name)


def test_the_directory_has_all_but_the_weights(server, source, tmp_path, monkeypatch):
  server.use(monkeypatch, tmp_path / "cache")
  commit = server.push(ID, source)
  assert hub.pinned(ID) == f"{ID}@{commit}" == hub.pinned(f"{ID}@main")
  directory = hub.directory(ID)
  assert sorted(path.name for path in directory.iterdir()) == ["config.json", "tokenizer.json"]
  assert str(directory).startswith(str(tmp_path / "cache"))


def test_a_branch_that_moves_on_and_a_revision(server, source, tmp_path, monkeypatch):
  server.use(monkeypatch, tmp_path / "cache")
  first = hub.pinned(server.push(ID, source) and ID)
  (source / "config.json").write_text('{"model_type": "qwen3"}')
  second = server.push(ID, source)
  server.push(ID, source, branch="v2")
  assert hub.pinned(ID) == f"{ID}@{second}" == hub.pinned(f"{ID}@v2") != first
  assert hub.pinned(first) == first
  assert json.loads((hub.directory(first) / "config.json").read_text())["model_type"] == "llama"


def test_a_download_is_continued_and_counted(server, source, repository):
  size = (source / FILE).stat().st_size
  server.break_off = 100_000
  repository.download([FILE])  # every connection ends early, and the next one goes on
  ranges = [r for method, path, r in server.requests if method == "GET" and "large" in path]
  assert ranges == [None, *(f"bytes={position}-" for position in range(100_000, size, 100_000))]
  assert arrived(repository, source)
  server.requests.clear()
  repository.download([FILE])
  assert not [r for r in server.requests if r[0] == "GET"]


DOWNLOADS = {
  "ours": f"hub.Repository.from_name({ID!r}).download([{FILE!r}])",
  "the library's": f"huggingface_hub.hf_hub_download({ID!r}, {FILE!r})",
}


@pytest.mark.parametrize("name", ["ours", pytest.param("the library's", marks=pytest.mark.long)])
def test_after_kill_9_our_download_resumes_and_the_librarys_begins_anew(
  name, server, source, repository, tmp_path
):
  """If huggingface_hub resumes one day, `Repository.download` has no reason any more."""
  code = "import huggingface_hub; from huggingface_hub import constants; "
  code += "from gspo_jax.system import hub; constants.DOWNLOAD_CHUNK_SIZE = 50_000; "
  code += DOWNLOADS[name]
  argv, env = [sys.executable, "-c", code], server.environment(tmp_path / "cache")
  env = os.environ | env | dict(JAX_PLATFORMS="cpu", HF_HUB_DISABLE_PROGRESS_BARS="1")
  server.break_off, server.stall = 600_000, True
  with subprocess.Popen(argv, env=env) as process:
    assert server.stalled.wait(60)
    until = time.monotonic() + 30
    while not any(p.stat().st_size for p in tmp_path.glob("cache/**/*.incomplete")):
      assert time.monotonic() < until
      time.sleep(0.05)
    process.kill()
  server.break_off = 0
  server.requests.clear()
  subprocess.run(argv, env=env, check=True)
  (start,) = [r for method, path, r in server.requests if method == "GET" and "large" in path]
  assert re.fullmatch(r"bytes=\d{5,6}-", start) if name == "ours" else start is None
  assert arrived(repository, source)


@pytest.mark.parametrize("size", [1000, 10**6])
def test_what_did_not_arrive_as_it_was_is_removed(size, source, repository):
  """More than the whole file before it is continued, as two processes may leave it."""
  partial = hub._Remote.find(repository, FILE).partial
  partial.parent.mkdir(parents=True, exist_ok=True)
  partial.write_bytes(bytes(size))
  if size < (source / FILE).stat().st_size:
    with pytest.raises(hub.HubError, match="was damaged on its way from the hub"):
      repository.download([FILE])
  repository.download([FILE])
  assert arrived(repository, source)


def test_a_gated_file_is_downloaded_with_the_token(server, source, tmp_path, monkeypatch):
  """Which the host of large files does not see: the server looks."""
  server.use(monkeypatch, tmp_path / "cache", token=fake_hub.TOKEN)
  server.gated.add(ID)
  server.push(ID, source)
  repository = hub.Repository.from_name(ID)
  repository.download([FILE])
  assert arrived(repository, source)


def test_a_range_that_breaks_off_is_asked_for_again(server, source, repository):
  _, read = repository.reader(FILE)
  server.break_off, server.break_offs = 100, 2
  assert read(10, 500) == (source / FILE).read_bytes()[10:500]


def test_ranges_and_addresses_that_expire(server, source, tmp_path, monkeypatch):
  server.use(monkeypatch, tmp_path / "cache", token=fake_hub.TOKEN)
  server.gated.add(ID)
  server.push(ID, source)
  size, read = hub.Repository.from_name(ID).reader(FILE)
  content = (source / FILE).read_bytes()
  assert size == len(content) and read(10, 500) == content[10:500]
  server.expire()
  assert read(500, size) == content[500:]
  assert server.read() == 490 + 2 * (size - 500)


def test_without_a_network(server, repository, tmp_path, monkeypatch):
  assert repository.directory
  server.use(monkeypatch, tmp_path / "cache", offline=True)
  server.requests.clear()
  assert hub.pinned(ID) == repository.name
  offline = hub.Repository.from_name(ID)
  assert offline.directory == repository.directory
  for use in lambda: offline.files, lambda: offline.reader(FILE):
    with pytest.raises(hub.HubError, match=f"{repository.name} is not completely in .*OFFLINE"):
      use()
  assert not server.requests


CASES = {
  "unknown": (
    "org/nothing",
    "org/nothing is neither a local directory nor a public repository of http.*TOKEN",
  ),
  "revision": (f"{ID}@v9", f"{ID} has no revision 'v9': .*/{ID}/tree/main"),
  "gated": ("org/gated", "org/gated is gated: ask for access at http.*/org/gated, .*auth login"),
  "file": ("org/empty", "org/empty has no config.json: "),
  "offline": (ID, f"{ID} is not completely in the cache, .*HF_HUB_OFFLINE is set"),
  "down": (
    ID,
    f"{ID} is not a local directory and not completely in .*not answer.*ConnectError.*: check the "
    "network and try again .the downloaded part is kept., or name a local copy's directory",
  ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_read_is_told(case, server, source, tmp_path, monkeypatch, caplog):
  name, message = CASES[case]
  for id_ in ID, "org/gated":
    server.push(id_, source)
  server.gated.add("org/gated")
  (tmp_path / "empty").mkdir()
  (tmp_path / "empty/README.md").write_text("")
  server.push("org/empty", tmp_path / "empty")
  server.use(monkeypatch, tmp_path / "cache", offline=case == "offline")
  if case == "down":
    server.close()
  with pytest.raises(hub.HubError, match=f"^{message}"):
    hub.pinned(name)
  assert not caplog.records  # The library logs every attempt.


def test_a_disk_that_is_too_small(repository, monkeypatch):
  assert repository.directory
  monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=10**5))
  with pytest.raises(hub.HubError, match=r"needs 0\.0 GB more in .*/cache/.*: set HF_HOME"):
    repository.download([FILE])


def test_a_bucket_that_cannot_be_read(monkeypatch, tmp_path):
  def refused(*_, **__):
    raise PermissionError("no credentials")

  fake_hub.bucket(monkeypatch, tmp_path)
  monkeypatch.setattr(local.LocalFileSystem, "ls", refused)
  with pytest.raises(hub.HubError, match="gs://bucket/model: PermissionError: no credentials"):
    hub.directory("gs://bucket/model")
