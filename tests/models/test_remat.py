"""Rematerialisation: no policy changes the result, and each keeps what it says."""

import collections
import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import pytest
from support.cases import long
from support.small_models import MOE

from gspo_jax import sharding
from gspo_jax.models import remat as remat_policies
from gspo_jax.models import transformer
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.model import REFERENCE
from gspo_jax.settings.model_groups import LinearConfig
from gspo_jax.system import accelerators

LAYERS, B, T, N, K, H, D, E = 2, 3, 12, 4, 2, 16, 32, 8
CONFIG = dataclasses.replace(MOE, num_heads=N, moe_intermediate_size=24)
POLICIES = [*remat_policies.POLICIES]


def loss(params, remat, attention):
  compute = dataclasses.replace(REFERENCE, remat=remat, attention=attention)
  tokens = transformer.example_tokens(CONFIG, B, T)
  hidden = transformer.forward(params, CONFIG, tokens, compute=compute).hidden_BTD
  logp, entropy = transformer.token_logp(
    params, CONFIG, hidden, jnp.roll(tokens, -1, 1), compute=compute
  )
  return -logp.mean() + 0.1 * entropy.mean()


@functools.cache
def step(remat, attention):
  params = transformer.init(CONFIG, jax.random.key(0))
  return jax.jit(jax.value_and_grad(functools.partial(loss, remat=remat, attention=attention)))(
    params
  )


@functools.cache
def saved_names(remat, attention):
  """Counts saved arrays by shape, over all layers."""

  def backward(params):
    return jax.vjp(functools.partial(loss, remat=remat, attention=attention), params)[1]

  params = jax.eval_shape(lambda: transformer.init(CONFIG, jax.random.key(0)))
  shapes = (x.shape for x in jax.tree.leaves(jax.eval_shape(backward, params)))
  return collections.Counter(shape for shape in shapes if shape[:1] == (LAYERS,))


@pytest.mark.parametrize("attention", [pytest.param("plain", marks=pytest.mark.long), "blockwise"])
@pytest.mark.parametrize(
  "remat",
  [x if x == "both" else pytest.param(x, marks=pytest.mark.long) for x in POLICIES],
)
def test_every_policy_gives_the_same_loss_and_gradients(remat, attention):
  value, gradient = step(remat, attention)
  expected, expected_gradient = step("none", "plain")
  assert abs(value - expected) < 1e-6 * abs(expected)
  largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected_gradient))
  chex.assert_trees_all_close(gradient, expected_gradient, atol=2e-6 * largest, rtol=0)


@pytest.mark.parametrize("attention", ["plain", "blockwise"])
def test_full_keeps_the_input_of_a_layer_and_its_weights(attention):
  shapes = saved_names("full", attention)
  params = jax.eval_shape(lambda: transformer.init(CONFIG, jax.random.key(0)))
  weights = collections.Counter(x.shape for x in jax.tree.leaves(params.blocks))
  activations = shapes - weights - collections.Counter([(LAYERS,)])  # the number of the layer
  assert activations == {(LAYERS, B, T, D): 1}


def test_attention_keeps_what_its_backward_pass_needs_besides():
  extra = saved_names("attention", "blockwise") - saved_names("full", "blockwise")
  output, logsumexp = (LAYERS, 1, B, T, K, N // K, H), (LAYERS, 1, B, K, N // K, T)  # one block
  assert extra == {output: 1, logsumexp: 1}
  # Where the scores are held, they are computed again whatever is kept of their result.
  assert saved_names("attention", "plain") == saved_names("full", "plain")


@pytest.mark.parametrize("attention", ["plain", "blockwise"])
def test_dots_keeps_products_with_weights_and_no_scores(attention):
  extra = saved_names("dots", attention) - saved_names("full", attention)
  router, output = (LAYERS, B, T, E), (LAYERS, B, T, D)
  queries, keys_and_values = (LAYERS, B, T, N, H), (LAYERS, B, T, K, H)
  assert extra == {queries: 1, keys_and_values: 2, output: 1, router: 1}


def test_both_keeps_what_attention_and_dots_keep():
  extra = saved_names("both", "blockwise") - saved_names("full", "blockwise")
  each = (
    saved_names(name, "blockwise") - saved_names("full", "blockwise")
    for name in ("attention", "dots")
  )
  assert extra == sum(each, collections.Counter())


def test_what_a_policy_keeps_is_as_many_bytes_as_is_said():
  for remat in ("attention", "dots", "both"):
    extra = saved_names(remat, "blockwise") - saved_names("full", "blockwise")
    numbers = sum(number * math.prod(shape) for shape, number in extra.items())
    assert numbers * 4 == B * T * remat_policies.saved_bytes(CONFIG, remat, 4)


HYBRID = dataclasses.replace(
  CONFIG,
  family="qwen3_5",
  num_layers=4,
  linear=LinearConfig(pattern=2, key_heads=2, value_heads=6, key_dim=8, value_dim=24),
)
SHARED = dataclasses.replace(
  CONFIG, router=dataclasses.replace(CONFIG.router, shared_width=16, shared_gate=True)
)


@pytest.mark.parametrize(
  "config", [HYBRID, SHARED], ids=["linear attention", "gated shared expert"]
)
@pytest.mark.parametrize("remat", [*long(("attention", "dots")), "both"])
def test_so_it_is_with_other_layers(remat, config):
  tokens = transformer.example_tokens(config, B, T)
  params = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))

  def saved(policy):
    def hidden(params):
      compute = dataclasses.replace(REFERENCE, remat=policy, attention="blockwise")
      return transformer.forward(params, config, tokens, compute=compute).hidden_BTD

    arrays = jax.tree.leaves(jax.eval_shape(lambda params: jax.vjp(hidden, params)[1], params))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)

  expected = B * T * remat_policies.saved_bytes(config, remat, 4)
  assert saved(remat) - saved("full") == expected


@pytest.mark.parametrize("memory, chosen", [(1.05, "both"), (0.95, "attention"), (0.1, "full")])
def test_auto_keeps_what_fits_beside_the_training_state(memory, chosen, monkeypatch):
  compute, inputs = dataclasses.replace(REFERENCE, remat="auto"), LAYERS * D * 4
  # A CPU has no known memory.
  assert remat_policies.choose(CONFIG, compute, 1000, 10_000) == "full"
  both_bytes = inputs + remat_policies.saved_bytes(CONFIG, "both", 4)
  needed = 10_000 * remat_policies.STATE + 1000 * both_bytes
  monkeypatch.setattr(accelerators, "memory", lambda kind: memory * needed / remat_policies.ROOM)
  with jax.set_mesh(sharding.make_mesh(MeshConfig(1, 8, 1, 1))):
    assert remat_policies.choose(CONFIG, compute, 1000, 10_000) == chosen


@pytest.mark.parametrize("attention", ["plain", "blockwise"])
def test_none_keeps_more_than_any_policy(attention):
  everything = saved_names("none", attention)
  for remat in POLICIES:
    assert saved_names(remat, attention).total() < everything.total()
