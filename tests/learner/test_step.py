"""One update: off-policy for real, and the same however the batch is cut."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.sampling import sample
from support.small_models import (
  HYBRID_MOE,
  MOE,
  SMALLER_DENSE,
  SMALLER_MOE,
  forward,
  initial,
)
from support.small_updates import (
  GSPO,
  SGD,
  batch_of,
  learner,
  old_policy_pass,
  review_pass,
  rl_step,
  scalars,
  score_pass,
  updated,
  with_inputs,
)

from gspo_jax import objectives as O
from gspo_jax import sharding
from gspo_jax.learner import passes
from gspo_jax.learner import step as train_step
from gspo_jax.learner.state import new_state
from gspo_jax.models import transformer
from gspo_jax.models.experts import routing
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.model import REFERENCE

TX = optax.adamw(1e-2)


@functools.cache
def rollout_batch(model=MOE, prompts=4, group=4):
  """Real responses, with experts."""
  options = dict(group_size=group, max_new_tokens=6, stop_ids=tuple(range(16)))
  prompts = [[10 + i, 20 + i] for i in range(prompts)]
  return batch_of(sample(initial(model), model, prompts, record_routing=True, **options))


@pytest.mark.parametrize(
  "tx", [SGD, pytest.param(TX, marks=pytest.mark.long)], ids=["sgd", "adamw"]
)
def test_ratio_differs_from_one_after_the_first_update(tx):
  params = initial(MOE)
  objective, batch = with_old_policy(params, rollout_batch(), replay="none")
  step = rl_step(learner(MOE), objective, tx)
  state, first = step(new_state(params, tx), batch)
  state, second = step(state, batch)
  row = scalars(first, second)
  assert row["minibatch/0/ratio/deviation"] < 1e-6
  assert row["minibatch/0/clip_fraction/sequence"] == 0
  assert row["minibatch/1/ratio/deviation"] > 1e-3
  assert row["minibatch/1/clip_fraction/sequence"] > 0.2  # an update moves far beyond 4e-4
  assert row["mismatch/abs/max"] < 1e-4  # Metrics of the first, before any update.
  assert row["router/dropped_tokens"] == 0
  if tx is TX:  # The second update moves nothing: all responses with a gradient are clipped.
    assert int(state.step) == 1 and second["grad_norm"].compute() == 0


@pytest.mark.parametrize("name", ["gspo", pytest.param("grpo", marks=pytest.mark.long)])
def test_each_mini_batch_has_metrics_of_drift_and_clipping(name):
  """Against NumPy, from the log-probs of each mini-batch's own parameters."""
  params, batch = initial(SMALLER_DENSE), rollout_batch(SMALLER_DENSE)
  batch = batch.replace(old_logp_BT=score_pass(learner(SMALLER_DENSE))(params, batch.inputs))
  # Entropy moves the policy where all responses are clipped.
  ranges = dict(clip_low=3e-3, clip_high=4e-3, entropy_coef=0.1)
  objective = dataclasses.replace(GSPO, name=name, **ranges)
  step, state = rl_step(learner(SMALLER_DENSE), objective, TX), new_state(params, TX)
  actual, log_ratios = [], []
  for _ in range(3):
    logp_BT = score_pass(learner(SMALLER_DENSE))(state.params, batch.inputs)
    log_ratios.append(np.float64(logp_BT - batch.old_logp_BT))
    state, metrics = step(state, batch)
    actual.append(metrics)
  row, mask_BT = scalars(*actual), np.asarray(batch.mask_BT) > 0
  up_B1 = batch.advantage_B[:, None] > 0
  for i, log_BT in enumerate(log_ratios[1:], 1):
    log_BT = np.where(mask_BT, log_BT, 0)
    log_BX, live_BX = log_BT, mask_BT
    if name == "gspo":
      log_BX, live_BX = log_BT.sum(1, keepdims=True) / mask_BT.sum(1, keepdims=True), [[True]]
    live_BX = np.broadcast_to(live_BX, log_BX.shape)
    high_BT = np.broadcast_to(up_B1 & (np.exp(log_BX) > 1.004), mask_BT.shape)[mask_BT]
    low_BT = np.broadcast_to(~up_B1 & (np.exp(log_BX) < 0.997), mask_BT.shape)[mask_BT]
    expected = {
      "ratio/std": np.exp(log_BX[live_BX]).std(),
      "kl/k3": (np.expm1(log_BT) - log_BT)[mask_BT].mean(),
      "clip_fraction/token/high": high_BT.mean(),
      "clip_fraction/token/low": low_BT.mean(),
      "clip_fraction/token": (high_BT | low_BT).mean(),
    }
    for key, value in expected.items():
      assert row[f"minibatch/{i}/{key}"] == pytest.approx(value, rel=1e-3) and value > 0, key
  assert row["minibatch/0/kl/k3"] == pytest.approx(0, abs=1e-8)
  each = [row[f"minibatch/{i}/kl/k3"] for i in range(3)]
  assert row["kl/k3"] == pytest.approx(np.mean(each)) and each[1] != each[2]


def with_rounding(batch, noise=1e-2):
  """Batch with noise like another program's rounding in its old log-probs."""
  rng = np.random.default_rng(1)
  return batch.replace(old_logp_BT=batch.old_logp_BT + noise * rng.normal(size=(16, 1)))


@pytest.mark.parametrize(
  "model, replay",
  [
    pytest.param(SMALLER_DENSE, "none", id="dense"),
    *(pytest.param(SMALLER_MOE, r, id=r, marks=pytest.mark.long) for r in ("none", "R2", "R3")),
  ],
)
def test_in_the_first_mini_batch_the_ratio_is_exactly_one(model, replay):
  """Holds in spite of rounding in the pass, in bfloat16 micro-batches."""
  params, bfloat16 = initial(model), dataclasses.replace(REFERENCE, dtype="bfloat16")
  trainer = learner(model, microbatches=2, compute=bfloat16)
  objective, batch = dataclasses.replace(GSPO, replay=replay), rollout_batch(model)
  batch = with_rounding(
    batch.replace(**old_policy_pass(trainer, objective)(params, batch.inputs)._asdict())
  )
  rows = {}
  for first in (True, False):
    marked = batch.replace(first_B=np.full(16, first))
    rows[first] = row = updated(params, marked, trainer, objective)[1]
    assert row["mismatch/recomputed"] == pytest.approx(0.8e-2, rel=0.5)
    assert row["grad_norm"] > 0 and row["clip_range"] == pytest.approx(3e-4)
  assert rows[True]["ratio/deviation"] == 0 == rows[True]["clip_fraction/sequence"]
  assert rows[True]["ratio/min"] == 1 == rows[True]["ratio/max"]
  assert rows[False]["ratio/deviation"] > 4e-3 and rows[False]["clip_fraction/sequence"] > 0.1


def test_old_log_probs_of_the_sampler_are_unchanged():
  params, objective = initial(SMALLER_DENSE), dataclasses.replace(GSPO, old_logp="sampler")
  batch = with_rounding(rollout_batch(SMALLER_DENSE)).replace(first_B=np.full(16, True))
  _, row = updated(params, batch, learner(SMALLER_DENSE), objective)
  assert row["ratio/deviation"] > 5e-4 and "mismatch/recomputed" not in row


def test_mismatch_is_by_version_of_the_weights():
  objective = dataclasses.replace(GSPO, old_logp="behaviour")
  batch = rollout_batch(SMALLER_DENSE)
  own_BT = np.asarray(score_pass(learner(SMALLER_DENSE))(initial(SMALLER_DENSE), batch.inputs))
  mask_BT = np.asarray(batch.mask_BT)
  older_BT = mask_BT * (np.arange(len(mask_BT)) % 2)[:, None]
  said_BT = own_BT - 0.5 * older_BT - 0.001 * mask_BT
  batch = batch.with_fields(
    own_logp_BT=own_BT, sampler_logp_BT=said_BT, old_logp_BT=said_BT, current_BT=mask_BT - older_BT
  )
  step = rl_step(learner(SMALLER_DENSE), objective, SGD)
  state, first = step(new_state(initial(SMALLER_DENSE), SGD), batch)
  row = scalars(first, step(state, batch)[1])  # the second mini-batch meets other weights
  for name, distance in (("current", 1e-3), ("older", 0.501)):
    assert row[f"mismatch/{name}/abs/mean"] == pytest.approx(distance, rel=1e-2)
    assert row[f"mismatch/{name}/sequence/mean"] == pytest.approx(distance, rel=1e-2)
  assert row["mismatch/older/tokens"] == pytest.approx(older_BT.sum() / mask_BT.sum())
  assert row["mismatch/abs/mean"] == pytest.approx(1e-3, rel=1e-2)  # alarms look at this one
  ratio = row["minibatch/0/ratio/deviation"]  # is to what sampled
  live = (mask_BT > 0).any(1)
  log_s = (own_BT - said_BT).sum(1)[live] / mask_BT.sum(1)[live]
  assert ratio == pytest.approx(np.expm1(log_s).mean(), rel=1e-2)


def smaller_step(before, after, rate=1e-2):
  """Scales an update at rate 1 to this rate."""
  return jax.tree.map(lambda a, b: a + rate * (b - a), before, after)


@pytest.mark.long
def test_update_raises_responses_with_positive_advantage():
  params = initial(MOE)
  batch = rollout_batch()
  score = score_pass(learner(MOE))
  before = np.asarray(score(params, batch.inputs))
  state, _ = updated(params, batch, learner(MOE))
  after = smaller_step(params, state.params)
  change_B = (np.asarray(score(after, batch.inputs)) - before).sum(1)
  assert np.corrcoef(change_B, batch.advantage_B)[0, 1] > 0.3


@pytest.mark.parametrize("parts", [pytest.param(2, marks=pytest.mark.long), 4])
def test_micro_batches_change_nothing(parts):
  params = initial(SMALLER_DENSE)
  batch = rollout_batch(SMALLER_DENSE)
  # An empty row and ragged lengths: a mean of means would be off.
  mask = np.array(batch.mask_BT)
  mask[3] = 0
  # Of a policy that has moved: how round-off spreads over a response is anybody's guess.
  moved_BT = 0.01 * np.sin(np.arange(mask.size)).reshape(mask.shape)
  batch = batch.replace(mask_BT=mask, old_logp_BT=batch.old_logp_BT + moved_BT.astype(np.float32))
  (whole, row), (several, row_of_parts) = (
    updated(params, batch, learner(SMALLER_DENSE, microbatches=microbatches))
    for microbatches in (1, parts)
  )
  chex.assert_trees_all_close(whole.params, several.params, rtol=1e-4, atol=2e-6)
  for name, value in row.items():
    assert row_of_parts[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def kind(loss):
  """Interface of losses to the step. (Its arithmetic: test_objective.py.)"""
  return loss.to_reference, loss.by_token, "clip_high" in loss.options


KINDS = {kind(loss): name for name, loss in reversed(O.POLICY_LOSSES.items())}
# Of the kinds, sapo clips as little as spo, and test_turns.py updates by gspo_token.
SHORT = {*KINDS.values()} - {"sapo", "gspo_token"}
BY_NAME = [
  name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in O.POLICY_LOSSES
]


@pytest.mark.parametrize("name", BY_NAME)
def test_step_supports_every_loss(name):
  params = initial(SMALLER_DENSE)
  batch, loss = rollout_batch(SMALLER_DENSE), O.POLICY_LOSSES[name]
  batch = batch.replace(ref_logp_BT=batch.old_logp_BT)
  trainer = learner(SMALLER_DENSE, response_tokens=6)
  _, row = updated(params, batch, trainer, dataclasses.replace(GSPO, name=name), TX)
  assert np.isfinite(list(row.values())).all()
  assert row["grad_norm"] > 0 and row["entropy"] > 0
  assert {"spo/gain" if loss.to_reference else "ratio/mean", "kl/k3"} <= row.keys()
  clips = "clip_high" in loss.options
  assert ({"clip_fraction/token", "clip_fraction/sequence"} <= row.keys()) == clips
  assert {f"by_length/{key}/le_8" for key in ("clip_fraction", "log_ratio_std")} <= row.keys()


@pytest.mark.long
def test_gspo_and_gspo_token_give_equal_updates():
  params = initial(SMALLER_DENSE)
  batch = rollout_batch(SMALLER_DENSE)
  drift = 1e-3 * np.random.default_rng(1).normal(size=batch.mask_BT.shape).astype(np.float32)
  batch = batch.replace(old_logp_BT=batch.old_logp_BT + drift * batch.mask_BT)
  after = []
  for name in ("gspo", "gspo_token"):
    state, row = updated(
      params, batch, learner(SMALLER_DENSE), dataclasses.replace(GSPO, name=name)
    )
    after.append((state.params, {k: v for k, v in row.items() if "clip" in k}))
  chex.assert_trees_all_close(*after, rtol=1e-4, atol=1e-6)
  assert row["clip_fraction/sequence"] > 0


def test_kl_penalty_pulls_towards_the_reference():
  params = initial(SMALLER_DENSE)
  batch = rollout_batch(SMALLER_DENSE)
  batch = batch.replace(advantage_B=0 * batch.advantage_B, ref_logp_BT=batch.old_logp_BT + 0.5)
  objective = dataclasses.replace(GSPO, kl_coef=1.0, kl="k2")
  state, row = updated(params, batch, learner(SMALLER_DENSE), objective)
  assert row["loss"] == pytest.approx(0.125, rel=1e-3)  # ½ · 0.5²
  after, before = (
    np.abs(
      (score_pass(learner(SMALLER_DENSE))(p, batch.inputs) - batch.ref_logp_BT) * batch.mask_BT
    ).sum()
    for p in (smaller_step(params, state.params), params)
  )
  assert after < before


@pytest.mark.parametrize("model, shape", [
  (SMALLER_DENSE, (1, 2, 2, 2)),
  pytest.param(MOE, (2, 2, 2, 1), marks=pytest.mark.long),
  pytest.param(MOE, (1, 2, 2, 2), marks=pytest.mark.long),
  pytest.param(HYBRID_MOE, (2, 1, 2, 2), marks=pytest.mark.long),
])  # fmt: skip
def test_sharded_update_equals_that_of_one_device(model, shape):
  params = initial(model)
  batch = rollout_batch(model)
  expected, row = updated(params, batch, learner(model), tx=TX)
  mesh = sharding.make_mesh(MeshConfig(*shape))
  with jax.set_mesh(mesh):
    sharded = jax.device_put(params, transformer.shardings(model, sharding.TRAIN, mesh))
    state = new_state(sharded, TX)
    types = jax.tree.map(jax.typeof, state)
    step = rl_step(learner(model, microbatches=2), GSPO, TX)
    state, metrics = step(state, sharding.put_batch(batch, mesh))
    chex.assert_trees_all_equal(jax.tree.map(jax.typeof, state), types)
    got = scalars(metrics)
  # Adam divides by the gradient's own size: round-off in tiny gradients becomes visible.
  chex.assert_trees_all_close(jax.device_get(state.params), expected.params, atol=2e-3)
  for name, value in row.items():
    if name not in ("router/load_balance", "router/busiest_expert"):  # per micro-batch
      assert got[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def drifted(params, seed=5):
  return jax.tree.map(lambda a, b: a + 0.2 * b, params, transformer.init(MOE, jax.random.key(seed)))


def with_old_policy(params, batch, **changes):
  objective = dataclasses.replace(GSPO, **changes)
  fields = old_policy_pass(learner(MOE), objective)(params, batch.inputs)
  return objective, batch.replace(**fields._asdict())


def first_metrics(params, batch, objective, **changes):
  """Metrics of a mini-batch under `params`, without the update."""
  return updated(params, batch, learner(MOE, **changes), objective)[1]


@pytest.mark.parametrize("replay", [pytest.param("R2", marks=pytest.mark.long), "R3"])
def test_ratio_under_replay_is_of_the_replayed_network(replay):
  params = initial(MOE)
  batch = rollout_batch()
  if replay == "R3":  # a sampler that disagrees: the trainer follows it all the same
    experts = np.asarray(batch.inputs.sampler_experts_BTlk)
    batch = with_inputs(batch, sampler_experts_BTlk=np.where(experts >= 0, (experts + 1) % 8, -1))
  objective, batch = with_old_policy(params, batch, replay=replay)
  before = first_metrics(params, batch, objective)
  assert before["minibatch/0/ratio/deviation"] < 1e-6

  moved = drifted(params)
  routes = batch.old_experts_BTlk if replay == "R2" else batch.inputs.sampler_experts_BTlk
  out = forward(moved, MOE, batch.inputs.tokens_BT, routing=routing.by_layer(jnp.asarray(routes)))
  logits_BTV = transformer.head_logits(moved, MOE, out.hidden_BTD)[:, :-1]
  target = jnp.asarray(batch.inputs.tokens_BT)[:, 1:, None]
  logp_BT = jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), target, -1)[..., 0]
  mask_BT = batch.mask_BT[:, 1:]
  ratio_B = jnp.exp(((logp_BT - batch.old_logp_BT[:, 1:]) * mask_BT).sum(1) / mask_BT.sum(1))
  row = first_metrics(moved, batch, objective)
  assert row["ratio/mean"] == pytest.approx(float(ratio_B.mean()), rel=1e-4)
  assert row["ratio/max"] == pytest.approx(float(ratio_B.max()), rel=1e-4)
  batch = batch.replace(old_experts_BTlk=routes)
  plain = first_metrics(moved, batch, dataclasses.replace(objective, replay="none"))
  assert abs(plain["ratio/max"] - row["ratio/max"]) > 1e-3


@pytest.mark.long
def test_replay_with_equal_weights_changes_nothing():
  params = initial(MOE)
  after = {}
  for replay in ("none", "R2", "R3"):
    objective, batch = with_old_policy(params, rollout_batch(), replay=replay)
    state, row = updated(params, batch, learner(MOE), objective)
    after[replay] = (state.params, row)
  for replay in ("R2", "R3"):
    chex.assert_trees_all_close(after[replay][0], after["none"][0], atol=1e-6)
    assert after[replay][1] == pytest.approx(after["none"][1], rel=1e-4, abs=1e-5)
  moved = jnp.abs(after["R3"][0].blocks[0].ffn.router - params.blocks[0].ffn.router)
  assert (moved.max((1, 2)) > 1e-5).all(), "the router learns under replay"


@pytest.mark.long
def test_volatility_starts_at_0_and_measures_the_update():
  params = initial(MOE)
  objective, batch = with_old_policy(params, rollout_batch())
  real_BT = jnp.asarray(batch.inputs.segments_BT)

  def experts(params):
    return forward(params, MOE, batch.inputs.tokens_BT).routing_lBTk

  step = rl_step(learner(MOE), objective, TX)
  state = new_state(jax.tree.map(jnp.copy, params), TX)
  state, first = step(state, batch)
  expected_l = routing.volatility(experts(state.params), experts(params), real_BT)
  _, second = step(state, batch)
  row = scalars(first, second)
  assert row["minibatch/0/router/volatility/mean"] == 0 == row["router/volatility/sampler"]
  assert row["minibatch/1/router/volatility/mean"] == pytest.approx(float(expected_l.mean()))
  assert row["minibatch/1/router/volatility/max_layer"] == pytest.approx(float(expected_l.max()))
  assert row["router/volatility/mean"] == pytest.approx(float(expected_l.mean()) / 2)
  for i, expected in enumerate(expected_l):
    assert row[f"minibatch/1/router/volatility/layer_{i:02d}"] == pytest.approx(float(expected))
    assert row[f"router/volatility/layer_{i:02d}"] == pytest.approx(float(expected) / 2)
  assert 0.02 < expected_l.mean() < expected_l.max() < 1


def test_volatility_under_replay_is_of_the_routers_own_choice():
  params = initial(MOE)
  objective, batch = with_old_policy(params, rollout_batch(), replay="none")
  old = routing.by_layer(batch.old_experts_BTlk)
  batch = with_inputs(batch, sampler_experts_BTlk=np.asarray(batch.old_experts_BTlk))
  batch = batch.replace(old_experts_BTlk=None)
  objective = dataclasses.replace(objective, replay="R3")
  moved, tokens = drifted(params), jnp.asarray(batch.inputs.tokens_BT)
  free_above = old.at[1:].set(-1)  # layer 1 chooses for itself above a replayed layer 0
  choice = [
    forward(moved, MOE, tokens, routing=r).routing_lBTk[layer]
    for layer, r in enumerate((None, free_above))
  ]
  expected_l = routing.volatility(jnp.stack(choice), old)
  row = first_metrics(moved, batch, objective)
  assert row["router/volatility/mean"] == pytest.approx(float(expected_l.mean()))
  assert row["router/volatility/max_layer"] == pytest.approx(float(expected_l.max()))
  layers = [row[f"router/volatility/layer_{i:02d}"] for i in range(MOE.num_layers)]
  np.testing.assert_allclose(layers, expected_l, rtol=1e-6)
  assert expected_l.mean() > 0.05


@pytest.mark.parametrize("replay", ["none", "R3"])
def test_experts_of_sampler_and_trainer_are_compared(replay):
  params = initial(MOE)
  batch = rollout_batch()
  routes = np.array(batch.inputs.sampler_experts_BTlk)
  routes[:, :, 0] = np.where(routes[:, :, 0] >= 0, 7 - routes[:, :, 0], -1)  # another first layer
  fed = routes[:, :, 0, 0] >= 0
  trainers = np.asarray(forward(params, MOE, batch.inputs.tokens_BT).routing_lBTk)[0]
  expected = float(routing.volatility(trainers[None], routes[None, :, :, 0], fed)[0]) / 2
  objective, batch = with_old_policy(
    params, with_inputs(batch, sampler_experts_BTlk=routes), replay=replay
  )
  row = first_metrics(params, batch, objective)
  at_least = expected if replay != "R3" else 0.9 * expected  # the layer above sees another input
  assert at_least <= row["router/volatility/sampler"] + 1e-6
  assert replay == "R3" or row["router/volatility/sampler"] == pytest.approx(expected, abs=1e-6)
  assert expected > 0.2


def test_volatility_needs_recorded_experts():
  params = initial(MOE)
  batch = with_inputs(rollout_batch(), sampler_experts_BTlk=None)
  objective, batch = with_old_policy(params, batch, volatility=False)
  assert batch.old_experts_BTlk is None
  step = rl_step(learner(MOE), objective, SGD)
  _, metrics = jax.eval_shape(step, new_state(params, SGD), batch)
  assert "ratio/mean" in metrics and not [name for name in metrics if "volatility" in name]
  for replay in ("R2", "R3"):
    missing = f"objective.replay='{replay}'.*the batch has no .*experts"
    with pytest.raises(ValueError, match=missing):
      first_metrics(params, batch, dataclasses.replace(objective, replay=replay))


@pytest.mark.parametrize("replay", ["none", "R3"])
@pytest.mark.long
def test_volatility_is_equal_over_micro_batches_and_meshes(replay):
  params = initial(MOE)
  sampled = rollout_batch()
  objective, batch = with_old_policy(params, sampled, replay=replay)
  moved = drifted(params)
  expected = first_metrics(moved, batch, objective)
  rows = [first_metrics(moved, batch, objective, microbatches=4)]
  mesh = sharding.make_mesh(MeshConfig(1, 2, 2, 2))
  with jax.set_mesh(mesh):
    shardings = transformer.shardings(MOE, sharding.TRAIN, mesh)
    on_mesh = sharding.put_batch(sampled, mesh)
    _, on_mesh = with_old_policy(jax.device_put(params, shardings), on_mesh, replay=replay)
    rows.append(first_metrics(jax.device_put(moved, shardings), on_mesh, objective))
  for row in rows:
    for name in ("mean", "max_layer", "layer_00", "layer_01", "sampler"):
      name = f"router/volatility/{name}"
      assert row[name] == pytest.approx(expected[name], abs=1e-5) and expected[name] > 0
    assert row["ratio/mean"] == pytest.approx(expected["ratio/mean"], rel=1e-4)


OTHERS = (pytest.param(name, marks=pytest.mark.long) for name in ("grpo", "cispo", "gmpo"))


@pytest.mark.parametrize("name", ["gspo", *OTHERS])
def test_review_gives_the_clipped_tokens_of_the_loss(name):
  objective = dataclasses.replace(GSPO, name=name, clip_high=0.01)
  batch, moved = (
    rollout_batch(SMALLER_DENSE),
    jax.tree.map(lambda x: 1.01 * x, initial(SMALLER_DENSE)),
  )
  actual = jax.device_get(review_pass(learner(SMALLER_DENSE), objective)(moved, batch))
  logp_BT = score_pass(learner(SMALLER_DENSE))(moved, batch.inputs)
  mask_BT = batch.mask_BT > 0
  log_ratio_BT = (logp_BT - batch.old_logp_BT)[mask_BT]
  np.testing.assert_allclose(actual["log_ratio_BT"][mask_BT], log_ratio_BT, atol=1e-6)
  loss = O.POLICY_LOSSES[name]
  args = logp_BT, batch.old_logp_BT, batch.advantage_B, batch.mask_BT
  np.testing.assert_array_equal(actual["clipped_BT"], loss.clipped(*args, clip_high=0.01))
  _, row = updated(moved, batch, learner(SMALLER_DENSE), objective)
  share = actual["clipped_BT"].sum() / mask_BT.sum()
  assert row["clip_fraction/token"] == pytest.approx(share) and 0 < share < 1


def test_review_is_of_the_replayed_network():
  params = initial(MOE)
  objective, batch = with_old_policy(params, rollout_batch(), replay="R2")
  actual = review_pass(learner(MOE), objective)(params, batch)
  mask_BT = batch.mask_BT > 0
  assert not actual["log_ratio_BT"][mask_BT].any()
  moved = drifted(params)
  free = dataclasses.replace(objective, replay="none")
  pair = [review_pass(learner(MOE), o)(moved, batch)["log_ratio_BT"] for o in (objective, free)]
  assert np.abs(np.asarray(pair[0] - pair[1])[mask_BT]).max() > 1e-3


def test_review_reuses_the_compiled_pass_for_batches_with_more_fields():
  """Batches may have fields of later passes, such as values."""
  jax.clear_caches()  # A full cache counts nothing.
  trainer = learner(SMALLER_DENSE)
  find, batch = passes.make_old_policy(trainer, GSPO), rollout_batch(SMALLER_DENSE)
  find(initial(SMALLER_DENSE), batch.inputs)
  review = passes.make_review(trainer, GSPO, find)
  for fields in {}, dict(old_value_BT=batch.old_logp_BT, return_BT=batch.old_logp_BT):
    review(initial(SMALLER_DENSE), batch.with_fields(**fields))
  assert find._cache_size() == 1


@pytest.mark.parametrize(
  "shape, microbatches",
  [((1, 1, 8, 1), 1), ((1, 2, 2, 2), 2)],
  ids=str,
)
@pytest.mark.long
def test_state_keeps_the_declared_shardings(shape, microbatches):
  mesh = sharding.make_mesh(MeshConfig(*shape))
  with jax.set_mesh(mesh):
    shardings = transformer.shardings(MOE, sharding.TRAIN, mesh)
    specs = [declared.spec for declared in jax.tree.leaves(shardings)]
    params = jax.device_put(initial(MOE), shardings)
    batch = sharding.put_batch(rollout_batch(), mesh)
    state = new_state(params, TX)
    step = rl_step(learner(MOE, microbatches=microbatches), GSPO, TX)
    for _ in range(2):
      adam = state.opt_state[0]
      for tree in (state.params, adam.mu, adam.nu):
        types = jax.tree.leaves(jax.tree.map(jax.typeof, tree))
        for got, expected_spec in zip(types, specs, strict=True):
          assert _without_ones(got.sharding.spec, mesh) == _without_ones(expected_spec, mesh)
      state, _ = step(state, batch)


def _without_ones(spec, mesh):
  """An axis of one device splits nothing."""
  axes = [axis if axis and mesh.shape[axis] > 1 else None for axis in spec]
  return axes[: max((i + 1 for i, axis in enumerate(axes) if axis), default=0)]


@pytest.mark.long
def test_step_compiles_once():
  jax.clear_caches()  # A full cache counts nothing.
  params = initial(SMALLER_DENSE)
  batch = rollout_batch(SMALLER_DENSE)
  step = train_step.make_rl_step(learner(SMALLER_DENSE), GSPO, TX)
  state, _ = step(new_state(params, TX), batch)
  for _ in range(2):
    state, _ = step(state, batch)
  assert step.function._cache_size() == 1
