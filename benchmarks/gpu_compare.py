"""Compares results on a GPU with float32 sums, on small arrays.

Each row has a name, a relative error (of norms; of log-probs the largest difference) and its limit.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from scaling_points import init

from gspo_jax import sharding
from gspo_jax.learner import passes
from gspo_jax.models import transformer
from gspo_jax.models.attention.attention import attend_self
from gspo_jax.models.experts import moe
from gspo_jax.models.experts.blocks import ExpertWeights
from gspo_jax.sampling import LocalEngine, Workload, sample_rollout
from gspo_jax.settings.model import REFERENCE, ModelConfig
from gspo_jax.settings.sampling import EngineConfig, SamplingConfig
from gspo_jax.settings.sizes import tiny_moe
from gspo_jax.structs import ModelInputs

LIMITS = dict(float32=1e-3, bfloat16=3e-2)
LOGP_LIMITS = dict(float32=2e-3, bfloat16=0.15)  # Nats: roundings of bfloat16 add up over layers.
Rows = Iterator[dict[str, Any]]


def rows(mesh: jax.sharding.Mesh) -> Rows:
  """Yields a row per comparison."""
  with jax.default_matmul_precision("highest"):  # Otherwise a GPU rounds float32 to TF32.
    yield from attention()
    yield from experts()
    with jax.set_mesh(mesh):
      yield from decoding()


def attention() -> Rows:
  """Compares attention's values and gradients with plain attention."""
  B, T, N, K, H = 2, 384, 4, 2, 64
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H)
  q, k, v, weight = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes))
  place = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
  layouts = dict(
    whole=jnp.ones((B, T), jnp.int32),
    padded=(place < jnp.array([[T], [T // 3]])).astype(jnp.int32),
    packed=1 + (place >= T // 3).astype(jnp.int32),
  )
  forms = [("blockwise", "float32"), ("blockwise", "bfloat16")]
  if sharding.platform() == "gpu":
    forms.append(("cudnn", "bfloat16"))
  for layout, segment_BT in layouts.items():
    real = (segment_BT > 0)[..., None, None]
    attend = functools.partial(_attend, segment_BT, weight)
    arrays = [jnp.where(real, x, 0) for x in (q, k, v)]
    for form, dtype in forms:
      rounded = [x.astype(dtype) for x in arrays]
      case = f"attention {form}, {layout}"
      function, reference = functools.partial(attend, form), functools.partial(attend, "plain")
      yield compare(case, dtype, function, reference, rounded)


def _attend(segment_BT: jax.Array, weight: jax.Array, form: str, *arrays: jax.Array) -> jax.Array:
  """Weighted attention of real tokens."""
  y = attend_self(*arrays, segment_BT, form).astype(jnp.float32)
  return jnp.where((segment_BT > 0)[..., None, None], y * weight, 0)


def experts() -> Rows:
  """Compares experts' values and gradients with a sum over all experts."""
  X, D, F, E, k = 512, 128, 64, 8, 2
  keys = jax.random.split(jax.random.key(1), 6)
  shapes = (X, D), (E, D, F), (E, D, F), (E, F, D)
  x, *w = (jax.random.normal(key, s) * s[-2] ** -0.5 for key, s in zip(keys, shapes))
  gate = jax.nn.softmax(jax.random.normal(keys[4], (X, k)))
  even = jax.lax.top_k(jax.random.normal(keys[5], (X, E)), k)[1]
  for routing, index in dict(even=even, one=jnp.full((X, k), 3)).items():

    def plain(x, gate, *w, index=index):
      w = ExpertWeights(*w)
      hidden = jax.nn.silu(jnp.einsum("XD,EDF->XEF", x, w.gate)) * jnp.einsum(
        "XD,EDF->XEF", x, w.up
      )
      all_XED = jnp.einsum("XEF,EFD->XED", hidden, w.down)
      return jnp.einsum("Xk,XkD->XD", gate, jnp.take_along_axis(all_XED, index[..., None], axis=1))

    kernels = {"megablox"} if sharding.platform() == "gpu" else {"megablox", "triton"}
    for form in sorted(set(moe.IMPLEMENTATIONS) - kernels):
      for dtype in LIMITS:

        def apply(x, gate, *w, index=index, form=form):
          fixed = ExpertWeights(*map(jax.lax.stop_gradient, w))
          return moe.IMPLEMENTATIONS[form](x, gate, index, fixed, ExpertWeights(*w))

        arrays = [a.astype(dtype) for a in (x, gate, *w)]
        yield compare(f"experts {form}, {routing} load", dtype, apply, plain, arrays)


def compare(
  name: str, dtype: str, form: Callable, reference: Callable, arrays: list[jax.Array]
) -> dict[str, Any]:
  """Compares a function and its gradients with a float32 reference."""

  def results(function: Callable, arrays: list[jax.Array]) -> list[jax.Array]:
    y, transpose = jax.vjp(function, *arrays)
    dy = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).astype(dtype).reshape(y.shape)
    return [y, *transpose(dy.astype(y.dtype))]

  actual = jax.jit(lambda a: results(form, a))(arrays)
  wide = [x.astype(jnp.float32) for x in arrays]
  expected = jax.jit(lambda a: results(reference, a))(wide)
  errors = [
    jnp.linalg.norm((a.astype(jnp.float32) - b).ravel()) / (jnp.linalg.norm(b.ravel()) + 1e-6)
    for a, b in zip(actual, expected)
  ]
  return row(name, dtype, float(jnp.max(jnp.array(errors))), LIMITS[dtype])


def decoding() -> Rows:
  """Compares log-probs of sampler and trainer, dense and MoE."""
  shape = dict(num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32)
  mixture = dataclasses.replace(tiny_moe(512), **shape)
  none = dict(num_experts=0, experts_per_token=0, moe_intermediate_size=0)
  for name, config in dict(dense=dataclasses.replace(mixture, **none), moe=mixture).items():
    for dtype in LOGP_LIMITS:
      error = _logp_error(config, dtype)
      yield row(f"decode against score, {name}", dtype, error, LOGP_LIMITS[dtype])


def _logp_error(config: ModelConfig, dtype: str) -> float:
  """Returns the largest difference of log-probs of sampled tokens.

  In bfloat16 the trainer replays the sampler's experts: roundings change those of a few tokens, and
  their log-probs by up to 1.4 nats.
  """
  replay = "R3" if config.num_experts and dtype == "bfloat16" else "none"
  compute = dataclasses.replace(REFERENCE, dtype=dtype)
  params = init(config, sharding.TRAIN)
  engine = LocalEngine(config, EngineConfig(slots=16, steps=8, cache_dtype=dtype), compute)
  narrow = transformer.dtypes(config, dtype)
  engine.load(jax.tree.map(lambda x, dtype: x.astype(dtype), params, narrow), version=0)
  prompts = transformer.example_tokens(config, 4, 160).tolist()
  sampling = SamplingConfig(1.0, 0, 1.0, 0.0, 32)
  workload = Workload(sampling, 160, 16, 4, record_routing=replay == "R3")
  rollout = sample_rollout(engine, workload, prompts, seed=0)
  learner = passes.Learner(config, compute, 1.0, 1, load_balance_coef=0.0)
  place = jnp.arange(rollout.tokens.shape[1])[None]
  segments = (place < rollout.ends[:, None]).astype(jnp.int32)
  inputs = ModelInputs(rollout.tokens, segments, sampler_experts_BTlk=rollout.routing)
  inputs = sharding.put_batch(jax.device_get(inputs), jax.sharding.get_mesh())
  score = jax.jit(lambda *arguments: passes.log_probs(*arguments, learner, replay)[0])
  logp = jax.device_get(score(params, inputs))
  return float(jnp.abs(logp - rollout.logp)[rollout.mask > 0].max())


def row(name: str, dtype: str, error: float, limit: float) -> dict[str, Any]:
  return dict(name=name, dtype=dtype, error=error, limit=limit, right=error <= limit)
