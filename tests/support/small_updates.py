"""Updates of small models on random mini-batches, for comparing two ways to the same update."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gspo_jax import sharding
from gspo_jax.learner import step as train_step
from gspo_jax.learner.objective import ObjectiveConfig
from gspo_jax.learner.state import new_state
from gspo_jax.models import transformer
from gspo_jax.models.sizes import REFERENCE, tiny_dense, tiny_gemma, tiny_moe
from gspo_jax.structs import TrainBatch

SMALL_MODEL = dict(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16)
MODELS = dict(
  dense=dataclasses.replace(tiny_dense(64), intermediate_size=48, **SMALL_MODEL),
  gemma=dataclasses.replace(
    tiny_gemma(64),
    intermediate_size=48,
    sliding_window=4,
    sliding_window_pattern=2,
    **SMALL_MODEL,
  ),
  moe=dataclasses.replace(tiny_moe(64), moe_intermediate_size=16, **SMALL_MODEL),
)
B, T, PROMPT, MICROBATCHES = 16, 20, 2, 4
LENGTHS = (5, 20, 3, 0, 9, 4, 12, 6, 4, 3, 7, 5, 10, 3, 4, 6)  # 101 tokens: 6 rows, 2 micro-batches
GSPO = ObjectiveConfig(
  name="gspo",
  clip_low=0.1,
  clip_high=0.1,
  advantage="std",
  old_logp="recompute",
  kl_coef=0.1,
  kl="k3",
  entropy_coef=0.01,
  load_balance_coef=0.0,
  replay="none",
  volatility=True,
)
PER_MICRO_BATCH = ("router/load_balance", "router/busiest_expert", "padding")
SGD = optax.sgd(1.0)


def make_batch(model=MODELS["dense"], lengths=LENGTHS, seed=0) -> TrainBatch:
  rng = np.random.default_rng(seed)
  lengths, time_T = np.array(lengths), np.arange(T)
  real_BT = time_T[None] < lengths[:, None]
  mask_BT = (real_BT & (time_T >= PROMPT)[None]).astype(np.float32)
  logp = lambda: (rng.normal(-4.2, 0.1, (B, T)) * mask_BT).astype(np.float32)  # noqa: E731
  batch = TrainBatch(
    tokens_BT=np.where(real_BT, rng.integers(0, 64, (B, T)), 0).astype(np.int32),
    segments_BT=real_BT.astype(np.int32),
    mask_BT=mask_BT,
    advantage_B=rng.normal(size=B).astype(np.float32),
    old_logp_BT=logp(),
    sampler_logp_BT=logp(),
    ref_logp_BT=logp(),
  )
  if not model.num_experts:
    return batch
  experts_BTlE = np.tile(np.arange(model.num_experts), (B, T, model.num_layers, 1))

  def route():
    routes = rng.permuted(experts_BTlE, axis=-1)[..., : model.experts_per_token]
    return np.where(real_BT[..., None, None], routes, -1).astype(np.int8)

  return batch.replace(routing_BTlk=route(), sampler_routing_BTlk=route())


@functools.cache
def learner(name, microbatches=MICROBATCHES):
  return train_step.Learner(MODELS[name], REFERENCE, 1.0, microbatches, load_balance_coef=0.0)


@functools.cache
def update(name, microbatches=MICROBATCHES, **changes):
  objective = dataclasses.replace(GSPO, **changes)
  return train_step.make_rl_step(learner(name, microbatches), objective, SGD)


@functools.cache
def initial(name):
  return jax.device_get(transformer.init(MODELS[name], jax.random.key(0)))


def after(step, name, batch, shape=None):
  """Parameters and metrics after one update, on a mesh if there is a shape of it."""
  params = jax.tree.map(jnp.array, initial(name))
  if shape is None:
    state, metrics = step(new_state(params, SGD), batch)
    return jax.device_get(state.params), scalars(metrics)
  mesh = sharding.make_mesh(sharding.MeshConfig(*shape))
  with jax.set_mesh(mesh):
    params = jax.device_put(params, transformer.shardings(MODELS[name], sharding.TRAIN, mesh))
    state, metrics = step(new_state(params, SGD), sharding.put_batch(batch, mesh))
    return jax.device_get(state.params), scalars(metrics)


def old_policy(learner, name, batch, shape=None):
  """What one pass of the trainer says of the old policy, on a mesh if there is a shape of it."""
  find = train_step.make_old_policy(learner, GSPO)
  if shape is None:
    return find(initial(name), batch)
  mesh = sharding.make_mesh(sharding.MeshConfig(*shape))
  with jax.set_mesh(mesh):
    params = jax.device_put(
      initial(name), transformer.shardings(MODELS[name], sharding.TRAIN, mesh)
    )
    return jax.device_get(find(params, sharding.put_batch(batch, mesh)))


def scalars(metrics):
  return {k: float(v) for k, v in train_step.summarize((metrics,)).items()}
