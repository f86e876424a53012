"""One update: off-policy for real, and the same however the batch is cut."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gspo_jax import sharding, train_step
from gspo_jax.context import new_state
from gspo_jax.models import transformer
from gspo_jax.models.sizes import REFERENCE, tiny_dense, tiny_moe
from gspo_jax.sampling import generate
from gspo_jax.structs import TrainBatch

SMALL = dict(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16)
MODEL = dataclasses.replace(tiny_moe(64), moe_intermediate_size=16, **SMALL)
DENSE = dataclasses.replace(tiny_dense(64), intermediate_size=48, **SMALL)
GSPO = train_step.ObjectiveConfig(
  name="gspo",
  clip_low=3e-4,
  clip_high=4e-4,
  dual_clip=0.0,
  max_length=6,
  advantage="std",
  old_logp="recompute",
  kl_coef=0.0,
  kl="k3",
  entropy_coef=0.0,
  load_balance_coef=0.0,
)
TX = optax.adamw(1e-2)


def learner(model=MODEL, **changes):
  base = train_step.Learner(model, REFERENCE, 1.0, microbatches=1, load_balance_coef=0.0)
  return dataclasses.replace(base, **changes)


def rollout_batch(params, model=MODEL, prompts=4, group=4):
  """Real responses with random advantages; the sampler's log-probs are the old ones."""
  out = generate(
    params,
    model,
    [[10 + i, 20 + i] for i in range(prompts)],
    group_size=group,
    max_new_tokens=6,
    stop_ids=tuple(range(16)),
  )
  ends = out.prompt_lengths + out.lengths
  advantage = np.random.default_rng(0).normal(size=len(out.lengths)).astype(np.float32)
  return TrainBatch(
    tokens_BT=out.tokens,
    segments_BT=(np.arange(out.tokens.shape[1])[None] < ends[:, None]).astype(np.int32),
    mask_BT=out.mask,
    advantage_B=advantage,
    old_logp_BT=out.logp,
    sampler_logp_BT=out.logp,
  )


def scalars(metrics):
  return {k: float(v) for k, v in train_step.summarize((metrics,)).items()}


def test_the_ratio_leaves_one_after_the_first_update():
  params = transformer.init(MODEL, jax.random.key(0))
  batch = rollout_batch(params)
  old = train_step.make_score(learner())(params, batch)
  batch = batch.replace(old_logp_BT=old)
  step = train_step.make_rl_step(learner(), GSPO, TX)
  state, first = step(new_state(params, TX), batch)
  state, second = step(state, batch)
  row = {k: float(v) for k, v in train_step.summarize((first, second)).items()}
  assert row["minibatch/0/ratio/deviation"] < 1e-6
  assert row["minibatch/0/clip_fraction/sequence"] == 0
  assert row["minibatch/1/ratio/deviation"] > 1e-3
  assert row["minibatch/1/clip_fraction/sequence"] > 0.2  # an update moves far beyond 4e-4
  assert row["mismatch/abs/max"] < 1e-4  # of the first, before any update
  assert row["router/dropped_tokens"] == 0
  assert int(state.step) == 2


def test_the_update_raises_what_had_a_positive_advantage():
  params = transformer.init(MODEL, jax.random.key(0))
  batch = rollout_batch(params)
  score = train_step.make_score(learner())
  before = np.asarray(score(params, batch))
  state, _ = train_step.make_rl_step(learner(), GSPO, optax.sgd(1e-2))(
    new_state(jax.tree.map(jnp.copy, params), optax.sgd(1e-2)), batch
  )
  change_B = (np.asarray(score(state.params, batch)) - before).sum(1)
  assert np.corrcoef(change_B, batch.advantage_B)[0, 1] > 0.3


@pytest.mark.parametrize("parts", [2, 4])
def test_micro_batches_change_nothing(parts):
  params = transformer.init(DENSE, jax.random.key(0))
  batch = rollout_batch(params, DENSE)
  # An empty row and ragged lengths: a mean of means would be off.
  mask = np.array(batch.mask_BT)
  mask[3] = 0
  batch = batch.replace(mask_BT=mask)
  states, rows = [], []
  for microbatches in (1, parts):
    step = train_step.make_rl_step(learner(DENSE, microbatches=microbatches), GSPO, optax.sgd(1.0))
    start = new_state(jax.tree.map(jnp.copy, params), optax.sgd(1.0))
    state, metrics = step(start, batch)
    states.append(state.params)
    rows.append(scalars(metrics))
  chex.assert_trees_all_close(*states, rtol=1e-4, atol=2e-6)
  for name, value in rows[0].items():
    assert rows[1][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("name", train_step.OBJECTIVES)
def test_every_objective_by_name(name):
  params = transformer.init(DENSE, jax.random.key(0))
  batch = rollout_batch(params, DENSE)
  ranges = dict(clip_low=0.2, clip_high=0.28)
  objective = dataclasses.replace(GSPO, name=name, **ranges)
  step = train_step.make_rl_step(learner(DENSE), objective, TX)
  _, metrics = step(new_state(params, TX), batch)
  row = scalars(metrics)
  assert np.isfinite(list(row.values())).all()
  assert row["grad_norm"] > 0 and row["entropy"] > 0
  assert {"clip_fraction/token", "clip_fraction/sequence", "ratio/mean", "kl/k3"} <= row.keys()


def test_gspo_and_gspo_token_make_the_same_update():
  params = transformer.init(DENSE, jax.random.key(0))
  batch = rollout_batch(params, DENSE)
  drift = 1e-3 * np.random.default_rng(1).normal(size=batch.mask_BT.shape).astype(np.float32)
  batch = batch.replace(old_logp_BT=batch.old_logp_BT + drift * batch.mask_BT)
  after = []
  for name in ("gspo", "gspo_token"):
    step = train_step.make_rl_step(
      learner(DENSE), dataclasses.replace(GSPO, name=name), optax.sgd(1.0)
    )
    state, metrics = step(new_state(jax.tree.map(jnp.copy, params), optax.sgd(1.0)), batch)
    after.append((state.params, {k: v for k, v in scalars(metrics).items() if "clip" in k}))
  chex.assert_trees_all_close(*after, rtol=1e-4, atol=1e-6)
  assert after[0][1]["clip_fraction/sequence"] > 0


def test_the_kl_penalty_pulls_back_to_the_reference():
  params = transformer.init(DENSE, jax.random.key(0))
  batch = rollout_batch(params, DENSE)
  batch = batch.replace(advantage_B=0 * batch.advantage_B, ref_logp_BT=batch.old_logp_BT + 0.5)
  objective = dataclasses.replace(GSPO, kl_coef=1.0, kl="k2")
  step = train_step.make_rl_step(learner(DENSE), objective, optax.sgd(1e-2))
  state, metrics = step(new_state(jax.tree.map(jnp.copy, params), optax.sgd(1e-2)), batch)
  row = scalars(metrics)
  assert row["loss"] == pytest.approx(0.125, rel=1e-3)  # ½ · 0.5²
  score = train_step.make_score(learner(DENSE))
  gap = lambda p: np.abs((score(p, batch) - batch.ref_logp_BT) * batch.mask_BT).sum()  # noqa: E731
  assert gap(state.params) < gap(params)


@pytest.mark.parametrize("shape", [(2, 2, 2, 1), (1, 2, 2, 2)], ids=str)
def test_a_sharded_update_is_the_update_of_one_device(shape):
  params = transformer.init(MODEL, jax.random.key(0))
  batch = rollout_batch(params)
  expected, row = train_step.make_rl_step(learner(), GSPO, TX)(
    new_state(jax.tree.map(jnp.copy, params), TX), batch
  )
  mesh = sharding.make_mesh(sharding.MeshConfig(*shape))
  with jax.set_mesh(mesh):
    sharded = jax.device_put(params, transformer.shardings(MODEL, sharding.TRAIN, mesh))
    state = new_state(sharded, TX)
    types = jax.tree.map(jax.typeof, state)
    step = train_step.make_rl_step(learner(microbatches=2), GSPO, TX)
    state, metrics = step(state, sharding.put_batch(batch, mesh))
    chex.assert_trees_all_equal(jax.tree.map(jax.typeof, state), types)
    got = scalars(metrics)
  # Adam divides by the gradient's own size: round-off in tiny gradients becomes visible.
  chex.assert_trees_all_close(jax.device_get(state.params), expected.params, atol=2e-3)
  for name, value in scalars(row).items():
    if name not in ("router/load_balance", "router/busiest_expert"):  # per micro-batch
      assert got[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_compiles_once():
  params = transformer.init(DENSE, jax.random.key(0))
  batch = rollout_batch(params, DENSE)
  step = train_step.make_rl_step(learner(DENSE), GSPO, TX)
  state, _ = step(new_state(params, TX), batch)
  for _ in range(2):
    state, _ = step(state, batch)
  assert step._cache_size() == 1


@pytest.mark.parametrize(
  "key, value", [("name", "gsp"), ("kl", "k4"), ("old_logp", "none"), ("clip_low", -0.1)]
)
def test_bad_objective_settings_are_named(key, value):
  with pytest.raises(ValueError, match=f"objective.{key}="):
    dataclasses.replace(GSPO, **{key: value})
