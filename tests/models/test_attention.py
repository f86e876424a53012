"""Attention: every formulation is the plain one, values and gradients, with none of its [T, T]."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from gspo_jax import sharding
from gspo_jax.models import attention, transformer
from gspo_jax.models.sizes import REFERENCE, tiny_dense


def inputs(B=2, T=37, N=4, K=2, H=16, S=None, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (B, T, N, H), (B, S or T, K, H), (B, S or T, K, H)
  return tuple(jax.random.normal(key, s).astype(dtype) for key, s in zip(keys, shapes))


def segments(kind, B, T):
  t = np.broadcast_to(np.arange(T), (B, T))
  ids = dict(one=np.ones_like(t), padded=t < T - 5, packed=1 + t // 11)[kind]
  return jnp.asarray(ids, jnp.int32)


def values_and_gradients(attend, q, k, v, real):
  """Of the real tokens: what padding looks at is nobody's business."""

  def scalar(q, k, v):
    y = attend(q, k, v)
    return jnp.sum(jnp.sin(y.astype(jnp.float32)) * real[..., None, None]), y * real[
      ..., None, None
    ]

  (_, y), gradient = jax.jit(jax.value_and_grad(scalar, (0, 1, 2), has_aux=True))(q, k, v)
  return y, gradient


@pytest.mark.parametrize("kind", ["one", "padded", "packed"])
@pytest.mark.parametrize("name, block", [("blockwise", 8), ("blockwise", 64), ("splash", None)])
def test_every_formulation_is_the_plain_one(name, block, kind, monkeypatch):
  if block:
    monkeypatch.setattr(attention.attend_blockwise, "__defaults__", (block,))
  q, k, v = inputs()
  ids = segments(kind, 2, 37)
  run = lambda name: values_and_gradients(  # noqa: E731
    functools.partial(attention.attend_self, segment_BT=ids, implementation=name), q, k, v, ids > 0
  )
  chex.assert_trees_all_close(run(name), run("plain"), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["one", "padded", "packed"])
def test_the_plain_one_in_slabs_is_the_whole_one(kind):
  T = 2 * attention.SLAB + 5
  q, k, v = inputs(T=T)
  ids = segments(kind, 2, T)
  ordered = np.arange(T)[:, None] >= np.arange(T)[None]
  visible = ordered[None] & (ids[:, :, None] == ids[:, None, :])
  slabs = functools.partial(attention.attend_self, segment_BT=ids)
  whole = functools.partial(attention.attend, visible_BTS=visible)
  run = lambda attend: values_and_gradients(attend, q, k, v, ids > 0)  # noqa: E731
  chex.assert_trees_all_close(run(slabs), run(whole), atol=2e-5, rtol=1e-4)


def test_splash_over_several_blocks():
  q, k, v = inputs(B=1, T=300, N=2, K=1)
  ids = segments("packed", 1, 300)
  run = lambda name: values_and_gradients(  # noqa: E731
    functools.partial(attention.attend_self, segment_BT=ids, implementation=name), q, k, v, ids > 0
  )
  chex.assert_trees_all_close(run("splash"), run("plain"), atol=2e-5, rtol=1e-4)


def test_blockwise_against_a_cache():
  """Queries somewhere in the middle of the keys, each row elsewhere."""
  q, k, v = inputs(T=6, S=40)
  position = jnp.array([[3], [30]]) + jnp.arange(6)[None]
  ones = jnp.ones((2, 6), jnp.int32), jnp.ones((2, 40), jnp.int32)
  got = attention.attend_blockwise(q, k, v, position, *ones, block=4)
  visible = position[:, :, None] >= jnp.arange(40)[None, None]
  expected = attention.attend(q, k, v, visible)
  np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("length", [1, 6, 200])
def test_queries_to_a_cache(length, monkeypatch):
  """As the cache keeps them: keys across the slots, values along them. Long ones go by blocks."""
  monkeypatch.setattr(attention, "PLAIN", 64)
  q, k, v = inputs(T=length, S=240)
  position = jnp.array([[3], [30]]) + jnp.arange(length)[None]
  visible = position[:, :, None] >= jnp.arange(240)[None, None]
  k_BKHS, v_BKSH = jnp.moveaxis(k, 1, 3), jnp.moveaxis(v, 1, 2)
  got = attention.attend_cache(q, k_BKHS, v_BKSH, position)
  np.testing.assert_allclose(got, attention.attend(q, k, v, visible), atol=1e-5)


def test_blockwise_in_bfloat16_is_as_exact_as_the_plain_one():
  exact = attention.attend_self(*inputs(T=64), segments("one", 2, 64))
  q, k, v = inputs(T=64, dtype=jnp.bfloat16)
  ids = segments("one", 2, 64)
  error = {
    name: float(jnp.abs(attention.attend_self(q, k, v, ids, name) - exact).max())
    for name in ("plain", "blockwise")
  }
  assert error["blockwise"] < 1.5 * error["plain"] < 0.1


def test_no_square_array_forward_or_backward():
  T = 4096
  shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.eval_shape(lambda: inputs(1, T))]
  ids = jax.ShapeDtypeStruct((1, T), jnp.int32)

  def scalar(q, k, v, ids):
    return attention.attend_self(q, k, v, ids, "blockwise").sum()

  jaxpr = jax.make_jaxpr(jax.grad(scalar, (0, 1, 2)))(*shapes, ids)
  largest = 0
  for equation in equations(jaxpr.jaxpr):
    largest = max([largest, *(v.aval.size for v in equation.outvars if hasattr(v.aval, "size"))])
  assert largest <= 4 * attention.BLOCK**2 * 4 < T * T


def equations(jaxpr):
  for equation in jaxpr.eqns:
    yield equation
    for inner in core.jaxprs_in_params(equation.params):
      yield from equations(inner)


@pytest.mark.parametrize("name", ["blockwise", "splash"])
def test_on_a_mesh_as_on_one_device(name):
  config = dataclasses.replace(
    tiny_dense(64), hidden_size=32, num_layers=1, head_dim=16, intermediate_size=32
  )
  params = transformer.init(config, jax.random.key(0))
  tokens = transformer.example_tokens(config, 8, 24)
  compute = dataclasses.replace(REFERENCE, attention=name)

  def loss(params, tokens, compute):
    return jnp.sin(transformer.forward(params, config, tokens, compute=compute).hidden_BTD).sum()

  expected = jax.jit(jax.value_and_grad(loss), static_argnums=2)(params, tokens, REFERENCE)
  mesh = sharding.make_mesh(sharding.MeshConfig(1, 2, 2, 2))
  with jax.set_mesh(mesh):
    placed = jax.device_put(params, transformer.shardings(config, sharding.TRAIN, mesh))
    step = jax.jit(jax.value_and_grad(loss), static_argnums=2)
    got = step(placed, sharding.put_batch(tokens, mesh), compute)
  chex.assert_trees_all_close(jax.device_get(got), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
  "name, queries, dtype, expected",
  [
    ("auto", 1, "float32", "plain"),
    ("auto", 2 * attention.PLAIN, "float32", "plain"),
    ("auto", 2 * attention.PLAIN + 1, "float32", "blockwise"),
    ("splash", 8, "float32", "splash"),
  ],
)
def test_the_name_or_what_suits_the_platform(name, queries, dtype, expected):
  assert attention.choose(name, queries, dtype) == expected


def test_cudnn_is_for_16_bit_on_gpu_and_splash_for_tpu(monkeypatch):
  for platform, dtype, expected in (
    ("gpu", "bfloat16", "cudnn"),
    ("gpu", "float32", "blockwise"),
    ("tpu", "float32", "splash"),
    ("tpu", "bfloat16", "splash"),
  ):
    monkeypatch.setattr(sharding, "platform", lambda platform=platform: platform)
    assert attention.choose("auto", 4096, dtype) == expected
