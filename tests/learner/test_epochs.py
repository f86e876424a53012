"""Several passes over a rollout, with clip ranges that move meanwhile, in whole runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.command_line import SMALL_VALUES, figures, rows_of
from support.configs import config_of

from configs import tiny
from gspo_jax import train
from gspo_jax.inputs import read_inputs
from gspo_jax.learner import adaptive_clip, batch, optimizer
from gspo_jax.models.flops import iteration_flops
from gspo_jax.run import open_run
from gspo_jax.settings.objective import AdaptiveClipConfig
from gspo_jax.structs import ModelInputs, TrainBatch, TrainState
from gspo_jax.system import preemption

SMALL = SMALL_VALUES | dict(
  job="rl",
  model__num_layers=1,
  sampling__max_new_tokens=4,
  objective__entropy_coef=0.1,  # The model earns no reward.
  objective__adaptive_clip__target=0.3,
  objective__adaptive_clip__gain=2.0,
  rl__prompts=4,
  rl__group_size=4,
  rl__minibatches=2,
  rl__epochs=2,
  rl__iterations=3,
  rl_optimizer__warmup_steps=0,
  eval__problems=2,
  eval__every=100,
  eval__greedy=False,
  checkpoint__every=1,
)


@pytest.fixture(autouse=True)
def rewards(monkeypatch):
  """Advantages of both signs without any right response."""
  place = batch.place

  def placed(c, mesh, collected, segments):
    advantage_PG = np.sin(collected.rollout.tokens.sum(1)).reshape(collected.advantage_PG.shape)
    return place(c, mesh, dataclasses.replace(collected, advantage_PG=advantage_PG), segments)

  monkeypatch.setattr(batch, "place", placed)


def run(workdir, **changes):
  config = config_of(tiny.get_config, **SMALL | changes)
  with open_run(read_inputs(config, workdir)) as opened:
    return config, jax.device_get(train.train(opened, opened.initial_params))


@pytest.mark.long
def test_resumed_run_equals_an_uninterrupted_run(tmp_path, monkeypatch):
  config, params = run(tmp_path / "whole")
  rows = rows_of(tmp_path / "whole", "rl")[1:]
  for row in rows:
    assert "minibatch/3/loss" in row and "minibatch/4/loss" not in row
    assert row["minibatch/0/ratio/deviation"] == 0, "of the policy that sampled"
    assert row["minibatch/2/ratio/deviation"] > 0, "the same responses, under other weights"
  schedule = optimizer.make(config.rl_optimizer, 3 * 2 * 2).hyperparameters
  rates = np.asarray(optimizer.rate(schedule, np.array([3, 7, 11])))
  assert [row["learning_rate"] for row in rows] == pytest.approx(rates)
  ranges = [row["clip_range"] for row in rows]
  moved = [2.0 * (row["clip_fraction/token"] - 0.3) for row in rows[:-1]]
  assert ranges[0] == pytest.approx(0.03) and len(set(ranges)) == 3
  np.testing.assert_allclose(np.diff(np.log(ranges)), moved, rtol=1e-3)
  same = run_interrupted(tmp_path / "again", monkeypatch)
  assert jax.tree.all(jax.tree.map(np.array_equal, same, params))
  assert figures(tmp_path / "again") == figures(tmp_path / "whole")


def run_interrupted(workdir, monkeypatch, **changes):
  """Parameters after a run with an interruption and a resume."""
  countdown = iter(range(3))

  def interrupt():
    if next(countdown, None) is None:
      raise preemption.Preempted

  monkeypatch.setattr(preemption, "check", interrupt)
  with pytest.raises(preemption.Preempted):
    run(workdir, **changes)
  assert len(rows_of(workdir, "rl")) < 4
  monkeypatch.setattr(preemption, "check", lambda: None)
  return run(workdir, **changes)[1]


def test_epochs_repeat_the_mini_batches_and_mark_the_first_once():
  rows, marked_B = np.zeros((2, 3), np.float32), jnp.array([True, True])
  first = TrainBatch(ModelInputs(rows, rows), rows, rows[:, 0], rows, rows, first_B=marked_B)
  second = first.replace(first_B=~marked_B)
  assert batch.epochs([first, second], 1) == [first, second]
  sequence = batch.epochs([first, second], 3)
  assert [bool(b.first_B.any()) for b in sequence] == [True] + 5 * [False]
  assert all(b.old_logp_BT is (first, second)[i % 2].old_logp_BT for i, b in enumerate(sequence))


def test_operations_of_updates_grow_with_epochs():
  prompt_B, end_B = np.array([5, 5, 7, 7]), np.array([9, 8, 8, 10])

  def operations(epochs):
    config = config_of(tiny.get_config, **SMALL | dict(rl__epochs=epochs))
    return iteration_flops(config, None, prompt_B, end_B)

  passes, updates = zip(operations(1), operations(3))
  assert passes[0] == passes[1] > 0 and updates[1] == 3 * updates[0] == 9 * passes[0]


def state(skipped=0, factor=2.0):
  return TrainState(0, {}, (), np.int32(skipped), None if factor is None else jnp.float32(factor))


def test_adaptive_ranges_stay_after_failed_or_empty_updates():
  def row(clipped, grad_norm=1.0):
    return {"clip_fraction/token": jnp.float32(clipped), "grad_norm": jnp.float32(grad_norm)}

  config = AdaptiveClipConfig(target=0.2)
  for on_nonfinite, skipped, expected in (
    ("stop", 0, 2 * np.exp(0.5)),
    ("stop", 1, 2.0),  # a failure is replayed with the ranges that it met
    ("skip", 1, 2 * np.exp(0.5)),
  ):
    after = adaptive_clip.adapted(state(skipped), row(0.7), config, on_nonfinite)
    assert float(after.clip_factor) == pytest.approx(expected)
    for nothing in (row(np.nan), row(0.0, grad_norm=0.0)):  # no response teaches
      assert float(adaptive_clip.adapted(state(), nothing, config, on_nonfinite).clip_factor) == 2
  assert adaptive_clip.adapted(state(factor=None), {}, config, "stop").clip_factor is None
