"""Metrics of segments by their place, against NumPy; alike however the update is laid out."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.test_layout import GROUP, PROMPT, grouped_batch
from support.small_models import DENSE, initial
from support.small_updates import (
  ALL_TERMS,
  GSPO,
  MICROBATCHES,
  SGD,
  B,
  T,
  after,
  learner,
  make_batch,
  review_pass,
  rl_step,
  score_pass,
)

from gspo_jax import objectives as O
from gspo_jax.learner import by_segment, packing
from gspo_jax.learner.objective import policy_loss
from gspo_jax.sampling.parts import segment_ids

SEGMENT = dataclasses.replace(
  GSPO, name="segment", segment_unit="tokens", segment_tokens=3, clip_low=0.01, clip_high=0.02
)
PLACES = ("1", "2", "3", "4", "first", "middle", "last")


def in_segments(batch):
  ids = segment_ids("tokens", batch.tokens_BT, batch.mask_BT, size=3)
  return batch.replace(unit_BT=np.where(batch.mask_BT > 0, ids, -1))  # off the mask: anything


def places(number, count):
  """Of segment `number`, from 0, of so many."""
  middle = (number + 0.5) / count
  third = "first" if middle < 1 / 3 else "middle" if middle < 2 / 3 else "last"
  return ([str(number + 1)] if number < 4 else []) + [third]


def by_hand(batch, logp_BT, low, high):
  """Of each place the list of (ratio, clipped, gradient) of its segments."""
  found = {place: [] for place in PLACES}
  for row in range(len(logp_BT)):
    mask_T = batch.mask_BT[row] > 0
    if not mask_T.any():
      continue
    count, advantage = batch.unit_BT[row, mask_T].max() + 1, float(batch.advantage_B[row])
    for u in range(count):
      mine = mask_T & (batch.unit_BT[row] == u)
      ratio = np.exp((logp_BT[row] - batch.old_logp_BT[row])[mine].mean(dtype=np.float64))
      clipped = ratio > 1 + high if advantage > 0 else ratio < 1 - low
      gradient = 0 if clipped else abs(ratio * advantage) / count
      for place in places(u, count):
        found[place].append((ratio, clipped, gradient))
  return found


@pytest.mark.long
def test_metrics_by_place_of_two_micro_batches():
  rng = np.random.default_rng(1)
  batch = in_segments(make_batch())
  logp_BT = batch.old_logp_BT + rng.normal(0, 0.03, (B, T)).astype(np.float32)

  def part(rows):
    one = jax.tree.map(lambda x: x[rows], batch)

    def loss(logp_BT):
      return policy_loss(SEGMENT, logp_BT, jnp.zeros_like(logp_BT), one)

    clipped_BT = loss(logp_BT[rows])[2]
    return by_segment.metrics(lambda x: loss(x)[0], logp_BT[rows], one, clipped_BT)

  row = O.compute(O.merge(part(slice(0, 6)), part(slice(6, B))))
  expected = by_hand(batch, logp_BT, 0.01, 0.02)
  assert set(row) == {
    "segment/count",
    "segment/length",
    *(f"segment/{name}/{p}" for name in ("clip_fraction", "gradient", "ratio_std") for p in PLACES),
  }
  for place, segments in expected.items():
    assert len(segments) > 1
    ratios, clipped, gradients = map(np.array, zip(*segments))
    assert row[f"segment/clip_fraction/{place}"] == pytest.approx(clipped.mean(), rel=1e-5)
    assert row[f"segment/gradient/{place}"] == pytest.approx(gradients.mean(), rel=1e-4)
    assert row[f"segment/ratio_std/{place}"] == pytest.approx(ratios.std(), rel=1e-3)
  clipped = [x[1] for x in expected["middle"]]
  assert 0 < np.mean(clipped) < 1
  live_B = (batch.mask_BT > 0).any(1)
  counts = (batch.unit_BT.max(1) + 1)[live_B]
  assert row["segment/count"] == pytest.approx(counts.mean())
  assert row["segment/length"] == pytest.approx(batch.mask_BT.sum() / counts.sum())


def test_an_only_segment_is_the_middle_and_no_segment_is_nowhere():
  one = jnp.array([[True, False, False], [False, False, False], [True, True, False]])
  found = by_segment._places(one, one.sum(1))
  assert [name for name in PLACES if found[name][0].any()] == ["1", "middle"]
  assert not any(found[name][1].any() for name in PLACES)
  assert found["first"][2].tolist() == [True, False, False]
  assert found["last"][2].tolist() == [False, True, False]


def test_the_gradient_has_all_terms_of_the_loss():
  """A penalty is in the gradient of what is clipped too."""
  batch = in_segments(make_batch())
  wide = dataclasses.replace(ALL_TERMS, **{
    key: getattr(SEGMENT, key) for key in ("name", "segment_unit", "segment_tokens")
  })  # fmt: skip
  with_kl, without = (
    by_segment.gradient(
      lambda x, c=config: policy_loss(c, x, jnp.zeros_like(x), batch)[0], batch.sampler_logp_BT
    )
    for config in (wide, dataclasses.replace(wide, kl_coef=None, kl=None))
  )
  assert not np.allclose(with_kl, without)
  assert not np.asarray(with_kl)[batch.mask_BT == 0].any()


def update(microbatches, **changes):
  return rl_step(learner(DENSE, microbatches=microbatches, **changes), SEGMENT, SGD)


def assert_alike(found, expected):
  (params, row), (others, other_row) = found, expected
  chex.assert_trees_all_close(params, others, rtol=2e-4, atol=5e-6)
  names = [name for name in row if name.startswith("segment/")]
  assert len(names) == 2 + 3 * len(PLACES)
  for name in names:
    assert row[name] == pytest.approx(other_row[name], rel=1e-3, abs=1e-5), name
  assert 0 < row["segment/clip_fraction/1"] < 1 and row["segment/gradient/1"] > 0


@pytest.fixture(scope="module")
def plain():
  return after(update(1), DENSE, in_segments(make_batch()))


@pytest.mark.parametrize("how", ["micro-batches", "packed", "mesh"])
@pytest.mark.long
def test_an_update_by_segments_is_the_same_in_every_layout(plain, how):
  batch, shape = in_segments(make_batch()), None
  if how == "packed":
    batch = packing.plan(batch, 1)
  if how == "mesh":
    shape = (2, 2, 1, 2)
  assert_alike(after(update(MICROBATCHES), DENSE, batch, shape), plain)


def test_an_update_by_segments_is_the_same_with_shared_prompts():
  batch = in_segments(grouped_batch(DENSE))
  shared = after(update(2, group_size=GROUP, prompt_tokens=PROMPT), DENSE, batch)
  assert_alike(shared, after(update(1), DENSE, batch.replace(prompt_B=None)))


def test_without_segments_there_are_no_such_metrics():
  _, row = after(rl_step(learner(DENSE), ALL_TERMS, SGD), DENSE, make_batch())
  assert not [name for name in row if name.startswith("segment")]
  found = review_pass(learner(DENSE), ALL_TERMS)(initial(DENSE), make_batch())
  assert set(found) == {"log_ratio_BT", "clipped_BT"}


def test_a_review_has_the_gradient_of_each_token():
  batch = in_segments(make_batch())
  found = jax.device_get(review_pass(learner(DENSE), SEGMENT)(initial(DENSE), batch))
  logp_BT = score_pass(learner(DENSE))(initial(DENSE), batch)
  expected = by_segment.gradient(
    lambda x: policy_loss(SEGMENT, x, jnp.zeros_like(x), batch)[0], logp_BT
  )
  np.testing.assert_allclose(found["gradient_BT"], expected, rtol=1e-5, atol=1e-7)
  live_BT = batch.mask_BT > 0
  assert not found["gradient_BT"][found["clipped_BT"]].any()
  assert found["gradient_BT"][live_BT & ~found["clipped_BT"]].all()
