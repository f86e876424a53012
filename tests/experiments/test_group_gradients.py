"""Gradients of single groups: their sums against loops, and what is estimated from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_models import SMALLER_MOE, initial
from support.small_updates import learner, make_batch, with_inputs

from experiments import group_gradients
from gspo_jax import objectives as O
from gspo_jax.learner import packing
from gspo_jax.learner.passes import log_probs

G = 4
LEARNER = learner(SMALLER_MOE, group_size=G)


def gspo(logp_BT, batch):
  return O.gspo_loss(logp_BT, batch.old_logp_BT, batch.advantage_B, batch.mask_BT)


def grpo(logp_BT, batch):
  return O.grpo_loss(logp_BT, batch.old_logp_BT, batch.advantage_B, batch.mask_BT)


LOSSES = dict(gspo=gspo, grpo=grpo, raw=group_gradients.raw_product_loss)


@pytest.fixture(scope="module")
def batch():
  """Half of the sequences have moved beyond GSPO's range."""
  params, inputs = initial(SMALLER_MOE), make_batch(SMALLER_MOE)
  inputs = with_inputs(inputs, tokens_BT=inputs.inputs.tokens_BT % 32)
  logp_BT = log_probs(params, inputs.inputs, LEARNER)[0]
  drift_BT = 0.02 * np.sin(np.arange(logp_BT.size)).reshape(logp_BT.shape)
  return inputs.replace(old_logp_BT=(logp_BT - drift_BT) * inputs.mask_BT)


def flat(tree):
  return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


@pytest.mark.long
def test_moments_are_those_of_one_gradient_after_the_other(batch):
  params = initial(SMALLER_MOE)
  actual = group_gradients.make_group_moments(LEARNER, [*LOSSES.values()])(params, batch)
  assert actual.groups == len(batch.mask_BT) / G
  for i, loss in enumerate(LOSSES.values()):
    gradient = jax.jit(
      jax.grad(
        lambda p, group, loss=loss: loss(log_probs(p, group.inputs, LEARNER)[0], group),
        has_aux=True,
      )
    )
    total, square, clipped = 0.0, 0.0, 0.0
    for j in range(0, len(batch.mask_BT), G):
      group, metrics = gradient(params, jax.tree.map(lambda x, j=j: x[j : j + G], batch))
      total, square = total + flat(group), square + (flat(group) ** 2).sum()
      clipped += float(metrics.get("clip_fraction/token", 0))
    mine = flat(jax.tree.map(lambda x, i=i: x[i], actual.total_X))
    np.testing.assert_allclose(mine, total, rtol=0, atol=1e-5 * abs(total).max())
    assert actual.square_X[i] == pytest.approx(square, rel=1e-4)
    assert actual.metrics_X["clip_fraction/token"][i] == pytest.approx(clipped, rel=1e-5)
  assert clipped == 0 and actual.metrics_X["clip_fraction/token"][0] > 0


@pytest.mark.long
def test_on_policy_all_losses_have_one_gradient(batch):
  params = initial(SMALLER_MOE)
  same = batch.replace(old_logp_BT=log_probs(params, batch.inputs, LEARNER)[0])
  actual = group_gradients.make_group_moments(LEARNER, [*LOSSES.values()])(params, same)
  gspo_X, *others = (
    flat(jax.tree.map(lambda x, i=i: x[i], actual.total_X)) for i in range(len(LOSSES))
  )
  for other in others:
    np.testing.assert_allclose(other, gspo_X, rtol=0, atol=1e-4 * abs(gspo_X).max())


def moments(gradient_NXD):
  total = dict(a=jnp.asarray(gradient_NXD.sum(0)[:, :3]), b=jnp.asarray(gradient_NXD.sum(0)[:, 3:]))
  square = jnp.asarray((gradient_NXD**2).sum((0, 2)))
  return group_gradients.Moments(jnp.float32(len(gradient_NXD)), total, square, {})


def test_estimates_are_without_bias():
  """For gradients of known mean and covariance, far below their noise."""
  rng = np.random.default_rng(0)
  true, other = np.array([0.3, 0, 0, 0.1, 0, 0, 0, 0]), np.array([0.3, 0.2, 0, 0.1, 0, 0, 0, 0])
  estimates = []
  for _ in range(400):
    draw = rng.normal(size=(32, 2, 8)) + np.stack([2 * true, other])
    independent = rng.normal(size=(64, 1, 8)) + true
    estimates.append(group_gradients.compare(moments(draw), moments(independent)))
  mean = {
    name: np.mean([estimate[name] for estimate in estimates], axis=0)
    for name in ("signal", "noise")
  }
  np.testing.assert_allclose(mean["signal"], [0.4, 0.14], rtol=0.1)
  np.testing.assert_allclose(mean["noise"], [8, 8], rtol=0.02)
  many = rng.normal(size=(200_000, 2, 8)) * 0.1 + np.stack([2 * true, other])
  estimates = group_gradients.compare(moments(many), moments(many[:, :1] / 2))
  np.testing.assert_allclose(estimates["snr"], np.array([0.4, 0.14]) / 0.08, rtol=1e-2)
  np.testing.assert_allclose(estimates["scale"], [2, 1], rtol=1e-2)
  np.testing.assert_allclose(estimates["bias"], [1, 0.4], rtol=2e-2)
  np.testing.assert_allclose(estimates["cosine"], [1, 0.1 / np.sqrt(0.1 * 0.14)], rtol=1e-2)
  np.testing.assert_allclose(estimates["projected"], [0.4 / 0.08, 0.1 / 0.08], rtol=2e-2)


def test_groups_that_are_not_apart_are_refused(batch):
  find = group_gradients.make_group_moments(LEARNER, [gspo])
  with pytest.raises(ValueError, match="not packed"):
    find(initial(SMALLER_MOE), packing.plan(batch, 1))
