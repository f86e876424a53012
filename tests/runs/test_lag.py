"""Whole runs whose sampling is ahead of their updates, on one mesh and on two."""

import random
import re
import signal
import time

import pytest
from support.command_line import (
  SMALL_MODEL,
  assert_same_run,
  command,
  figures,
  rows,
  rows_of,
  run,
  run_until,
  started,
)

from gspo_jax.system.preemption import EXIT_CODE

LAST, LAG = 8, 2
FLAGS = [
  *SMALL_MODEL,
  *f"""
  job=rl rl.lag={LAG} rl.iterations={LAST} rl.prompts=4 rl.group_size=4 rl.minibatches=2
  rl.extra_prompts=2 engine.slots=8 engine.steps=2 rl.dump_every=1 objective.old_logp=sampler
  objective.volatility=False objective.entropy_coef=0.01 rl_optimizer.warmup_steps=2
  rl_optimizer.learning_rate=0.01
  eval.problems=4 eval.batch=4 eval.samples=1 eval.greedy=False eval.every=3 checkpoint.every=3
""".split(),
]
MESHES = dict(one=[], two=["rollout_mesh.fsdp=1"])
DEVICES = dict(JAX_NUM_CPU_DEVICES="2")


def devices(mesh):
  return DEVICES if mesh == "two" else dict(JAX_NUM_CPU_DEVICES="1")


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("untouched")
  run(workdir, *FLAGS, **devices("one"))
  return workdir


@pytest.mark.long
def test_on_two_meshes_a_run_is_the_same_to_the_bit(untouched, tmp_path):
  run(tmp_path, *FLAGS, *MESHES["two"], **devices("two"))
  assert_same_run(tmp_path, untouched, LAST)
  assert "time/sample" in rows_of(untouched, "rl")[2]
  row = rows_of(tmp_path, "rl")[2]
  assert "time/wait_for_sampler" in row and "time/sampler/sample" in row
  assert "time/sample" not in row  # it is not a stage of the trainer


@pytest.mark.slow
def test_two_meshes_of_several_devices_are_the_same_to_the_bit(tmp_path):
  """Both threads start collectives, on devices of their own."""
  run(tmp_path / "1", *FLAGS, "mesh.fsdp=2", JAX_NUM_CPU_DEVICES="2")
  run(tmp_path / "2", *FLAGS, "mesh.fsdp=2", "rollout_mesh.fsdp=2", JAX_NUM_CPU_DEVICES="4")
  assert_same_run(tmp_path / "2", tmp_path / "1", LAST)


@pytest.mark.long
def test_rows_have_the_age_of_the_weights(untouched):
  training = [row for row in rows(untouched) if row["step"]]
  assert [row["lag/max"] >= min(row["step"] - 1, LAG) for row in training] == [True] * LAST
  for row in training:
    assert min(row["step"] - 1, LAG) <= row["lag/mean"] <= row["lag/max"]
    shares = [row[f"by_age/responses/{age}"] for age in range(LAG + 2)]
    assert sum(shares) == pytest.approx(1) and not any(shares[: min(row["step"] - 1, LAG)])
    for age, share in enumerate(shares):  # the mismatch is that of the first mini-batch
      assert share or f"mismatch/by_age/{age}" not in row
    assert row.get("mismatch/by_age/0", 0) < 1e-4  # The weights are the same.
    assert ("mismatch/abs/mean" in row) == (row["step"] == 1), "later, all weights are older ones"
  for age in range(1, LAG + 1):
    assert max(row.get(f"mismatch/by_age/{age}", 0) for row in training) > 1e-3
  assert any(row["partial/stale_tokens"] for row in training)
  assert training[-1]["minibatch/0/ratio/deviation"] > 0  # older weights sampled


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_notice_saves_the_run(untouched, tmp_path, mesh):
  flags = [*FLAGS, *MESHES[mesh]]
  stderr, code = run_until(tmp_path, "rl", 2, signal.SIGTERM, flags, **devices(mesh))
  assert code == EXIT_CODE and "the same command continues" in stderr
  run(tmp_path, *flags, **devices(mesh))
  assert_same_run(tmp_path, untouched, LAST)


@pytest.mark.slow
def test_a_run_on_one_mesh_continues_on_two(untouched, tmp_path):
  run_until(tmp_path, "rl", 4, signal.SIGKILL, FLAGS, **devices("one"))
  stderr = run(tmp_path, *FLAGS, *MESHES["two"], "resume=force", **devices("two"))
  assert not re.search("Traceback", stderr)
  assert figures(tmp_path) == figures(untouched)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_killed_run_ends_as_the_uninterrupted_one(untouched, tmp_path, mesh):
  flags, rng, kills = [*FLAGS, *MESHES[mesh], "checkpoint.every=1"], random.Random(7), 0
  while True:
    process = started(command(tmp_path, *flags), **devices(mesh))
    before = len(rows(tmp_path))
    while process.poll() is None and len(rows(tmp_path)) < before + 2:
      time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.2))
    if process.poll() is not None:
      assert process.returncode == 0, process.communicate()[1][-2000:]
      break
    process.kill()
    process.communicate()
    kills += 1
  assert kills >= 2
  assert figures(tmp_path) == figures(untouched)
