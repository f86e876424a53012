"""A server in this process that speaks as much of the Hugging Face hub's API as downloads need, and
a bucket that is a directory."""

import contextlib
import functools
import hashlib
import http.server
import json
import re
import threading
import time
import urllib.parse

from etils.epath import backend
from fsspec.implementations import local
from fsspec.registry import _registry
from huggingface_hub import constants

TOKEN = "hf_of_somebody_with_access"


class FakeHub:
  """Repositories at commits. As on the hub, large files are at another host, whose addresses are
  good for a while.

  Attributes:
    gated: repositories that ask for `TOKEN`.
    break_off: bytes of a large file after which a connection ends; 0: never.
    break_offs: how often that happens.
    stall: whether such a connection stays open without a byte more; `stalled` is set then.
    expire: addresses that were given out until now are not good any more, if called.
    requests: (method, path, Range) in their order.
  """

  def __init__(self):
    self.commits, self.branches, self.large = {}, {}, {}
    self.break_off, self.break_offs = 0, 1000
    self.stall, self.stalled = False, threading.Event()
    self.gated, self.requests, self._age = set(), [], 0
    self._http = http.server.ThreadingHTTPServer(
      ("127.0.0.1", 0), functools.partial(_Handler, self)
    )
    self.url = f"http://127.0.0.1:{self._http.server_port}"
    threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

  def close(self):
    self._http.shutdown()
    self._http.server_close()

  def expire(self):
    self._age += 1

  def push(self, id_, directory, branch="main"):
    """A commit with the files of a directory."""
    files = {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file()}
    commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
    self.commits[id_, commit] = files
    self.branches[id_, branch] = commit
    return commit

  def read(self):
    """Bytes of large files requested in ranges."""
    ranges = [re.fullmatch(r"bytes=(\d+)-(\d+)", r or "") for _, _, r in self.requests]
    return sum(int(r[2]) - int(r[1]) + 1 for r in ranges if r)

  def use(self, monkeypatch, cache, *, token=None, offline=False):
    """Has `huggingface_hub` use this server and this cache, as its environment variables do."""
    template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", self.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    for name in "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN":
      monkeypatch.delenv(name, raising=False)
    if token:
      monkeypatch.setenv("HF_TOKEN", token)

  def environment(self, cache):
    """Environment variables for another process."""
    return dict(HF_ENDPOINT=self.url, HF_HUB_CACHE=str(cache), HF_HUB_DISABLE_TELEMETRY="1")


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"

  def __init__(self, hub, *args):
    self.hub = hub
    super().__init__(*args)

  def log_message(self, *_):
    pass

  def do_HEAD(self):
    self.do_GET()

  def do_GET(self):
    hub, path = self.hub, urllib.parse.unquote(self.path)
    hub.requests.append((self.command, path, self.headers.get("Range")))
    if match := re.fullmatch(r"/large/(\d+)/(\w+)", path):
      assert "Authorization" not in self.headers  # it is for the hub alone
      if int(match[1]) != hub._age:
        return self.answer(403, b"expired")
      return self.ranged(hub.large[match[2]])
    match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^?]+)\?.*", path) or re.fullmatch(
      r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path
    )
    if not match:  # Further requests of the library.
      return self.answer(404)
    id_, revision, *file = match.groups()
    if not any(id_ == name for name, _ in hub.commits):
      return self.answer(404, code="RepoNotFound")
    if id_ in hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
      return self.answer(401, code="GatedRepo")
    commit = hub.branches.get((id_, revision), revision)
    if (files := hub.commits.get((id_, commit))) is None:
      return self.answer(404, code="RevisionNotFound")
    if not file:
      rows = [dict(type="file", path=n, size=len(c), oid="0" * 40) for n, c in files.items()]
      return self.answer(200, json.dumps(rows).encode())
    about = {"X-Repo-Commit": commit}
    if (content := files.get(file[0])) is None:
      return self.answer(404, code="EntryNotFound", **about)
    if not file[0].endswith(".safetensors"):
      return self.answer(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', **about)
    digest = hashlib.sha256(content).hexdigest()
    hub.large[digest] = content
    url = f"http://localhost:{self.server.server_port}/large/{hub._age}/{digest}"
    linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
    return self.answer(302, Location=url, **about | linked)

  def ranged(self, content):
    total, status = len(content), 200
    start = 0
    if header := self.headers.get("Range"):
      first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", header).groups()
      start, status = int(first), 206
      content = content[start : int(last) + 1 if last else None]
    part = {"Content-Range": f"bytes {start}-{start + len(content) - 1}/{total}"}
    self.answer(status, content, **part if status == 206 else {})

  def answer(self, status, content=b"", code="", **headers):
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name, value)
    if code:
      self.send_header("X-Error-Code", code)
    self.send_header("Content-Length", str(len(content)))
    self.end_headers()
    if self.command == "HEAD":
      return
    most = self.hub.break_off
    if most and self.path.startswith("/large/") and len(content) > most and self.hub.break_offs:
      self.hub.break_offs -= 1
      content, self.close_connection = content[:most], True
    with contextlib.suppress(ConnectionError):
      self.wfile.write(content)
      if self.close_connection and self.hub.stall:
        self.hub.stalled.set()
        time.sleep(60)


def bucket(monkeypatch, root):
  """Maps gs://bucket/x to ROOT/bucket/x; returns a list of the ranges read."""
  ranges = []

  class Bucket(local.LocalFileSystem):
    protocol = ("gs", "gcs")
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
      path = str(path).removeprefix("gs://").removeprefix("gcs://")
      return path if path.startswith(str(root)) else f"{root}/{path}".rstrip("/")

    def cat_file(self, path, start=None, end=None, **options):
      ranges.append((path, start, end))
      return super().cat_file(path, start, end, **options)

  backend.fsspec_backend._get_filesystem.cache_clear()
  for name in "gs", "gcs":
    monkeypatch.setitem(_registry, name, Bucket)
  return ranges
