"""Experts while sampling: the sums are those of training, on however many chips the experts are."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_models import MOE, expert_inputs, initial, plain_experts

from gspo_jax import sharding
from gspo_jax.models import publication, transformer
from gspo_jax.models.attention import cache as kv_cache
from gspo_jax.models.experts import blocks, decode, moe
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.sharding import ROLLOUT, ROLLOUT_FSDP, ROLLOUT_SLICE

X, K, E = 40, 2, 8


@pytest.mark.parametrize("rows", [8, 128])  # several rounds, and one
@pytest.mark.parametrize("case", ["mixed", "all_to_one", "held_elsewhere"])
def test_one_hot_equals_the_plain_sum(case, rows, monkeypatch):
  monkeypatch.setattr(decode, "ROWS", rows)
  x, gate, _, w = expert_inputs(X, E, K)
  keys = jax.random.split(jax.random.key(1), X)
  index = jax.vmap(lambda key: jax.random.permutation(key, E)[:K])(keys)
  if case != "mixed":
    index = jnp.broadcast_to(jnp.array([3, 5 if case == "all_to_one" else E]), (X, K))
  got = jax.jit(lambda *a: decode.apply_one_hot(*a, E, lambda: w, load=1.0))(x, gate, index)
  np.testing.assert_allclose(got, plain_experts(x, gate, index, w), atol=1e-5)


def cached(params, tokens):
  """Hidden states and experts chosen of a prefix and of two decoding steps; one row is idle."""
  B, T = tokens.shape
  active = jnp.ones((B, T), jnp.int32).at[3].set(0)
  cache, outputs = kv_cache.allocate(MOE, B, T, jnp.float32), []
  for piece in (slice(0, T - 2), slice(T - 2, T - 1), slice(T - 1, T)):
    positions = jnp.broadcast_to(jnp.arange(T)[None, piece], tokens[:, piece].shape)
    out = transformer.forward(
      params,
      MOE,
      tokens[:, piece],
      positions=positions,
      segments=active[:, piece],
      cache=cache,
    )
    cache = out.cache
    outputs.append((out.hidden_BTD, out.routing_lBTk))
  return outputs


TOKENS = transformer.example_tokens(MOE, 8, 6)


@functools.cache
def expected():
  return jax.device_get(jax.jit(cached)(initial(MOE), TOKENS))


@pytest.mark.parametrize("few", [0, 256], ids=["weights travel", "tokens travel"])
@pytest.mark.parametrize(
  "shape, rules, form",
  [
    ((2, 2, 1, 2), ROLLOUT_SLICE, "one_hot"),
    pytest.param((1, 4, 2, 1), ROLLOUT_FSDP, "one_hot", marks=pytest.mark.long),
    pytest.param((1, 2, 4, 1), ROLLOUT, "one_hot", marks=pytest.mark.long),
    pytest.param((1, 2, 4, 1), ROLLOUT_SLICE, "auto", marks=pytest.mark.long),
    pytest.param((1, 4, 2, 1), ROLLOUT_SLICE, "one_hot", marks=pytest.mark.long),
  ],
  ids=str,
)
def test_every_layout_gives_the_hidden_states_and_experts_of_one_device(
  shape, rules, form, few, monkeypatch
):
  monkeypatch.setattr(moe, "FEW", few)
  if form == "one_hot":  # The form of TPUs.

    def one_hot(_, load):
      return functools.partial(decode.apply_one_hot, load=load)

    monkeypatch.setattr(moe, "choose_for_few", one_hot)
  mesh = sharding.make_mesh(MeshConfig(*shape))
  with jax.set_mesh(mesh):
    params = jax.device_put(initial(MOE), transformer.shardings(MOE, rules, mesh))
    run = jax.jit(lambda p, t: cached(p, t))  # traced anew, with what was changed above
    got = jax.device_get(run(params, sharding.put_batch(TOKENS, mesh)))
  for (hidden, experts), (expected_hidden, expected_experts) in zip(got, expected()):
    assert (experts[:, 3] == -1).all() and (experts[:, :3] >= 0).all()
    np.testing.assert_array_equal(experts, expected_experts)
    np.testing.assert_allclose(hidden, expected_hidden, atol=2e-5)


def test_rows_of_an_expert_follow_the_load_over_all_chips_with_experts(monkeypatch):
  loads = []

  def batched_rows(X, load):
    loads.append(load)
    return 8, 8

  monkeypatch.setattr(blocks, "batched_rows", batched_rows)
  mesh = sharding.make_mesh(MeshConfig(1, 4, 2, 1))
  with jax.set_mesh(mesh):
    params = jax.device_put(initial(MOE), transformer.shardings(MOE, ROLLOUT_FSDP, mesh))
    jax.eval_shape(cached, params, sharding.put_batch(TOKENS, mesh))
  # Four of eight chips share the experts and gather their tokens, of a prefix and of a step.
  tokens = {4 * 4, 4}
  assert set(loads) == {n * MOE.experts_per_token / MOE.num_experts for n in tokens}


def test_experts_go_over_all_chips_if_they_divide_and_a_router_is_whole():
  mesh = sharding.make_mesh(MeshConfig(1, 2, 4, 1))

  def rules(word, experts):
    return sharding.rollout_rules(MeshConfig(1, 2, 4, 1, word), mesh, experts)

  assert rules("auto", 8) is rules("all", 8) is ROLLOUT_SLICE
  assert rules("auto", 12) is rules("expert", 8) is ROLLOUT
  assert rules("fsdp", 12) is ROLLOUT_FSDP
  with pytest.raises(ValueError, match=r"rollout_experts=fsdp: 6 experts .* 4 chips"):
    rules("fsdp", 6)  # Decoding can, prefills cannot.
  with pytest.raises(ValueError, match=r"rollout_experts=all: 12 experts .* 8 chips"):
    rules("all", 12)
  with pytest.raises(ValueError, match=r"mesh\.rollout_experts='most' is not"):
    MeshConfig(1, 2, 4, 1, "most")
  layout = transformer.shardings(MOE, ROLLOUT_SLICE, mesh).blocks[0].ffn
  assert layout.gate.spec == sharding.P(None, ("expert", "fsdp"), None, "tensor")
  assert not any(layout.router.spec)


def test_publishing_sends_each_weight_to_its_chip_once():
  """From D over fsdp to E over fsdp: an all-to-all, and experts are nowhere put together."""
  mesh = sharding.make_mesh(MeshConfig(1, 2, 4, 1))
  params = initial(MOE)
  with jax.set_mesh(mesh):
    training = jax.device_put(params, transformer.shardings(MOE, sharding.TRAIN, mesh))
    layout = transformer.shardings(MOE, ROLLOUT_SLICE, mesh)
    publish = publication.publisher(layout, transformer.dtypes(MOE, jnp.float32))
    experts = jax.jit(lambda p: publish(p).blocks[0].ffn.gate)
    text = experts.lower(training).compile().as_text()
    got = publish(training)
  assert "all-to-all(" in text and "all-gather(" not in text
  chex.assert_trees_all_equal(jax.device_get(got), jax.device_get(params))
