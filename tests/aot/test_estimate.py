"""What programs need to move at least, against hand-written sums for the flagship."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from configs import moe_aime
from gspo_jax import sharding
from gspo_jax.aot import estimate, programs
from gspo_jax.configs import common
from gspo_jax.models import flops
from gspo_jax.models.attention import cache as kv_cache
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.model_groups import LinearConfig
from gspo_jax.settings.reading import from_dict

EXPERTS = 48 * 3 * 128 * 2048 * 768
HEAD = 151_936 * 2048
ATTENTION = 48 * 2048 * (2 * 32 + 2 * 4) * 128  # q, k, v, o
POSITION = 48 * 2 * 4 * 128 * 2  # bytes of keys and values


@pytest.fixture(scope="module")
def mesh():
  return sharding.make_mesh(MeshConfig(1, 2, 4, 1))


def case(**options):
  config = moe_aime.get_config()
  config.update(compute=dict(remat="full"), engine=dict(slots=64, cache_dtype="bfloat16"))
  config.mesh.rollout_experts = "all"
  return programs.make_case(from_dict(config.to_dict()), **options)


def test_a_decode_step_reads_weights_and_the_filled_cache_once(mesh):
  spec = case(mean_response=8192, mean_prompt=500)
  slots = 64 / 8
  idle = (1 - 8 / 128) ** 64  # experts, each on one of the devices, that none of 64 tokens chooses
  weights = 2 * (HEAD + ATTENTION + EXPERTS / 8 * (1 - idle))
  cache = slots * (spec.filled + 1) * POSITION
  # routers and norms are 0.2 %
  assert estimate.needed("decode", spec, mesh) == pytest.approx(weights + cache, rel=0.004)
  assert 500 + 4096 < spec.filled < 500 + 8192
  twice = estimate.needed("decode", case(slots=128, mean_response=8192, mean_prompt=500), mesh)
  assert twice > estimate.needed("decode", spec, mesh) + cache


def test_a_layer_with_a_window_reads_the_window_alone(mesh):
  spec = case(slots=64, mean_response=8192)
  windows = dict(sliding_window=1024, sliding_window_pattern=4)
  model = dataclasses.replace(spec.model, **windows)  # Every fourth layer sees all positions.
  local = dataclasses.replace(spec, config=dataclasses.replace(spec.config, model=model))
  positions = 3 / 4 * 1024 + spec.filled / 4
  expected = positions / spec.filled * estimate.filled_cache(spec, mesh)
  assert estimate.filled_cache(local, mesh) == pytest.approx(expected)


def test_a_decode_program_has_the_operations_of_the_filled_cache(mesh):
  spec = case(slots=64, mean_response=8192)
  with jax.set_mesh(mesh):
    decode = programs.sampling_program("decode", spec, mesh, programs.sampler_params(spec, mesh))
  step = flops.work(spec.model, 64, 1, round(spec.filled), decoding=True).forward()
  assert decode.work.forward() == decode.steps * step


def test_an_update_needs_state_weights_activations_and_gradients(mesh):
  spec = case(sequences=64, length=8192)
  local = EXPERTS / 8 + (HEAD + ATTENTION) / 2  # parameters of a device, without the embedding
  whole = EXPERTS / 4 + HEAD + ATTENTION  # gathered over fsdp=2
  state = 2 * 12 * (local + HEAD / 2) + 2 * 4 * (local + HEAD / 2)  # Moments; gradients.
  passes = 2 * (4 * local + 2 * 2 * whole)  # read, written where gathered, and read from there
  gradients = 2 * 2 * whole
  saved = 2 * 8 * 8192 * 2048 * 48 * 2  # 8 sequences of a device: the layers' inputs
  expected = state + passes + gradients + saved
  assert estimate.needed("train", spec, mesh) == pytest.approx(expected, rel=0.004)
  assert estimate.needed("score", spec, mesh) == pytest.approx(passes / 2, rel=0.004)


@pytest.mark.parametrize("tokens, positions", [(16, 208), (256, 207), (512, 414)])
def test_prefilling_writes_whole_prompts(tokens, positions, mesh):
  config = moe_aime.get_config("tiny")
  config.update(data=dict(max_prompt_tokens=208), engine=dict(prefill_tokens=tokens))
  spec = programs.make_case(from_dict(config.to_dict()))
  weights = estimate.device_bytes(programs.sampler_params(spec, mesh).blocks)
  written = (estimate.needed("prefill", spec, mesh) - weights) / estimate.position_bytes(spec, mesh)
  assert written == pytest.approx(positions)


def test_publication_reads_the_trainers_weights_and_writes_the_samplers(mesh):
  read = 4 * (EXPERTS / 8 + (2 * HEAD + ATTENTION) / 2)
  written = 2 * (EXPERTS / 8 + 2 * HEAD + ATTENTION)
  assert estimate.needed("publish", case(), mesh) == pytest.approx(read + written, rel=0.004)


@pytest.mark.parametrize("dtype", ["", "float32"])
def test_the_sampler_has_a_dtype_of_its_own(dtype, mesh):
  """Programs take weights of this dtype, publication casts to it; the update is unchanged."""
  spec = case(sequences=8, length=256)
  engine = dataclasses.replace(spec.config.engine, dtype=dtype)
  spec = dataclasses.replace(spec, config=dataclasses.replace(spec.config, engine=engine))
  with jax.set_mesh(mesh):
    compiled = dict(programs.programs(spec, mesh, list(programs.PROGRAMS)))
  weights, kind = compiled["decode"].arguments[0], jnp.dtype(dtype or "bfloat16")
  assert weights.embed.dtype == compiled["prefill"].arguments[0].embed.dtype == kind
  assert compiled["decode"].function.__wrapped__.keywords["compute"].dtype == kind.name
  assert (
    jax.eval_shape(compiled["publish"].function, *compiled["publish"].arguments).embed.dtype == kind
  )
  assert compiled["train"].arguments[0].params.embed.dtype == jnp.float32
  written = kind.itemsize * (EXPERTS / 8 + 2 * HEAD + ATTENTION)
  read = 4 * (EXPERTS / 8 + (2 * HEAD + ATTENTION) / 2)
  assert estimate.needed("publish", spec, mesh) == pytest.approx(read + written, rel=0.004)


HYBRID = ModelConfig(
  family="qwen3_5",
  vocab_size=1024,
  hidden_size=64,
  num_layers=8,
  num_heads=4,
  num_kv_heads=2,
  head_dim=32,
  intermediate_size=128,
  rope_theta=1e6,
  rms_norm_eps=1e-6,
  qk_norm=True,
  max_position_embeddings=32_768,
  linear=LinearConfig(pattern=4, key_heads=2, value_heads=6, key_dim=16, value_dim=8, kernel=4),
)


def test_linear_layers_have_no_positions_but_a_state_that_a_step_reads_and_writes(mesh):
  values = moe_aime.get_config("tiny")
  values.model = common.model(HYBRID)
  values.update(engine=dict(slots=64, cache_dtype="bfloat16"))
  spec = programs.make_case(from_dict(values.to_dict()))
  state = 6 * 4 * (6 * 16 * 8 + 3 * (2 * 2 * 16 + 6 * 8))
  assert estimate.state_bytes(spec, mesh) == state
  assert estimate.position_bytes(spec, mesh) == 2 * 2 * 2 * 32 * 2  # of two layers
  blocks = jax.eval_shape(lambda: kv_cache.allocate(HYBRID, 3, 5, "bfloat16")).blocks
  arrays = jax.tree.leaves([block for block in blocks if isinstance(block, kv_cache.States)])
  assert sum(x.size * x.dtype.itemsize for x in arrays) == 3 * state

  def moved(value_heads):
    linear = dataclasses.replace(HYBRID.linear, value_heads=value_heads)
    model = dataclasses.replace(HYBRID, linear=linear)
    changed = dataclasses.replace(spec, config=dataclasses.replace(spec.config, model=model))
    params = programs.sampler_params(changed, mesh)
    weights = estimate.device_bytes((params.blocks, params.final_norm, params.head))
    return estimate.needed("decode", changed, mesh) - weights

  more = 6 * 4 * 2 * (16 * 8 + 3 * 8)  # Two value heads more.
  assert moved(8) - moved(6) == pytest.approx(64 / 8 * 2 * more)
