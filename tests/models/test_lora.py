"""Adapters: the plain model at first, what is trained of it, one sum wherever it is made."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from support.cases import long
from support.small_models import (
  HYBRID_MOE,
  MODELS,
  SHALLOW_MOE,
  SMALLER_DENSE,
  initial,
  logits,
)
from support.small_updates import GSPO, learner, make_batch, rl_step, scalars

from gspo_jax import sharding
from gspo_jax.learner.state import abstract_state, new_state
from gspo_jax.models import hf, lora, publication, transformer, weights
from gspo_jax.models.params import with_adapters
from gspo_jax.runs import checkpoint, weight_source
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.model import RouterConfig
from gspo_jax.settings.training import CheckpointConfig, LoraConfig

SHARED = RouterConfig(shared_width=8, shared_gate=True)
ALL = MODELS | dict(hybrid=dataclasses.replace(HYBRID_MOE, router=SHARED))
RANK = 3
LORA = LoraConfig(rank=RANK)
CHECKPOINTS = CheckpointConfig("", every=1, keep=1, keep_every=0, best="", grace_s=30.0)
ADAM = optax.adamw(1e-2)
TOKENS = np.arange(12).reshape(2, 6)
ONE = (1, 1, 1, 1)


def adapted(model, mesh, dtype="float32"):
  """The model's initial parameters, frozen, with new adapters."""
  params = jax.device_put(initial(model), transformer.shardings(model, sharding.TRAIN, mesh))
  return with_adapters(params, model, LORA, dtype, mesh, seed=1)


@functools.cache
def two_updates(name, shape):
  """Parameters before and after two updates, on the host, and the norm of the last gradient."""
  model, mesh = ALL[name], make_mesh(shape)
  with jax.set_mesh(mesh):
    params = adapted(model, mesh)
    before = jax.device_get(params)
    state = new_state(params, ADAM)
    batch = sharding.put_batch(make_batch(model), mesh)
    for _ in range(2):
      state, metrics = rl_step(learner(model, microbatches=1), GSPO, ADAM)(state, batch)
    described = abstract_state(model, mesh, ADAM, LORA)
    kinds, expected = (
      jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree) for tree in (state, described)
    )
    assert kinds == expected
    return before, jax.device_get(state.params), scalars(metrics)["grad_norm"]


def make_mesh(shape):
  return sharding.make_mesh(MeshConfig(*shape), jax.devices()[: np.prod(shape)])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.long
def test_new_adapters_change_nothing_and_updates_change_nothing_else(name):
  before, after, _ = two_updates(name, ONE)
  plain, model = initial(ALL[name]), ALL[name]
  np.testing.assert_array_equal(logits(before, model, TOKENS), logits(plain, model, TOKENS))
  trained, frozen = lora.split(after)
  jax.tree.map(np.testing.assert_array_equal, frozen, lora.split(before)[1])
  changed = jax.tree.map(lambda x, y: (x != y).any(), trained, lora.split(before)[0])
  assert all(jax.tree.leaves(changed))
  # Layers of the hybrid also have a gate of attention, and three matrices of shared experts.
  assert len(jax.tree.leaves(changed)) == 2 * (7 + 4 * (name == "hybrid")) * len(plain.blocks)
  assert np.abs(logits(after, model, TOKENS) - logits(plain, model, TOKENS)).max() > 1e-3


def test_adapters_are_split_as_their_weights_are():
  model, mesh = MODELS["moe"], make_mesh((1, 2, 2, 2))
  declared = lora.table(transformer.table(model), LORA)
  experts = weights.shardings(declared, sharding.TRAIN, mesh).blocks[0].ffn.gate  # l E D F
  assert experts.frozen.spec == jax.P(None, "expert", "fsdp", "tensor")
  assert experts.a.spec == jax.P(None, "expert", "fsdp", None)
  assert experts.b.spec == jax.P(None, "expert", None, "tensor")
  heads = weights.shardings(declared, sharding.TRAIN, mesh).blocks[0].attention.o  # l N H D
  assert (heads.a.spec[1], heads.b.spec[2]) == ("tensor", "fsdp")


@pytest.mark.long
def test_updates_are_the_same_on_any_mesh():
  _, params, norm = two_updates("moe", ONE)
  _, params_of_8, norm_of_8 = two_updates("moe", (1, 2, 2, 2))
  assert norm_of_8 == pytest.approx(norm, rel=1e-4)
  near = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
  jax.tree.map(near, params_of_8, params)


def test_a_weight_is_the_frozen_one_and_the_scaled_product():
  with jax.set_mesh(mesh := make_mesh(ONE)):
    trained, frozen = lora.split(adapted(MODELS["moe"], mesh))
  random = np.random.default_rng(0)
  trained = jax.tree.map(lambda x: jnp.asarray(random.normal(0, 0.1, x.shape), x.dtype), trained)
  params = lora.join(trained, frozen)
  total, block = lora.merged(params).blocks[0], params.blocks[0]
  for name, equation in dict(q="ldr,lrnh->ldnh", o="lnhr,lrd->lnhd").items():
    w = getattr(block.attention, name)
    product = np.einsum(equation, w.a, w.b) * (LORA.alpha / RANK)
    np.testing.assert_allclose(getattr(total.attention, name), w.frozen + product, atol=1e-6)
  w = block.ffn.down
  product = np.einsum("lefr,lerd->lefd", w.a, w.b) * (LORA.alpha / RANK)
  np.testing.assert_allclose(total.ffn.down, w.frozen + product, atol=1e-6)
  assert total.ffn.router is block.ffn.router  # Read in float32.


def test_gradients_of_adapters_are_those_of_the_weight_by_the_chain_rule():
  model = SMALLER_DENSE
  with jax.set_mesh(mesh := make_mesh(ONE)):
    trained, frozen = lora.split(adapted(model, mesh))
    trained = jax.tree.map(lambda x: x + 0.1, trained)

    def loss(params):
      return transformer.logits(params, model, TOKENS).std()

    @jax.jit
    def gradients(trained, frozen):
      plain = lora.merged(lora.join(trained, frozen))
      return jax.grad(lambda x: loss(lora.join(x, frozen)))(trained), jax.grad(loss)(plain)

    grads, plain = gradients(trained, frozen)
    w, w_gradient = trained.blocks[0].attention.o, plain.blocks[0].attention.o
    scale = LORA.alpha / RANK
    a_gradient = np.einsum("lnhd,lrd->lnhr", w_gradient, w.b) * scale
    b_gradient = np.einsum("lnhd,lnhr->lrd", w_gradient, w.a) * scale
  np.testing.assert_allclose(grads.blocks[0].attention.o.a, a_gradient, rtol=1e-3, atol=1e-6)
  np.testing.assert_allclose(grads.blocks[0].attention.o.b, b_gradient, rtol=1e-3, atol=1e-6)


def test_in_bfloat16_frozen_weights_take_half_and_sampler_and_trainer_are_one_network():
  model, mesh = SHALLOW_MOE, make_mesh((1, 2, 2, 2))
  with jax.set_mesh(mesh):
    params = adapted(model, mesh, "bfloat16")
    trained, frozen = lora.split(params)
    assert {x.dtype.name for x in jax.tree.leaves(trained)} == {"float32"}
    assert params.embed.dtype == jnp.bfloat16
    assert (
      frozen.blocks[0].ffn.router.dtype == jnp.float32
    )  # Otherwise other experts would be chosen.
    params = lora.join(jax.tree.map(lambda x: x + 0.1, trained), frozen)
    layout = transformer.shardings(model, sharding.ROLLOUT, mesh)
    read = transformer.dtypes(model, "bfloat16")
    sampler = publication.publisher(layout, read)(params)
    assert jax.tree.map(lambda x: x.dtype, sampler) == read
    compute = dataclasses.replace(transformer.REFERENCE, dtype="bfloat16")
    run = jax.jit(functools.partial(transformer.forward, config=model, compute=compute))
    tokens = np.arange(48).reshape(8, 6)
    trainer_hidden, sampler_hidden = (
      run(x, tokens_BT=tokens).hidden_BTD for x in (params, sampler)
    )
  np.testing.assert_array_equal(trainer_hidden, sampler_hidden)


@functools.cache
def small_change(name):
  """Frozen weights in bfloat16, with products of some hundredths of its resolution."""
  model, mesh = ALL[name], make_mesh(ONE)
  with jax.set_mesh(mesh):
    trained, frozen = lora.split(adapted(model, mesh, "bfloat16"))
  random = np.random.default_rng(0)
  small = jax.tree.map(lambda x: jnp.asarray(random.normal(0, 2e-3, x.shape), x.dtype), trained)
  return lora.join(small, frozen)


def each_matrix(params):
  return [x for x in jax.tree.leaves(params, is_leaf=lora.is_adapted) if lora.is_adapted(x)]


@pytest.mark.parametrize(
  "name",
  ["dense", *long(("gemma", "moe", "hybrid"))],
)
def test_in_bfloat16_a_small_change_arrives_in_the_mean(name):
  matrices = each_matrix(small_change(name))

  def arrives(round_sum):
    """Slope of rounded changes over true changes."""
    changes = [(lora.merged(w, jnp.float32) - w.frozen, round_sum(w) - w.frozen) for w in matrices]
    true, rounded = (
      np.concatenate([np.ravel(x) for x in side]).astype("f8") for side in zip(*changes)
    )
    return (true * rounded).sum() / (true * true).sum()

  assert arrives(lora.merged) < 0.3
  assert arrives(lora.dithered) == pytest.approx(1, abs=0.15)


def test_dithered_weights_are_the_frozen_ones_without_a_change_and_the_gradient_is_the_sums():
  w = each_matrix(small_change("dense"))[0]
  same = lora.dithered(w.replace(b=jnp.zeros_like(w.b)))
  np.testing.assert_array_equal(same, w.frozen)

  def total(a):
    return lora.dithered(w.replace(a=a)).astype("f4").sum()

  b_sum = w.scale * w.b.sum((2, 3))[:, None]
  np.testing.assert_allclose(jax.grad(total)(w.a), np.broadcast_to(b_sum, w.a.shape), rtol=1e-2)


def test_dither_depends_on_the_place_alone():
  """Sums in the same place between their neighbours are rounded alike, whatever the weights."""

  def rounded(value):
    constant = jnp.full((1, 1, 16), value, jnp.float32)
    frozen, ones = jnp.zeros((1, 12, 16), jnp.bfloat16), jnp.ones((1, 12, 1), jnp.float32)
    return np.asarray(lora.dithered(lora.Adapted(frozen, ones, constant, 1.0)), np.float32)[0]

  for share in (0.25, 0.6):  # The place between 1 and its neighbour.
    up = rounded(1 + share / 128) > 1
    assert 0 < up.mean() < 1
    for start, width in (2.0, 1 / 64), (1.5, 1 / 128), (0.25, 1 / 512):
      np.testing.assert_array_equal(rounded(start + share * width) > start, up)


def layers_of(block):
  """Each layer of the two by itself."""
  return [jax.tree.map(operator.itemgetter(i), block) for i in range(2)]


def test_a_layer_is_rounded_alike_by_itself_and_in_the_stack():
  block = small_change("dense").blocks[0]
  stack = lora.dithered(block)
  layers = [lora.dithered(layer) for layer in layers_of(block)]
  jax.tree.map(np.testing.assert_array_equal, layers, layers_of(stack))


def test_adapters_are_of_the_matrices_and_the_scale_that_are_asked_for():
  config = LoraConfig(rank=2, alpha=6.0, matrices=("k_proj", "down_proj"))
  block = lora.table(transformer.table(MODELS["moe"]), config).blocks[0]
  assert [lora.is_adapted(x) for x in (block.attention.q, block.attention.k)] == [False, True]
  assert [lora.is_adapted(x) for x in (block.ffn.router, block.ffn.down)] == [False, True]
  assert block.ffn.down.scale == 3


def test_gates_of_attention_are_adapted_with_queries_and_the_rest_of_linear_layers_is_frozen():
  attention, experts = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj",)
  adapted_fields = []
  for matrices in (attention, experts):
    table = lora.table(transformer.table(HYBRID_MOE), LoraConfig(rank=2, matrices=matrices))
    paths = jax.tree.leaves_with_path(table, is_leaf=lora.is_adapted)
    adapted_fields.append({path[-1].name for path, w in paths if lora.is_adapted(w)})
  assert adapted_fields == [{"q", "k", "v", "o", "z", "q_gate"}, {"gate"}]


def test_saved_weights_are_merged(tmp_path):
  _, params, _ = two_updates("dense", ONE)
  model = MODELS["dense"]
  hf.save(tmp_path, params, model)
  loaded, _ = hf.load(tmp_path)
  jax.tree.map(np.testing.assert_array_equal, loaded, lora.merged(params))


def test_saved_weights_are_rounded_once(tmp_path):
  """Rounding the sum to bfloat16 before float32 would change it."""
  params = small_change("dense")
  hf.save(tmp_path, params, MODELS["dense"], dtype="float32")
  loaded, _ = hf.load(tmp_path)
  exact = lora.merged(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params))
  jax.tree.map(np.testing.assert_array_equal, loaded, exact)


def assert_equal(a, b):
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x.astype("f4"), y.astype("f4")), a, b)


@pytest.mark.parametrize(
  "name",
  ["dense", *long(("gemma", "moe", "hybrid"))],
)
def test_others_read_the_sum_that_was_trained(name, tmp_path):
  """Rounded to the nearest it would be nearly the frozen weights."""
  model, params = ALL[name], small_change(name)
  trained = lora.dithered(params)
  assert_equal(lora.materialize(params, jnp.dtype("bfloat16")), trained)
  wide = jax.tree.map(lambda x: x.astype("float32"), params)  # Published in bfloat16.
  assert_equal(lora.materialize(wide, jnp.dtype("bfloat16")), trained)
  hf.save(tmp_path, params, model)
  assert_equal(hf.load(tmp_path)[0], trained)


def test_sums_with_weights_between_those_of_bfloat16_are_rounded_to_the_nearest():
  for w in each_matrix(small_change("dense")):
    w = jax.device_get(w.replace(frozen=w.frozen.astype("float32") * 1.001))
    between = w.frozen != w.frozen.astype("bfloat16")
    assert between.mean() > 0.9
    materialized, nearest = lora.materialize(w, jnp.dtype("bfloat16")), lora.merged(w, "bfloat16")
    np.testing.assert_array_equal(materialized[between], nearest[between])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_checkpoint_is_read_as_it_was_trained(dtype, tmp_path):
  """As exports, teachers, evaluations and first weights do."""
  model, mesh, params = MODELS["dense"], make_mesh(ONE), small_change("dense")
  checkpoints = checkpoint.Checkpointer(tmp_path, "rl", CHECKPOINTS)
  checkpoints.save(1, dict(params=params), {})
  checkpoints.close()
  config = dict(lora=dataclasses.asdict(LORA), compute=dict(dtype="bfloat16"))
  start = weight_source.RunCheckpoint(epath.Path(tmp_path / "checkpoints/rl/1"), config)
  with jax.set_mesh(mesh):
    loaded = start.load(model, mesh, dtype)
  assert loaded.blocks[0].attention.q.dtype == dtype
  assert_equal(loaded, lora.dithered(params))


def test_a_restored_state_goes_on_as_if_it_had_not_been_saved(tmp_path):
  model, mesh = MODELS["dense"], make_mesh(ONE)
  with jax.set_mesh(mesh):
    update = rl_step(learner(model, microbatches=1), GSPO, ADAM)
    batch = sharding.put_batch(make_batch(model), mesh)
    state, _ = update(new_state(adapted(model, mesh), ADAM), batch)
    checkpoints = checkpoint.Checkpointer(tmp_path, "rl", CHECKPOINTS)
    checkpoints.save(1, state, {})
    checkpoints.close()
    checkpoints = checkpoint.Checkpointer(tmp_path, "rl", CHECKPOINTS)
    restored, _ = checkpoints.restore(1, abstract_state(model, mesh, ADAM, LORA))
    checkpoints.close()
    expected, resumed = (jax.device_get(update(x, batch)[0]) for x in (state, restored))
  jax.tree.map(np.testing.assert_array_equal, resumed, expected)


def test_without_adapters_an_update_changes_everything():
  params = initial(SMALLER_DENSE)
  trained, frozen = lora.split(params)
  assert trained is params and not jax.tree.leaves(frozen)
  assert jax.tree.structure(lora.join(trained, frozen)) == jax.tree.structure(params)
