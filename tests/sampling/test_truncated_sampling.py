"""Whole runs that sample with top-k, top-p and min-p: sampler and trainer keep agreeing."""

import json

import jax
import numpy as np
import pytest
from support.command_line import SMALL_VALUES, figures, rows_of, told_to_go
from support.configs import config_of

from configs import tiny
from gspo_jax import train
from gspo_jax.inputs import read_inputs
from gspo_jax.run import open_run
from gspo_jax.sampling.requests import workload

SMALL = SMALL_VALUES | dict(
  job="rl", model__num_layers=1, sampling__max_new_tokens=8, engine__steps=2,
  sampling__top_k=40, sampling__top_p=0.6, sampling__temperature=0.7,
  objective__entropy_coef=0.1,  # so small a model earns no reward
  objective__kl_coef=0.1,
  rl__prompts=4, rl__group_size=4, rl__minibatches=2, rl__iterations=3,
  rl__extra_prompts=4, rl__token_budget=60,
  rl_optimizer__warmup_steps=0, rl_optimizer__learning_rate=1e-2,
  eval__problems=2, eval__every=100, eval__greedy=False, checkpoint__every=1, engine__slots=8,
)  # fmt: skip


def run(workdir, **changes):
  with open_run(read_inputs(config_of(tiny.get_config, **SMALL | changes), workdir)) as opened:
    return jax.device_get(train.train(opened, opened.initial_params))


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.long
def test_a_run_with_partial_rollouts_ends_as_one_that_was_interrupted(lag, tmp_path):
  """What is put aside, and what is ahead, goes into checkpoints with the tokens that its own were
  drawn from."""
  params = run(tmp_path / "whole", rl__lag=lag)
  rows = rows_of(tmp_path / "whole", "rl")[1:]
  for row in rows:
    # With a lag only what is sampled at first is of the weights of now.
    assert row.get("mismatch/abs/max", 0.0 if lag else np.nan) < 1e-5
    assert row["minibatch/0/ratio/deviation"] == 0
    assert 1 < row["sampling/support"] < 40  # top-p is of what top-k leaves
    assert 0.2 < row["sampling/support_mass"] < 0.6
    assert 0 < row["entropy"] < np.log(40) and np.isfinite(row["kl_ref/k3"])
  assert any(row["partial/stale_tokens"] > 0 for row in rows)
  assert rows[-1]["minibatch/1/ratio/deviation"] > 0
  line = (tmp_path / "whole" / "rollouts" / "rl_000001.jsonl").read_text().splitlines()[0]
  assert "support" not in json.loads(line), "it is too large for a dump"

  with told_to_go(checks=6):
    run(tmp_path / "again", rl__lag=lag)
  assert len(rows_of(tmp_path / "again", "rl")) < 4
  same = run(tmp_path / "again", rl__lag=lag)
  assert jax.tree.all(jax.tree.map(np.array_equal, same, params))
  assert figures(tmp_path / "again") == figures(tmp_path / "whole")


def test_what_is_asked_of_the_engine():
  def asked(**changes):
    return workload(config_of(tiny.get_config, **SMALL | changes), (1,), False)

  assert asked().support == 40 and asked(sampling__top_k=264).support == 264
  assert asked(sampling__top_k=0, sampling__top_p=1.0).support == 0
  assert asked(job="eval").support == 0
  assert asked(sampling__stop_strings=("\n",)).stop_strings == ("\n",)  # of single turns too
