"""Tokens that an update or its metrics leave out: of older weights, of responses cut off."""

import dataclasses

import chex
import jax
import numpy as np
import optax
import pytest
from support.small_models import SHALLOW
from support.small_updates import (
  GSPO,
  SGD,
  after,
  learner,
  make_batch,
  placed,
  rl_step,
  with_inputs,
)

from gspo_jax.learner.state import new_state

LENGTHS = (5, 20, 3, 4, 9, 4, 12, 6)
OBJECTIVE = dataclasses.replace(GSPO, volatility=False, clip_low=0.2, clip_high=0.2)
ADAM = optax.adamw(1e-2)


def batch(**changes):
  whole_batch = make_batch(lengths=LENGTHS + LENGTHS)
  return whole_batch.with_fields(ref_logp_BT=None, **changes)


@pytest.mark.parametrize("microbatches", [1, pytest.param(4, marks=pytest.mark.long)])
def test_mismatch_is_over_tokens_of_the_current_weights(microbatches):
  step = rl_step(learner(SHALLOW, microbatches=microbatches), OBJECTIVE, SGD)
  whole = batch()
  current = whole.mask_BT * (np.arange(whole.mask_BT.shape[1])[None] >= 4)
  current[:4] = 0
  stale = (whole.mask_BT > 0) & (current == 0)
  far = whole.sampler_logp_BT - 3 * stale.astype(np.float32)  # whatever older weights said
  params, row = after(step, SHALLOW, whole.with_fields(sampler_logp_BT=far, current_BT=current))
  _, expected = after(step, SHALLOW, whole.replace(mask_BT=current))
  names = [name for name in row if name.startswith("mismatch/")]
  assert len(names) == 10 and row["mismatch/abs/max"] > 0
  for name in names:
    assert row[name] == pytest.approx(expected[name], rel=1e-5), name
  plain_params, _ = after(step, SHALLOW, whole)
  # Metrics alone depend on it; the programs are two, and round as they like.
  chex.assert_trees_all_close(params, plain_params, atol=1e-6)


def test_metrics_without_tokens_are_absent():
  """0 would be read as agreement of sampler and trainer."""
  step = rl_step(
    learner(SHALLOW, ages=3), dataclasses.replace(OBJECTIVE, old_logp="behaviour"), SGD
  )
  whole = batch(age_B=np.full(16, 1, np.int32), own_logp_BT=batch().sampler_logp_BT)
  _, row = after(step, SHALLOW, whole.with_fields(current_BT=0 * whole.mask_BT))
  compared = {name for name in row if name.startswith(("mismatch/", "by_age/"))}
  shares = {f"by_age/responses/{age}" for age in range(3)}
  by_age = {"mismatch/by_age/1", "by_age/ratio_deviation/1", "by_age/clip_fraction/1"}
  older = {name for name in compared if name.startswith("mismatch/older/")}
  assert compared == shares | by_age | older and len(older) == 11
  _, row = after(step, SHALLOW, whole.with_fields(current_BT=whole.mask_BT))
  assert {"mismatch/abs/max", "mismatch/current/ess/sequence"} <= row.keys()
  assert {n for n in row if n.startswith("mismatch/older/")} == {"mismatch/older/tokens"}


def test_masked_responses_have_no_effect():
  step, whole = rl_step(learner(SHALLOW), OBJECTIVE, SGD), batch()
  mask_B1 = (np.arange(len(whole.mask_BT)) % 3 > 0).astype(np.float32)[:, None]
  masked = whole.replace(mask_BT=whole.mask_BT * mask_B1)
  nothing = with_inputs(
    masked,
    tokens_BT=whole.inputs.tokens_BT * mask_B1.astype(np.int32),
    segments_BT=whole.inputs.segments_BT * mask_B1.astype(np.int32),
  )
  (actual, row), (expected, same) = after(step, SHALLOW, masked), after(step, SHALLOW, nothing)
  chex.assert_trees_all_close(actual, expected, atol=1e-7)
  for name in ("loss", "ratio/mean", "clip_fraction/token", "entropy", "mismatch/abs/mean"):
    assert row[name] == pytest.approx(same[name], abs=1e-6), name


def test_mini_batch_of_masked_responses_changes_nothing():
  step, whole = rl_step(learner(SHALLOW), OBJECTIVE, SGD), batch()
  before, _ = after(step, SHALLOW, whole.replace(advantage_B=0 * whole.advantage_B))
  actual, row = after(step, SHALLOW, whole.replace(mask_BT=0 * whole.mask_BT))
  chex.assert_trees_all_close(actual, before, atol=0)
  assert all(np.isfinite(value) for value in row.values()) and row["loss"] == 0
  assert row["updates_skipped"] == 0


# Mini-batches without a gradient: of masked responses, equal rewards, and clipped ratios.
WITHOUT_GRADIENT = dict(
  masked=lambda whole: whole.replace(mask_BT=0 * whole.mask_BT),
  equal=lambda whole: whole.replace(advantage_B=0 * whole.advantage_B),
  clipped=lambda whole: whole.replace(
    advantage_B=abs(whole.advantage_B), old_logp_BT=whole.old_logp_BT - 5 * whole.mask_BT
  ),
)


@pytest.mark.parametrize("nothing", WITHOUT_GRADIENT.values(), ids=WITHOUT_GRADIENT)
def test_optimizer_ignores_momentum_without_a_gradient(nothing):
  step, whole = rl_step(learner(SHALLOW), OBJECTIVE, ADAM), batch()
  with placed(SHALLOW, whole, (1, 1, 1, 1)) as (params, whole):
    state, row = step(new_state(params, ADAM), whole)
    assert row["grad_norm"].compute() > 0 and state.step == 1
    before = jax.device_get(state)
    state, row = step(state, nothing(whole))
    assert row["grad_norm"].compute() == 0
    chex.assert_trees_all_equal(jax.device_get(state), before)
    state, _ = step(state, whole)
    assert state.step == 2
