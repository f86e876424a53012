"""The devices' part of advantages: rewards less a price on leaving the reference, and metrics."""

import dataclasses

import jax
import numpy as np
import pytest
from support.configs import config_of
from support.small_updates import GSPO, make_batch

from configs import tiny
from gspo_jax import sharding
from gspo_jax.learner import packing
from gspo_jax.learner.advantages import make, reference_advantages
from gspo_jax.learner.batch import at_the_end
from gspo_jax.settings.mesh import MeshConfig

G, COEF = 4, 0.3


def batches():
  """Two mini-batches of four groups each, with some responses masked."""
  rng, minibatches = np.random.default_rng(0), [make_batch(seed=seed) for seed in (0, 1)]
  minibatches[1].mask_BT[:3] = 0  # One response of the group is left.
  rewards = [rng.integers(0, 2, len(b.mask_BT)).astype(np.float32) for b in minibatches]
  return [
    b.with_fields(reward_BT=at_the_end(r, b.mask_BT)) for b, r in zip(minibatches, rewards)
  ], rewards


def expected(kind):
  """float64, group by group."""
  minibatches, rewards = batches()
  drift = [
    np.where(b.mask_BT > 0, np.float64(b.old_logp_BT) - b.ref_logp_BT, 0) for b in minibatches
  ]
  valid = np.concatenate([b.mask_BT.any(1) for b in minibatches])
  price = COEF * np.concatenate(drift).sum(1)
  shaped = np.where(valid, np.concatenate(rewards) - price, 0)
  size = {"std": lambda rows: rows.std(ddof=1) + 1e-6, "none": lambda _: 1.0}
  size["batch"] = lambda _: shaped[valid].std(ddof=1) + 1e-6
  advantage = np.zeros(len(valid))
  for group in np.split(np.arange(len(valid)), len(valid) // G):
    rows = group[valid[group]]
    if len(rows) > 1:
      advantage[rows] = (shaped[rows] - shaped[rows].mean()) / size[kind](shaped[rows])
  return advantage, price[valid].mean()


@pytest.mark.parametrize("kind, shards", [("std", 0), ("none", 2), ("batch", 2)])
def test_divergence_from_the_reference_is_subtracted_from_rewards_before_comparison(kind, shards):
  """Covers packed rows on two devices, with groups split between them."""
  part = reference_advantages(dataclasses.replace(GSPO, advantage=kind, reward_kl_coef=COEF), G)
  minibatches, _ = batches()
  if not shards:
    results, row = part(minibatches)
  else:
    mesh = sharding.make_mesh(MeshConfig(1, shards, 1, 1), jax.devices()[:shards])
    with jax.set_mesh(mesh):
      results, row = part([sharding.put_batch(packing.plan(b, shards), mesh) for b in minibatches])
    assert any((np.diff(np.asarray(b.order_B)) < 0).any() for b in results)
    assert all(b.advantage_B.sharding == b.order_B.sharding for b in results)
  host = jax.device_get(results)
  ours = [packing.in_order(b.advantage_B, b.order_B) for b in host]
  advantage, price = expected(kind)
  np.testing.assert_allclose(np.concatenate(ours), advantage, atol=1e-4)
  assert row["reward/kl_penalty"] == pytest.approx(price, rel=1e-4)
  assert all(b.advantage_inputs.reward_BT is None for b in results)


@pytest.mark.parametrize("name, by_token", [("gspo", False), ("gspo_token", True)])
def test_advantages_without_a_critic_have_metrics(name, by_token):
  """Moments over unmasked responses, or tokens, of all mini-batches."""
  rng, (minibatches, _) = np.random.default_rng(1), batches()
  minibatches = [
    b.with_fields(reward_BT=None, advantage_BT=rng.normal(5, 2, b.mask_BT.shape).astype(np.float32))
    for b in minibatches
  ]
  results, row = make(config_of(tiny.get_config, objective__name=name), None)(minibatches)
  values = [b.advantage_BT[b.mask_BT > 0] for b in minibatches]
  if not by_token:
    values = [b.advantage_B[b.mask_BT.any(1)] for b in minibatches]
  values = np.concatenate(values).astype(np.float64)
  expected = dict(mean=values.mean(), std=values.std(), min=values.min(), max=values.max())
  assert row == {f"advantage/{k}": pytest.approx(x, rel=1e-4) for k, x in expected.items()}
  assert results == minibatches
  nothing = [b.replace(mask_BT=0 * b.mask_BT) for b in minibatches]
  assert not any(make(config_of(tiny.get_config), None)(nothing)[1].values())
