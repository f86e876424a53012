"""Real vLLM, on the CPU: sampling, new weights in place, a server that is killed and comes back.

  GSPO_VLLM_PYTHON=PYTHON python -m pytest -m slow -n0 tests/sampling/test_vllm.py

PYTHON is that of an environment with vLLM, which `bash .ci/vllm` makes. A server takes a minute to
start on two cores.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import time
import urllib.request

import jax
import numpy as np
import pytest
from support.command_line import command, environment, rows
from support.configs import config_of
from support.small_models import next_logp

from configs import tiny
from gspo_jax.models import hf, transformer
from gspo_jax.sampling import Driver, ServersGone, Workload, sample_rollout
from gspo_jax.sampling.driver import new_groups
from gspo_jax.sampling.servers.engine import ServerEngine
from gspo_jax.settings.model import REFERENCE
from gspo_jax.settings.sampling import EngineConfig, SamplingConfig, ServerConfig
from gspo_jax.settings.sizes import tiny_dense, tiny_moe
from gspo_jax.structs import Prompt

PYTHON = os.environ.get("GSPO_VLLM_PYTHON", "")
pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    not PYTHON, reason="GSPO_VLLM_PYTHON names no Python with vLLM; bash .ci/vllm makes one"
  ),
]
FLAGS = "--dtype float32 --enforce-eager --skip-tokenizer-init --enable-scale-out"
MOST_S = 1200.0  # of half a run, on a machine that has other things to do
SMALL = dict(rope_theta=10.0, max_position_embeddings=256)
DENSE = dataclasses.replace(tiny_dense(264), **SMALL)
MOE = dataclasses.replace(tiny_moe(264), **SMALL)
NO_EXPERTS = dict(model__num_experts=0, model__experts_per_token=0, model__moe_intermediate_size=0)
WORKLOAD = Workload(SamplingConfig(0.8, 0, 1.0, 0.0, 64), 8, 64, 8, stop_ids=(1,), partial=True)
PROMPTS = [np.random.default_rng(i).integers(2, 264, 3 + i % 5).tolist() for i in range(8)]


class Vllm:
  """A server in a process group of its own, on a port that was free."""

  def __init__(self, weights, log):
    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      self.port = free.getsockname()[1]
    self.url, self.weights, self.log = f"http://127.0.0.1:{self.port}", weights, log
    self.start()

  def start(self):
    argv = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.weights)]
    argv += ["--host", "127.0.0.1", "--port", str(self.port), *FLAGS.split()]
    argv += ["--logprobs-mode", "processed_logprobs"]
    env = os.environ | dict(
      VLLM_SERVER_DEV_MODE="1", VLLM_CPU_KVCACHE_SPACE="1", OMP_NUM_THREADS="1"
    )
    env.pop("PYTHONPATH", None)  # Packages of this Python would hide those of PYTHON.
    with open(self.log, "ab") as log:
      self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=env, start_new_session=True)

  def wait(self):
    """Until it is well."""
    end = time.monotonic() + MOST_S
    while True:
      assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
      with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
        return
      time.sleep(0.5)

  def kill(self):
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.process.pid, signal.SIGKILL)
    self.process.wait()


@pytest.fixture
def start(tmp_path):
  """Starts so many servers of a model with its first weights; they end with the test."""
  with contextlib.ExitStack() as stack:

    def start(model, params, count):
      weights = tmp_path / "first"
      hf.save(weights, params, model)
      servers = [Vllm(weights, tmp_path / f"server_{i}.log") for i in range(count)]
      for server in servers:
        stack.callback(server.kill)
      for server in servers:
        server.wait()
      return servers

    yield start


def engine_of(model, servers, workdir):
  urls = tuple(server.url for server in servers)
  patient = ServerConfig(timeout_s=120.0, wait_s=0.0)
  config = EngineConfig(name="server", urls=urls, server=patient)
  return ServerEngine(model, config, REFERENCE, workdir=workdir, window=72, temperature=0.8)


def check(params, model, rollout, version):
  logp_BT = np.asarray(next_logp(params, model, rollout.tokens, temperature=0.8))
  off_BT = abs(logp_BT - rollout.logp[:, 1:]) * rollout.mask[:, 1:]
  assert off_BT.max() < 1e-3 and off_BT.sum() / rollout.mask.sum() < 1e-5
  assert set(rollout.version[rollout.mask > 0]) == {version}
  assert len(rollout.tokens) == 64 and (rollout.lengths > 0).all()


def test_two_servers_of_which_one_is_killed(start, tmp_path):
  params = [transformer.init(DENSE, jax.random.key(seed)) for seed in range(4)]
  servers = start(DENSE, params[0], 2)
  with engine_of(DENSE, servers, tmp_path) as engine:
    for version in (0, 1):
      engine.load(params[version], version)
      check(params[version], DENSE, sample_rollout(engine, WORKLOAD, PROMPTS), version)
    metrics = engine.usage.metrics()
    assert metrics["engine/servers"] == 2
    assert metrics["engine/probe/disagreed"] == 0 and metrics["engine/probe/mean"] < 1e-4

    prompts = [Prompt(str(i), "", "", tuple(prompt)) for i, prompt in enumerate(PROMPTS)]
    groups = new_groups(prompts, 8, 0, 8, None)
    driver = Driver(engine, WORKLOAD)
    for group in groups:
      driver.begin(group)
    servers[0].kill()
    done = list(driver.run())
    assert len(done) == 64 and all(
      trajectory.length for trajectory in done
    )  # no group has lost one
    metrics = engine.usage.metrics()
    assert metrics["engine/servers"] == 1 and metrics["engine/failed/connection"] >= 1
    servers[0].start()
    servers[0].wait()
    engine.load(params[2], 2)
    check(params[2], DENSE, sample_rollout(engine, WORKLOAD, PROMPTS), 2)
    assert engine.usage.metrics()["engine/servers"] == 2

    # What is put aside goes on under other weights.
    (group,) = new_groups(prompts[:1], 8, 1, 8, None)
    driver, until = Driver(engine, WORKLOAD), time.monotonic() + 0.1
    driver.begin(group)
    list(driver.run(lambda: time.monotonic() > until))
    unfinished = [len(trajectory.tokens) for trajectory in group]
    engine.load(params[3], 3)
    driver = Driver(engine, WORKLOAD)
    driver.begin(group)
    list(driver.run())
    assert any(unfinished) and all(trajectory.finished for trajectory in group)
    for trajectory, length in zip(group, unfinished):
      assert set(trajectory.version[:length]) <= {2} and set(trajectory.version[length:]) <= {3}


def test_experts_that_were_not_reloaded_rightly_are_found_out(start, tmp_path):
  """vLLM 0.32 on CPU answers 200 to new weights of experts and is wrong by more than a nat."""
  params = [transformer.init(MOE, jax.random.key(seed)) for seed in range(2)]
  servers = start(MOE, params[0], 1)
  off = pytest.raises(ServersGone, match=r"its log-probs of version 1 differ from the trainer's by")
  with engine_of(MOE, servers, tmp_path) as engine, off:
    engine.load(params[1], 1)


def test_a_run_goes_on_with_the_server_that_is_left(start, tmp_path):
  model = config_of(tiny.get_config, **NO_EXPERTS).model
  servers = start(model, transformer.init(model, jax.random.key(0)), 2)
  urls, workdir = tuple(server.url for server in servers), tmp_path / "run"
  flags = """
    job=rl objective.volatility=False objective.old_logp=behaviour objective.entropy_coef=0.01
    rl.iterations=5 rl.prompts=16 eval.every=5 eval.problems=32 checkpoint.every=2
    engine.name=server
  """  # random weights have no reward; the bonus for entropy gives a gradient
  model_flags = [f"{key.replace('__', '.')}=0" for key in NO_EXPERTS]
  argv = command(workdir, *flags.split(), *model_flags, f"engine.urls={urls}")
  with open(tmp_path / "stderr.txt", "w+") as stderr:
    process = subprocess.Popen(argv, stderr=stderr, stdout=stderr, env=environment())
    try:
      end = time.monotonic() + MOST_S
      while max((row["step"] for row in rows(workdir) if row["phase"] == "rl"), default=0) < 2:
        assert process.poll() is None and time.monotonic() < end, stderr.seek(0) or stderr.read()
        time.sleep(0.1)
      servers[1].kill()
      assert process.wait(timeout=MOST_S) == 0
    finally:
      process.kill()
      process.wait()
    stderr.seek(0)
    text = stderr.read()
  assert f"server {urls[1]} is excluded" in text
  rl = [row for row in rows(workdir) if row["phase"] == "rl" and row["step"]]
  assert [row["step"] for row in rl] == [1, 2, 3, 4, 5]
  assert rl[0]["engine/servers"] == 2 and rl[-1]["engine/servers"] == 1
  assert max(row["mismatch/current/abs/mean"] for row in rl) < 1e-4
  assert max(row["engine/probe/mean"] for row in rl) < 1e-4
  assert "eval/accuracy" in rl[-1]
