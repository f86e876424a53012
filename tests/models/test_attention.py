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
from gspo_jax.models import remat, transformer
from gspo_jax.models.attention import attention, positions, splash
from gspo_jax.models.attention import blocks as attention_blocks
from gspo_jax.models.attention.attention import Scores
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.model import REFERENCE
from gspo_jax.settings.sizes import tiny_dense
from gspo_jax.system import accelerators


def inputs(B=2, T=37, N=4, K=2, H=16, S=None, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (B, T, N, H), (B, S or T, K, H), (B, S or T, K, H)
  return tuple(jax.random.normal(key, s).astype(dtype) for key, s in zip(keys, shapes))


def segments(kind, B, T):
  t = np.broadcast_to(np.arange(T), (B, T))
  ids = dict(one=np.ones_like(t), padded=t < T - 5, packed=1 + t // 11)[kind]
  return jnp.asarray(ids, jnp.int32)


def values_and_gradients(attend, q, k, v, real):
  """Values and gradients of real tokens, without padding."""

  def scalar(q, k, v):
    y = attend(q, k, v) * real[..., None, None]
    return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

  (_, y), gradient = jax.jit(jax.value_and_grad(scalar, (0, 1, 2), has_aux=True))(q, k, v)
  return y, gradient


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_heads_turn_on_tpu_as_elsewhere(dtype, monkeypatch):
  """There a product swaps their halves; no remat policy saves it."""
  x, position_BT = inputs(H=32, dtype=dtype)[0], jnp.arange(37)[None] + jnp.array([[0], [1000]])
  rotation = positions.Rotation(1 / positions.waves(16, 1e6))

  def turned(x, policy=None):
    def turn(x):
      return jnp.sin(positions.rotate(x, position_BT, rotation).astype(jnp.float32))

    return jax.checkpoint(turn, policy=policy)(x)

  def residuals(policy):
    backward = jax.eval_shape(lambda x: jax.vjp(lambda x: turned(x, policy), x)[1], x)
    return [leaf.shape for leaf in jax.tree.leaves(backward)]

  expected, backward = jax.vjp(turned, x)
  monkeypatch.setattr(sharding, "platform", lambda: "tpu")
  assert "dot_general" in str(jax.make_jaxpr(turned)(x))
  y, backward_on_tpu = jax.vjp(turned, x)
  np.testing.assert_array_equal(y, expected)
  (actual,), (gradient,) = backward_on_tpu(y), backward(y)
  np.testing.assert_allclose(np.float32(actual), np.float32(gradient), rtol=0, atol=0.02)
  assert all(residuals(policy) == residuals(None) for policy in remat.POLICIES.values())


ALL = Scores(0.3)
LOCAL = Scores(0.3, window=7)
BOUNDED = Scores(0.3, cap=0.8)
BOTH = Scores(0.3, window=20, cap=0.8)
SINKS = np.array([0.5, -1, 2, 0], np.float32)


@pytest.mark.parametrize("mebibytes, queries", [(16, 1024), (32, 2048)])  # v5p; v6e
def test_a_kernel_with_more_memory_reads_keys_less_often(mebibytes, queries, monkeypatch):
  monkeypatch.setattr(accelerators, "vector_memory", lambda kind: mebibytes << 20)
  kernel = splash.make(1, (4096, 4096), 128, (512, 512), 0, ALL, interpret=True)
  sizes = kernel.kwargs["block_sizes"]
  assert (sizes.block_q, sizes.block_q_dq, sizes.block_kv_dkv) == (queries, queries, 2 * queries)


def by_hand(q, k, v, visible, scores):
  """One [T, S] array and a loop over heads, in NumPy's float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out = np.zeros(q.shape)
  for n in range(q.shape[2]):
    key_head = n * k.shape[2] // q.shape[2]
    score = np.einsum("bth,bsh->bts", q[:, :, n], k[:, :, key_head]) * scores.scale
    if scores.cap:
      score = scores.cap * np.tanh(score / scores.cap)
    weight = np.where(visible, np.exp(score), 0)
    weight /= weight.sum(-1, keepdims=True)
    out[:, :, n] = np.einsum("bts,bsh->bth", weight, v[:, :, key_head])
  return out


SUM_T = 2 * attention.SLAB + 5  # Several slabs.


@functools.cache
def sum_by_hand(kind, scores):
  """Values and gradients of one [T, T] array, shared by formulations."""
  q, k, v = inputs(T=SUM_T)
  ids = segments(kind, 2, SUM_T)
  distance = np.arange(SUM_T)[:, None] - np.arange(SUM_T)[None]
  visible = (distance >= 0) & (distance < (scores.window or SUM_T))
  visible = visible[None] & np.asarray(ids[:, :, None] == ids[:, None, :])
  whole = functools.partial(attention.attend, visible_BTS=visible, scores=scores)
  _, gradient = values_and_gradients(whole, q, k, v, ids > 0)
  return by_hand(q, k, v, visible, scores) * np.asarray(ids > 0)[..., None, None], gradient


@pytest.mark.parametrize(
  "kind, scores",
  [
    pytest.param("padded", ALL, id="padded-all"),
    pytest.param("packed", BOTH, id="packed-both"),
    pytest.param("packed", ALL, id="packed-all", marks=pytest.mark.long),
    pytest.param("padded", BOTH, id="padded-both", marks=pytest.mark.long),
    *(
      pytest.param(kind, scores, id=f"{kind}-{name}", marks=pytest.mark.long)
      for kind in ("padded", "packed")
      for name, scores in dict(window=LOCAL, bound=BOUNDED).items()
    ),
  ],
)
@pytest.mark.parametrize(
  "name, block",
  [
    ("plain", 0),
    ("blockwise", 8),
    ("splash", 0),
    pytest.param("blockwise", 256, marks=pytest.mark.long),
  ],
)
def test_every_formulation_is_the_sum_by_hand(name, block, kind, scores, monkeypatch):
  """Values and gradients equal those of one [T, T] array, over several slabs and blocks."""
  expected, expected_gradient = sum_by_hand(kind, scores)
  monkeypatch.setattr(attention_blocks, "block_size", lambda _: block)
  monkeypatch.setattr(attention_blocks, "SHORT", 0)
  ids = segments(kind, 2, SUM_T)
  form = functools.partial(
    attention.attend_self, segment_BS=ids, implementation=name, scores=scores
  )
  y, gradient = values_and_gradients(form, *inputs(T=SUM_T), ids > 0)
  np.testing.assert_allclose(y, expected, atol=1e-5)
  chex.assert_trees_all_close(gradient, expected_gradient, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [7, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["plain", "blockwise", "splash", "cache"])
def test_sinks_are_in_the_denominator_alone(name, window, monkeypatch):
  """Values and gradients, the sinks' too, of two packed segments; a cache has one."""
  monkeypatch.setattr(attention_blocks, "block_size", lambda _: 8)
  q, k, v = inputs(T=24)
  ids = jnp.ones((2, 24), jnp.int32) if name == "cache" else segments("packed", 2, 24)
  distance = np.arange(24)[:, None] - np.arange(24)[None]
  visible = (distance >= 0) & (distance < (window or 24))
  visible = visible[None] & np.asarray(ids[:, :, None] == ids[:, None, :])

  def reference(q, k, v, sink_N):
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    weight = jnp.exp(0.3 * jnp.einsum("BTNH,BSNH->BNTS", q, k)) * visible[:, None]
    total = weight.sum(-1, keepdims=True) + jnp.exp(sink_N)[None, :, None, None]
    return jnp.einsum("BNTS,BSNH->BTNH", weight / total, v)

  def form(q, k, v, sink_N):
    scores = Scores(0.3, window, sink_N=sink_N)
    if name == "cache":
      k, v = jnp.moveaxis(k, 1, 3), jnp.moveaxis(v, 1, 2)
      return attention.attend_cache(q, k, v, jnp.tile(jnp.arange(24), (2, 1)), scores)
    return attention.attend_self(q, k, v, ids, name, scores)

  def outputs(attend):
    def scalar(*x):
      return jnp.sin(3 * attend(*x)).sum(), attend(*x)

    return jax.jit(jax.value_and_grad(scalar, (0, 1, 2, 3), has_aux=True))(q, k, v, SINKS)

  chex.assert_trees_all_close(outputs(form), outputs(reference), atol=2e-5, rtol=1e-4)


TREE_PROMPTS, BRANCH = (3, 24), 20


@functools.cache
def tree_inputs():
  """Segments and positions, [4, 32]: prompts in trunks of 24, two branches each."""
  ids, position = np.zeros((2, 64), np.int32), np.zeros((2, 64), np.int32)
  for row, prompt in enumerate(TREE_PROMPTS):
    places = [*range(prompt), *range(24, 64)]
    ids[row, places] = 1
    position[row, places] = [*range(prompt), *[*range(prompt, prompt + BRANCH)] * 2]
  return tuple(jnp.asarray(x.reshape(4, 32)) for x in (ids, position))


@functools.cache
def paths(scores):
  """Values and gradients of each path in a row of its own, shared by formulations."""

  def attend(q, k, v):
    y_RX = jnp.zeros((2, 64, *q.shape[2:]))
    q, k, v = (x.reshape(2, 64, *x.shape[2:]) for x in (q, k, v))
    for row, prompt in enumerate(TREE_PROMPTS):
      for member in range(2):
        places = np.array([*range(prompt), *(24 + member * BRANCH + np.arange(BRANCH))])
        alone = [x[row : row + 1, places] for x in (q, k, v)]
        segment = jnp.ones((1, len(places)), jnp.int32)
        y_RX = y_RX.at[row, places].set(attention.attend_self(*alone, segment, "plain", scores)[0])
    return y_RX.reshape(4, 32, *y_RX.shape[2:])

  return values_and_gradients(attend, *inputs(B=4, T=32), tree_inputs()[0] > 0)


# Their ids count them, so that long ones are in their places.
@pytest.mark.parametrize(
  "name, scores",
  [
    *(pytest.param("plain", scores, marks=pytest.mark.long) for scores in (ALL, LOCAL, BOUNDED)),
    ("plain", BOTH),
    *(
      pytest.param("blockwise", scores, marks=pytest.mark.long) for scores in (ALL, LOCAL, BOUNDED)
    ),
    ("blockwise", BOTH),
    ("splash", ALL),
    pytest.param("splash", BOUNDED, marks=pytest.mark.long),
    ("cudnn", ALL),
  ],
)
def test_a_tree_is_its_paths(name, scores, monkeypatch):
  """Prompts of 3 and 24 tokens in a trunk of 24, branches of 20, against rows of their own; values
  and gradients. A window skips the padding of a trunk."""
  expected = paths(scores)
  monkeypatch.setattr(attention_blocks, "block_size", lambda _: 8)
  monkeypatch.setattr(jax.nn, "dot_product_attention", top_left)
  ids, position = tree_inputs()
  options = dict(implementation=name, scores=scores, position_BT=position)
  attend_tree = functools.partial(
    attention.attend_tree, segment_BT=ids, tree=attention.Tree(24, 2), **options
  )
  actual = values_and_gradients(attend_tree, *inputs(B=4, T=32), ids > 0)
  chex.assert_trees_all_close(actual, expected, atol=2e-5, rtol=1e-4)


def test_queries_of_a_trunk_attend_once():
  """No array of scores has its rows once for each branch."""
  tree, B, T = attention.Tree(64, 8), 8, 24
  q, k, v = inputs(B=B, T=T)
  ids = jnp.ones((B, T), jnp.int32)

  def scalar(q, k, v):
    return attention.attend_tree(q, k, v, ids, tree).sum()

  jaxpr = jax.make_jaxpr(jax.grad(scalar, (0, 1, 2)))(q, k, v)
  scores = {
    v.aval.shape[-2:]
    for equation in equations(jaxpr.jaxpr)
    for v in equation.outvars
    if equation.primitive.name == "exp"
  }
  assert scores == {(64, 64), (16, 80)}


def top_left(q, k, v, is_causal, scale, **_):
  """cuDNN's: its causal mask begins with the first key, and knows no segments."""
  ids = jnp.ones(k.shape[:2], jnp.int32)
  assert is_causal and q.shape[1] == k.shape[1]
  return attention.attend_self(q, k, v, ids, scores=Scores(scale))


def test_padding_between_tokens_keeps_cudnn_from_its_causal_mask(monkeypatch):
  """Such as in a tree's trunk: the kernel (here the plain one) has no segments."""
  monkeypatch.setattr(jax.nn, "dot_product_attention", top_left)
  q, k, v = inputs(T=12)
  for ids in ([1] * 12, [1] * 9 + [0] * 3, [1] * 4 + [0] * 3 + [1] * 5, [1] * 5 + [2] * 7):
    ids = jnp.broadcast_to(jnp.asarray(ids, jnp.int32)[None], (2, 12))
    expected = attention.attend_self(q, k, v, ids)
    got = attention.attend_self(q, k, v, ids, "cudnn")
    real = np.asarray(ids > 0)[..., None, None]
    np.testing.assert_allclose(got * real, expected * real, atol=1e-5)


@pytest.mark.parametrize(
  "name, scores, gaps, message",
  [
    (
      "cudnn",
      LOCAL,
      False,
      "compute.attention='cudnn' does not support a sliding window: set it to auto",
    ),
    ("cudnn", BOUNDED, False, "compute.attention='cudnn' does not support a soft bound"),
    (
      "cudnn",
      Scores(1.0, sink_N=SINKS),
      False,
      "support sinks: set it to auto or plain, blockwise, sp",
    ),
    (
      "splash",
      LOCAL,
      True,
      "compute.attention='splash' does not support a sliding window where responses",
    ),
  ],
)
def test_what_a_kernel_lacks_is_named_and_auto_goes_without(
  name, scores, gaps, message, monkeypatch
):
  with pytest.raises(ValueError, match=message):
    attention.choose(name, 4096, "bfloat16", scores, gaps)
  platform = dict(cudnn="gpu", splash="tpu")[name]
  monkeypatch.setattr(sharding, "platform", lambda: platform)
  assert attention.choose("auto", 4096, "bfloat16", scores, gaps) == "blockwise"
  assert attention.choose("auto", 4096, "bfloat16", ALL, gaps) == name


@pytest.mark.parametrize(
  "scores",
  [pytest.param(ALL, marks=pytest.mark.long), BOTH, pytest.param(LOCAL, marks=pytest.mark.long)],
  ids=["all", "both", "window"],
)
@pytest.mark.parametrize("length", [1, 200, pytest.param(6, marks=pytest.mark.long)])
def test_queries_to_a_cache(length, scores, monkeypatch):
  """In the cache's layout: keys across slots, values along them; long ones in blocks."""
  monkeypatch.setattr(attention, "PLAIN", 64)
  q, k, v = inputs(T=length, S=240)
  position = jnp.array([[3], [30]]) + jnp.arange(length)[None]
  distance = position[:, :, None] - jnp.arange(240)[None, None]
  visible = (distance >= 0) & (distance < (scores.window or 240))
  k_BKHS, v_BKSH = jnp.moveaxis(k, 1, 3), jnp.moveaxis(v, 1, 2)
  got = attention.attend_cache(q, k_BKHS, v_BKSH, position, scores)
  np.testing.assert_allclose(got, by_hand(q, k, v, visible, scores), atol=1e-5)


def test_blockwise_in_bfloat16_is_as_exact_as_the_plain_one():
  exact = attention.attend_self(*inputs(T=64), segments("one", 2, 64))
  q, k, v = inputs(T=64, dtype=jnp.bfloat16)
  ids = segments("one", 2, 64)
  attend = jax.jit(attention.attend_self, static_argnums=4)
  error = {
    name: float(jnp.abs(attend(q, k, v, ids, name) - exact).max())
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
  assert largest <= 4 * attention_blocks.BLOCK**2 * 4 < T * T


def equations(jaxpr):
  for equation in jaxpr.eqns:
    yield equation
    for inner in core.jaxprs_in_params(equation.params):
      yield from equations(inner)


@pytest.mark.parametrize("name", ["splash", pytest.param("blockwise", marks=pytest.mark.long)])
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
  mesh = sharding.make_mesh(MeshConfig(1, 2, 2, 2))
  with jax.set_mesh(mesh):
    placed = jax.device_put(params, transformer.shardings(config, sharding.TRAIN, mesh))
    step = jax.jit(jax.value_and_grad(loss), static_argnums=2)
    got = step(placed, sharding.put_batch(tokens, mesh), compute)
  chex.assert_trees_all_close(jax.device_get(got), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
  "platform, name, queries, dtype, width, expected",
  [
    ("cpu", "auto", 1, "float32", 128, "plain"),
    ("cpu", "auto", 2 * attention.PLAIN, "float32", 128, "plain"),
    ("cpu", "auto", 2 * attention.PLAIN + 1, "float32", 128, "blockwise"),
    ("cpu", "splash", 8, "float32", 128, "splash"),
    ("tpu", "auto", 4096, "float32", 128, "splash"),
    ("tpu", "auto", 4096, "bfloat16", 128, "splash"),
    ("gpu", "auto", 4096, "float32", 128, "blockwise"),
    ("gpu", "auto", 4096, "bfloat16", 128, "cudnn"),
    ("gpu", "auto", 4096, "bfloat16", 100, "blockwise"),
    ("gpu", "auto", 4096, "bfloat16", 256, "blockwise"),
    ("Hopper", "auto", 4096, "bfloat16", 256, "cudnn"),
  ],
)
def test_the_name_or_what_suits_the_platform(
  platform, name, queries, dtype, width, expected, monkeypatch
):
  if platform == "Hopper":
    monkeypatch.setattr(attention, "_widest_head", lambda: 256)
    platform = "gpu"
  monkeypatch.setattr(sharding, "platform", lambda: platform)
  assert attention.choose(name, queries, dtype, width=width) == expected


@pytest.mark.parametrize(
  "dtype, width, message", [("float32", 64, "float32"), ("bfloat16", 256, "heads of width 256")]
)
def test_types_and_heads_that_cudnn_lacks_are_named(dtype, width, message):
  with pytest.raises(ValueError, match=f"compute.attention='cudnn' does not support {message}"):
    attention.choose("cudnn", 4096, dtype, width=width)
