"""Scans over stacked layers, against the layers one by one."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_models import HYBRID_MOE, MOE, initial

from gspo_jax.models import layer_scan, transformer
from gspo_jax.models.attention import cache as kv_cache

# Linear with experts, linear and dense, full with experts; twice, and a last layer.
PERIODIC = dataclasses.replace(
  HYBRID_MOE, num_layers=7, mlp_only_layers=(1, 4), intermediate_size=48
)
NESTED = dataclasses.replace(HYBRID_MOE, num_layers=7)  # Two linear, one full; twice; one linear.
WINDOWS = dataclasses.replace(MOE, num_layers=4, sliding_window=4, sliding_window_pattern=2)


def layers_of(model):
  return [[list(stack.layers) for stack in scan.stacks] for scan in model.scans()]


def test_a_scan_covers_as_many_layers_as_repeat():
  assert layers_of(MOE) == [[[*range(MOE.num_layers)]]]
  assert layers_of(WINDOWS) == [[[0, 2], [1, 3]]]
  assert layers_of(PERIODIC) == [[[0, 3], [1, 4], [2, 5]], [[6]]]
  dense_first = dataclasses.replace(MOE, num_layers=4, mlp_only_layers=(0,))
  assert layers_of(dense_first) == [[[0]], [[1, 2, 3]]]
  five_to_one = dataclasses.replace(WINDOWS, num_layers=14, sliding_window_pattern=6)
  assert layers_of(five_to_one) == [[[0, 1, 2, 3, 4, 6, 7, 8, 9, 10], [5, 11]], [[12, 13]]]
  assert layers_of(HYBRID_MOE) == [[[0, 1]], [[2]]]
  assert layers_of(NESTED) == [[[0, 1, 3, 4], [2, 5]], [[6]]]


@pytest.mark.long
@pytest.mark.parametrize(
  "model, replayed",
  [
    pytest.param(WINDOWS, True, id="windows-replayed"),
    pytest.param(WINDOWS, False, id="windows"),
    pytest.param(PERIODIC, True, id="mixed-replayed"),
    pytest.param(NESTED, False, id="nested"),
    pytest.param(PERIODIC, False, id="mixed"),
    pytest.param(NESTED, True, id="nested-replayed"),
  ],
)
def test_several_stacks_are_the_layers_in_order(model, replayed, monkeypatch):
  monkeypatch.setattr(layer_scan, "UNROLLED", 0)
  params, tokens = initial(model), transformer.example_tokens(model, 3, 10)
  B, T = tokens.shape
  moe_layers = sum(map(model.is_moe, range(model.num_layers)))
  shape = moe_layers, B, T, model.num_experts
  order = np.random.default_rng(0).permuted(np.broadcast_to(np.arange(shape[-1]), shape), axis=-1)
  routing = order[..., : model.experts_per_token].astype(np.int32) if replayed else None

  def run(params):
    out = transformer.forward(params, model, tokens, routing=routing)
    return jnp.sum(out.hidden_BTD[..., 0] ** 3), (out.hidden_BTD, out.routing_lBTk, out.stats)

  step = jax.jit(jax.value_and_grad(run, has_aux=True))
  (_, got), gradient = step(params)
  (_, expected), by_layer = step(transformer.unstack(params, model))
  np.testing.assert_array_equal(got[1], expected[1])
  if replayed:
    np.testing.assert_array_equal(got[1], routing)
  chex.assert_trees_all_close(got, expected, atol=2e-5, rtol=1e-4)
  gradient = transformer.unstack(gradient, model)
  chex.assert_trees_all_close(gradient, by_layer, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
  "model",
  [
    pytest.param(WINDOWS, id="windows"),
    pytest.param(NESTED, id="nested", marks=pytest.mark.long),
    pytest.param(PERIODIC, id="mixed", marks=pytest.mark.long),
  ],
)
def test_several_stacks_decode_as_one_pass(model, monkeypatch):
  monkeypatch.setattr(layer_scan, "UNROLLED", 0)
  params, tokens = initial(model), transformer.example_tokens(model, 3, 10)
  B, T = tokens.shape
  # Traced anew, as a loop.
  forward = jax.jit(
    lambda *args, **options: transformer.forward(*args, **options), static_argnums=1
  )
  expected = forward(params, model, tokens).hidden_BTD
  prefix = forward(params, model, tokens[:, :-1], cache=kv_cache.allocate(model, B, T, "float32"))
  last = forward(
    params, model, tokens[:, -1:], positions=jnp.full((B, 1), T - 1), cache=prefix.cache
  )
  np.testing.assert_allclose(last.hidden_BTD, expected[:, -1:], atol=2e-5, rtol=1e-4)
