"""Linear attention: chunks are the recurrence, and nothing passes from a sample to the next."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import long
from support.small_models import HYBRID

from gspo_jax.models import gated_delta, weights
from gspo_jax.models.attention import cache as kv_cache
from gspo_jax.models.attention import delta_rule
from gspo_jax.models.attention.delta_rule import Inputs
from gspo_jax.settings.model import REFERENCE

B, K, R, H, J = 2, 2, 3, 8, 12
LENGTHS = [65, *long((1, 3, 63, 64, 150))]


def inputs_of(length, seed=0):
  """Decays of 1e-4 to 1 per position, in every order of magnitude."""
  rng = np.random.default_rng(seed)
  q, k = (rng.normal(size=(B, length, K, H)) for _ in range(2))
  q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
  v, g = rng.normal(size=(B, length, K, R, J)), rng.uniform(np.log(1e-4), 0, (B, length, K, R))
  state = rng.normal(size=(B, K, R, H, J))
  beta = rng.uniform(size=(B, length, K, R))
  return jax.tree.map(jnp.float32, (Inputs(q, k, v, g, beta), state))


def by_steps(inputs, state):
  def step(state, current):
    y, state = delta_rule.step(jax.tree.map(lambda x: x[:, None], current), state)
    return state, y[:, 0]

  state, y = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs))
  return jnp.moveaxis(y, 0, 1), state


def in_chunks(inputs, state):
  return delta_rule.chunked(inputs, jnp.ones(inputs.g_BTKR.shape[:2], jnp.int32), state)


def directions(results):
  """A random direction for each result: gradients along it reach every value."""
  rng = np.random.default_rng(9)
  return [np.float32(rng.normal(size=np.shape(x))) for x in results]


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(rule, *arguments):
  """Outputs, last states, and gradients of all arguments."""
  results, pull = jax.vjp(rule, *arguments)
  return results, pull(tuple(map(jnp.asarray, directions(results))))


def assert_close(actual, expected, rtol=2e-5):
  """Compares arrays up to a share of each one's largest value."""

  def compare(path, a, b):
    error = np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max()
    assert error < rtol, (jax.tree_util.keystr(path), error)

  jax.tree.map_with_path(compare, actual, expected)


@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_are_the_recurrence(length):
  arguments = inputs_of(length)
  assert_close(with_gradients(in_chunks, *arguments), with_gradients(by_steps, *arguments))


@pytest.mark.parametrize(
  "name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"]
)
@pytest.mark.parametrize("rule", [in_chunks, by_steps])
def test_rules_are_those_of_transformers(rule, name):
  torch = pytest.importorskip("torch")
  module = "transformers.models.qwen3_5.modeling_qwen3_5"
  reference = getattr(pytest.importorskip(module), name)
  arguments = inputs_of(150)
  results, gradients = with_gradients(rule, *arguments)
  leaves = [torch.tensor(np.asarray(x), requires_grad=True) for x in jax.tree.leaves(arguments)]
  q, k, v, g, beta, state = leaves
  v, g, beta, state = (
    x.flatten(i, i + 1)
    for x, i in ((v, 2), (g, 2), (beta, 2), (state, 1))  # K R -> N
  )
  y, last = reference(
    q * H**0.5, k, v, g=g, beta=beta, initial_state=state, output_final_state=True
  )
  expected = [y.unflatten(2, (K, R)), last.unflatten(1, (K, R))]
  by_result = map(torch.tensor, directions(results))
  sum((x * d).sum() for x, d in zip(expected, by_result)).backward()
  assert_close(list(results), [x.detach().numpy() for x in expected])
  assert_close(jax.tree.leaves(gradients), [x.grad.numpy() for x in leaves])


def test_equal_keys_that_are_overwritten_at_every_position():
  """The sum of powers of A would have terms of 1e18."""
  inputs, state = inputs_of(64)
  inputs = inputs._replace(
    k_BTKH=jnp.broadcast_to(inputs.k_BTKH[:, :1], inputs.k_BTKH.shape),
    g_BTKR=jnp.zeros_like(inputs.g_BTKR),
    beta_BTKR=jnp.full_like(inputs.beta_BTKR, 0.999),
  )
  actual, expected = (with_gradients(rule, inputs, state) for rule in (in_chunks, by_steps))
  assert_close(actual, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 50, 64])
def test_inverse_is_that_of_float64(size):
  rng = np.random.default_rng(size)
  a = np.tril(rng.uniform(-1, 1, (3, size, size)) / np.sqrt(size), -1)
  a[0] = np.tril(np.ones((size, size)), -1)
  expected = np.linalg.inv(np.eye(size) + a)
  actual, pull = jax.vjp(delta_rule.inverse, jnp.float32(a))
  np.testing.assert_allclose(actual, expected, atol=2e-5 * np.abs(expected).max())
  dx = rng.normal(size=a.shape)
  transposed = np.swapaxes(expected, 1, 2)
  gradient = -transposed @ dx @ transposed
  np.testing.assert_allclose(*pull(jnp.float32(dx)), gradient, atol=2e-5 * np.abs(gradient).max())


def convolved(x, w, lengths, tail):
  segment = jnp.arange(x.shape[1])[None] < jnp.asarray(lengths)[:, None]
  return delta_rule.convolve(x, w, segment.astype(jnp.int32), tail)


@pytest.mark.parametrize("shape", [(), pytest.param((3,), marks=pytest.mark.long)])
def test_a_convolution_goes_on_from_its_tail(shape):
  """Rows of different lengths, shorter than the convolution and longer, in two pieces or one."""
  torch = pytest.importorskip("torch")
  rng = np.random.default_rng(0)
  x, w = (np.float32(rng.normal(size=s)) for s in ((4, 9, 2, *shape), (2, *shape, 4)))
  zeros = jnp.zeros((4, 3, 2, *shape))
  first, second = (1, 2, 5, 5), (4, 1, 0, 3)
  y, tail = convolved(x[:, :5], w, first, zeros)
  z, last = convolved(x[:, 5:], w, second, tail)
  for row, (n, m) in enumerate(zip(first, second)):
    whole = np.concatenate([x[row, :n], x[row, 5 : 5 + m]]).reshape(n + m, -1)
    flat = torch.tensor(w.reshape(-1, 1, 4))
    expected = torch.nn.functional.conv1d(
      torch.tensor(whole.T)[None], flat, padding=3, groups=len(flat)
    )
    expected = torch.nn.functional.silu(expected[0, :, : n + m].T).numpy()
    actual = np.concatenate([y[row, :n], z[row, :m]]).reshape(n + m, -1)
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    np.testing.assert_array_equal(last[row].reshape(3, -1), np.pad(whole, ((3, 0), (0, 0)))[-3:])


# The layer.

MODEL = dataclasses.replace(HYBRID, hidden_size=16)
SAMPLES = (1, 2, 3, 70, 40, 2, 5)  # Shorter than the convolution; two end within a chunk.
STARTS = (0, 1, 3, 8, 78, 118, 125)  # Padding before the fourth, the seventh and the end.
ROW, LONGEST = 135, max(SAMPLES)


@functools.cache
@jax.ensure_compile_time_eval()  # The first call may be of a function that is being traced.
def layer_weights():
  table = weights.gated_delta_table(MODEL, 1)
  w = weights.init(table, jax.random.key(0), jnp.float32)
  rng = np.random.default_rng(0)
  decays, scale = rng.uniform(-4, 2, w.log_decay.shape), rng.uniform(0.5, 2, w.norm.shape)
  w = w.replace(log_decay=jnp.float32(decays), norm=jnp.float32(scale))
  return jax.tree.map(lambda x: x[0], w)


def attend(x_BTD, w, segments_BT, kv=None, tree=None, from_start=False):
  return gated_delta.attend(
    x_BTD, w, None, kv, 0, config=MODEL, compute=REFERENCE, kind=MODEL.kind(0), positions_BT=None,
    segments_BT=segments_BT, tree=tree, from_start=from_start,
  )  # fmt: skip


@jax.numpy_rank_promotion("allow")
def naive(x_BTD, w):
  """The layer by its equations, one position after another."""
  q, k = (jnp.einsum("BTD,DKH->BTKH", x_BTD, m) for m in (w.q, w.k))
  v, z = (jnp.einsum("BTD,DKRJ->BTKRJ", x_BTD, m) for m in (w.v, w.z))
  a, b = (jnp.einsum("BTD,DKR->BTKR", x_BTD, m) for m in (w.a, w.b))

  def convolve(x, w):
    earlier = [jnp.roll(x, n, axis=1).at[:, :n].set(0) for n in (3, 2, 1, 0)]
    return jax.nn.silu(sum(x * w[None, None, ..., c] for c, x in enumerate(earlier)))

  q, k, v = convolve(q, w.q_conv), convolve(k, w.k_conv), convolve(v, w.v_conv)
  q, k = (x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
  decay = jnp.exp(-jnp.exp(w.log_decay) * jax.nn.softplus(a + w.decay_bias))
  beta, scale = jax.nn.sigmoid(b), q.shape[-1] ** -0.5

  def step(state, current):
    q, k, v, decay, beta = current
    state = state * decay[..., None, None]
    u = beta[..., None] * (v - jnp.einsum("BKRHJ,BKH->BKRJ", state, k))
    state = state + jnp.einsum("BKH,BKRJ->BKRHJ", k, u)
    return state, jnp.einsum("BKRHJ,BKH->BKRJ", state, q) * scale

  state = jnp.zeros((len(x_BTD), *v.shape[2:4], q.shape[-1], v.shape[-1]))
  parts = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, decay, beta))
  y = jnp.moveaxis(jax.lax.scan(step, state, parts)[1], 0, 1)
  y = y / jnp.sqrt((y * y).mean(-1, keepdims=True) + MODEL.rms_norm_eps) * w.norm
  return jnp.einsum("BTKRJ,KRJD->BTD", y * jax.nn.silu(z), w.o)


def samples(seed=0):
  """Samples as right-padded rows, with a number at each token of each sample."""
  x_BTD = np.random.default_rng(seed).normal(size=(len(SAMPLES), LONGEST, MODEL.hidden_size))
  return np.float32(x_BTD)


def packed(x_BTD):
  """Samples in one row. Padding has values, too."""
  x_1TD = np.full((1, ROW, MODEL.hidden_size), 3, np.float32)
  segments_1T = np.zeros((1, ROW), np.int32)
  for i, (start, length) in enumerate(zip(STARTS, SAMPLES)):
    x_1TD[0, start : start + length] = x_BTD[i, :length]
    segments_1T[0, start : start + length] = 7 - i  # In any order.
  return x_1TD, segments_1T


def apart(x_1TD):
  """Undoes `packed`; padding is 0."""
  x_BTD = np.zeros((len(SAMPLES), LONGEST, MODEL.hidden_size), np.float32)
  for i, (start, length) in enumerate(zip(STARTS, SAMPLES)):
    x_BTD[i, :length] = x_1TD[0, start : start + length]
  return x_BTD


@jax.jit
def packed_layer(x_1TD, w, segments_1T, direction_1TD):
  def value(x_1TD, w):
    y_1TD = attend(x_1TD, w, segments_1T)[0]
    return (y_1TD * direction_1TD).sum(), y_1TD

  return jax.grad(value, argnums=(0, 1), has_aux=True)(x_1TD, w)


@jax.jit
def naive_layer(x_BTD, w, direction_BTD):
  def value(x_BTD, w):
    y_BTD = naive(x_BTD, w)
    return (y_BTD * direction_BTD).sum(), y_BTD

  return jax.grad(value, argnums=(0, 1), has_aux=True)(x_BTD, w)


def run_packed(x_BTD, direction_BTD):
  x_1TD, segments_1T = packed(x_BTD)
  direction_1TD = packed(direction_BTD)[0] * (segments_1T > 0)[..., None]
  (dx_1TD, dw), y_1TD = packed_layer(x_1TD, layer_weights(), segments_1T, direction_1TD)
  assert not np.asarray(dx_1TD)[segments_1T == 0].any()
  return apart(dx_1TD), dw, apart(y_1TD)


def test_a_packed_row_is_its_samples_alone():
  x_BTD, direction_BTD = samples(), samples(1)
  real_BT1 = np.arange(LONGEST)[None, :, None] < np.array(SAMPLES)[:, None, None]
  dx_BTD, dw, y_BTD = run_packed(x_BTD, direction_BTD)
  (expected_dx, expected_dw), expected_y = naive_layer(
    x_BTD, layer_weights(), direction_BTD * real_BT1
  )
  for i in range(len(SAMPLES)):
    assert_close((y_BTD[i], dx_BTD[i]), ((expected_y * real_BT1)[i], expected_dx[i]))
  assert_close(dw, expected_dw)


@pytest.mark.parametrize("changed", [0, 2, 3])
def test_nothing_passes_from_a_sample_to_another(changed):
  before, direction_BTD = samples(), samples(1)
  after = before.copy()
  after[changed, : SAMPLES[changed]] *= -5
  others = np.arange(len(SAMPLES)) != changed
  (dx, _, y), (other_dx, _, other_y) = (run_packed(x, direction_BTD) for x in (before, after))
  np.testing.assert_array_equal(y[others], other_y[others])
  np.testing.assert_array_equal(dx[others], other_dx[others])
  assert (y[changed, : SAMPLES[changed]] != other_y[changed, : SAMPLES[changed]]).any()


@functools.partial(jax.jit, static_argnames="from_start")
def cached_layer(x_BTD, kv, segments_BT, from_start=False):
  return attend(x_BTD, layer_weights(), segments_BT, kv, from_start=from_start)


def empty(rows):
  return kv_cache.allocate_states(MODEL, 1, rows)


def real(lengths, size):
  return (np.arange(size)[None] < np.array(lengths)[:, None]).astype(np.int32)


def test_states_do_not_see_padding():
  """Pieces of 4, rows of different lengths, then single positions of rows in turn."""
  x_BTD, lengths = samples()[:4, :12], np.array([1, 4, 7, 12])
  whole = naive(x_BTD, layer_weights())
  kv, loud, outputs = empty(4), empty(4), []
  for start in (0, 4, 8):
    piece = x_BTD[:, start : start + 4]
    segments = real(lengths - start, 4)
    y, kv = cached_layer(piece, kv, segments)
    _, loud = cached_layer(np.where(segments[..., None] > 0, piece, 9), loud, segments)
    outputs.append(y)
  chex.assert_trees_all_equal(kv, loud)
  y_BTD = np.concatenate(outputs, axis=1)
  for row, length in enumerate(lengths):
    assert_close(y_BTD[row, :length], whole[row, :length])
  position = lengths.copy()
  for turn in (0, 0, 1, 2, 0, 1):  # One row goes on at a time.
    current = np.arange(4)[:, None] == turn
    x_B1D = x_BTD[np.arange(4), position % 12][:, None]
    y, after = cached_layer(x_B1D, kv, current.astype(np.int32))
    assert_close(y[turn, 0], whole[turn, position[turn]])
    for old, new in zip(jax.tree.leaves(kv), jax.tree.leaves(after)):
      np.testing.assert_array_equal(old[:, ~current[:, 0]], new[:, ~current[:, 0]])
      assert (old[:, turn] != new[:, turn]).any()
    kv, position = after, position + current[:, 0]


def test_a_row_that_begins_forgets_the_states_before_it():
  x_BTD, segments_BT = samples()[:2, :6], np.ones((2, 6), np.int32)
  stale = jax.tree.map(lambda x: x + 1, empty(2))
  expected = cached_layer(x_BTD, empty(2), segments_BT)
  chex.assert_trees_all_equal(cached_layer(x_BTD, stale, segments_BT, from_start=True), expected)


@pytest.mark.parametrize("size", [6, pytest.param(1, marks=pytest.mark.long)])
def test_a_row_does_not_depend_on_its_neighbours(size):
  x_BTD, segments_BT = samples()[:4, 10 : 10 + size], np.ones((4, size), np.int32)
  _, kv = cached_layer(samples()[:4, :10], empty(4), np.ones((4, 10), np.int32))
  other_kv = jax.tree.map(lambda x: x.at[:, 1:].multiply(3), kv)
  other_x = np.concatenate([x_BTD[:1], 7 - x_BTD[1:]])
  y, after = cached_layer(x_BTD, kv, segments_BT)
  other_y, other_after = cached_layer(other_x, other_kv, real((size, 0, size, 1), size))
  np.testing.assert_array_equal(y[0], other_y[0])
  for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(other_after)):
    np.testing.assert_array_equal(a[:, 0], b[:, 0])
