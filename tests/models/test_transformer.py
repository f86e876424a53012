"""The model as a function: causal, cached as uncached, the same on every mesh."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_models
from support.cases import long
from support.small_models import forward, initial, logits

from gspo_jax import sharding
from gspo_jax.learner import replicas
from gspo_jax.models import layer_scan, publication, transformer
from gspo_jax.models.attention import attention
from gspo_jax.models.attention import cache as kv_cache
from gspo_jax.sampling import generate
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.model import REFERENCE
from gspo_jax.settings.sampling import LOCAL_ENGINE

# Layers are unrolled on CPU, so that each one is compiled.
MOE = dataclasses.replace(small_models.MOE, num_heads=4)
MIXED = dataclasses.replace(MOE, num_layers=3, mlp_only_layers=(1,), intermediate_size=48)
DENSE = dataclasses.replace(small_models.DENSE, num_layers=2, num_heads=4)
GEMMA = dataclasses.replace(  # Layers local, global, local; rows are longer than the window.
  small_models.GEMMA,
  num_layers=3,
  num_heads=4,
  sliding_window_pattern=2,
  attn_logit_softcapping=2.0,
  final_logit_softcapping=1.5,
)
HYBRID, HYBRID_MOE, SHALLOW_HYBRID = (
  dataclasses.replace(config, num_heads=4)
  for config in (small_models.HYBRID, small_models.HYBRID_MOE, small_models.SHALLOW_HYBRID)
)
CONFIGS = pytest.mark.parametrize(
  "config",
  [
    DENSE,
    HYBRID,
    *long((MOE, GEMMA, MIXED)),
  ],
  ids=["dense", "hybrid", "moe", "gemma", "mixed"],
)
MESHES = [(1, 2, 2, 2), (8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 8, 1), (2, 2, 2, 1), (2, 1, 2, 2)]
LAYOUTS = [(SHALLOW_HYBRID, MESHES[0])]
LAYOUTS += [
  pytest.param(config, MESHES[0], marks=pytest.mark.long)
  for config in (MIXED, HYBRID_MOE, DENSE, GEMMA)
]
LAYOUTS += [pytest.param(MOE, mesh, marks=pytest.mark.long) for mesh in MESHES]
LAYOUTS += [pytest.param(HYBRID, mesh, marks=pytest.mark.long) for mesh in MESHES]


def tokens_of(config, batch=8, length=10):
  return transformer.example_tokens(config, batch, length)


def loss(params, config, tokens, compute=REFERENCE):
  out = transformer.forward(params, config, tokens, compute=compute)
  logp, entropy = transformer.token_logp(
    params, config, out.hidden_BTD, jnp.roll(tokens, -1, 1), compute=compute
  )
  return -logp.mean() + 0.1 * entropy.mean()


@functools.cache
def single_device(config):
  params, tokens = initial(config), tokens_of(config)
  return jax.jit(lambda p, t: jax.value_and_grad(loss)(p, config, t))(params, tokens)


@pytest.mark.parametrize(  # Also of hybrids, if their decoding is one pass.
  "config",
  [DENSE, *long((MOE, GEMMA, HYBRID, MIXED))],
  ids=["dense", "moe", "gemma", "hybrid", "mixed"],
)
def test_a_token_cannot_see_the_future(config):
  params, tokens = initial(config), tokens_of(config)
  changed = tokens.copy()
  changed[:, 6] = (changed[:, 6] + 1) % config.vocab_size
  a = logits(params, config, tokens)
  b = logits(params, config, changed)
  np.testing.assert_allclose(a[:, :6], b[:, :6], atol=1e-5)
  assert np.abs(a[:, 6:] - b[:, 6:]).max() > 1e-2


@CONFIGS
def test_prefill_and_decode_equal_one_forward(config):
  params, tokens = initial(config), tokens_of(config)
  whole = forward(params, config, tokens).hidden_BTD
  cache = kv_cache.allocate(config, len(tokens), 12, jnp.float32)
  out = forward(params, config, tokens[:, :6], cache=cache)
  hidden = [out.hidden_BTD]
  for t in range(6, 10):
    position = jnp.full((len(tokens), 1), t)
    out = forward(params, config, tokens[:, t : t + 1], positions=position, cache=out.cache)
    hidden.append(out.hidden_BTD)
  np.testing.assert_allclose(jnp.concatenate(hidden, 1), whole, atol=2e-5)


@pytest.mark.parametrize(
  "config",
  [GEMMA, *long((MOE, HYBRID))],
  ids=["gemma", "moe", "hybrid"],
)
def test_packed_segments_equal_separate_rows(config):
  params, tokens = initial(config), tokens_of(config)
  first, second = tokens[:, :4], tokens[:, 4:]
  segments = np.repeat(np.array([[1] * 4 + [2] * 6]), len(tokens), 0)
  positions = np.repeat(np.array([[*range(4), *range(6)]]), len(tokens), 0)
  packed = forward(
    params, config, tokens, segments=jnp.asarray(segments), positions=jnp.asarray(positions)
  ).hidden_BTD
  apart = [forward(params, config, part).hidden_BTD for part in (first, second)]
  np.testing.assert_allclose(packed, jnp.concatenate(apart, 1), atol=2e-5)


@pytest.mark.parametrize("config, shape", LAYOUTS, ids=lambda x: str(x) if type(x) is tuple else "")
def test_every_mesh_gives_the_loss_and_gradients_of_one_device(config, shape):
  params, tokens = initial(config), tokens_of(config)
  expected, gradient = single_device(config)
  mesh = sharding.make_mesh(MeshConfig(*shape))
  with jax.set_mesh(mesh):
    sharded = jax.device_put(params, transformer.shardings(config, sharding.TRAIN, mesh))
    batch = sharding.put_batch(tokens, mesh)
    step = jax.jit(jax.value_and_grad(lambda p, t: loss(p, config, t)))
    value, got = step(sharded, batch)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient))
  rounding = 1e-4 if config.linear.pattern > 1 else 2e-5  # Sums of decayed states round more.
  chex.assert_trees_all_close(jax.device_get(got), gradient, atol=rounding * largest, rtol=0)
  # Sharding is in the type: a gradient laid out otherwise would be copied at every step.
  chex.assert_trees_all_equal(jax.tree.map(jax.typeof, got), jax.tree.map(jax.typeof, sharded))


@pytest.mark.parametrize("config", [MOE, GEMMA, HYBRID_MOE], ids=["moe", "gemma", "hybrid"])
@pytest.mark.long
def test_a_loop_over_layers_gives_the_gradients_of_unrolled_ones(config, monkeypatch):
  """Few layers are unrolled on CPU; a pod runs the loop."""
  params, tokens = initial(config), tokens_of(config)
  expected = single_device(config)
  monkeypatch.setattr(layer_scan, "UNROLLED", 0)
  got = jax.jit(lambda p, t: jax.value_and_grad(loss)(p, config, t))(params, tokens)
  chex.assert_trees_all_close(got, expected, atol=2e-6, rtol=1e-4)
  mesh = sharding.make_mesh(MeshConfig(1, 4, 2, 1))
  with jax.set_mesh(mesh):
    sharded = jax.device_put(params, transformer.shardings(config, sharding.TRAIN, mesh))
    step = jax.jit(jax.value_and_grad(lambda p, t: loss(p, config, t)))
    got = step(sharded, sharding.put_batch(tokens, mesh))
  chex.assert_trees_all_close(jax.device_get(got), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
  "experts, remat, shape, pattern",
  [
    ("ragged", "both", (1, 4, 2, 1), 1),
    ("ragged", "both", (1, 4, 2, 1), 2),
    ("ragged", "both", (1, 4, 2, 1), 3),
    ("blocks", "none", (2, 2, 2, 1), 1),
    ("megablox", "full", (2, 2, 1, 2), 1),
  ],
)
def test_experts_that_are_gathered_a_layer_ahead_are_the_same(
  experts, remat, shape, pattern, monkeypatch
):
  """Losses and gradients of the loop over layers, but for how the compiler fuses sums."""
  monkeypatch.setattr(layer_scan, "UNROLLED", 0)
  windows = dict(num_layers=2 * pattern, sliding_window=4, sliding_window_pattern=pattern)
  model = dataclasses.replace(MOE, **windows) if pattern > 1 else MOE
  assert [scan.steps for scan in model.scans()] == [2]
  mesh = sharding.make_mesh(MeshConfig(*shape))

  def step(params, tokens, compute):
    value, grads = jax.value_and_grad(loss)(replicas.apart(params), model, tokens, compute)
    return value, replicas.summed(grads)

  with jax.set_mesh(mesh):
    params = jax.device_put(initial(model), transformer.shardings(model, sharding.TRAIN, mesh))
    tokens = sharding.put_batch(tokens_of(model), mesh)
    usual = dataclasses.replace(REFERENCE, experts=experts, remat=remat)
    ahead = dataclasses.replace(usual, prefetch=True)
    results = [jax.jit(step, static_argnums=2)(params, tokens, each) for each in (usual, ahead)]
  chex.assert_trees_all_close(*map(jax.device_get, results), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("config", [MOE, DENSE], ids=["moe", "dense"])
def test_published_parameters_are_the_same_in_the_rollout_layout(config):
  params = initial(config)
  mesh = sharding.make_mesh(MeshConfig(1, 2, 2, 2))
  with jax.set_mesh(mesh):
    training = jax.device_put(params, transformer.shardings(config, sharding.TRAIN, mesh))
    layout = transformer.shardings(config, sharding.ROLLOUT, mesh)
    read = transformer.dtypes(config, jnp.bfloat16)
    got = publication.publisher(layout, read)(training)
  expected = jax.tree.map(jnp.astype, params, read)
  chex.assert_trees_all_equal(jax.device_get(got), jax.device_get(expected))
  chex.assert_trees_all_equal(jax.tree.map(lambda x: x.sharding, got), layout)


def test_arrays_of_numpy_are_taken_everywhere():
  params, tokens = initial(MOE), np.asarray(tokens_of(MOE))
  B, T = tokens.shape
  arrays = dict(
    segments=1 + np.tile(np.arange(T, dtype=np.int32) * 2 // T, (B, 1)),
    positions=np.tile(np.arange(T, dtype=np.int32), (B, 1)),
    routing=np.zeros((MOE.num_layers, B, T, MOE.experts_per_token), np.int8) + np.int8([0, 1]),
  )
  run = jax.jit(lambda p, t, arrays: transformer.forward(p, MOE, t, **arrays).hidden_BTD)
  expected = run(params, tokens, arrays)
  for keys in (["segments"], ["positions"], ["routing"], list(arrays)):
    options = {key: arrays[key] for key in keys}
    hidden = transformer.forward(params, MOE, tokens, **options).hidden_BTD
    assert hidden.shape == expected.shape
  np.testing.assert_allclose(hidden, expected, atol=1e-5)
  logits = transformer.logits(jax.device_get(params), MOE, tokens)
  np.testing.assert_array_equal(logits, transformer.logits(params, MOE, tokens))


def test_parameters_on_a_mesh_need_it_set():
  mesh = sharding.make_mesh(MeshConfig(1, 8, 1, 1))
  params = jax.device_put(initial(DENSE), transformer.shardings(DENSE, sharding.TRAIN, mesh))
  with pytest.raises(ValueError, match=r"over a mesh: call this under jax\.set_mesh"):
    transformer.logits(params, DENSE, tokens_of(DENSE))
  whole = jax.device_put(initial(DENSE), jax.NamedSharding(mesh, sharding.P()))
  expected = transformer.logits(initial(DENSE), DENSE, tokens_of(DENSE))
  np.testing.assert_allclose(
    transformer.logits(whole, DENSE, tokens_of(DENSE)), expected, atol=1e-5
  )


def test_the_platform_is_that_of_the_default_device(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert sharding.platform() == "gpu"
  with jax.default_device(jax.devices("cpu")[0]):
    assert sharding.platform() == "cpu"


@pytest.mark.long
def test_formulations_agree():
  params, tokens = initial(MOE), tokens_of(MOE)
  expected = single_device(MOE)
  for change in (
    dict(experts="ragged"),
    dict(experts="blocks"),
    dict(experts="batched", logits_chunk=3),
  ):
    compute = dataclasses.replace(REFERENCE, **change)
    got = jax.jit(lambda p, t: jax.value_and_grad(loss)(p, MOE, t, compute))(params, tokens)  # noqa: B023
    chex.assert_trees_all_close(got, expected, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize(
  "config", [pytest.param(MOE, marks=pytest.mark.long), GEMMA], ids=["moe", "gemma"]
)
def test_token_logp_is_log_softmax(config):
  params, tokens = initial(config), tokens_of(config)
  hidden = forward(params, config, tokens).hidden_BTD
  logp, entropy = transformer.token_logp(params, config, hidden, tokens, temperature=0.7)
  reference = jax.nn.log_softmax(logits(params, config, tokens) / 0.7, axis=-1)
  np.testing.assert_allclose(
    logp, jnp.take_along_axis(reference, tokens[..., None], -1)[..., 0], atol=1e-5
  )
  np.testing.assert_allclose(entropy, -(jnp.exp(reference) * reference).sum(-1), atol=1e-5)


@pytest.mark.parametrize(
  "config", [MOE, pytest.param(HYBRID, marks=pytest.mark.long)], ids=["moe", "hybrid"]
)
def test_bfloat16_stays_near_float32(config):
  params, tokens = initial(config), tokens_of(config)
  exact = loss(params, config, tokens)
  rough = loss(params, config, tokens, dataclasses.replace(REFERENCE, dtype="bfloat16"))
  assert 0 < abs(float(exact - rough)) < 0.03 * float(exact)


def test_a_weight_that_the_mesh_does_not_divide_is_named():
  mesh = sharding.make_mesh(MeshConfig(1, 1, 1, 8))
  with pytest.raises(ValueError, match=r"blocks\.0\.attention\.q.*N=4.*mesh\.tensor=8"):
    transformer.shardings(MOE, sharding.TRAIN, mesh)


def test_mesh_sizes_must_multiply_to_the_devices():
  with pytest.raises(ValueError, match=r"mesh\.fsdp=3.*8 exist"):
    sharding.make_mesh(MeshConfig(1, 3, 1, 1))
  assert sharding.make_mesh(MeshConfig(-1, 2, 1, 2)).shape["data"] == 2
  for size in 3, 16:
    with pytest.raises(ValueError, match=f"without -1 is {size}, and must divide 8 devices"):
      sharding.make_mesh(MeshConfig(-1, size, 1, 1))


def test_two_axes_of_one_weight_on_one_mesh_axis_are_refused():
  with pytest.raises(ValueError, match="splits two dimensions over one mesh axis"):
    sharding.spec("DF", dict(D="fsdp", F="fsdp"))


def test_attention_that_lacks_a_window_is_refused_by_name(monkeypatch):
  half = dataclasses.replace(REFERENCE, dtype="bfloat16")
  auto, cudnn, splash = (
    dataclasses.replace(half, attention=name) for name in ("auto", "cudnn", "splash")
  )
  with pytest.raises(ValueError, match=r"attention='cudnn' is for NVIDIA GPUs"):
    transformer.check_attention(DENSE, cudnn, shared_prompts=True)
  monkeypatch.setattr(sharding, "platform", lambda: "gpu")
  transformer.check_attention(GEMMA, auto, shared_prompts=True)
  transformer.check_attention(DENSE, cudnn, shared_prompts=True)
  transformer.check_attention(GEMMA, splash, shared_prompts=False)
  with pytest.raises(ValueError, match=r"compute\.attention='cudnn' does not support a soft bound"):
    transformer.check_attention(GEMMA, cudnn, shared_prompts=True)
  with pytest.raises(
    ValueError, match="'splash' does not support a sliding window where responses"
  ):
    transformer.check_attention(GEMMA, splash, shared_prompts=True)


@pytest.mark.long
@pytest.mark.parametrize("shape", [None, (1, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("config", [GEMMA, HYBRID], ids=["gemma", "hybrid"])
def test_greedy_tokens_do_not_depend_on_how_prompts_are_prefilled(config, shape, monkeypatch):
  """In pieces that look back at the cache, by blocks and on a mesh: each token is the most likely
  one of a forward pass over the whole row."""
  monkeypatch.setattr(attention, "PLAIN", 4)
  params = initial(config)
  prompts = [tokens_of(config, 1, n)[0].tolist() for n in (27, 3, 40)]
  engine = dataclasses.replace(LOCAL_ENGINE, prefill_tokens=16)
  options = dict(group_size=1, max_new_tokens=6, temperature=0, engine=engine)
  if shape is None:
    rollout = generate(params, config, prompts, **options)
  else:
    mesh = sharding.make_mesh(MeshConfig(*shape))
    with jax.set_mesh(mesh):
      placed = jax.device_put(params, transformer.shardings(config, sharding.ROLLOUT, mesh))
      rollout = generate(placed, config, prompts, **options)
  logits_BTV = logits(params, config, rollout.tokens)
  for row, prompt in enumerate(prompts):
    response = rollout.response(row)
    logits_TV = logits_BTV[row, len(prompt) - 1 : len(prompt) + len(response)]
    np.testing.assert_array_equal(response, np.argmax(logits_TV[:-1], axis=-1))
    logp = jax.nn.log_softmax(logits_TV[:-1])[np.arange(6), np.array(response)]
    np.testing.assert_allclose(rollout.logp[row][rollout.mask[row] > 0], logp, atol=1e-4)
