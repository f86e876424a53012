"""The server as a process: its command line, a checkpoint, SIGTERM."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import jax
import pytest
from support.command_line import ROOT, SMALL_MODEL, environment
from support.configs import config_of

from configs import tiny
from gspo_jax import serve
from gspo_jax.models import hf, transformer

uvicorn = pytest.importorskip("uvicorn", reason="pip install -e '.[serve]'")

TOKEN = "GSPO_JAX_SERVE_TOKEN"
MODEL = [f"--config.{flag}" for flag in SMALL_MODEL]


def command(*flags):
  return [sys.executable, "-m", "gspo_jax.serve", "--config=tiny", *MODEL, *flags]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
  small = {k.replace(".", "__"): int(v) for k, v in (flag.split("=") for flag in SMALL_MODEL)}
  model = config_of(tiny.get_config, **small).model
  directory = tmp_path_factory.mktemp("weights")
  hf.save(directory, transformer.init(model, jax.random.key(0)), model)
  return directory


@pytest.mark.slow  # three processes that import JAX
def test_one_line_for_what_cannot_be_served(tmp_path):
  for flags, message in (
    ([f"--weights={tmp_path}/none"], "is not a directory"),
    (["--config.engine.slot=3"], "did you mean engine.slots?"),
    (["--weights=random", "--host=0.0.0.0"], f"set {TOKEN} to a secret"),
  ):
    done = subprocess.run(
      command(*flags), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_the_first_moment_ends_it(monkeypatch, number):
  """As soon as it has said where it listens, when uvicorn has not begun."""

  async def nothing(scope, receive, send):
    raise AssertionError("nobody has asked")

  server = uvicorn.Server(uvicorn.Config(nothing, lifespan="off", log_level="error"))
  stderr = SimpleNamespace(write=lambda _: os.kill(os.getpid(), number), flush=lambda: None)
  monkeypatch.setattr(serve.sys, "stderr", stderr)
  before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
  late = threading.Timer(5, lambda: setattr(server, "should_exit", True))
  late.start()
  begun = time.monotonic()
  try:
    serve.run(server, serve._listen("127.0.0.1", 0), "it listens")
  finally:
    late.cancel()
    for s, handler in before.items():
      signal.signal(s, handler)
  assert time.monotonic() - begun < 4


@pytest.mark.slow  # a process that compiles
def test_a_server_from_its_start_to_its_end(weights):
  process = subprocess.Popen(
    command(f"--weights={weights}", "--port=0", "--slots=4", "--model_name=sums"),
    cwd=ROOT, env=environment(**{TOKEN: "secret"}), stderr=subprocess.PIPE, text=True,
  )  # fmt: skip
  try:
    line = next(line for line in process.stderr if "http://" in line)
    address = re.search(r"http://127\.0\.0\.1:\d+", line)[0]
    said = []
    threading.Thread(target=lambda: said.extend(process.stderr), daemon=True).start()
    assert "4 slots of 18 tokens" in line and "SIGTERM" in line

    def ask(path, body=None, token="secret"):
      headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
      data = None if body is None else json.dumps(body).encode()
      request = urllib.request.Request(address + path, data, headers)
      with urllib.request.urlopen(request, timeout=120) as response:
        return response.read()

    body = dict(model="sums", prompt="12+34=", max_tokens=10, seed=1)
    answer = json.loads(ask("/v1/completions", body))
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")
    with pytest.raises(urllib.error.HTTPError, match="401"):
      ask("/v1/completions", body, token="guess")
    reload = dict(method="reload_weights", kwargs=dict(weights_path=str(weights)))
    assert json.loads(ask("/collective_rpc", reload)) == dict(results=[None])
    assert json.loads(ask("/v1/completions", body))["choices"] != []
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert not said, "".join(said)
  finally:
    if process.poll() is None:
      os.kill(process.pid, signal.SIGKILL)
      process.wait()
