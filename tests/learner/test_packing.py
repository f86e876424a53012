"""Packed rows: the same update from fewer positions."""

import dataclasses
import json
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from support.command_line import SMALL, figures, run
from support.configs import config_of
from support.small_models import SHALLOW, SHALLOW_MOE, initial
from support.small_updates import (
  ALL_TERMS,
  LENGTHS,
  MICROBATCHES,
  MODELS,
  PER_MICRO_BATCH,
  SGD,
  B,
  T,
  after,
  assert_same_update,
  learner,
  make_batch,
  old_policy,
  review_pass,
  scalars,
  update,
)

from configs import tiny
from gspo_jax import sharding
from gspo_jax.learner import packing
from gspo_jax.learner.batch import in_rollout_order, minibatches
from gspo_jax.learner.state import new_state
from gspo_jax.runs import nonfinite
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.structs import ModelInputs, TrainBatch


@pytest.mark.parametrize("name, shape, replay", [
  ("dense", None, "none"),
  pytest.param("dense", (2, 2, 1, 2), "none", marks=pytest.mark.long),
  pytest.param("gemma", None, "none", marks=pytest.mark.long),
  pytest.param("moe", None, "none", marks=pytest.mark.long),
  pytest.param("moe", None, "R2", marks=pytest.mark.long),
  pytest.param("hybrid", None, "none", marks=pytest.mark.long),
  pytest.param("hybrid_moe", (1, 2, 2, 2), "R3", marks=pytest.mark.long),
  pytest.param("shallow_moe", (1, 2, 2, 2), "R3", marks=pytest.mark.long),
  pytest.param("moe", (1, 2, 2, 2), "R3", marks=pytest.mark.long),
])  # fmt: skip
def test_a_packed_update_is_the_update(name, shape, replay):
  model = MODELS[name]
  batch = make_batch(model)
  shards = 1 if shape is None else math.prod(shape[:3])
  packed = packing.plan(batch, shards)
  _, row = expected = after(update(model, 1, replay=replay), model, batch)
  _, packed_row = actual = after(update(model, replay=replay), model, packed, shape)
  assert_same_update(actual, expected, PER_MICRO_BATCH)
  tokens, used = sum(LENGTHS), 2 * B // MICROBATCHES  # two micro-batches of four
  assert row["padding"] == pytest.approx(1 - tokens / (B * T))
  assert packed_row["padding"] == pytest.approx(1 - tokens / (used * T))
  if model.num_experts:
    assert row["router/volatility/mean"] > 0.1 and row["router/volatility/sampler"] > 0.1


@pytest.mark.parametrize(
  "shape", [None, pytest.param((1, 2, 2, 2), marks=pytest.mark.long)], ids=str
)
def test_packed_pass_gives_the_same_old_policy(shape):
  """Compares log-probs and experts."""
  batch = make_batch(SHALLOW_MOE)
  packed = packing.plan(batch, 1 if shape is None else 4)
  expected = old_policy(learner(SHALLOW_MOE), batch)
  actual = old_policy(learner(SHALLOW_MOE, microbatches=MICROBATCHES), packed, shape)
  real_BT = batch.inputs.segments_BT > 0
  logp_BT, expected_BT = (
    np.where(real_BT, x, 0)
    for x in (packing.in_order(actual.old_logp_BT, packed.order_B), expected.old_logp_BT)
  )
  np.testing.assert_allclose(logp_BT, expected_BT, atol=2e-5)
  assert (logp_BT[:, 0] == 0).all() and (expected_BT[:, 1:][real_BT[:, 1:]] < -1).all()
  routes_BTlk = packing.in_order(actual.old_experts_BTlk, packed.order_B)
  np.testing.assert_array_equal(routes_BTlk, expected.old_experts_BTlk)
  assert routes_BTlk.dtype == np.int8 and (routes_BTlk[~real_BT] == -1).all()


def test_packed_review_clips_the_same_tokens():
  batch = make_batch()
  packed = packing.plan(batch, 1)
  expected, actual = (
    review_pass(learner(SHALLOW, microbatches=microbatches), ALL_TERMS)(initial(SHALLOW), b)
    for microbatches, b in ((1, batch), (MICROBATCHES, packed))
  )
  clipped_BT = packing.in_order(np.asarray(actual["clipped_BT"]), packed.order_B)
  np.testing.assert_array_equal(clipped_BT, expected["clipped_BT"])
  assert 0 < clipped_BT.sum() < batch.mask_BT.sum()


def test_number_of_used_micro_batches_does_not_recompile():
  step, counts = update(SHALLOW), []
  state = new_state(initial(SHALLOW), SGD)
  for lengths in (LENGTHS, (3,) * B, (T,) * B, (0,) * B):
    batch = packing.plan(make_batch(lengths=lengths), 1)
    counts.append(int(packing.count(batch.inputs, B // MICROBATCHES)))
    if not counts[1:]:
      step(jax.tree.map(jnp.copy, state), batch)
      compiled = step.function._cache_size()
    state, metrics = step(state, batch)
    assert np.isfinite(list(scalars(metrics).values())).all()
  assert counts == [2, 1, 4, 1]
  assert step.function._cache_size() == compiled


def test_nonfinite_values_skip_the_update_unless_they_are_masked():
  """Masked responses may be NaN; unmasked ones spoil the update."""
  batch = make_batch()
  bad = np.array(batch.old_logp_BT)
  bad[5, 3] = np.nan
  mask = np.array(batch.mask_BT)
  mask[5] = 0
  packed = packing.plan(batch.replace(old_logp_BT=bad), 1)
  _, row = after(update(SHALLOW), SHALLOW, packed)
  assert row["updates_skipped"] == 1
  packed = packing.plan(batch.replace(old_logp_BT=bad, mask_BT=mask), 1)
  _, row = after(update(SHALLOW), SHALLOW, packed)
  assert row["updates_skipped"] == 0 and np.isfinite(list(row.values())).all()


@pytest.mark.parametrize("shards", [1, 2, 8])
@pytest.mark.parametrize("seed", range(5))
def test_packed_responses_do_not_overlap(shards, seed):
  rng = np.random.default_rng(seed)
  size, per_shard = 50, 16
  length_B = rng.integers(0, size + 1, shards * per_shard)
  length_B[rng.random(len(length_B)) < 0.2] = 0
  segments_BT = (np.arange(size)[None] < length_B[:, None]).astype(np.int32)
  number_B = np.arange(len(length_B), dtype=np.float32)
  zeros = np.zeros((len(length_B), size), np.float32)
  batch = TrainBatch(ModelInputs(zeros, segments_BT), zeros, number_B, zeros, zeros)
  planned = packing.plan(batch, shards)
  np.testing.assert_array_equal(np.sort(planned.order_B), np.arange(len(length_B)))
  np.testing.assert_array_equal(planned.advantage_B, planned.order_B)
  np.testing.assert_array_equal(planned.inputs.segments_BT.sum(1), length_B[planned.order_B])
  chex.assert_trees_all_equal(packing.undo(planned), batch)
  fill = np.zeros((shards, per_shard, size), int)
  for i, length in enumerate(planned.inputs.segments_BT.sum(1)):
    assert (planned.inputs.places.row_B[i] >= 0) == (length > 0)
    if length:
      start = planned.inputs.places.start_B[i]
      assert start + length <= size
      fill[i // per_shard, planned.inputs.places.row_B[i], start : start + length] += 1
  assert fill.max() <= 1 and fill.sum() == length_B.sum()
  used = (fill[:, :, 0] > 0).sum(1)
  assert (np.diff((fill[:, :, 0] > 0).astype(int), axis=1) <= 0).all(), "rows without gaps"
  assert np.ptp(fill.sum((1, 2))) <= size, "about as many tokens for each device"
  assert (used <= np.ceil(fill.sum((1, 2)) / size * 11 / 9) + 1).all()


@pytest.mark.parametrize("shards", [1, 2, 8])
@pytest.mark.parametrize("seed", range(5))
def test_rows_hold_the_prompt_of_a_group_once(shards, seed):
  """Trunks, branches and attention paths do not overlap."""
  rng = np.random.default_rng(seed)
  size, group, groups, longest = 60, 4, 4 * shards, 30
  prompt_B = np.repeat(rng.integers(1, longest + 1, groups), group)
  length_B = prompt_B + rng.integers(1, size - longest + 1, groups * group)
  length_B[rng.random(len(length_B)) < 0.1] = 0
  placed = packing.places(length_B, size, shards, prompt_B, group, size - longest)
  order_B = placed.order_B
  np.testing.assert_array_equal(np.sort(order_B), np.arange(len(length_B)))
  per_shard = len(length_B) // shards
  width = packing.with_prompts(size, size - longest)
  fill = np.zeros((2, shards, per_shard, width), int)  # rows, and those of attention
  trunks = set()
  for i, index in enumerate(order_B):
    row = i // per_shard, placed.row_B[i]
    assert (row[1] >= 0) == (length_B[index] > 0)
    if row[1] < 0:
      continue
    shared, trunk, start = prompt_B[index] - 1, placed.trunk_B[i], placed.start_B[i]
    if (row, index // group) not in trunks and start == trunk + shared:
      trunks.add((row, index // group))
      fill[0][row][trunk : trunk + shared] += 1
    fill[0][row][start : start + length_B[index] - shared] += 1
    fill[1][row][placed.path_B[i] :][: length_B[index]] += 1
    assert start + length_B[index] - shared <= size
  assert fill.max() == 1 and fill[1].sum() == length_B.sum()
  assert (fill[0].sum() < length_B.sum()) == (order_B[:group] // group == order_B[0] // group).all()
  rows = [
    (fill[0, :, :, 0] > 0).sum(1).max(),
    packing.places(length_B, size, shards).row_B.max(),
  ]
  assert rows[0] <= rows[1] + 1, "no more rows than without"


def test_prompts_are_shared_where_they_are_long():
  """Four responses of 4 + 7 tokens fill 2 rows of 20."""
  lengths, prompts = np.full(4, 11), np.full(4, 4)
  assert packing.places(lengths, 20, 1).row_B.max() == 3
  assert packing.places(lengths, 20, 1, prompts, 4, 12).row_B.max() == 1
  assert packing.places(lengths, 20, 1, prompts, 4, 16).trunk_B is None  # a fifth of the row


@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize("seed", range(5))
def test_at_heavy_tailed_lengths_a_tenth_is_padding(shards, seed):
  size, responses, R = 4096, 512, 8
  rng = np.random.default_rng(seed)
  length_B = np.clip(rng.lognormal(np.log(size / 9), 1.0, responses), 8, size).astype(int)
  assert 0.13 < length_B.mean() / size < 0.19 and length_B.max() > 0.9 * size
  order_B = packing.balanced_order(length_B, shards)
  rows = [packing.first_fit(x, size)[0].max() + 1 for x in np.split(length_B[order_B], shards)]
  per_device = R // shards
  positions = math.ceil(max(rows) / per_device) * R * size
  assert 1 - length_B.sum() / positions <= 0.1
  assert 1 - length_B.sum() / (responses * size) > 0.8


def test_log_ratios_of_packed_mini_batches_are_in_the_order_of_the_rollout():
  rows = 28  # a group is missing
  old = np.arange(rows * T, dtype=np.float32).reshape(rows, T)
  ends = 1 + np.arange(rows) * 7 % T
  segments = (np.arange(T)[None] < ends[:, None]).astype(np.int32)
  inputs = ModelInputs(segments, segments)
  batch = TrainBatch(inputs, segments.astype(np.float32), old[:, 0], old, old)
  mesh = sharding.make_mesh(MeshConfig(4, 1, 1, 1), jax.devices()[:4])
  parts = minibatches(batch, 2, prompts=8, group_size=4, mesh=mesh, packed=True)
  assert not (parts[0].order_B == np.arange(16)).all()
  ratios = [2 * p.old_logp_BT + 1 for p in parts]
  actual = in_rollout_order(ratios, parts, rows, group_size=4)
  np.testing.assert_array_equal(actual, 2 * old + 1)


def test_recorded_batch_keeps_the_plan(tmp_path):
  batch = make_batch()
  planned = packing.plan(batch, 4)
  directory = nonfinite.dump(
    epath.Path(tmp_path),
    dataclasses.asdict(config_of(tiny.get_config)),
    dict(phase="rl", step=1),
    "a test",
    new_state(dict(w=jnp.zeros(1)), SGD),
    [planned, batch],
  )
  _, (first, second) = nonfinite.load(directory)
  chex.assert_trees_all_equal(first, planned)
  chex.assert_trees_all_equal(packing.undo(first), batch)
  chex.assert_trees_all_equal(packing.undo(second), batch)


@pytest.mark.slow  # updates, dumps and passes of the old policy are compared above, one by one
def test_a_packed_run_is_the_run(tmp_path):
  """On one device. The room for prompts lets two or three of their sums into a row."""
  flags = [*SMALL, "job=rl", "data.max_prompt_tokens=40", "rl.iterations=2", "rl.microbatches=4"]
  flags += ["rl.dump_every=2", "eval.greedy=False"]
  for name in ("plain", "packed"):
    run(tmp_path / name, *flags, f"rl.packed={name == 'packed'}")
  plain, packed = (figures(tmp_path / name) for name in ("plain", "packed"))
  assert [row["step"] for row in packed] == [row["step"] for row in plain]
  for row, packed_row in zip(plain, packed):
    assert row.keys() == packed_row.keys()
    for metric, value in row.items():
      # A prompt counts once in statistics of the router where responses share it.
      alike = metric not in PER_MICRO_BATCH and "router/" not in metric
      if isinstance(value, float) and alike:
        assert packed_row[metric] == pytest.approx(value, rel=1e-3, abs=1e-4), metric
  assert packed[-1]["padding"] < 0.5 < plain[-1]["padding"]
  dumps = [
    [json.loads(x) for x in path.read_text().splitlines()]
    for path in (tmp_path / name / "rollouts" / "rl_000002.jsonl" for name in ("plain", "packed"))
  ]
  for record, packed_record in zip(*dumps, strict=True):
    assert record["response"] == packed_record["response"]
    np.testing.assert_allclose(record["log_ratio"], packed_record["log_ratio"], atol=2e-4)
