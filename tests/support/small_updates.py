"""Updates of small models on random mini-batches, for comparing two ways to the same update."""

import contextlib
import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gspo_jax import sharding
from gspo_jax.learner import passes
from gspo_jax.learner import step as train_step
from gspo_jax.learner.batch import train_batch
from gspo_jax.learner.state import new_state
from gspo_jax.learner.summary import summarize
from gspo_jax.models import transformer
from gspo_jax.runs.metrics import compute
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.model import REFERENCE
from gspo_jax.settings.objective import ObjectiveConfig
from gspo_jax.structs import ModelInputs, Rollout, TrainBatch
from support.small_models import GEMMA, HYBRID, HYBRID_MOE, MOE, SHALLOW, SHALLOW_MOE, initial

B, T, PROMPT, MICROBATCHES = 16, 20, 2, 4
LENGTHS = (5, 20, 3, 0, 9, 4, 12, 6, 4, 3, 7, 5, 10, 3, 4, 6)  # 101 tokens: 6 rows, 2 micro-batches
GSPO = ObjectiveConfig(advantage="std", old_logp="recompute", volatility=True)
ALL_TERMS = dataclasses.replace(
  GSPO, clip_low=0.1, clip_high=0.1, kl_coef=0.1, kl="k3", entropy_coef=0.01
)
PER_MICRO_BATCH = ("router/load_balance", "router/busiest_expert", "padding")
SGD = optax.sgd(1.0)
MODELS = dict(dense=SHALLOW, gemma=GEMMA, moe=MOE, shallow_moe=SHALLOW_MOE)
MODELS |= dict(hybrid=HYBRID, hybrid_moe=HYBRID_MOE)


def learner(model, **changes) -> passes.Learner:
  base = passes.Learner(model, REFERENCE, 1.0, microbatches=1, load_balance_coef=0.0)
  return dataclasses.replace(base, **changes)


# Programs that several tests need are compiled once.
rl_step = functools.cache(train_step.make_rl_step)
old_policy_pass = functools.cache(passes.make_old_policy)
score_pass = functools.cache(passes.make_score)


@functools.cache
def review_pass(learner, objective):
  return passes.make_review(learner, objective, old_policy_pass(learner, objective))


def update(model, microbatches=MICROBATCHES, **changes):
  """The program of an update with all terms of an objective."""
  objective = dataclasses.replace(ALL_TERMS, **changes)
  return rl_step(learner(model, microbatches=microbatches), objective, SGD)


def make_batch(model=SHALLOW, lengths=LENGTHS, seed=0) -> TrainBatch:
  rng = np.random.default_rng(seed)
  lengths, time_T = np.array(lengths), np.arange(T)
  real_BT = time_T[None] < lengths[:, None]
  mask_BT = (real_BT & (time_T >= PROMPT)[None]).astype(np.float32)

  def logp():
    return (rng.normal(-4.2, 0.1, (B, T)) * mask_BT).astype(np.float32)

  tokens_BT = np.where(real_BT, rng.integers(0, 64, (B, T)), 0).astype(np.int32)
  batch = TrainBatch(
    ModelInputs(tokens_BT, real_BT.astype(np.int32)),
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

  batch = batch.replace(old_experts_BTlk=route())
  return with_inputs(batch, sampler_experts_BTlk=route())


def with_inputs(batch: TrainBatch, **fields) -> TrainBatch:
  """Replaces model inputs of a batch."""
  return batch.replace(inputs=batch.inputs.replace(**fields))


def batch_of(rollout: Rollout) -> TrainBatch:
  """Random advantages; the sampler's log-probs are the old ones."""
  advantage_B = np.random.default_rng(0).normal(size=len(rollout.lengths))
  return train_batch(rollout, advantage_B, shared_prompts=False).replace(old_logp_BT=rollout.logp)


def updated(params, batch, options, objective=GSPO, tx=SGD):
  """State and metrics after one update of copied `params`."""
  state = new_state(jax.tree.map(jnp.copy, params), tx)
  state, metrics = rl_step(options, objective, tx)(state, batch)
  return state, scalars(metrics)


@contextlib.contextmanager
def placed(model, values, shape=None):
  """Initial parameters and a batch of `values`, on a mesh if there is a shape."""
  if shape is None:
    yield initial(model), values
    return
  mesh = sharding.make_mesh(MeshConfig(*shape), jax.devices()[: math.prod(shape)])
  with jax.set_mesh(mesh):
    shardings = transformer.shardings(model, sharding.TRAIN, mesh)
    yield jax.device_put(initial(model), shardings), sharding.put_batch(values, mesh)


def after(step, model, batch, shape=None):
  """Parameters and metrics after one update, on a mesh if there is a shape of it."""
  with placed(model, batch, shape) as (params, batch):
    state, metrics = step(new_state(params, SGD), batch)
    return jax.device_get(state.params), scalars(metrics)


def old_policy(learner, batch, shape=None):
  """Trainer's pass of the old policy, on a mesh if there is a shape of it."""
  with placed(learner.model, batch.inputs, shape) as (params, inputs):
    return jax.device_get(old_policy_pass(learner, ALL_TERMS)(params, inputs))


def scalars(*metrics):
  return compute(summarize(metrics))


def assert_same_update(actual, expected, apart=()):
  """Asserts that two ways lead to the same parameters and metrics, but for some of the latter."""
  (params, row), (expected_params, expected_row) = actual, expected
  atol = 3e-6 * max(5 / 3, expected_row["grad_norm"])
  chex.assert_trees_all_close(params, expected_params, rtol=2e-4, atol=atol)
  assert row.keys() == expected_row.keys()
  for metric, value in expected_row.items():
    if not any(name in metric for name in apart):
      assert row[metric] == pytest.approx(value, rel=1e-3, abs=1e-5), metric
  assert expected_row["grad_norm"] > 0.1 and 0 < expected_row["clip_fraction/sequence"] < 1
