"""Updates over the tokens that each one was drawn from: log-probs, entropy, gradients, mismatch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.sampling import sample
from support.small_models import GEMMA, SHALLOW_MOE, SMALLER_DENSE, forward, initial, logits
from support.small_updates import ALL_TERMS, SGD, after, learner, rl_step, score_pass, with_inputs

from gspo_jax import sharding
from gspo_jax.learner import packing
from gspo_jax.learner.batch import train_batch
from gspo_jax.models import transformer
from gspo_jax.models.head import NO_TOKEN
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.model import REFERENCE

G = 4


def supports(tokens_BT, size=5, seed=0, vocabulary=64):
  """Ragged supports with the targets in them; some whole."""
  rng = np.random.default_rng(seed)
  support_BTX = np.full((*tokens_BT.shape, size), NO_TOKEN, np.int32)
  for place in np.ndindex(tokens_BT.shape):
    if rng.random() < 0.8:
      outside = rng.permutation(np.setdiff1d(np.arange(vocabulary), [tokens_BT[place]]))
      number = rng.integers(1, size + 1)
      support_BTX[place][:number] = rng.permutation([tokens_BT[place], *outside[: number - 1]])
  return support_BTX


def by_hand(logits_BTV, tokens_BT, support_BTX):
  """Log-probs and entropies in float64."""
  logp_BT, entropy_BT = np.zeros(tokens_BT.shape), np.zeros(tokens_BT.shape)
  for place in np.ndindex(tokens_BT.shape):
    z_V, ids = np.float64(logits_BTV[place]), support_BTX[place]
    kept_X = z_V[ids[ids != NO_TOKEN]] if (ids != NO_TOKEN).any() else z_V
    lse = np.log(np.exp(kept_X - z_V.max()).sum()) + z_V.max()
    p_X = np.exp(kept_X - lse)
    logp_BT[place], entropy_BT[place] = z_V[tokens_BT[place]] - lse, -(p_X * (kept_X - lse)).sum()
  return logp_BT, entropy_BT


@pytest.mark.parametrize(
  "model, mesh",
  [
    pytest.param(SHALLOW_MOE, None, id="None-moe"),
    pytest.param(GEMMA, None, id="None-gemma", marks=pytest.mark.long),
    pytest.param(SHALLOW_MOE, (1, 2, 2, 2), id="(1, 2, 2, 2)-moe", marks=pytest.mark.long),
    # A soft bound, tied embeddings.
    pytest.param(GEMMA, (1, 2, 2, 2), id="(1, 2, 2, 2)-gemma"),
    pytest.param(SHALLOW_MOE, (1, 1, 1, 2), id="(1, 1, 1, 2)-moe", marks=pytest.mark.long),
    pytest.param(GEMMA, (1, 1, 1, 2), id="(1, 1, 1, 2)-gemma", marks=pytest.mark.long),
  ],
)
def test_log_probs_are_normalised_over_the_support(model, mesh):
  """Covers a split vocabulary, and chunks not dividing the length."""
  tokens_BT = transformer.example_tokens(model, 4, 10)
  support_BTX = supports(tokens_BT)
  hidden_BTD = np.asarray(forward(initial(model), model, tokens_BT).hidden_BTD)
  expected = by_hand(logits(initial(model), model, tokens_BT) / 0.7, tokens_BT, support_BTX)
  compute = dataclasses.replace(REFERENCE, logits_chunk=3)
  find = jax.jit(
    functools.partial(transformer.token_logp, temperature=0.7, compute=compute), static_argnums=1
  )
  params = initial(model)
  if mesh is None:
    actual = find(params, model, hidden_BTD, tokens_BT, support_BTX=support_BTX)
  else:
    mesh = sharding.make_mesh(MeshConfig(*mesh), jax.devices()[: np.prod(mesh)])
    with jax.set_mesh(mesh):
      params = jax.device_put(params, transformer.shardings(model, sharding.TRAIN, mesh))
      arrays = sharding.put_batch((hidden_BTD, tokens_BT, support_BTX), mesh)
      actual = jax.device_get(find(params, model, *arrays[:2], support_BTX=arrays[2]))
  for ours, exact in zip(actual, expected):
    np.testing.assert_allclose(ours, exact, atol=2e-5)


def test_only_the_support_has_a_gradient():
  """The head has a column for each token."""
  model = SMALLER_DENSE
  tokens_BT = transformer.example_tokens(model, 2, 6)
  hidden_BTD = forward(initial(model), model, tokens_BT).hidden_BTD
  support_BTX = supports(tokens_BT, vocabulary=model.vocab_size, seed=2)
  support_BTX[0, 0] = [tokens_BT[0, 0], *[NO_TOKEN] * 4]  # alone: certain, whatever the logits

  def total(params, hidden_BTD):
    logp, entropy = transformer.token_logp(
      params, model, hidden_BTD, tokens_BT, support_BTX=support_BTX
    )
    return (logp * weight_BT + 0.3 * entropy).sum()

  def plain(params, hidden_BTD):
    z_BTV = transformer.head_logits(params, model, hidden_BTD)
    kept_BTV = (support_BTX[..., None] == np.arange(model.vocab_size)).any(2)
    kept_BTV |= (support_BTX == NO_TOKEN).all(-1)[..., None]
    logp_BTV = jax.nn.log_softmax(jnp.where(kept_BTV, z_BTV, -1e30))
    p_BTV = jnp.where(kept_BTV, jnp.exp(logp_BTV), 0)
    logp = jnp.take_along_axis(logp_BTV, tokens_BT[..., None], -1)[..., 0]
    entropy = -(p_BTV * jnp.where(kept_BTV, logp_BTV, 0)).sum(-1)
    return (logp * weight_BT + 0.3 * entropy).sum()

  weight_BT = np.random.default_rng(1).normal(size=tokens_BT.shape)
  actual, exact = (
    jax.jit(jax.grad(f, argnums=(0, 1)))(initial(model), hidden_BTD) for f in (total, plain)
  )
  for ours, expected in zip(jax.tree.leaves(actual), jax.tree.leaves(exact), strict=True):
    np.testing.assert_allclose(ours, expected, atol=2e-6)

  @jax.jit
  def only_token_logp(hidden_BTD):
    pair = transformer.token_logp(
      initial(model), model, hidden_BTD, tokens_BT, support_BTX=support_BTX
    )
    return jnp.array([x_BT[0, 0] for x_BT in pair])

  assert not only_token_logp(hidden_BTD).any()
  assert np.abs(jax.jit(jax.grad(lambda h: only_token_logp(h).sum()))(hidden_BTD)).max() < 1e-6


def test_likely_tokens_outside_the_support_give_finite_gradients():
  """exp of other logits overflows in float32; the gradient has no 0 · ∞."""
  model = SMALLER_DENSE
  tokens_BT, hidden_BTD = np.full((1, 1), 3, np.int32), np.ones((1, 1, 16), np.float32)
  head_DV = np.zeros((16, 32), np.float32)
  head_DV[:, 9] = 20.0  # a logit of 320
  params = initial(model).replace(head=jnp.asarray(head_DV))
  support_BTX = np.array([[[3, 4, NO_TOKEN]]], np.int32)

  def total(hidden_BTD):
    pair = transformer.token_logp(params, model, hidden_BTD, tokens_BT, support_BTX=support_BTX)
    return sum(x_BT.sum() for x_BT in pair), pair

  gradient, (logp, entropy) = jax.jit(jax.grad(total, has_aux=True))(hidden_BTD)
  assert [float(logp[0, 0]), float(entropy[0, 0])] == pytest.approx([-np.log(2), np.log(2)])
  assert np.isfinite(gradient).all()


PARAMS = initial(SMALLER_DENSE).replace(head=5 * initial(SMALLER_DENSE).head)


@pytest.fixture(scope="module")
def rollout():
  prompts = [(5, 6, 7), (8,), (9, 10, 11, 12, 13), (14, 15)]
  options = dict(group_size=G, max_new_tokens=11, stop_ids=(1, 2), temperature=0.8)
  return sample(PARAMS, SMALLER_DENSE, prompts, truncation=(6, 0.8, 0.0), support=6, **options)


def batch_of(rollout, shared=False):
  advantage_B = np.random.default_rng(0).normal(size=len(rollout.lengths))
  batch = train_batch(rollout, advantage_B, shared_prompts=shared)
  return batch.replace(old_logp_BT=rollout.logp, ref_logp_BT=rollout.logp - 0.1)


LAYOUTS = {
  "plain": dict(),
  "trees": dict(shared=True),
  "packed": dict(packed=True),
  "mesh": dict(shape=(1, 2, 1, 2)),
  "trees on a mesh": dict(shared=True, shape=(2, 1, 2, 2)),
  "packed on a mesh": dict(packed=True, shape=(2, 1, 1, 2)),
}


OFTEN = "plain", "trees", "packed on a mesh"
LAYOUTS = [
  pytest.param(layout, id=name, marks=() if name in OFTEN else pytest.mark.long)
  for name, layout in LAYOUTS.items()
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sampler_and_trainer_agree_over_the_support_alone(rollout, layout):
  shape = layout.get("shape", (1, 1, 1, 1))
  minibatch, packed = batch_of(rollout, layout.get("shared", False)), layout.get("packed", False)
  settings = dict(group_size=G, response_tokens=11, temperature=0.8, microbatches=2)
  score = score_pass(learner(SMALLER_DENSE, **settings))
  mesh = sharding.make_mesh(MeshConfig(*shape), jax.devices()[: np.prod(shape)])

  def difference(batch):
    with jax.set_mesh(mesh):
      params = jax.device_put(PARAMS, transformer.shardings(SMALLER_DENSE, sharding.TRAIN, mesh))
      placed = packing.plan(batch, sharding.batch_shards(mesh)) if packed else batch
      actual = np.asarray(jax.device_get(score(params, sharding.put_batch(placed.inputs, mesh))))
      actual = packing.in_order(actual, placed.order_B)
    return np.abs(actual - rollout.logp)[rollout.mask > 0]

  assert difference(minibatch).max() < 2e-5
  without = difference(with_inputs(minibatch, support_BTX=None))
  assert without.mean() > 0.05, "the mass that was left out"


@pytest.mark.long
def test_micro_batches_give_the_same_update(rollout):
  """Covers plain and packed rows and meshes, with all terms of the loss."""
  whole = batch_of(rollout)
  objective = dataclasses.replace(ALL_TERMS, old_logp="sampler", volatility=False)
  settings = dict(temperature=0.8, response_tokens=11)

  def step(n):
    return rl_step(learner(SMALLER_DENSE, microbatches=n, **settings), objective, SGD)

  expected, metrics = after(step(1), SMALLER_DENSE, whole)
  for n, batch, shape in (
    (4, whole, None),
    (2, packing.plan(whole, 8), (8, 1, 1, 1)),
    (2, whole, (2, 2, 1, 2)),
  ):
    actual, row = after(step(n), SMALLER_DENSE, batch, shape)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(x, y, atol=2e-5)
    assert row["entropy"] == pytest.approx(metrics["entropy"], rel=1e-4)
  assert metrics["entropy"] < np.log(6) and np.isfinite(metrics["kl_ref/k3"])
