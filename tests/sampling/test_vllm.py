"""Real vLLM, on the CPU: sampling, new weights in place and by a restart, a server that is killed,
and a teacher.

  GSPO_VLLM_PYTHON=PYTHON python -m pytest -m slow -n0 tests/sampling/test_vllm.py

PYTHON is that of an environment with vLLM, which `bash .ci/vllm` makes. A server takes a minute to
start on two cores.
"""

import dataclasses
import os
import signal
import socket
import subprocess
import time

import jax
import numpy as np
import pytest
from support.command_line import command, environment, rows
from support.small_models import next_logp

from gspo_jax.models import hf, transformer
from gspo_jax.sampling import Driver, ServersGone, Workload, sample_rollout
from gspo_jax.sampling.driver import new_groups
from gspo_jax.sampling.servers import scoring
from gspo_jax.sampling.servers.engine import ServerEngine
from gspo_jax.sampling.servers.launch import Process, filled
from gspo_jax.settings import model as sizes
from gspo_jax.settings.model import REFERENCE
from gspo_jax.settings.sampling import EngineConfig, SamplingConfig
from gspo_jax.settings.server import ServerConfig
from gspo_jax.structs import Prompt

PYTHON = os.environ.get("GSPO_VLLM_PYTHON", "")
pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    not PYTHON, reason="GSPO_VLLM_PYTHON names no Python with vLLM; bash .ci/vllm makes one"
  ),
]
COMMAND = (
  "echo $$ > {weights}/../server_{index}.pid; "
  "exec env VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 "
  f"{PYTHON} -m vllm.entrypoints.openai.api_server --model {{weights}} "
  "--host {host} --port {port} --dtype float32 --enforce-eager --skip-tokenizer-init "
  "--logprobs-mode processed_logprobs --enable-scale-out"
)
TEACHER = (
  "exec env VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 "
  f"{PYTHON} -m vllm.entrypoints.openai.api_server --model {{weights}} "
  "--host {host} --port {port} --dtype float32 --enforce-eager --skip-tokenizer-init"
)
MOST_S = 1200.0  # of half a run, on a machine that has other things to do
SMALL = dict(rope_theta=10.0, max_position_embeddings=256)
DENSE = dataclasses.replace(sizes.tiny_dense(264), **SMALL)
MOE = dataclasses.replace(sizes.tiny_moe(264), **SMALL)
WORKLOAD = Workload(SamplingConfig(0.8, 0, 1.0, 0.0, 64), 8, 64, 8, stop_ids=(1,), partial=True)
PROMPTS = [np.random.default_rng(i).integers(2, 264, 3 + i % 5).tolist() for i in range(8)]


def urls(count):
  found = []
  for _ in range(count):
    with socket.socket() as one:
      one.bind(("127.0.0.1", 0))
      found.append(f"http://127.0.0.1:{one.getsockname()[1]}")
  return tuple(found)


def engine_of(model, count, workdir):
  config = EngineConfig(
    **dict(slots=0, steps=16, prefill_tokens=4096, cache_dtype="float32", name="server"),
    urls=urls(count),
    server=ServerConfig(command=COMMAND, timeout_s=120.0),
  )
  return ServerEngine(model, config, REFERENCE, workdir=workdir, window=72, temperature=0.8)


def check(params, model, rollout, version):
  logp_BT = np.asarray(next_logp(params, model, rollout.tokens, temperature=0.8))
  off_BT = abs(logp_BT - rollout.logp[:, 1:]) * rollout.mask[:, 1:]
  assert off_BT.max() < 1e-3 and off_BT.sum() / rollout.mask.sum() < 1e-5
  assert set(rollout.version[rollout.mask > 0]) == {version}
  assert len(rollout.tokens) == 64 and (rollout.lengths > 0).all()


def kill(published, index):
  os.killpg(int((published / f"server_{index}.pid").read_text()), signal.SIGKILL)


def test_two_servers_of_which_one_is_killed(tmp_path):
  params = [transformer.init(DENSE, jax.random.key(seed)) for seed in range(4)]
  with engine_of(DENSE, 2, tmp_path) as engine:
    for version in (0, 1):  # the second time in place
      engine.load(params[version], version)
      check(params[version], DENSE, sample_rollout(engine, WORKLOAD, PROMPTS), version)
    metrics = engine.usage.metrics()
    assert metrics["engine/servers"] == 2 and metrics["engine/restarts"] == 0
    assert metrics["engine/probe/disagreed"] == 0 and metrics["engine/probe/mean"] < 1e-4

    prompts = [Prompt(str(i), "", "", tuple(one)) for i, one in enumerate(PROMPTS)]
    groups = new_groups(prompts, 8, 0, 8, None)
    driver = Driver(engine, WORKLOAD)
    for group in groups:
      driver.begin(group)
    kill(tmp_path / "published", 0)
    done = list(driver.run())
    assert len(done) == 64 and all(one.length for one in done)  # no group has lost one
    metrics = engine.usage.metrics()
    assert metrics["engine/servers"] == 1 and metrics["engine/failed/connection"] >= 1
    engine.load(params[2], 2)
    check(params[2], DENSE, sample_rollout(engine, WORKLOAD, PROMPTS), 2)
    metrics = engine.usage.metrics()
    assert metrics["engine/servers"] == 2 and metrics["engine/restarts"] == 1

    # What is put aside goes on under other weights.
    (group,) = new_groups(prompts[:1], 8, 1, 8, None)
    driver, until = Driver(engine, WORKLOAD), time.monotonic() + 0.1
    driver.begin(group)
    list(driver.run(lambda: time.monotonic() > until))
    begun = [len(one.tokens) for one in group]
    engine.load(params[3], 3)
    driver = Driver(engine, WORKLOAD)
    driver.begin(group)
    list(driver.run())
    assert any(begun) and all(one.finished for one in group)
    for one, length in zip(group, begun):
      assert set(one.version[:length]) <= {2} and set(one.version[length:]) <= {3}


def test_experts_are_reloaded_by_a_restart(tmp_path):
  """vLLM 0.32 on CPU answers 200 to new weights of experts and is wrong by more than a nat."""
  params = [transformer.init(MOE, jax.random.key(seed)) for seed in range(2)]
  with engine_of(MOE, 1, tmp_path) as engine:
    for version in (0, 1):
      engine.load(params[version], version)
      check(params[version], MOE, sample_rollout(engine, WORKLOAD, PROMPTS), version)
    metrics = engine.usage.metrics()
    assert metrics["engine/probe/disagreed"] == metrics["engine/restarts"]


def test_a_run_goes_on_with_the_server_that_is_left(tmp_path):
  two = urls(2)
  flags = """
    model.num_experts=0 model.experts_per_token=0 model.moe_intermediate_size=0
    job=rl objective.volatility=False objective.old_logp=behaviour objective.entropy_coef=0.01
    rl.iterations=5 rl.prompts=16 eval.every=5 eval.problems=32 checkpoint.every=2
    engine.name=server
  """  # random weights have no reward; the bonus for entropy gives a gradient
  engine = [f"engine.urls={two}", f"engine.server.command={COMMAND}"]
  argv = command(tmp_path, *flags.split(), *engine)
  with open(tmp_path.parent / "stderr.txt", "w+") as said:
    process = subprocess.Popen(argv, stderr=said, stdout=said, env=environment())
    try:
      end = time.monotonic() + MOST_S
      while max((row["step"] for row in rows(tmp_path) if row["phase"] == "rl"), default=0) < 2:
        assert process.poll() is None and time.monotonic() < end, said.seek(0) or said.read()
        time.sleep(0.1)
      kill(tmp_path / "published", 1)
      assert process.wait(timeout=MOST_S) == 0
    finally:
      process.kill()
      process.wait()
    said.seek(0)
    text = said.read()
  assert f"server {two[1]} is left out" in text
  found = [row for row in rows(tmp_path) if row["phase"] == "rl" and row["step"]]
  assert [row["step"] for row in found] == [1, 2, 3, 4, 5]
  assert found[0]["engine/servers"] == 2 == found[-1]["engine/servers"]
  assert found[-1]["engine/restarts"] == 1
  assert max(row["mismatch/current/abs/mean"] for row in found) < 1e-4
  assert max(row["engine/probe/mean"] for row in found) < 1e-4
  assert "eval/accuracy" in found[-1]


def test_a_teacher_scores_what_it_is_sent(tmp_path):
  """Of lengths up to the longest that it has room for, 64 at once."""
  params, (url,) = transformer.init(MOE, jax.random.key(3)), urls(1)
  hf.save(tmp_path / "teacher", params, MOE)
  process = Process(filled(TEACHER, url, 0, str(tmp_path / "teacher")), tmp_path / "teacher.log")
  vocabulary, longest, end = MOE.vocab_size, MOE.max_position_embeddings, time.monotonic() + MOST_S
  config = ServerConfig(in_flight=64)

  def probe(vocab_size=vocabulary, window=longest - 1):
    return scoring.probe(url, config, vocab_size, window)

  try:
    about = None
    while about is None:
      try:
        about = probe()
      except ServersGone as error:
        assert "ConnectError" in str(error) and process.alive and time.monotonic() < end, error
        time.sleep(1)
    assert about == dict(server=url, model=str(tmp_path / "teacher"))
    with pytest.raises(ServersGone, match=f"a vocabulary of {vocabulary} tokens, and the policy"):
      probe(vocab_size=vocabulary + 8)
    with pytest.raises(ServersGone, match=r"a larger vocabulary than model\.vocab_size=256"):
      probe(vocab_size=256)
    with pytest.raises(ServersGone, match=r"room for 256 tokens, .* a larger --max-model-len"):
      probe(window=longest)
    rng = np.random.default_rng(0)
    lengths = [2, longest - 1, *rng.integers(3, longest, 98)]
    sequences = [rng.integers(0, vocabulary, length).tolist() for length in lengths]
    found = scoring.score(url, config, sequences)
  finally:
    process.stop()
  tokens_BT = np.zeros((len(sequences), longest), np.int32)
  for row, tokens in enumerate(sequences):
    tokens_BT[row, : len(tokens)] = tokens
  wanted_BT = np.asarray(next_logp(params, MOE, tokens_BT))
  for logp, wanted, length in zip(found, wanted_BT, lengths, strict=True):
    np.testing.assert_allclose(logp[1:], wanted[: length - 1], atol=1e-4)
