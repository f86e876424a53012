"""Weights for a sampler that is not the trainer, KL estimates, metrics and reductions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import objectives_reference as paper
from support.cases import long
from support.compiled import compiled, value_and_grad

from gspo_jax import objectives as O

CASE = paper.case(4)
LOGP, OLD, MASK = CASE["logp"], CASE["old"], CASE["mask"]
DELTA = np.where(MASK, LOGP, 0).astype(np.float64) - np.where(MASK, OLD, 0)
LENGTH = MASK.sum(1)
RATIO = {
  "token": np.where(MASK, np.exp(DELTA), 0),
  "sequence": np.where(LENGTH > 0, np.exp(DELTA.sum(1)), 0),
  "geometric": np.where(LENGTH > 0, np.exp(DELTA.sum(1) / np.maximum(LENGTH, 1)), 0),
}


@pytest.mark.parametrize("level", RATIO)
def test_weights(level):
  ratio = RATIO[level]
  truncated = compiled(O.truncated_weight, LOGP, OLD, MASK, level, cap=1.5)
  np.testing.assert_allclose(truncated, np.minimum(ratio, 1.5), rtol=1e-5)
  masked = compiled(O.masked_weight, LOGP, OLD, MASK, level, low=0.9, high=1.5)
  np.testing.assert_allclose(masked, ratio * (ratio >= 0.9) * (ratio <= 1.5), rtol=1e-5)
  assert np.any(ratio > 1.5) and np.any((ratio < 0.9) & (ratio > 0))
  packed = [x.reshape(4, -1) for x in (LOGP, OLD, MASK)]
  ids = np.where(packed[2], np.repeat([3, 1], MASK.shape[1]), -1)
  long = compiled(O.truncated_weight, *packed, level, cap=1.5, response_BT=ids)
  expected = truncated if level == "token" else np.where(MASK, truncated[:, None], 0)
  np.testing.assert_allclose(long.reshape(MASK.shape), expected, rtol=1e-5)


def test_weights_are_constants_and_finite():
  for level in RATIO:
    f = functools.partial(O.truncated_weight, level=level)
    assert not np.any(jax.jit(jax.grad(lambda x: f(x, OLD, MASK).sum()))(LOGP))  # noqa: B023
    logp, old, mask = np.full((2, 3), 1e4), np.zeros((2, 3)), np.ones((2, 3))
    extreme = compiled(O.masked_weight, logp, old, mask, level)
    assert not np.any(extreme)


@pytest.mark.parametrize(
  "loss",
  [
    O.gspo_loss,
    pytest.param(O.gspo_token_loss, marks=pytest.mark.long),
    O.grpo_loss,
    pytest.param(O.gmpo_loss, marks=pytest.mark.long),
  ],
)
def test_a_weight_per_sequence_multiplies_the_rows(loss):
  """Weights of 0 stay in the denominator."""
  weight = np.array([2.0, 1, 0, 1, 0.5, 1, 3, 0], np.float32)
  weighted = compiled(loss.sums, LOGP, OLD, CASE["advantage"], MASK, weight=weight)[0]
  scaled = compiled(loss.sums, LOGP, OLD, CASE["advantage"] * weight, MASK)[0]
  np.testing.assert_allclose(weighted, scaled, rtol=1e-6)


def test_a_weight_per_token_multiplies_the_tokens(x64):
  weight = CASE["rng"].random(MASK.shape)
  weight[~MASK] = np.nan
  args = [np.asarray(x, np.float64) for x in (LOGP, OLD, CASE["advantage_bt"])]
  (loss, _), grad = compiled(value_and_grad(O.grpo_loss), *args, MASK, weight=weight)

  def reference(x):
    # A weight that is not negative commutes with the clipping.
    return paper.grpo(x, args[1], args[2] * weight, MASK)

  expected = paper.gradient(reference, args[0])
  np.testing.assert_allclose(loss, reference(args[0]).real, rtol=1e-12)
  np.testing.assert_allclose(grad, expected, rtol=0, atol=1e-12 * abs(expected).max())


def test_off_policy_mask():
  """Row by row: drift of the mean old − new beyond the threshold, and a negative advantage."""
  logp = np.log([[0.5, 0.5], [0.1, 0.1], [0.1, 0.1], [0.1, 0.9]]).astype(np.float32)
  old = np.log(np.full((4, 2), 0.5)).astype(np.float32)
  mask = np.array([[1, 1], [1, 1], [1, 1], [0, 1]])
  advantage = np.array([-1.0, -1.0, 1.0, -1.0])
  weight = compiled(O.off_policy_mask, logp, old, advantage, mask, 0.5)
  np.testing.assert_array_equal(weight, [1, 0, 1, 1])
  per_token = np.array([[-1.0, -1], [-1, 1], [1, 1], [-1, -1]])
  weight = compiled(O.off_policy_mask, logp, old, per_token, mask, 0.5)
  np.testing.assert_array_equal(weight, [[1, 1], [0, 1], [1, 1], [1, 1]])


def effective_size(weight):
  return weight.sum() ** 2 / (weight**2).sum() / len(weight)


def test_mismatch():
  ours = compiled(O.mismatch, LOGP, OLD, MASK)
  rows = DELTA.sum(1)[LENGTH > 0] / LENGTH[LENGTH > 0]
  delta = DELTA[MASK]
  expected = {
    "mismatch/abs/mean": abs(delta).mean(),
    "mismatch/abs/max": abs(delta).max(),
    "mismatch/tail": (abs(delta) > np.log(2)).mean(),
    "mismatch/k3": (np.exp(delta) - 1 - delta).mean(),
    "mismatch/sequence/mean": rows.mean(),
    "mismatch/sequence/abs/mean": abs(rows).mean(),
    "mismatch/sequence/abs/max": abs(rows).max(),
    "mismatch/ess/token": effective_size(RATIO["token"][MASK]),
    "mismatch/ess/sequence": effective_size(RATIO["sequence"][LENGTH > 0]),
    "mismatch/ess/geometric": effective_size(RATIO["geometric"][LENGTH > 0]),
  }
  assert ours.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(ours[name], value, rtol=1e-5, err_msg=name)
  halves = [
    compiled(O.mismatch.sums, *(x[rows] for x in (LOGP, OLD, MASK)))
    for rows in np.split(np.arange(8), 2)
  ]
  merged = O.compute(O.merge(*halves))
  for name, value in expected.items():
    np.testing.assert_allclose(merged[name], value, rtol=1e-5, err_msg=name)


def test_effective_size_of_weights_that_no_float_holds():
  """Two sequences of equal weight e^4000 among four are half of them."""
  logp = np.array([[2000.0, 2000], [0, 0], [2000, 2000], [0, 0]], np.float32)
  metrics = compiled(O.mismatch, logp, np.zeros_like(logp), np.ones_like(logp))
  np.testing.assert_allclose(metrics["mismatch/ess/sequence"], 0.5, rtol=1e-3)


def test_ratios():
  np.testing.assert_allclose(
    compiled(O.token_ratio, LOGP, OLD, MASK), np.where(MASK, RATIO["token"], 1), rtol=1e-6
  )
  expected = np.where(LENGTH > 0, RATIO["geometric"], 1)
  np.testing.assert_allclose(compiled(O.sequence_ratio, LOGP, OLD, MASK), expected, rtol=1e-6)
  raw = np.where(LENGTH > 0, RATIO["sequence"], 1)
  np.testing.assert_allclose(compiled(O.sequence_ratio, LOGP, OLD, MASK, 0.0), raw, rtol=1e-5)
  token = compiled(O.gspo_token_ratio, LOGP, OLD, MASK)
  np.testing.assert_allclose(token, np.where(MASK, expected[:, None], 1), rtol=1e-6)
  same = compiled(O.segment_ratio, LOGP, OLD, MASK, np.zeros(MASK.shape, int))
  np.testing.assert_allclose(same, token, rtol=1e-6)
  ids = np.tile(np.arange(MASK.shape[1]), (len(MASK), 1))
  each = compiled(O.segment_ratio, LOGP, OLD, MASK, ids)
  np.testing.assert_allclose(each, compiled(O.token_ratio, LOGP, OLD, MASK), rtol=1e-6)
  grad = jax.jit(jax.grad(lambda x: O.gspo_token_ratio(x, OLD, MASK).sum()))(LOGP)
  np.testing.assert_allclose(grad, np.where(MASK, expected[:, None], 0), rtol=1e-6)


def test_what_each_kl_estimate_is_the_gradient_of(x64):
  """Expectations over all of a small vocabulary, no sampling."""
  rng = np.random.default_rng(1)
  logits, ref = rng.normal(size=(2, 7))
  ref = jax.nn.log_softmax(ref)

  @functools.partial(jax.jit, static_argnums=0)
  def expected(estimate, logits):
    probability = jax.lax.stop_gradient(jax.nn.softmax(logits))
    return jnp.sum(probability * estimate(jax.nn.log_softmax(logits), ref))

  @jax.jit
  def kl(p, q):
    return jnp.sum(jnp.exp(p) * (p - q))

  reverse = kl(jax.nn.log_softmax(logits), ref)
  for estimate in O.kl_k1, O.kl_k3:  # unbiased
    np.testing.assert_allclose(expected(estimate, logits), reverse, rtol=1e-12)
  gradient = jax.jit(jax.grad(expected, argnums=1), static_argnums=0)
  gradients = {k: gradient(k, logits) for k in (O.kl_k1, O.kl_k2, O.kl_k3)}
  np.testing.assert_allclose(gradients[O.kl_k1], np.zeros(7), atol=1e-14)
  true = jax.jit(jax.grad(lambda x: kl(jax.nn.log_softmax(x), ref)))(logits)
  np.testing.assert_allclose(gradients[O.kl_k2], true, rtol=1e-10, atol=1e-14)
  forward = jax.jit(jax.grad(lambda x: kl(ref, jax.nn.log_softmax(x))))(logits)
  np.testing.assert_allclose(gradients[O.kl_k3], forward, rtol=1e-10, atol=1e-14)


def test_k3_keeps_its_digits_near_zero():
  """exp(x) − 1 − x at 1e-3 is off by 10% in float32."""
  np.testing.assert_allclose(O.kl_k3(np.float32(0), np.float32(1e-3)), 5.0017e-7, rtol=1e-3)
  half = jnp.float16(-10), jnp.float16(0)
  np.testing.assert_allclose(O.kl_k3(*half), np.exp(10) - 11, rtol=1e-6)
  assert O.kl_k2(*half).dtype == jnp.float32


def test_of_older_responses_the_weighted_k3_points_where_the_divergence_does(x64):
  """A softmax over six tokens, drawn from the policy of updates ago; expectations are exact."""
  rng = np.random.default_rng(0)
  ref, step = jax.nn.log_softmax(rng.normal(size=6)), 0.5 * rng.normal(size=6)
  old = jax.nn.log_softmax(ref + 0.3 * step)
  logits = old + step

  @functools.partial(jax.jit, static_argnums=0)
  def penalty(kind, logits, sampled):
    """The gradient of E_sampled[KL estimate] by logits, as a loss has it of each token."""

    def token_term(logits, token):
      def row(logp):
        return logp[token][None, None]

      new, advantage, mask = jax.nn.log_softmax(logits), jnp.zeros(1), jnp.ones((1, 1))
      options = dict(ref_logp_BT=row(ref), kl=kind, kl_coef=1.0)
      return O.grpo_loss(row(new), row(sampled), advantage, mask, **options)[0]

    grads = jax.vmap(jax.grad(token_term), in_axes=(None, 0))(logits, jnp.arange(6))
    return jnp.exp(sampled) @ grads

  @jax.jit
  def divergence(logits):
    logp = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(logp) * (logp - ref))

  def cosine(x, y):
    return x @ y / np.linalg.norm(x) / np.linalg.norm(y)

  true = jax.grad(divergence)(logits)
  np.testing.assert_allclose(penalty("k1", logits, jax.nn.log_softmax(logits)), 0, atol=1e-12)
  assert cosine(penalty("k1", logits, old), true) < -0.9
  assert cosine(penalty("k3", logits, old), true) < 0.99
  np.testing.assert_allclose(penalty("k3_weighted", logits, old), true, rtol=1e-9, atol=1e-12)


@functools.partial(jax.jit, static_argnums=(0, 1))
def penalised(loss, kind, logp, old, ref, advantage, mask, half):
  """Returns value and gradient with a penalty and without, and the values with it on each half."""

  def value(x, **options):
    return loss(x, old, advantage, mask, **options)[0]

  options = dict(ref_logp_BT=ref, kl=kind, kl_coef=0.3)
  halves = [value(logp, kl_mask_BT=tokens_BT, **options) for tokens_BT in (half, ~half)]
  gradient = jax.value_and_grad(value)
  return gradient(logp, **options), gradient(logp), halves


@pytest.mark.parametrize(
  "kind",
  [*long(("k1", "k2")), "k3", "k3_weighted"],
)
def test_penalties_are_added(kind, x64):
  """Value and gradient, in the loss's own aggregation."""
  case = paper.case(2, dtype=np.float64)
  logp, old, ref, mask = (case[name] for name in ("logp", "old", "ref", "mask"))
  half = np.broadcast_to(np.arange(mask.shape[1]) % 2 == 0, mask.shape)  # The mean is over all.
  for loss, aggregate in (
    (O.gspo_loss, "sequence"),
    (O.dapo_loss, "token"),
    (O.gmpo_loss, "sequence"),
  ):
    arguments = logp, old, ref, case["advantage"], mask, half
    (value, grad), (plain, plain_grad), halves = penalised(loss, kind, *arguments)

    def penalty(x, aggregate=aggregate):
      return paper.kl_penalty(x, ref, mask, kind, aggregate, old=old)

    np.testing.assert_allclose(value - plain, 0.3 * penalty(logp).real, rtol=1e-9)
    np.testing.assert_allclose(grad - plain_grad, 0.3 * paper.gradient(penalty, logp), atol=1e-12)
    np.testing.assert_allclose(sum(halves) - plain, value, rtol=1e-12)
    assert plain != halves[0] != value


def test_the_entropys_bonus_is_added(x64):
  case = paper.case(2, dtype=np.float64)
  entropy = np.where(case["mask"], case["rng"].random(case["mask"].shape), np.nan)
  arguments = case["logp"], case["old"], case["advantage"], case["mask"]
  options = dict(entropy_BT=entropy, entropy_coef=0.1)
  bonus, metrics = compiled(O.dapo_loss, *arguments, **options)
  mean = entropy[case["mask"]].mean()
  np.testing.assert_allclose(bonus, compiled(O.dapo_loss, *arguments)[0] - 0.1 * mean)
  np.testing.assert_allclose(metrics["entropy"], mean)


def test_metrics_by_hand():
  """Four rows: one clipped high, one low, one that may not be clipped for its sign, one within."""
  lengths = [4, 2, 3, 1]
  mask = np.arange(4) < np.array(lengths)[:, None]
  delta = np.array([1e-3, -1e-3, -1e-3, 1e-4])
  advantage = np.array([1.0, -1.0, 1.0, 1.0])
  logp = np.where(mask, delta[:, None], 9).astype(np.float32)
  for loss in O.gspo_loss, O.gspo_token_loss:
    metrics = compiled(loss, logp, np.zeros_like(logp), advantage, mask)[1]
    ratio = np.exp(delta)
    expected = {
      "clip_fraction/sequence": 2 / 4,
      "clip_fraction/sequence/high": 1 / 4,
      "clip_fraction/sequence/low": 1 / 4,
      "clip_fraction/token": 6 / 10,
      "clip_fraction/token/high": 4 / 10,
      "clip_fraction/token/low": 2 / 10,
      "ratio/mean": ratio.mean(),
      "ratio/min": ratio.min(),
      "ratio/max": ratio.max(),
      "ratio/std": ratio.std(),
      "ratio/deviation": abs(ratio - 1).mean(),
      "ratio/effective_length": np.mean(lengths),  # all tokens have moved alike
      "ratio/tail": 0,
      "kl/k1": -(delta * lengths).sum() / 10,
      "kl/k3": ((ratio - 1 - delta) * lengths).sum() / 10,
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
      np.testing.assert_allclose(metrics[name], value, rtol=1e-3, err_msg=name)


@pytest.mark.parametrize("name", ["gspo", pytest.param("grpo", marks=pytest.mark.long)])
def test_the_effective_length_is_of_the_tokens_that_move(name):
  """Over responses with any such token, packed or not, in one batch or two."""
  still, alone, *_ = np.flatnonzero(LENGTH > 2)
  delta = DELTA.copy()
  delta[still] = 0
  delta[alone, np.flatnonzero(MASK[alone])[1:]] = 0  # a single token moved
  logp = np.where(MASK, OLD + delta, np.nan)
  moved = (delta**2).sum(1) > 0
  each = (abs(delta).sum(1) ** 2)[moved] / (delta**2).sum(1)[moved]
  assert each.min() == pytest.approx(1) and 1.5 < each.max() <= LENGTH.max()
  assert moved.sum() == (LENGTH > 0).sum() - 1 > 2
  loss, advantage = O.POLICY_LOSSES[name], np.nan_to_num(CASE["advantage"])
  args = logp, OLD, advantage, MASK
  halves = ([x[rows] for x in args] for rows in (slice(0, 3), slice(3, None)))
  sums = O.merge(*(compiled(loss.sums, *half)[1] for half in halves))
  ids = np.repeat([3, 1], MASK.shape[1]) * np.ones((4, 1), int)
  packed = [np.reshape(x * np.ones(MASK.shape[1]), (4, -1)) for x in (advantage[:, None],)]
  long = [x.reshape(4, -1) for x in (logp, OLD)]
  packed = compiled(loss, *long, *packed, MASK.reshape(4, -1), response_BT=ids)[1]
  for metrics in (compiled(loss, *args)[1], O.compute(sums), packed):
    np.testing.assert_allclose(metrics["ratio/effective_length"], each.mean(), rtol=1e-4)
    beyond = (abs(delta[MASK]) > np.log(2)).mean()
    np.testing.assert_allclose(metrics["ratio/tail"], beyond, rtol=1e-6)
    assert beyond > 0


def test_clip_fractions_of_token_losses():
  """By token, and by response as the mean share; the dual bound is counted apart."""
  mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
  ratio = np.array([[1.3, 1.3, 0.7, 1], [5, 0.7, 9, 9]])
  advantage = np.array([1.0, -1.0])
  args = np.log(ratio).astype(np.float32), np.zeros((2, 4), np.float32), advantage, mask
  metrics = compiled(O.grpo_loss, *args, dual_clip=3.0)[1]
  expected = {"token": 3 / 6, "token/high": 2 / 6, "token/low": 1 / 6, "token/dual": 1 / 6}
  expected |= {"sequence": 1 / 2, "sequence/high": 1 / 4, "sequence/low": 1 / 4}
  expected |= {"sequence/dual": 1 / 4}
  for name, value in expected.items():
    np.testing.assert_allclose(metrics[f"clip_fraction/{name}"], value, rtol=1e-6, err_msg=name)
  np.testing.assert_allclose(metrics["ratio/max"], 5, rtol=1e-6)
  np.testing.assert_allclose(metrics["ratio/std"], ratio[mask == 1].std(), rtol=1e-5)


def test_reductions():
  mean = O.merge(O.Mean(jnp.float32(1), jnp.float32(2)), O.Mean(jnp.float32(5), jnp.float32(1)))
  assert mean.compute() == 2  # not (0.5 + 5) / 2
  assert O.Mean(jnp.float32(0), jnp.float32(0)).compute() == 0
  assert O.merge(O.Max(jnp.float32(-1)), O.Max(jnp.float32(-jnp.inf))).compute() == -1
  assert O.merge(O.Min(jnp.float32(3)), O.Min(jnp.float32(jnp.inf))).compute() == 3
  assert O.merge(O.Last(jnp.int32(3)), O.Last(jnp.int32(2))).compute() == 2
  assert O.collapse(O.Last(jnp.array([[3, 4], [5, 1]]))).compute().tolist() == [5, 1]
  x = np.random.default_rng(0).normal(size=(4, 10)).astype(np.float32)
  stacked = O.Std(jnp.full(4, 10.0), jnp.asarray(x.sum(1)), jnp.asarray((x**2).sum(1)))
  np.testing.assert_allclose(O.collapse(stacked).compute(), x.std(), rtol=1e-6)
  grad = jax.grad(lambda n: O.Mean(n, jnp.float32(0)).compute())(1.0)
  assert grad == 0
