"""Experts: every formulation is the plain sum, no token is lost, replay keeps its gradient."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import long
from support.small_models import SMALLER_MOE, expert_inputs, plain_experts

from gspo_jax import sharding
from gspo_jax.models import remat
from gspo_jax.models.experts import blocks, decode, groups, moe, triton
from gspo_jax.models.families import gpt_oss
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.sharding import P

CONFIG = dataclasses.replace(SMALLER_MOE, vocab_size=64, moe_intermediate_size=12)


CASES = "mixed", "all_to_one", "held_elsewhere"


def chosen_experts(case, tokens):
  """Experts [tokens, 2] of a case; None means random ones."""
  if case == "all_to_one":
    return jnp.full((tokens, 2), 3)
  if case == "held_elsewhere":
    return jnp.where(jnp.arange(2 * tokens).reshape(tokens, 2) % 3 == 0, 8, 1)
  return None


def scalar(f, index):
  return jax.jit(
    jax.value_and_grad(lambda x, g, w: jnp.sin(f(x, g, index, w)).sum(), argnums=(0, 1, 2))
  )


@functools.cache
def plain_scalar(tokens=37, case="mixed", activation=None, scale=1):
  """Value and gradients of the plain sum, shared by formulations."""
  x, gate, index, w = expert_inputs(
    tokens, experts=chosen_experts(case, tokens), activation=activation
  )
  return scalar(plain_experts, index)(scale * x, gate, w)


def test_products_with_the_router_are_not_rounded():
  """Each of them, also those of the gradients, asks for the highest precision."""
  x_BTD, router_DE = jnp.ones((2, 3, 16)), jnp.ones((16, CONFIG.num_experts))

  def loss(x_BTD, router_DE):
    return moe.route(x_BTD, router_DE, CONFIG, jnp.ones((2, 3)))[2].z

  jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x_BTD, router_DE)
  highest = (jax.lax.Precision.HIGHEST,) * 2
  precisions = [x.params["precision"] for x in jaxpr.eqns if x.primitive.name == "dot_general"]
  assert precisions.count(highest) == 3


FORMS_AND_CASES = [
  # Kernels are slow to interpret; cases differ in the layout, which the forms share.
  pytest.param(name, case, marks=pytest.mark.long)
  if name in ("megablox", "triton", "batched") and case != "mixed"
  else (name, case)
  for name in moe.IMPLEMENTATIONS
  for case in CASES
]  # fmt: skip


@pytest.mark.parametrize("name, case", FORMS_AND_CASES)
def test_value_and_gradient_equal_the_plain_sum(name, case):
  x, gate, index, w = expert_inputs(experts=chosen_experts(case, 37))
  form = moe.IMPLEMENTATIONS[name]

  def apply(x, gate, index, w):  # the gradient of the weights goes to the last argument
    return form(x, gate, index, jax.lax.stop_gradient(w), w)

  got = scalar(apply, index)(x, gate, w)
  chex.assert_trees_all_close(got, plain_scalar(case=case), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
  "name",
  [
    *(name for name in moe.IMPLEMENTATIONS if name != "megablox"),
    *("decode", "mesh"),
    pytest.param("pieces", marks=pytest.mark.long),
    pytest.param("megablox", marks=pytest.mark.long),
  ],
)
def test_biases_and_a_clamped_gate(name, monkeypatch):
  """GPT-OSS, beyond its bounds: every formulation, and matrices joined on a mesh."""
  x, gate, index, w = expert_inputs(tokens=48, activation=gpt_oss.activation)
  x = 8 * x

  def apply(x, gate, index, w):
    if name == "mesh":
      rows = [a.reshape(8, 6, -1) for a in (x, gate, index)]
      return moe.experts(*rows, w, "ragged").reshape(48, -1)
    if name == "decode":
      return decode.apply_one_hot(x, gate, index, 8, lambda: w, load=1)
    form = moe.IMPLEMENTATIONS.get(name, groups.apply_ragged)
    return form(x, gate, index, jax.lax.stop_gradient(w), w)

  expected = plain_scalar(tokens=48, activation=gpt_oss.activation, scale=8)
  if name == "pieces":
    monkeypatch.setattr(sharding, "axis_size", lambda axis: 4)
    assert groups._pieces(index, 8)[1] == 32
  if name != "mesh":
    got = scalar(apply, index)(x, gate, w)
  else:
    mesh = sharding.make_mesh(MeshConfig(1, 2, 2, 2))
    with jax.set_mesh(mesh):
      split = w.layout(P("expert", "fsdp", "tensor"), P("expert", "tensor", "fsdp"), P("expert"))
      placed = jax.tree.map(lambda a, s: jax.device_put(a, jax.NamedSharding(mesh, s)), w, split)
      rows = [sharding.put_batch(np.asarray(a), mesh) for a in (x, gate, index)]
      got = scalar(apply, rows[2])(rows[0], rows[1], placed)
  chex.assert_trees_all_close(jax.device_get(got), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
  "name",
  [
    "ragged",
    *(pytest.param(x, marks=pytest.mark.long) for x in moe.IMPLEMENTATIONS if x != "ragged"),
  ],
)
@pytest.mark.parametrize("case", [pytest.param("mixed", marks=pytest.mark.long), "all_to_one"])
@pytest.mark.parametrize("chunk", [pytest.param(0, marks=pytest.mark.long), 5])
def test_experts_on_a_mesh_equal_the_plain_sum_however_they_are_chosen(name, case, chunk):
  tokens = 48
  x, gate, index, w = expert_inputs(tokens, experts=chosen_experts(case, tokens))

  def apply(x, gate, index, w):
    rows = [a.reshape(8, 6, -1) for a in (x, gate, index)]
    return moe.experts(*rows, w, name, chunk).reshape(48, -1)

  expected = plain_scalar(tokens, case)
  mesh = sharding.make_mesh(MeshConfig(1, 2, 4, 1))
  with jax.set_mesh(mesh):
    split = jax.tree.map(lambda _: sharding.P("expert", "fsdp"), w)
    placed = jax.tree.map(lambda a, s: jax.device_put(a, jax.NamedSharding(mesh, s)), w, split)
    rows = [sharding.put_batch(np.asarray(a), mesh) for a in (x, gate, index)]
    got = scalar(apply, rows[2])(rows[0], rows[1], placed)
  chex.assert_trees_all_close(jax.device_get(got), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["ragged", *long(("triton", "megablox"))])
def test_assignments_that_fill_several_pieces_are_all_computed(name, monkeypatch):
  """A device with more than its share loops again."""
  monkeypatch.setattr(sharding, "axis_size", lambda axis: 8)  # pieces of a quarter of them
  x, gate, index, w = expert_inputs(tokens=256)
  assert groups._pieces(index, 8)[1] == 128
  got = scalar(lambda *a: moe.IMPLEMENTATIONS[name](*a, a[-1]), index)(x, gate, w)
  np.testing.assert_allclose(got[0], plain_scalar(tokens=256)[0], rtol=1e-4)


@pytest.mark.parametrize(
  "policy, number", [("both", 2), ("dots", 2), ("attention", 0), ("full", 0)]
)
def test_products_with_gate_and_up_are_saved_on_a_gpu_with_the_other_products(policy, number):
  x, gate, index, w = expert_inputs(F=16)

  def backward(x, w):
    apply = functools.partial(groups.apply_triton, x, gate, index, jax.lax.stop_gradient(w))
    return jax.vjp(jax.checkpoint(apply, policy=remat.POLICIES[policy]), w)[1]

  shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(backward, x, w))]
  assert shapes.count((128, 16)) == number  # A piece of 74 assignments, and F.


@pytest.mark.parametrize("name", ["ragged", pytest.param("megablox", marks=pytest.mark.long)])
def test_in_bfloat16_sums_of_a_tokens_experts_round_as_bfloat16_does(name):
  """Rows add up in the dtype of their transfer, products in float32."""

  def narrow(tree):
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)

  def wide(tree):
    return jax.tree.map(lambda a: a.astype(jnp.float32), tree)

  x, gate, index, w = expert_inputs(tokens=128, k=4)
  x, gate, w = narrow((x, gate, w))
  y, vjp = jax.vjp(lambda x, w: moe.IMPLEMENTATIONS[name](x, gate, index, w, w), x, w)
  expected, vjp_of_expected = jax.vjp(
    lambda x, w: plain_experts(x, wide(gate), index, w), *wide((x, w))
  )
  dy = narrow(jax.random.normal(jax.random.key(1), y.shape))
  got, right = (y, *vjp(dy)), (expected, *vjp_of_expected(wide(dy)))
  assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype("bfloat16")}
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(right)):
    assert jnp.linalg.norm(a.astype(jnp.float32) - b) < 2**-7 * jnp.linalg.norm(b)


@pytest.mark.parametrize(
  "counts",
  [
    [100, 0, 3, 120],
    *long(([256, 0, 0, 0], [0, 0, 0, 1])),
  ],
)
def test_triton_multiplies_each_groups_rows(counts):
  """Rows of several tiles, none, and groups that end within a tile."""
  keys, E = jax.random.split(jax.random.key(0), 3), len(counts)
  x, y = (jax.random.normal(key, (256, size)) for key, size in zip(keys, (64, 32)))
  w, count = jax.random.normal(keys[2], (E, 64, 32)), jnp.array(counts, jnp.int32)
  expert = np.repeat(np.arange(E), counts)
  real = len(expert)
  expected = jnp.einsum("RD,RDF->RF", x[:real], w[expert])
  one_hot = jax.nn.one_hot(expert, E)
  for transposed, matrix in ((False, w), (True, jnp.swapaxes(w, 1, 2))):
    actual = triton.product(x, matrix, count, transposed, jnp.float32)[:real]
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-4)
  expected = jnp.einsum("RE,RD,RF->EDF", one_hot, x[:real], y[:real])
  chex.assert_trees_all_close(
    triton.outer(x, y, count, jnp.float32), expected, rtol=1e-5, atol=1e-4
  )


def test_by_itself_it_takes_the_form_for_the_platform_and_the_load(monkeypatch):
  def chosen(share):
    return moe.choose("auto", share)

  assert chosen(moe.FEW) is blocks.apply_batched
  assert chosen(moe.FEW + 1) is blocks.apply_blocks
  assert moe.choose("batched", 1000) is blocks.apply_batched
  monkeypatch.setattr(sharding, "platform", lambda: "tpu")
  assert chosen(1) is chosen(1000) is groups.apply_megablox
  monkeypatch.setattr(sharding, "platform", lambda: "gpu")
  assert chosen(1) is chosen(1000) is groups.apply_triton
  monkeypatch.setattr(moe, "multiply_batched", lambda *a: "batched")
  assert moe.choose_for_few("auto", 1)(*"xgen", read=dict) == "batched"


@pytest.mark.parametrize(
  "busy",
  [
    pytest.param((17, 7), id="busy3"),
    pytest.param((2, 22), marks=pytest.mark.long, id="busy5"),
    pytest.param((8, 0), marks=pytest.mark.long, id="busy0"),
    pytest.param((9, 0), marks=pytest.mark.long, id="busy1"),
    pytest.param((24, 0), marks=pytest.mark.long, id="busy2"),
    pytest.param((9, 9), marks=pytest.mark.long, id="busy4"),
  ],
)
def test_batched_has_room_for_what_busy_experts_take(busy):
  """24 tokens, 8 experts: 8 tokens of each at once, the others of two of them in blocks of 8."""
  index = jnp.repeat(jnp.array([1, 6, 3]), jnp.array([*busy, 24 - sum(busy)]))[:, None]
  x, gate, _, w = expert_inputs(tokens=24, k=1)
  order = jax.random.permutation(jax.random.key(0), 24)
  index = index[order]
  assert blocks.batched_rows(24, blocks.mean_load(index, w)) == (8, 8)
  got = scalar(lambda *a: blocks.apply_batched(*a, a[-1]), index)(x, gate, w)
  # The gradient of the weights goes to `sink` alone, which is the same array here.
  chex.assert_trees_all_close(got, scalar(plain_experts, index)(x, gate, w), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  "C, R",
  [
    *((0, 8), (24, 8), (101, 32)),
    pytest.param(8, 8, marks=pytest.mark.long),
    pytest.param(16, 16, marks=pytest.mark.long),
  ],
)
@pytest.mark.parametrize("case", ["mixed", pytest.param("all_to_one", marks=pytest.mark.long)])
def test_layout_holds_every_assignment_once(case, C, R):
  """An expert's first C in slots of its own, the others in blocks behind all of these."""
  index = expert_inputs(tokens=101)[2] if case == "mixed" else jnp.full((101, 1), 3)
  layout = jax.device_get(jax.jit(blocks.block_layout, static_argnums=(1, 2, 3))(index, 8, R, C))
  assignments = layout.assignment_Z[layout.assignment_Z < index.size]
  assert sorted(assignments.tolist()) == list(range(index.size))
  expert_of_block = np.searchsorted(layout.end_E, np.arange(layout.end_E[-1]), side="right")
  counts = np.zeros(8, int)
  for a, expert in enumerate(np.ravel(index)):
    slot = int(layout.slot_A[a])
    assert layout.assignment_Z[slot] == a
    if counts[expert] < C:
      assert slot == expert * C + counts[expert]
    else:
      assert expert_of_block[(slot - 8 * C) // R] == expert
    counts[expert] += 1


def test_router_gates_are_the_softmax_over_the_chosen():
  x = jax.random.normal(jax.random.key(0), (2, 5, 16))
  router = jax.random.normal(jax.random.key(1), (16, 8))
  route = jax.jit(moe.route, static_argnums=2)
  gate, index, stats = route(x, router, CONFIG, jnp.ones((2, 5), bool))
  chosen = jnp.take_along_axis(x @ router, index, -1)
  np.testing.assert_allclose(gate, jax.nn.softmax(chosen, -1), rtol=1e-5)
  assert stats.load_E.sum() == 2 * 5 * 2 and stats.tokens == 10 and stats.dropped == 0


def test_padding_has_no_experts_and_is_not_in_the_statistics():
  x = jax.random.normal(jax.random.key(0), (2, 5, 16))
  router = jax.random.normal(jax.random.key(1), (16, 8))
  valid = jnp.arange(5)[None] < jnp.array([[3], [5]])
  route = jax.jit(moe.route, static_argnums=2)
  _, index, stats = route(x, router, CONFIG, valid)
  assert stats.tokens == 8 and stats.load_E.sum() == 16 and stats.dropped == 0
  np.testing.assert_array_equal((index == -1).all(-1), ~valid)
  garbage = jnp.where(valid[..., None], x, 1e3)
  *_, again = route(garbage, router, CONFIG, valid)
  chex.assert_trees_all_close(stats, again, rtol=1e-5)


def test_load_balance_is_one_when_even_and_grows_when_not():
  even = moe.RouterStats(jnp.full((1, 8), 2.0), jnp.ones((1, 8)), 0, 0, jnp.array([8.0]), 0)
  assert moe.load_balance(even, CONFIG) == pytest.approx(1)
  collapsed = even.replace(load_E=jnp.eye(8)[:1] * 16, probability_E=jnp.eye(8)[:1] * 8)
  assert moe.load_balance(collapsed, CONFIG) == pytest.approx(8)
