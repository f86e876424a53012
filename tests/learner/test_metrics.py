"""Metrics of responses by age and length and of segments by their place, against NumPy; those of
segments alike however the update is laid out."""

import dataclasses
import functools
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.test_layout import GROUP, PROMPT, grouped_batch
from support.small_models import SHALLOW, initial
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
  with_inputs,
)

from gspo_jax import objectives as O
from gspo_jax.learner import metrics, packing
from gspo_jax.learner.objective import configured_loss
from gspo_jax.sampling.parts import segment_ids
from gspo_jax.structs import MetricInputs, ModelInputs, TrainBatch

SEGMENT = dataclasses.replace(
  GSPO, name="segment", segment_unit="tokens", segment_tokens=3, clip_low=0.01, clip_high=0.02
)
PLACES = ("1", "2", "3", "4", "first", "middle", "last")


def case(rows, longest, seed):
  """Log-probs of policy, old policy and sampler, mask, and clipped tokens."""
  rng = np.random.default_rng(seed)
  length_B = rng.integers(0, longest + 1, rows)  # a row without tokens is padding
  mask_BT = (np.arange(longest + 3)[None] < length_B[:, None]).astype(np.float32)
  logp_BT, old_BT, sampler_BT = rng.normal(-2, 0.1, (3, *mask_BT.shape)).astype(np.float32)
  logp_BT = np.where(mask_BT > 0, logp_BT, np.nan)
  return logp_BT, old_BT, sampler_BT, mask_BT, rng.random(mask_BT.shape) < 0.3


def age_case(rows, classes, seed):
  logp_BT, old_BT, sampler_BT, mask_BT, clipped_BT = case(rows, 9, seed)
  age_B = np.random.default_rng(seed).integers(0, classes + 2, rows).astype(np.int32)
  age_B[age_B == 1] = 0  # an empty class
  age_B[:3] = -1  # No class.
  plain = np.zeros(mask_BT.shape, np.int32)
  batch = TrainBatch(
    ModelInputs(plain, plain),
    mask_BT,
    np.zeros(rows),
    old_BT,
    sampler_BT,
    metric_inputs=MetricInputs(age_B=age_B),
  )
  return logp_BT, batch, clipped_BT


def test_figures_by_age():
  """Covers two mini-batches with masked tokens; the last class is open."""
  classes, parts = 4, [age_case(40, 4, seed) for seed in range(2)]
  measure = jax.jit(metrics.age_metrics, static_argnums=3)
  row = O.compute(O.merge(*[measure(*part, classes) for part in parts]))
  assert len(row) == 4 * classes
  expected = {age: [] for age in range(classes)}
  for logp_BT, batch, clipped_BT in parts:
    for i, live in enumerate(batch.mask_BT > 0):
      if live.any() and batch.metric_inputs.age_B[i] >= 0:
        to_old, to_sampler = (
          (logp_BT[i] - old_BT[i])[live].mean(dtype=np.float64)
          for old_BT in (batch.old_logp_BT, batch.sampler_logp_BT)
        )
        values = abs(np.exp(to_old) - 1), abs(to_sampler), clipped_BT[i][live]
        expected[min(batch.metric_inputs.age_B[i], classes - 1)].append(values)
  total = sum(map(len, expected.values()))
  assert not expected[1] and len(expected[3]) > len(expected[2]) > 0
  for age, actual in expected.items():
    assert row[f"by_age/responses/{age}"] == pytest.approx(len(actual) / total)
    deviation, mismatch, clipped = zip(*actual) if actual else ([0], [0], [[0]])
    assert row[f"by_age/ratio_deviation/{age}"] == pytest.approx(np.mean(deviation), rel=1e-4)
    assert row[f"mismatch/by_age/{age}"] == pytest.approx(np.mean(mismatch), rel=1e-4)
    share = np.concatenate(clipped).mean()
    assert row[f"by_age/clip_fraction/{age}"] == pytest.approx(share, rel=1e-5)


def test_age_of_a_response_is_that_of_its_oldest_token():
  version_BL = np.array([[-1, 4, 4, -1, 6], [-1, 6, 6, 6, -1], [-1, -1, -1, -1, -1]])
  rollout = SimpleNamespace(version=version_BL)
  assert metrics.ages(rollout, 7).tolist() == [3, 1, -1]
  assert metrics.lag_metrics(rollout, 7) == {"lag/mean": 10 / 6, "lag/max": 3.0}
  rollout.mask = (version_BL >= 0) * [[1], [0], [1]]  # the second one is masked out
  every_B, none_B = np.ones(3, bool), np.zeros(3, bool)
  assert metrics.lag_metrics(rollout, 7, every_B) == {"lag/mean": 7 / 3, "lag/max": 3.0}
  assert metrics.lag_metrics(rollout, 7, none_B) == {"lag/mean": 0.0, "lag/max": 0.0}
  nothing = SimpleNamespace(version=version_BL[2:])
  assert metrics.lag_metrics(nothing, 7) == {"lag/mean": 0.0, "lag/max": 0.0}


@pytest.mark.parametrize(
  "longest, expected",
  [(1, [4]), (4, [4]), (5, [4, 8]), *((n, [8, 16, 32, 64, 128, 256]) for n in (192, 256))],
)
def test_length_classes_depend_on_the_longest_response_alone(longest, expected):
  assert metrics.length_limits(longest) == expected


def classes(length_B, longest):
  """{name: rows}, by a loop."""
  limits, rows = metrics.length_limits(longest), {}
  for limit, above in zip(limits, [0, *limits]):
    rows[f"le_{limit}"] = [i for i, n in enumerate(length_B) if above < n <= limit]
  return rows


def test_rewards_by_length():
  rng = np.random.default_rng(0)
  length_B, reward_B = rng.integers(1, 100, 300), rng.normal(size=300)
  known_B = rng.random(300) < 0.8
  length_B[length_B > 64] = 128  # le_64 has lengths up to 64 alone.
  length_B[(length_B > 16) & (length_B <= 32)] = 40  # an empty class
  row = metrics.reward_metrics(np.where(known_B, reward_B, 9), known_B, length_B, 128)
  assert len(row) == 12
  for name, rows in classes(length_B, 128).items():
    assert row[f"by_length/responses/{name}"] == len(rows) / 300
    rewards = [reward_B[i] for i in rows if known_B[i]]
    expected = np.mean(rewards) if rewards else 0
    assert row[f"by_length/reward/{name}"] == pytest.approx(expected)
  assert row["by_length/responses/le_32"] == 0 != row["by_length/reward/le_16"]
  assert sum(v for k, v in row.items() if "responses" in k) == pytest.approx(1)


def test_ratios_and_clipping_by_length():
  """Covers two mini-batches with masked tokens."""
  longest, parts = 40, [case(12, 40, 0), case(12, 40, 1)]
  measure = jax.jit(metrics.length_metrics, static_argnums=4)
  sums = [measure(logp, old, mask, clipped, longest) for logp, old, _, mask, clipped in parts]
  row = O.compute(O.merge(*sums))
  logp_BT, old_BT, _, mask_BT, clipped_BT = (np.concatenate(arrays) for arrays in zip(*parts))
  live_BT = mask_BT > 0
  length_B = live_BT.sum(1)
  actual = classes(length_B, longest)
  assert len(row) == 2 * len(actual) == 10
  for name, rows in actual.items():
    means = [(logp_BT[i] - old_BT[i])[live_BT[i]].mean(dtype=np.float64) for i in rows]
    share = clipped_BT[rows][live_BT[rows]].mean() if rows else 0
    spread = np.std(means) if rows else 0
    assert row[f"by_length/log_ratio_std/{name}"] == pytest.approx(spread, rel=1e-4)
    assert row[f"by_length/clip_fraction/{name}"] == pytest.approx(share, rel=1e-5)
  assert sum(len(rows) > 1 for rows in actual.values()) >= 3


def in_segments(batch):
  ids = segment_ids(batch.mask_BT, size=3)
  return batch.replace(unit_BT=np.where(batch.mask_BT > 0, ids, -1))  # off the mask: anything


def places(number, count):
  """Place of segment `number` among so many."""
  middle = (number + 0.5) / count
  third = "first" if middle < 1 / 3 else "middle" if middle < 2 / 3 else "last"
  return ([str(number + 1)] if number < 4 else []) + [third]


def by_hand(batch, logp_BT, low, high):
  """Lists (ratio, clipped, gradient) of segments by place."""
  actual = {place: [] for place in PLACES}
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
        actual[place].append((ratio, clipped, gradient))
  return actual


def test_metrics_by_place_of_two_micro_batches():
  rng = np.random.default_rng(1)
  batch = in_segments(make_batch())
  logp_BT = batch.old_logp_BT + rng.normal(0, 0.03, (B, T)).astype(np.float32)

  @jax.jit
  def part(logp_BT, minibatch):
    def loss(logp_BT):
      return configured_loss(SEGMENT, logp_BT, jnp.zeros_like(logp_BT), minibatch)

    return metrics.segment_metrics(lambda x: loss(x)[0], logp_BT, minibatch, loss(logp_BT)[2])

  def half(i):
    return jax.tree.map(lambda x: np.split(x, 2)[i], (logp_BT, batch))

  row = O.compute(O.merge(part(*half(0)), part(*half(1))))
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


def test_place_of_a_single_segment_is_the_middle():
  live_BU = jnp.array([[True, False, False], [False, False, False], [True, True, False]])
  actual = metrics._places(live_BU, live_BU.sum(1))
  assert [name for name in PLACES if actual[name][0].any()] == ["1", "middle"]
  assert not any(actual[name][1].any() for name in PLACES)
  assert actual["first"][2].tolist() == [True, False, False]
  assert actual["last"][2].tolist() == [False, True, False]


def test_gradient_has_all_terms_of_the_loss():
  """A penalty has a gradient at clipped tokens too."""
  batch = in_segments(make_batch())
  wide = dataclasses.replace(ALL_TERMS, **{
    key: getattr(SEGMENT, key) for key in ("name", "segment_unit", "segment_tokens")
  })  # fmt: skip

  @functools.partial(jax.jit, static_argnums=0)
  def gradient(config, logp_BT):
    def loss(x):
      return configured_loss(config, x, jnp.zeros_like(x), batch)[0]

    return metrics.token_gradient(loss, logp_BT)

  with_kl, without = (
    gradient(config, batch.sampler_logp_BT)
    for config in (wide, dataclasses.replace(wide, kl_coef=None, kl=None))
  )
  assert not np.allclose(with_kl, without)
  assert not np.asarray(with_kl)[batch.mask_BT == 0].any()


def update(microbatches, **changes):
  return rl_step(learner(SHALLOW, microbatches=microbatches, **changes), SEGMENT, SGD)


def assert_alike(actual, expected):
  (params, row), (expected_params, other_row) = actual, expected
  chex.assert_trees_all_close(params, expected_params, rtol=2e-4, atol=5e-6)
  names = [name for name in row if name.startswith("segment/")]
  assert len(names) == 2 + 3 * len(PLACES)
  for name in names:
    assert row[name] == pytest.approx(other_row[name], rel=1e-3, abs=1e-5), name
  assert 0 < row["segment/clip_fraction/1"] < 1 and row["segment/gradient/1"] > 0


@pytest.fixture(scope="module")
def plain():
  return after(update(1), SHALLOW, in_segments(make_batch()))


@pytest.mark.parametrize("layout", ["micro-batches", "packed", "mesh"])
@pytest.mark.long
def test_segment_update_is_equal_in_every_layout(plain, layout):
  batch, shape = in_segments(make_batch()), None
  if layout == "packed":
    batch = packing.plan(batch, 1)
  if layout == "mesh":
    shape = (2, 2, 1, 2)
  assert_alike(after(update(MICROBATCHES), SHALLOW, batch, shape), plain)


@pytest.mark.long
def test_segment_update_is_equal_with_shared_prompts():
  batch = in_segments(grouped_batch(SHALLOW))
  shared = after(update(2, group_size=GROUP, response_tokens=T - PROMPT), SHALLOW, batch)
  assert_alike(shared, after(update(1), SHALLOW, with_inputs(batch, prompt_B=None)))


def test_metrics_by_segment_need_segments():
  _, row = after(rl_step(learner(SHALLOW), ALL_TERMS, SGD), SHALLOW, make_batch())
  assert not [name for name in row if name.startswith("segment")]
  actual = review_pass(learner(SHALLOW), ALL_TERMS)(initial(SHALLOW), make_batch())
  assert set(actual) == {"log_ratio_BT", "clipped_BT"}


def test_review_has_the_gradient_of_each_token():
  batch = in_segments(make_batch())
  actual = jax.device_get(review_pass(learner(SHALLOW), SEGMENT)(initial(SHALLOW), batch))
  logp_BT = score_pass(learner(SHALLOW))(initial(SHALLOW), batch.inputs)

  def loss(x):
    return configured_loss(SEGMENT, x, jnp.zeros_like(x), batch)[0]

  expected = jax.jit(functools.partial(metrics.token_gradient, loss))(logp_BT)
  np.testing.assert_allclose(actual["gradient_BT"], expected, rtol=1e-5, atol=1e-7)
  live_BT = batch.mask_BT > 0
  assert not actual["gradient_BT"][actual["clipped_BT"]].any()
  assert actual["gradient_BT"][live_BT & ~actual["clipped_BT"]].all()
