"""Sampler and trainer are one network in bfloat16 too: what is read in float32 is published so."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_models import MODELS, initial

from gspo_jax import sharding
from gspo_jax.models import publication, transformer
from gspo_jax.settings.model import REFERENCE

BFLOAT16 = dataclasses.replace(REFERENCE, dtype="bfloat16")
# Roundings are carried out: XLA may otherwise hide a difference.
OPTIONS = dict(xla_allow_excess_precision=False)
MODELS = MODELS | dict(dense=dataclasses.replace(MODELS["dense"], attention_bias=True))


def passes(params, model, tokens_BT):
  """Returns the trainer's pass and the sampler's."""
  out = transformer.forward(params, model, tokens_BT, compute=BFLOAT16)
  logp_BT, _ = transformer.token_logp(params, model, out.hidden_BTD, tokens_BT, compute=BFLOAT16)
  logits_BTV = transformer.head_logits(params, model, out.hidden_BTD, BFLOAT16)
  return out.hidden_BTD, logp_BT, logits_BTV, out.routing_lBTk


@functools.cache
def case(name):
  """A model without bfloat16 weights, its published weights, and tokens."""
  model = MODELS[name]
  leaves, structure = jax.tree.flatten(initial(model))
  keys = jax.random.split(jax.random.key(1), len(leaves))
  noisy = [x + 0.1 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys)]
  params = jax.tree.unflatten(structure, noisy)
  layout = jax.tree.map(lambda x: x.sharding, params)
  read = transformer.dtypes(model, BFLOAT16.dtype)
  published = publication.publisher(layout, read)(params)
  tokens = jax.random.randint(jax.random.key(2), (4, 24), 0, model.vocab_size)
  return model, params, published, tokens


@functools.cache
def compiled(name, mode):
  model, params, published, tokens = case(name)
  lowered = jax.jit(passes, static_argnums=1).lower(
    published if mode == "published" else params, model, tokens
  )
  return lowered.compile(OPTIONS)


def same(outputs, expected):
  return all(map(np.array_equal, jax.tree.leaves(outputs), jax.tree.leaves(expected)))


NAMED = pytest.mark.parametrize(
  "name", ["moe", "gemma", pytest.param("dense", marks=pytest.mark.long)]
)


@NAMED
def test_the_published_network_is_the_trainers_to_the_bit(name):
  _, params, published, tokens = case(name)
  expected = compiled(name, "trainer")(params, tokens)
  assert same(compiled(name, "published")(published, tokens), expected)


@NAMED
def test_the_trainer_reads_every_weight_in_the_type_that_is_published(name):
  """Rounding a weight to that dtype changes nothing; float32 ones need it."""
  _, params, published, tokens = case(name)
  run, wide = compiled(name, "trainer"), []
  expected = run(params, tokens)
  paths, structure = jax.tree.flatten_with_path(params)

  def run_with(i, x):
    leaves = [x if i == j else leaf for j, (_, leaf) in enumerate(paths)]
    return run(jax.tree.unflatten(structure, leaves), tokens)

  for i, ((path, x), published_x) in enumerate(zip(paths, jax.tree.leaves(published))):
    label = jax.tree_util.keystr(path, simple=True, separator=".")
    assert same(run_with(i, published_x.astype(jnp.float32)), expected), label
    if published_x.dtype == jnp.float32:
      wide.append(label.rsplit(".")[-1])
      rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
      assert not same(run_with(i, rounded), expected), label
  norms = ["attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm", "final_norm"]
  expected = dict(moe={"router"}, gemma={*norms, "q_norm", "k_norm"})
  assert set(wide) == expected.get(name, set())


def test_gradients_of_norms_and_biases_are_as_exact_as_those_of_matrices():
  """They are sums over all tokens, too long for bfloat16's digits."""
  model = dataclasses.replace(MODELS["dense"], num_layers=1)
  params = initial(model)
  tokens = jax.random.randint(jax.random.key(2), (64, 256), 0, model.vocab_size)

  @functools.partial(jax.jit, static_argnums=1)
  def gradient(params, compute):
    def loss(params):
      hidden_BTD = transformer.forward(params, model, tokens, compute=compute).hidden_BTD
      targets = jnp.roll(tokens, -1, axis=1)
      logp_BT, _ = transformer.token_logp(params, model, hidden_BTD, targets, compute=compute)
      return -logp_BT.mean()

    return jax.grad(loss)(params)

  exact, rough = gradient(params, REFERENCE), gradient(params, BFLOAT16)
  vector_errors, matrix_errors = {}, {}
  for (path, x), y in zip(jax.tree.leaves_with_path(exact), jax.tree.leaves(rough)):
    label = jax.tree_util.keystr(path, simple=True, separator=".")
    errors = vector_errors if label.endswith(("norm", "bias")) else matrix_errors
    errors[label] = float(jnp.linalg.norm(x - y) / jnp.linalg.norm(x))
  assert max(vector_errors.values()) < 1.5 * max(matrix_errors.values()), (
    vector_errors,
    matrix_errors,
  )


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_on_cpu_products_of_bfloat16_are_made_in_float32_and_rounded(platform, monkeypatch):
  """Values and both gradients; it is twice as fast there, and as exact."""
  monkeypatch.setattr(sharding, "platform", lambda: platform)
  keys = jax.random.split(jax.random.key(0))
  x, w = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, ((2, 8, 48), (48, 32))))

  def scalar(x, w):
    y_BTF = sharding.project("BTD,DF->BTF", x, w, sharding.P())
    return jnp.sin(y_BTF.astype(jnp.float32)).sum(), y_BTF

  step = jax.value_and_grad(scalar, (0, 1), has_aux=True)
  products = re.findall(r":(\w+)\[[^]]*\] = dot_general", str(jax.make_jaxpr(step)(x, w)))
  assert products == [dict(cpu="f32", tpu="bf16")[platform]] * 3
  (_, y), gradients = jax.jit(step)(x, w)
  assert {a.dtype for a in (y, *gradients)} == {jnp.dtype(jnp.bfloat16)}
  wide = (a.astype(jnp.float32) for a in (x, w))
  (_, exact), exact_gradients = jax.jit(step)(*wide)
  for a, b in zip((y, *gradients), (exact, *exact_gradients), strict=True):
    np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0.01, atol=0.05 * jnp.abs(b).max())
