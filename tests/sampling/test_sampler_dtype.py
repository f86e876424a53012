"""Runs whose sampler has a dtype of its own: the trainer keeps its own, and resuming is exact."""

import jax
import jax.numpy as jnp
import pytest
from support.command_line import SMALL_VALUES, figures, rows_of, told_to_go
from support.configs import config_of

from configs import tiny
from gspo_jax.inputs import read_inputs
from gspo_jax.main import run_job
from gspo_jax.run import open_run

RL = SMALL_VALUES | dict(
  job="rl", model__num_layers=1, sampling__max_new_tokens=6, engine__dtype="bfloat16",
  rl__iterations=3, rl__prompts=8, rl__group_size=4, rl__minibatches=2,
  rl_optimizer__learning_rate=1e-3, rl_optimizer__warmup_steps=0,
  objective__entropy_coef=0.01,  # so small a model earns no reward
  objective__replay="R3", checkpoint__every=1,
  eval__every=9, eval__problems=8, eval__batch=8, eval__greedy=False,
)  # fmt: skip


def ran(workdir, **changes):
  """Rows of a run's iterations."""
  with open_run(read_inputs(config_of(tiny.get_config, **RL | changes), workdir)) as run:
    run_job(run)
  return rows_of(workdir, "rl")[1:]


@pytest.mark.long
def test_the_sampler_rounds_and_the_trainer_does_not(tmp_path):
  rows = ran(tmp_path / "whole")
  for row in rows:
    assert 1e-3 < row["mismatch/abs/mean"] < 3e-2, "another network than the trainer's"
    assert row["mismatch/recomputed"] < 1e-6, "the trainer agrees with itself in float32"
    assert row["minibatch/0/ratio/deviation"] == 0 < row["minibatch/1/ratio/deviation"]
  with told_to_go(checks=10):
    ran(tmp_path / "again")
  assert 1 < len(rows_of(tmp_path / "again", "rl")) < 4
  ran(tmp_path / "again")
  assert figures(tmp_path / "again") == figures(tmp_path / "whole")


def kinds(tree):
  return {x.dtype for x in jax.tree.leaves(tree)}


def test_its_weights_are_published_in_its_dtype(tmp_path):
  with open_run(read_inputs(config_of(tiny.get_config, **RL), tmp_path)) as run:
    params = run.initial_params()
    run.engine.load(params, version=0)
    published, trainer = run.engine._params, params.blocks[0].ffn.router
    assert kinds(params) == {jnp.dtype("float32")}
    routers = [block.ffn.router for block in published.blocks]
    assert kinds(routers) == {jnp.dtype("float32")}, "as the trainer reads it, in any dtype"
    assert (jnp.concatenate(routers) == trainer).all()
    without = [block.replace(ffn=block.ffn.replace(router=None)) for block in published.blocks]
    assert kinds(published.replace(blocks=without)) == {jnp.dtype("bfloat16")}
