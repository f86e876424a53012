"""Two processes of four devices each compute what one process computes.

`python tests/test_two_processes.py MESH OUT.npz` is the work; pytest starts it twice, connected
over localhost with Gloo, and does it once more itself. So does the whole job.
"""

import dataclasses
import functools
import json
import operator
import os
import signal
import sys
import tempfile
import time

import chex
import jax
import numpy as np
import optax
import pytest
from support.command_line import (
  command,
  figures,
  on_two_processes,
  parameters,
  run,
  start_two_processes,
)
from support.sampling import sample
from support.small_models import SMALLER_MOE, on_host
from support.small_updates import GSPO, batch_of, learner, scalars

from gspo_jax import sharding
from gspo_jax.learner import passes
from gspo_jax.learner import step as train_step
from gspo_jax.learner.state import new_state
from gspo_jax.models import transformer
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.system import stops
from gspo_jax.system.preemption import EXIT_CODE

# data, fsdp, expert, tensor. Devices are numbered along the last axis first, so the border between
# the processes runs through the first axis that is not 1. (The job below has it through data.) Of
# `slices` each process is one.
MESHES = dict(expert=(1, 1, 4, 2), fsdp=(1, 2, 2, 2), slices=(2, 2, 2, 1))
OBJECTIVE = dataclasses.replace(
  GSPO, clip_low=0.2, clip_high=0.2, load_balance_coef=0.01, replay="R3"
)
LEARNER = learner(SMALLER_MOE, load_balance_coef=0.01)
TX = optax.chain(optax.trace(0.9), optax.scale(-0.1))  # a state to lay out; linear in the gradient


def sampled(params):
  prompts = [[1 + i, 20 - i, 3][: 1 + i % 3] for i in range(8)]
  options = dict(group_size=2, max_new_tokens=4, stop_ids=(7, 8, 9), prompt_length=3)
  options |= dict(truncation=(20, 0.9, 0.0), support=20)  # whole sampling is that of the job below
  return sample(params, SMALLER_MOE, prompts, record_routing=True, **options)


def work(shape=None):
  """Sampling and one update under a mesh (None: one device), as host arrays by name."""
  if shape is None:
    return measure(None)
  mesh = sharding.make_mesh(MeshConfig(*shape))
  with jax.set_mesh(mesh):
    return measure(mesh)


def measure(mesh):
  def place(tree, rules):
    shardings = None if mesh is None else transformer.shardings(SMALLER_MOE, rules, mesh)
    return jax.jit(lambda x: x, out_shardings=shardings)(tree)

  with jax.default_device(jax.local_devices()[0]), jax.set_mesh(None):
    start = on_host(SMALLER_MOE)
  rollout = sampled(place(start, sharding.ROLLOUT))
  batch = batch_of(rollout)
  if mesh is not None:
    batch = sharding.put_batch(batch, mesh)
  params = place(start, sharding.TRAIN)
  old = passes.make_old_policy(LEARNER, OBJECTIVE)(params, batch.inputs)
  batch = batch.replace(**old._asdict())
  state = new_state(params, TX)
  before = jax.tree.map(jax.typeof, state)
  state, metrics = train_step.make_rl_step(LEARNER, OBJECTIVE, TX)(state, batch)
  assert jax.tree.map(jax.typeof, state) == before, "the update changed a sharding"
  # The trace after one update is the gradient itself.
  names = ("params", "gradient")
  trees = dict(zip(names, sharding.fetch((state.params, state.opt_state[0].trace))))
  arrays = {
    f"{name}{jax.tree_util.keystr(path)}": x
    for name, tree in trees.items()
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }
  rest = dict(tokens=rollout.tokens, routing=rollout.routing, logp=sharding.fetch(old).old_logp_BT)
  rest |= dict(support=np.sort(rollout.support))
  return arrays | rest | {f"metric/{k}": v for k, v in scalars(metrics).items()}


@functools.cache
def two_processes(mesh):
  with tempfile.TemporaryDirectory() as out:
    paths = [f"{out}/{i}.npz" for i in range(2)]
    on_two_processes(lambda i: [sys.executable, __file__, mesh, paths[i]], devices=4)
    return [dict(np.load(path)) for path in paths]


@pytest.fixture(scope="module")
def one_device():
  return work()


def assert_same(got, expected):
  assert got.keys() == expected.keys()
  largest = max(np.abs(v).max() for k, v in expected.items() if k.startswith("gradient"))
  for name, value in expected.items():
    exact = name in ("tokens", "routing")
    bound = 0 if exact else 2e-5 * max(largest, 1) if "metric" not in name else 1e-4
    np.testing.assert_allclose(
      got[name], value, rtol=0 if exact else 1e-4, atol=bound, err_msg=name
    )
  assert largest > 1e-3 and (expected["routing"] >= 0).any()


@pytest.mark.parametrize("mesh", ["expert", "slices", pytest.param("fsdp", marks=pytest.mark.slow)])
@pytest.mark.long
def test_two_processes_compute_what_one_device_does(mesh, one_device):
  for process in two_processes(mesh):
    assert_same(process, one_device)


@pytest.mark.slow  # Both equal a single device.
def test_one_process_with_the_same_eight_devices_agrees():
  assert_same(two_processes("expert")[0], work(MESHES["expert"]))


JOB = """
  distributed=true job=rl mesh.data=2 mesh.expert=-1 checkpoint.every=1
  model.hidden_size=16 model.num_layers=1 model.num_heads=2 model.num_kv_heads=2 model.head_dim=8
  model.moe_intermediate_size=8 sampling.max_new_tokens=4
  rl.iterations=2 rl.prompts=8 rl.group_size=2 rl.minibatches=2 rl.dump_every=1
  rl_optimizer.schedule=constant objective.entropy_coef=0.01 objective.replay=R3
  eval.problems=8 eval.batch=8 eval.samples=2 eval.max_new_tokens=4 eval.greedy=false eval.every=1
""".split()


def job(workdir):
  return command(workdir, *JOB)


@pytest.fixture(scope="module")
def job_on_one_process(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("one")
  run(workdir, *JOB, "distributed=false", JAX_NUM_CPU_DEVICES="4")
  return workdir


def same_rollouts(two, single):
  """Equal, with ratios within the tolerance of log-probs."""
  ours, theirs = ([json.loads(x) for x in p.read_text().splitlines()] for p in (two, single))
  for got, expected in zip(ours, theirs, strict=True):
    for name in ("ratio", "log_ratio"):
      if name in expected:
        assert got.pop(name) == pytest.approx(expected.pop(name), abs=1e-3)
    assert got == expected


def same_run(two, single):
  ours, theirs = figures(two), figures(single)
  assert [row["step"] for row in theirs] == [0, 1, 2]
  assert {"router/volatility/sampler", "minibatch/1/router/volatility/mean"} <= theirs[1].keys()
  for got, expected in zip(ours, theirs, strict=True):
    assert got.pop("phase") == expected.pop("phase") == "rl"
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)
  for name in ("eval_000002.jsonl", "rl_000002.jsonl"):
    same_rollouts(two / "rollouts" / name, single / "rollouts" / name)
  assert (two / "report.html").exists()
  chex.assert_trees_all_close(parameters(two, 2), parameters(single, 2), atol=1e-6, rtol=1e-3)


@pytest.mark.slow  # the interrupted one below comes to the same
def test_the_job_on_two_processes_is_the_job_on_one(job_on_one_process, tmp_path):
  # Two devices each: compiling for eight takes long, and the arithmetic is compared above.
  on_two_processes(lambda i: job(tmp_path), devices=2)
  same_run(tmp_path, job_on_one_process)


def interrupted(workdir, notice, messages):
  """Runs the job, sends a signal to its second process once `seen`; returns codes and outputs."""
  # Where programs are kept, the job is over before its processes have agreed where to stop.
  options = dict(devices=2, JAX_ENABLE_COMPILATION_CACHE="false")
  processes = start_two_processes(lambda i: job(workdir), **options)
  try:
    deadline = time.monotonic() + 200
    while not messages():
      assert all(p.poll() is None for p in processes), processes[0].communicate()[0][-3000:]
      assert time.monotonic() < deadline
      time.sleep(0.01)
    processes[1].send_signal(notice)
    if notice == signal.SIGKILL:
      processes[1].wait(60)
      processes[0].kill()  # Like a cluster: alone it would wait for the other one.
    outputs = [p.communicate(timeout=100)[0] for p in processes]
  finally:
    for p in processes:
      p.kill()
  return [p.returncode for p in processes], outputs


def saved(workdir, step):
  return (workdir / "checkpoints" / "rl" / str(step)).exists()


@pytest.mark.long
@pytest.mark.parametrize("notice", [signal.SIGTERM, signal.SIGINT])
def test_a_notice_to_one_process_stops_both_at_the_same_step(notice, job_on_one_process, tmp_path):
  """While they sample for the first iteration: no checkpoint is due there."""
  evaluated = tmp_path / "rollouts" / "eval_000000.jsonl"
  codes, outputs = interrupted(tmp_path, notice, evaluated.exists)
  assert codes == [EXIT_CODE, stops.code(notice)], "\n".join(o[-3000:] for o in outputs)
  assert all("the same command continues" in output for output in outputs)
  outputs = on_two_processes(lambda i: job(tmp_path), devices=2)
  assert ["rl 2/2" in output for output in outputs] == [True, False]  # one of them shows progress
  same_run(tmp_path, job_on_one_process)


@pytest.mark.slow
def test_one_of_two_processes_is_killed_and_both_start_again(job_on_one_process, tmp_path):
  interrupted(tmp_path, signal.SIGKILL, lambda: saved(tmp_path, 1))
  on_two_processes(lambda i: job(tmp_path), devices=2)
  same_run(tmp_path, job_on_one_process)


if __name__ == "__main__":
  jax.distributed.initialize(
    num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
    process_id=int(os.environ["JAX_PROCESS_ID"]),
  )
  assert jax.process_count() == 2 and jax.device_count() == 8
  if sys.argv[1] == "slices":
    sharding.slice_of = operator.attrgetter("process_index")
  np.savez(sys.argv[2], **work(MESHES[sys.argv[1]]))
