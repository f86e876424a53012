"""Experts: compared as sets, recorded as they were used, replayed without losing the gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.sampling import PROMPTS
from support.sampling import sample as generate
from support.small_models import MOE, initial

from gspo_jax import sharding
from gspo_jax.learner.metrics import router_metrics
from gspo_jax.models import transformer
from gspo_jax.models.attention import cache as kv_cache
from gspo_jax.models.experts import moe, routing
from gspo_jax.objectives import reductions
from gspo_jax.settings.mesh import MeshConfig

# Experts of three layers, in two scans.
MODEL = dataclasses.replace(MOE, num_layers=4, mlp_only_layers=(1,), intermediate_size=32)
PARAMS, OTHER = initial(MODEL), initial(MODEL, seed=1)
DRIFTED = jax.tree.map(lambda a, b: a + 0.3 * b, PARAMS, OTHER)
TOKENS = transformer.example_tokens(MODEL, 4, 7)


@jax.jit
def forward(params, tokens=TOKENS, **options):
  return transformer.forward(params, MODEL, jnp.asarray(tokens), **options)


def own_experts():
  return forward(PARAMS).routing_lBTk


# Volatility.


def test_volatility_of_a_worked_example():
  # One layer, k = 3: the same experts in another order, one of three new, two new, all new.
  old = np.array([[[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]]])
  new = np.array([[[2, 0, 1], [0, 1, 5], [7, 1, 5], [7, 4, 5]]])
  layers = np.stack([new, old]), np.stack([old, old])
  np.testing.assert_allclose(routing.volatility(*layers), [(0 + 1 / 3 + 2 / 3 + 1) / 4, 0])
  masked = routing.volatility(*layers, where_BT=np.array([[1, 0, 0, 1]]))
  np.testing.assert_allclose(masked, [1 / 2, 0])


def test_volatility_of_the_same_experts_is_0_and_of_disjoint_ones_1():
  experts = np.asarray(own_experts())
  assert (routing.volatility(experts, experts[..., ::-1]) == 0).all()
  assert (routing.volatility(experts % 4, experts % 4 + 4) == 1).all()


def test_volatility_of_unrelated_choices_is_what_chance_gives():
  key = jax.random.key(0)
  scores = jax.random.normal(key, (2, 1, 50, 100, 8))
  a, b = (jax.lax.top_k(s, 2)[1] for s in scores)
  np.testing.assert_allclose(routing.volatility(a, b), 1 - 2 / 8, atol=0.02)


def test_tokens_without_experts_on_either_side_are_not_compared():
  old, new = np.zeros((1, 1, 4, 2), int), np.ones((1, 1, 4, 2), int)
  old[..., 1] = 3
  new[..., 1] = 3  # share 1/2 everywhere
  new[0, 0, 0] = -1
  old[0, 0, 1] = -1
  total, number = routing.volatility_sums(new, old)
  assert float(number[0]) == 2 and float(total[0]) == 1
  assert float(routing.volatility(new, -np.ones_like(old))[0]) == 0


def test_experts_are_stored_in_as_few_bytes_as_they_need():
  assert [routing.storage_dtype(n).name for n in (8, 128, 129, 512)] == ["int8"] * 2 + ["int16"] * 2
  experts = jnp.array([127, 0]).reshape(1, 1, 1, 2)
  stored = routing.by_row(experts, 128)
  assert stored.dtype == jnp.int8
  np.testing.assert_array_equal(routing.by_layer(stored), experts)


# Replay.


def test_replay_with_the_same_weights_changes_nothing():
  out = forward(PARAMS)
  stored = routing.by_row(out.routing_lBTk, MODEL.num_experts)
  again = forward(PARAMS, routing=routing.by_layer(stored))
  np.testing.assert_array_equal(again.hidden_BTD, out.hidden_BTD)
  np.testing.assert_array_equal(again.routing_lBTk, out.routing_lBTk)
  assert (again.stats.overridden == 0).all() and (again.stats.replayed_tokens == TOKENS.size).all()


def test_drifted_weights_are_evaluated_on_the_replayed_network(monkeypatch):
  old = own_experts()
  replaying, free = forward(DRIFTED, routing=old), forward(DRIFTED)
  assert (free.routing_lBTk != old).any()
  assert jnp.abs(free.hidden_BTD - replaying.hidden_BTD).max() > 0.1

  def route(x_BTD, router_DE, config, valid_BT, replayed_experts_BTk, *biases):
    """Softmax over the current logits of the replayed experts (arXiv:2512.01374, gates in R3)."""
    logit_BTk = jnp.take_along_axis(x_BTD @ router_DE, replayed_experts_BTk, -1)
    return jax.nn.softmax(logit_BTk, axis=-1), replayed_experts_BTk, moe.RouterStats(*jnp.zeros(6))

  monkeypatch.setattr(moe, "route", route)
  run = jax.jit(lambda p: transformer.forward(p, MODEL, TOKENS, routing=old))  # traced anew
  expected = run(DRIFTED).hidden_BTD
  np.testing.assert_allclose(replaying.hidden_BTD, expected, atol=2e-5)
  np.testing.assert_array_equal(replaying.routing_lBTk, old)


def test_what_replay_overrides_is_the_routers_own_choice_above_replayed_layers():
  old = own_experts()
  stats = forward(DRIFTED, routing=old).stats
  for layer in range(3):
    free = old.at[layer:].set(-1)  # replayed below, its own choice here
    choice = forward(DRIFTED, routing=free).routing_lBTk[layer]
    expected = float(routing.volatility(choice[None], old[layer][None])[0])
    assert stats.overridden[layer] / stats.replayed_tokens[layer] == pytest.approx(
      expected, abs=1e-6
    )
    assert expected > 0.1


def test_positions_without_experts_use_the_routers_own_choice():
  old = own_experts()
  partial = jnp.where((jnp.arange(7) % 2 == 0)[None, None, :, None], old, -1)
  experts = forward(DRIFTED, routing=partial).routing_lBTk
  np.testing.assert_array_equal(experts[:, :, ::2], old[:, :, ::2])
  assert (experts[:, :, 1::2] >= 0).all() and (experts[:, :, 1::2] != old[:, :, 1::2]).any()
  nothing = forward(DRIFTED, routing=-jnp.ones_like(old))
  np.testing.assert_array_equal(nothing.hidden_BTD, forward(DRIFTED).hidden_BTD)
  assert (nothing.stats.replayed_tokens == 0).all()


def test_half_of_the_experts_is_none():
  # Filled up by the router, it could name one expert twice.
  half = own_experts().at[..., 0].set(-1)
  np.testing.assert_array_equal(
    forward(DRIFTED, routing=half).routing_lBTk, forward(DRIFTED).routing_lBTk
  )


@pytest.mark.parametrize("logit", [-1.0, -6.0, -15.0, -18.75, -100.0])
def test_gates_of_replayed_experts_are_right_however_unlikely(logit):
  """Softmax over the two logits, with its gradient; 0 if both scores are below normal numbers."""
  x = jnp.ones((1, 1, 4))
  router = jnp.concatenate([jnp.full((4, 6), 5.0), jnp.full((4, 2), logit)], 1).at[0, 7].add(0.5)

  def first_gate(router):
    gate_BTk, *_ = moe.route(x, router, MODEL, jnp.ones((1, 1)), jnp.array([[[6, 7]]], jnp.int8))
    return 5 * gate_BTk[0, 0, 0]

  value, gradient = jax.jit(jax.value_and_grad(first_gate))(router)
  gate, gradient = value / 5, gradient / 5
  expected = 0 if logit < -16 else 1 / (1 + np.exp(0.5))
  np.testing.assert_allclose(gate, expected, rtol=1e-4)
  np.testing.assert_allclose(gradient[0, 6:], [gate * (1 - gate), -gate * (1 - gate)], atol=1e-4)
  assert jnp.isfinite(gradient).all()


def test_gradients_reach_the_router_under_replay_and_are_right():
  # Experts of other weights: gathered after the router's own top-k, these gates had no gradient.
  old = forward(OTHER).routing_lBTk
  direction = jax.random.normal(jax.random.key(2), (4, 7, 32))

  gradient = jax.grad(lambda p: (forward(p, routing=old).hidden_BTD * direction).mean())(PARAMS)
  leaves = jax.tree.leaves_with_path(gradient)
  routers = [(path, g) for path, g in leaves if path[-1].name == "router"]
  assert len(routers) == 2
  for path, g in routers:
    assert (jnp.abs(g).max((1, 2)) > 1e-4).all(), "every layer's router learns"
    along = g / jnp.linalg.norm(g)
    step = 0.02

    shifted = []
    for move in (step * along, -step * along):
      params = jax.tree.map_with_path(
        lambda key, p, path=path, move=move: p + move if key == path else p, PARAMS
      )
      shifted.append(float((forward(params, routing=old).hidden_BTD * direction).mean()))
    slope = (shifted[0] - shifted[1]) / (2 * step)
    assert slope == pytest.approx(float(jnp.linalg.norm(g)), rel=0.02)


# Statistics as values.


def test_router_statistics_as_values():
  stats = forward(PARAMS, segments=jnp.ones(TOKENS.shape).at[:, 5:].set(0)).stats
  router_experts = np.asarray(own_experts())[:, :, :5]
  counts = np.stack([np.bincount(layer.reshape(-1), minlength=8) for layer in router_experts])
  np.testing.assert_array_equal(stats.load_E, counts)
  values = reductions.compute(router_metrics(stats, MODEL))
  assert 0 < values["router/entropy"] < np.log(8) and values["router/z"] > 0
  assert values["router/load_balance"] >= 1 and values["router/dropped_tokens"] == 0
  share = counts.max(-1) / counts.sum(-1)
  assert values["router/busiest_expert"] == pytest.approx(share.max(), rel=1e-6)
  assert stats.overridden is None
  assert forward(PARAMS, routing=own_experts()).stats.overridden.shape == (3,)


def test_an_expert_that_is_not_there_is_counted_as_dropped():
  wrong = own_experts().at[1, 0, 2].set(99)
  values = router_metrics(forward(PARAMS, routing=wrong).stats, MODEL)
  assert reductions.compute(values)["router/dropped_tokens"] == 2


# Capture.


def sample(params=PARAMS, prompts=PROMPTS, **changes):
  options = dict(group_size=4, max_new_tokens=6, stop_ids=(1, 2, 3, 20, 21), seed=7)
  options |= dict(prompt_length=5, record_routing=True) | changes
  return generate(params, MODEL, prompts, **options)


def test_the_samplers_experts_are_the_trainers():
  out = sample()
  assert out.routing.shape == (16, 11, 3, 2) and out.routing.dtype == np.int8
  assert 0 < out.stopped.sum() < 16
  # All but the last token of a response were fed to the sampler.
  fed = np.arange(11)[None] < (out.prompt_lengths + out.lengths - 1)[:, None]
  trainer = np.moveaxis(np.asarray(forward(PARAMS, out.tokens).routing_lBTk), 0, 2)
  np.testing.assert_array_equal(np.sort(out.routing, -1)[fed], np.sort(trainer, -1)[fed])
  assert (out.routing[~fed] == -1).all()
  for layer in range(3):  # not all zero, not one expert everywhere
    assert len(np.unique(out.routing[fed][:, layer])) >= 6
  assert (out.routing[fed][..., 0] != out.routing[fed][..., 1]).all()


@pytest.mark.long
def test_recording_changes_no_token_and_a_row_does_not_depend_on_the_others():
  out = sample()
  plain = sample(record_routing=False)
  assert plain.routing is None
  np.testing.assert_array_equal(out.tokens, plain.tokens)
  np.testing.assert_array_equal(out.logp, plain.logp)
  alone = sample(prompts=[PROMPTS[2]])  # ends when its own rows have
  for row in range(4):
    end = out.prompt_lengths[8 + row] + out.lengths[8 + row]
    np.testing.assert_array_equal(alone.routing[row, :end], out.routing[8 + row, :end])


@pytest.mark.long
@pytest.mark.parametrize("shape", [(8, 1, 1, 1), (1, 2, 2, 2)], ids=str)
def test_every_mesh_records_the_same_experts(shape):
  base = sample()
  mesh = sharding.make_mesh(MeshConfig(*shape))
  with jax.set_mesh(mesh):
    params = jax.device_put(PARAMS, transformer.shardings(MODEL, sharding.ROLLOUT_SLICE, mesh))
    np.testing.assert_array_equal(sample(params).routing, base.routing)


@pytest.mark.long
def test_a_dense_model_has_no_experts():
  dense = dataclasses.replace(MODEL, num_experts=0, experts_per_token=0)
  params = transformer.init(dense, jax.random.key(0))
  out = generate(params, dense, [[1, 2]], group_size=2, max_new_tokens=2, record_routing=True)
  assert out.routing is None


@pytest.mark.parametrize(
  "shape", [pytest.param((2, 2, 2, 1), marks=pytest.mark.long), (1, 2, 2, 2)], ids=str
)
def test_the_cache_keeps_its_sharding_through_prefill_and_decoding(shape):
  mesh = sharding.make_mesh(MeshConfig(*shape))
  with jax.set_mesh(mesh):
    params = jax.device_put(PARAMS, transformer.shardings(MODEL, sharding.ROLLOUT, mesh))
    tokens = sharding.put_batch(np.concatenate([TOKENS, TOKENS]), mesh)
    cache = kv_cache.allocate(MODEL, 8, 9, jnp.float32)
    types = jax.tree.map(jax.typeof, cache)
    for leaf in jax.tree.leaves(types):
      assert leaf.sharding.spec == kv_cache.spec(leaf)

    def step(p, t, c, positions):
      return transformer.forward(p, MODEL, t, positions=positions, cache=c).cache

    for first, new in ((0, tokens), (7, tokens[:, :1])):
      position = jnp.broadcast_to(jnp.arange(first, first + new.shape[1])[None], new.shape)
      # Sharding is in the types, so that none has to be compiled.
      out = jax.make_jaxpr(step)(params, new, cache, position).out_avals
      assert out == jax.tree.leaves(types)
