"""Matrices in eight bits: products of the rounded matrices, on one device and on eight."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import long
from support.small_models import HYBRID_MOE, MOE, SHALLOW, initial, next_logp

from gspo_jax import sharding
from gspo_jax.models import publication, transformer, weights
from gspo_jax.models.attention import cache as kv_cache
from gspo_jax.models.int8 import as_array, is_int8, quantise
from gspo_jax.models.params import with_adapters
from gspo_jax.sampling import EngineConfig, generate
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.sizes import PUBLISHED
from gspo_jax.settings.training import LoraConfig
from gspo_jax.sharding import ROLLOUT, ROLLOUT_SLICE

MODELS = dict(dense=SHALLOW, moe=MOE, hybrid=HYBRID_MOE)


def plain(params):
  """The rounded weights as arrays."""
  return jax.tree.map(lambda x: as_array(x, jnp.float32), params, is_leaf=is_int8)


def cached(params, model, tokens):
  """Hidden states of a prefix and of a decoding step."""
  (B, T), outputs = tokens.shape, []
  cache = kv_cache.allocate(model, B, T, jnp.float32)
  for piece in (slice(0, T - 1), slice(T - 1, T)):
    positions = jnp.broadcast_to(jnp.arange(T)[None, piece], tokens[:, piece].shape)
    out = transformer.forward(params, model, tokens[:, piece], positions=positions, cache=cache)
    cache = out.cache
    outputs.append(out.hidden_BTD)
  return jnp.concatenate(outputs, axis=1)


def test_a_channel_is_off_by_half_a_step_of_its_scale():
  w = np.random.default_rng(0).standard_normal((3, 4, 8, 5), np.float32) * np.logspace(-3, 3, 5)
  w[1, :, :, 2] = 0
  narrow = quantise(jnp.asarray(w), (-3, -2))
  assert narrow.values.dtype == jnp.int8 and narrow.scale.shape == (3, 5)
  step = np.asarray(narrow.scale)[:, None, None]
  assert np.all(np.abs(as_array(narrow, jnp.float32) - w) <= 0.5001 * step)
  np.testing.assert_allclose(step[:, 0, 0], np.where(w.any((1, 2)), abs(w).max((1, 2)) / 127, 1))


@pytest.mark.parametrize(
  "name, shape, rules",
  [
    ("dense", (1, 4, 1, 2), ROLLOUT),
    pytest.param("moe", (1, 2, 2, 2), ROLLOUT_SLICE, marks=pytest.mark.long),
  ],
)
def test_published_on_eight_devices_or_one_products_are_of_the_rounded(name, shape, rules):
  model, params = MODELS[name], initial(MODELS[name])
  table, tokens = transformer.sampler_table(model, "int8"), transformer.example_tokens(model, 8, 6)
  run = jax.jit(functools.partial(cached, model=model))
  narrow = publication.in_eight_bits(params, model)
  assert publication.in_eight_bits(narrow, model).blocks[0].attention.q.values.dtype == jnp.int8
  expected = jax.device_get(run(plain(narrow), tokens=tokens))
  np.testing.assert_allclose(run(narrow, tokens=tokens), expected, atol=2e-5)
  mesh = sharding.make_mesh(MeshConfig(*shape))
  with jax.set_mesh(mesh):
    trained = jax.device_put(params, transformer.shardings(model, sharding.TRAIN, mesh))
    layout = weights.shardings(table, rules, mesh)
    publish = publication.publisher(layout, weights.dtypes(table, jnp.float32))
    published = publish(trained)
    text = publish.lower(trained).compile().as_text()
    actual = jax.device_get(run(published, tokens=sharding.put_batch(tokens, mesh)))
  chex.assert_trees_all_equal(jax.device_get(published), jax.device_get(narrow))
  np.testing.assert_allclose(actual, expected, atol=2e-5)
  # Matrices are sent in eight bits: no stack of them is gathered before.
  sent = re.findall(r"= (\w+)\[([\d,]*)\]\S* (?:all-gather|all-to-all)\(", text)
  sizes = {
    d: max(np.prod([int(n) for n in s.split(",") if n]) for e, s in sent if e == d) for d, _ in sent
  }
  assert sizes["s8"] > model.hidden_size * model.head_dim / 2
  assert sizes["f32"] <= model.vocab_size * model.hidden_size


@pytest.mark.parametrize("name", ["moe", *long(("dense", "hybrid"))])
def test_sampled_log_probs_are_the_scores_of_the_rounded(name):
  model, params = MODELS[name], initial(MODELS[name])
  rollout = generate(
    params,
    model,
    [[5, 9, 11], [7, 8], [12, 13, 14, 15]],
    group_size=3,
    max_new_tokens=8,
    stop_ids=(2,),
    engine=EngineConfig(slots=4, steps=2, weights_dtype="int8"),
  )
  narrow = plain(publication.in_eight_bits(params, model))
  scores = jnp.pad(next_logp(narrow, model, rollout.tokens), ((0, 0), (1, 0)))
  np.testing.assert_allclose(rollout.logp, np.where(rollout.mask, scores, 0), atol=2e-5)


def test_adapters_are_merged_before_they_are_rounded():
  model = MODELS["dense"]
  mesh = sharding.make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])
  adapted = with_adapters(initial(model), model, LoraConfig(rank=2), "float32", mesh, seed=1)
  narrow, expected = (publication.in_eight_bits(x, model) for x in (adapted, initial(model)))
  chex.assert_trees_all_equal(narrow, expected)  # New adapters change nothing.


def test_projections_of_linear_attention_are_rounded_and_decays_are_not():
  attention = transformer.sampler_table(HYBRID_MOE, "int8").blocks[0].attention
  fields = {name: is_int8(getattr(attention, name)) for name in vars(attention)}
  assert {name for name, rounded in fields.items() if rounded} == {"q", "k", "v", "z", "o"}
  assert {"a", "b", "q_conv", "log_decay", "norm"} <= fields.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_all_but_matrices_of_layers_stay(name):
  table = transformer.sampler_table(PUBLISHED[name], "int8")
  paths = jax.tree.leaves_with_path(table, is_leaf=is_int8)
  narrow = {path[-1].name for path, w in paths if is_int8(w)}
  gates = {"z", "q_gate"} if PUBLISHED[name].linear.pattern > 1 else set()
  assert narrow == {"q", "k", "v", "o", "gate", "up", "down"} | gates
  others = {path[-1].name for path, w in paths if not is_int8(w)}
  assert not others & narrow and {"embed", "final_norm"} <= others
