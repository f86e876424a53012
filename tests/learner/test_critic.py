"""A critic: values before the updates, advantages from them, and its own part of an update."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import objectives_reference as paper
from support.configs import config_of
from support.small_models import SMALLER_DENSE, forward, initial
from support.small_updates import GSPO, B, T, learner, make_batch, scalars, with_inputs

from configs import common, tiny_ppo
from gspo_jax import objectives as O
from gspo_jax import sharding
from gspo_jax.learner import optimizer, packing
from gspo_jax.learner.advantages import critic_advantages
from gspo_jax.learner.batch import at_the_end
from gspo_jax.learner.critic import Critic, make_values, new_critic
from gspo_jax.learner.objective import configured_loss
from gspo_jax.learner.passes import log_probs
from gspo_jax.learner.state import abstract_state, new_state, with_critic
from gspo_jax.learner.step import make_rl_step
from gspo_jax.models import transformer
from gspo_jax.models.head import values as head_values
from gspo_jax.runs.checkpoint import restore_state, save_state
from gspo_jax.settings.critic import CriticConfig
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.training import OptimizerConfig
from gspo_jax.structs import AdvantageInputs

MODEL = SMALLER_DENSE
HEAD = CriticConfig(**(common.base().critic.to_dict() | dict(name="head", trunk_coef=0.5)))
OWN = dataclasses.replace(HEAD, name="model")
PPO = dataclasses.replace(GSPO, name="ppo_clip", old_logp="sampler", volatility=False)
PPO = dataclasses.replace(PPO, clip_low=0.2, clip_high=0.2)
RATES = common.optimizer(learning_rate=3e-3).to_dict() | dict(warmup_steps=0)
TX = optimizer.make(OptimizerConfig(**RATES), 9)
MESH = MeshConfig(1, 1, 1, 1)


def critic_of(config, updates=1, learning_rate=3e-3):
  tx = optimizer.make(OptimizerConfig(**RATES | dict(learning_rate=learning_rate)), 9)
  return Critic(config, tx, config.hyperparameters(updates))


def critic_on(mesh, config, seed=0):
  """Policy and critic with a nonzero head, on a mesh."""
  policy_shardings = transformer.shardings(MODEL, sharding.TRAIN, mesh)
  policy = jax.device_put(initial(MODEL), policy_shardings)

  def other_weights():
    return jax.device_put(initial(MODEL, seed=5), policy_shardings)

  critic = new_critic(config, MODEL, mesh, seed, other_weights)
  weight_D = np.random.default_rng(3).normal(size=MODEL.hidden_size).astype(np.float32)
  weight_D = jax.device_put(0.3 * weight_D, critic.weight.sharding)
  return policy, critic.replace(weight=weight_D, bias=critic.bias + 0.25)


@functools.cache
def batch():
  rng = np.random.default_rng(0)
  plain = make_batch()
  plain = with_inputs(plain, tokens_BT=plain.inputs.tokens_BT % MODEL.vocab_size)
  reward_BT = at_the_end(rng.integers(0, 2, B).astype(np.float32), plain.mask_BT)
  noise = {
    name: (rng.normal(0.5, 0.3, (B, T)) * plain.mask_BT).astype(np.float32)
    for name in ("advantage_BT", "old_value_BT", "return_BT")
  }
  return plain.with_fields(reward_BT=reward_BT, **noise)


def updated(config, shape=(1, 1, 1, 1), microbatches=1, packed=False, updates=1, **numbers):
  """Host states before and after updates on one batch, with metrics."""
  mesh = sharding.make_mesh(MeshConfig(*shape), jax.devices()[: np.prod(shape)])
  critic = critic_of(config, **numbers)
  step = make_rl_step(learner(MODEL, microbatches=microbatches), PPO, TX, critic)
  minibatch = batch().with_fields(reward_BT=None)
  with jax.set_mesh(mesh):
    policy, params = critic_on(mesh, config)
    state = with_critic(new_state(policy, TX), params, critic.tx)
    start, rows = jax.device_get(state), []
    shards = sharding.batch_shards(mesh)
    minibatch = sharding.put_batch(packing.plan(minibatch, shards) if packed else minibatch, mesh)
    for _ in range(updates):
      state, metrics = step(state, minibatch)
      rows.append(scalars(metrics))
    return start, jax.device_get(state), rows


def difference(first, second):
  leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
  return max(abs(np.asarray(x) - y).max() for x, y in leaves)


def test_values_depend_on_earlier_tokens_alone():
  mesh = sharding.make_mesh(MESH, jax.devices()[:1])
  for config in (HEAD, OWN):
    with jax.set_mesh(mesh):
      policy, critic = critic_on(mesh, config)
      find = make_values(learner(MODEL), config, "none")
      minibatch = batch()
      found_BT = np.asarray(find(policy, critic, sharding.put_batch(minibatch.inputs, mesh)))
      changed = with_inputs(
        minibatch, tokens_BT=np.where(np.arange(T) == 4, 7, minibatch.inputs.tokens_BT)
      )
      moved_BT = np.asarray(find(policy, critic, sharding.put_batch(changed.inputs, mesh)))
    trunk = jax.device_get(policy if config is HEAD else critic.trunk)
    hidden_BTD = forward(trunk, MODEL, jnp.asarray(minibatch.inputs.tokens_BT)).hidden_BTD
    expected_BT = np.asarray(head_values(jax.device_get(critic), hidden_BTD))
    real_BT = np.asarray(minibatch.inputs.segments_BT[:, 1:]) > 0
    np.testing.assert_allclose(found_BT[:, 1:][real_BT], expected_BT[:, :-1][real_BT], atol=1e-5)
    np.testing.assert_array_equal(found_BT[:, :5], moved_BT[:, :5])
    assert (found_BT != moved_BT)[1, 5:20].all()  # a row of 20 tokens


def test_last_value_reads_all_tokens_with_shared_prompts_too():
  """Covers truncated responses at the end of rows, packed too."""
  mesh, config = (
    sharding.make_mesh(MESH, jax.devices()[:1]),
    dataclasses.replace(HEAD, bootstrap=True),
  )
  minibatch = make_batch(lengths=(T, T, 7, 3) * 4)
  tokens_BT = minibatch.inputs.tokens_BT % MODEL.vocab_size
  tokens_BT[:, :2] = 5
  minibatch = with_inputs(minibatch, tokens_BT=tokens_BT, prompt_B=np.full(B, 2, np.int32))
  packed = packing.plan(with_inputs(minibatch, prompt_B=None), 1)
  with jax.set_mesh(mesh):
    policy, critic = critic_on(mesh, config)
    settings = learner(MODEL, group_size=4, response_tokens=T - 2)
    find = make_values(settings, config, "none")
    value_BT, last_B = find(policy, critic, sharding.put_batch(minibatch.inputs, mesh))
    packed_values = find(policy, critic, sharding.put_batch(packed.inputs, mesh))
    plain = make_values(settings, HEAD, "none")
    shared_BT = plain(policy, critic, sharding.put_batch(minibatch.inputs, mesh))
  hidden_BTD = forward(jax.device_get(policy), MODEL, jnp.asarray(tokens_BT)).hidden_BTD
  expected_BT = np.asarray(head_values(jax.device_get(critic), hidden_BTD))
  last_place_B = minibatch.inputs.segments_BT.sum(1) - 1
  np.testing.assert_allclose(last_B, expected_BT[np.arange(B), last_place_B], atol=1e-5)
  np.testing.assert_allclose(
    packing.in_order(np.asarray(packed_values[1]), packed.order_B), last_B, atol=1e-5
  )
  live = minibatch.mask_BT > 0
  np.testing.assert_allclose(np.asarray(value_BT)[live], np.asarray(shared_BT)[live], atol=1e-5)


@pytest.mark.long
def test_last_value_of_packed_rows_that_share_their_prompts():
  mesh, prompt = sharding.make_mesh(MESH, jax.devices()[:1]), T // 2
  config = dataclasses.replace(HEAD, bootstrap=True)
  minibatch = make_batch(lengths=(T, T, T - 3, prompt + 1) * 4)
  tokens_BT = minibatch.inputs.tokens_BT % MODEL.vocab_size
  tokens_BT[:, :prompt] = np.arange(4).repeat(4)[:, None] + 5
  minibatch = with_inputs(minibatch, tokens_BT=tokens_BT, prompt_B=np.full(B, prompt, np.int32))
  packed = packing.plan(minibatch, 1, 4, T - prompt)
  assert packed.inputs.places.trunk_B is not None
  with jax.set_mesh(mesh):
    policy, critic = critic_on(mesh, config)
    settings = learner(MODEL, group_size=4, response_tokens=T - prompt, microbatches=4)
    values = make_values(settings, config, "none")(
      policy, critic, sharding.put_batch(packed.inputs, mesh)
    )
  value_BT, last_B = (packing.in_order(np.asarray(x), packed.order_B) for x in values)
  hidden_BTD = forward(jax.device_get(policy), MODEL, jnp.asarray(tokens_BT)).hidden_BTD
  expected_BT = np.asarray(head_values(jax.device_get(critic), hidden_BTD))
  last_place_B = minibatch.inputs.segments_BT.sum(1) - 1
  np.testing.assert_allclose(last_B, expected_BT[np.arange(B), last_place_B], atol=1e-5)
  live_BT = minibatch.mask_BT[:, 1:] > 0
  np.testing.assert_allclose(value_BT[:, 1:][live_BT], expected_BT[:, :-1][live_BT], atol=1e-5)


def test_truncated_responses_are_bootstrapped_from_their_last_value():
  """Covers tokens and turns; finished responses ignore their last value."""
  config = dataclasses.replace(HEAD, discount=0.9, trace=0.8, normalize=False, bootstrap=True)
  rng = np.random.default_rng(0)
  cut_B, last_B = np.arange(B) % 2 > 0, rng.normal(size=B).astype(np.float32)
  turns_BT = np.broadcast_to(np.arange(T) // 5, (B, T)).astype(np.int32)
  mask = np.asarray(batch().mask_BT) > 0
  arrays = batch().advantage_inputs.reward_BT, batch().critic_targets.old_value_BT
  arrays = [np.float64(x) for x in arrays]
  worth_B = np.where(cut_B, np.float64(last_B), 0)
  for turn_BT, expected in (
    (None, paper.gae(*arrays, mask, 0.9, 0.8, worth_B)),
    (turns_BT, paper.turn_gae(*arrays, mask, turns_BT, 0.9, 0.8, worth_B)),
  ):
    minibatch = batch().with_fields(last_value_B=last_B, cut_off_B=cut_B, turn_BT=turn_BT)
    (result,), _ = critic_advantages(config, config.hyperparameters(1))([minibatch])
    for actual_BT, expected_BT in zip(
      (result.advantage_BT, result.critic_targets.return_BT), expected
    ):
      np.testing.assert_allclose(actual_BT, expected_BT, atol=1e-5)
    assert result.advantage_inputs == AdvantageInputs()


def test_values_equal_to_the_returns_of_turns_explain_all():
  config = dataclasses.replace(HEAD, discount=0.5, trace=1.0, kl_coef=0.0)
  turn_BT = np.broadcast_to(np.arange(T) // 5, (B, T)).astype(np.int32)
  reward_BT, mask = np.asarray(batch().advantage_inputs.reward_BT), np.asarray(batch().mask_BT)
  zeros_BT = np.zeros((B, T))
  return_BT, _ = paper.turn_gae(reward_BT, zeros_BT, mask > 0, turn_BT, 0.5, 1.0, zeros_BT[:, 0])
  minibatch = batch().with_fields(turn_BT=turn_BT, old_value_BT=np.float32(return_BT))
  _, row = critic_advantages(config, config.hyperparameters(1))([minibatch])
  assert row["value/explained_variance"] == pytest.approx(1, abs=1e-5)


def test_equal_advantages_are_0_after_normalization():
  """Their deviations from the mean are rounding, which Adam would scale up."""
  config = dataclasses.replace(HEAD, discount=1.0, trace=1.0, normalize=True)
  minibatch = batch()
  reward_BT = at_the_end(np.full(B, 0.1, np.float32), minibatch.mask_BT)
  fields = dict(reward_BT=reward_BT, old_value_BT=np.zeros_like(reward_BT))
  (result,), _ = critic_advantages(config, config.hyperparameters(1))(
    [minibatch.with_fields(**fields)]
  )
  assert not np.asarray(result.advantage_BT).any()


@pytest.mark.parametrize("normalize", [True, pytest.param(False, marks=pytest.mark.long)])
def test_advantages_equal_the_recursion(normalize):
  """Compares two ragged mini-batches with kl_coef, in float64."""
  config = dataclasses.replace(HEAD, discount=0.9, trace=0.8, kl_coef=0.3, normalize=normalize)
  shorter = make_batch(lengths=(7, 3, 20, 0, 5, 9, 2, 11, 6, 6, 8, 4, 19, 3, 5, 12), seed=4)
  second = with_inputs(batch(), segments_BT=shorter.inputs.segments_BT)
  second = second.replace(mask_BT=shorter.mask_BT)
  second = second.with_fields(reward_BT=at_the_end(np.linspace(-1, 2, B), shorter.mask_BT))
  dirty = []
  for clean in batch(), second:
    value_BT = np.where(clean.mask_BT > 0, clean.critic_targets.old_value_BT, np.nan)
    dirty.append(clean.with_fields(old_value_BT=value_BT))
  actual, row = critic_advantages(config, config.hyperparameters(1))(dirty)
  expected = []
  for minibatch in dirty:
    mask = np.asarray(minibatch.mask_BT)
    drift = np.where(mask > 0, np.float64(minibatch.old_logp_BT) - minibatch.ref_logp_BT, 0)
    reward, value = (
      np.float64(minibatch.advantage_inputs.reward_BT) - 0.3 * drift,
      np.nan_to_num(minibatch.critic_targets.old_value_BT),
    )
    outcome, _ = paper.gae(reward, np.zeros_like(reward), mask, 0.9, 1.0)
    expected.append((*paper.gae(reward, np.float64(value), mask, 0.9, 0.8), outcome, value, mask))
  advantage, returns, outcome, value, mask = (np.concatenate(x) for x in zip(*expected))
  inside = mask > 0
  mean, std = advantage[inside].mean(), advantage[inside].std()
  residual, whole = (outcome - value)[inside].var(), outcome[inside].var()
  assert row["value/explained_variance"] == pytest.approx(1 - residual / whole, rel=1e-4)
  assert row["advantage/mean"] == pytest.approx(mean, rel=1e-4)
  assert row["advantage/std"] == pytest.approx(std, rel=1e-4)
  if normalize:
    advantage = np.where(inside, (advantage - mean) / (std + 1e-6), 0)
  ours = np.concatenate([b.advantage_BT for b in actual])
  np.testing.assert_allclose(ours, advantage, atol=1e-5)
  ours = np.concatenate([b.critic_targets.return_BT for b in actual])
  np.testing.assert_allclose(ours, returns, atol=1e-5)
  assert actual[0].advantage_inputs.reward_BT is None


def test_explained_variance_is_precise_for_large_returns():
  """E[x²] − E[x]² in float32 would be mostly rounding."""
  rng, config = np.random.default_rng(0), dataclasses.replace(HEAD, discount=1.0, normalize=False)
  parts, pairs = [], []
  for _ in range(2):
    offset_B1 = 1000 + 0.1 * rng.normal(size=(B, 1))
    reward_BT = at_the_end(offset_B1[:, 0].astype(np.float32), batch().mask_BT)
    value_BT = (offset_B1 - 30 + 0.05 * rng.normal(size=(B, T))).astype(np.float32)
    parts.append(batch().with_fields(reward_BT=reward_BT, old_value_BT=value_BT))
    live = batch().mask_BT > 0
    pairs.append((np.broadcast_to(offset_B1, (B, T))[live], np.float64(value_BT)[live]))
  returns, values = (np.concatenate(x) for x in zip(*pairs))
  _, row = critic_advantages(config, config.hyperparameters(1))(parts)
  expected = 1 - np.var(returns - values) / np.var(returns)
  assert row["value/explained_variance"] == pytest.approx(expected, abs=0.01) and expected > 0.5


@pytest.mark.long
def test_explained_variance_is_relative_to_the_returns():
  returns = np.array([[1.0, 0.0, 5.0], [0.0, 1.0, np.nan]])
  mask = np.array([[1, 1, 0], [1, 1, 0]])

  def explained(value):
    return float(O.explained_variance(np.where(mask, value, np.inf), returns, mask))

  assert explained(returns) == 1 and explained(np.full((2, 3), 0.7)) == pytest.approx(0, abs=1e-6)
  assert explained(1 - returns) == pytest.approx(-3)
  half = [O.explained_variance.sums(0.5 * returns[i : i + 1], returns[i : i + 1], mask[i : i + 1])
          for i in range(2)]  # fmt: skip
  assert O.compute(O.merge(*half)) == pytest.approx(0.75)
  for constant in (1, 0.7, 0.9):  # rounding gives the last ones a variance; and no NaN
    same = np.full((8, 50), constant)
    assert float(O.explained_variance(same + np.eye(8, 50), same, np.ones((8, 50)))) == 0
  rounded = 1e-9 * np.sin(np.arange(400.0).reshape(8, 50))  # A penalty on equal policies.
  assert float(O.explained_variance(np.eye(8, 50), rounded, np.ones((8, 50)))) == 0


@pytest.mark.parametrize(
  "layout",
  [{}, pytest.param(dict(microbatches=4, packed=True), marks=pytest.mark.long)],
  ids=["plain", "packed"],
)
def test_trunk_has_the_gradient_of_both_losses(layout):
  """The policy's mean is over responses, the critic's over tokens."""
  mesh, minibatch = sharding.make_mesh(MESH, jax.devices()[:1]), batch().with_fields(reward_BT=None)
  with jax.set_mesh(mesh):
    minibatch = sharding.put_batch(minibatch, mesh)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def expected(trained):
      policy, critic = trained
      logp_BT, entropy_BT, out, _ = log_probs(policy, minibatch.inputs, learner(MODEL))
      half_BTD = (out.hidden_BTD + jax.lax.stop_gradient(out.hidden_BTD)) / 2
      value_BT = jnp.pad(head_values(critic, half_BTD)[:, :-1], ((0, 0), (1, 0)))
      targets = minibatch.critic_targets
      actual = O.value_loss(
        value_BT, targets.old_value_BT, targets.return_BT, minibatch.mask_BT, 0.2
      )
      policy_loss = configured_loss(PPO, logp_BT, entropy_BT, minibatch, T)[0]
      return policy_loss.compute() + actual[0], actual

    (policy_loss, critic_grad), (loss, expected_metrics) = expected(critic_on(mesh, HEAD))
  expected_metrics |= {"grad_norm": optax.tree.norm(policy_loss), "value/loss": loss}
  expected_metrics |= {"value/grad_norm": optax.tree.norm(critic_grad)}
  *_, (row,) = updated(HEAD, **layout)
  for name, value in expected_metrics.items():
    assert row[name] == pytest.approx(float(value), rel=1e-4) and row[name], name


def test_warm_up_trains_the_critic_alone():
  start, end, rows = updated(OWN, updates=4, learning_rate=1e-2)
  assert difference(end.params, start.params) > 1e-4
  losses = [row["value/loss"] for row in rows]
  assert losses[-1] < 0.7 * losses[0] and losses == sorted(losses, reverse=True)
  config = dataclasses.replace(OWN, warmup_iterations=2)
  _, waited, rows = updated(config, updates=4, learning_rate=1e-2)
  assert [row["ratio/deviation"] for row in rows][:2] == [rows[2]["ratio/deviation"]] * 2
  assert rows[3]["ratio/deviation"] != rows[2]["ratio/deviation"]
  _, alone, _ = updated(dataclasses.replace(config, warmup_iterations=4), updates=4)
  assert difference((alone.params, alone.opt_state), (start.params, start.opt_state)) == 0
  assert difference(alone.critic.params, start.critic.params) > 1e-4 and alone.step == 4
  # Apart from each other, the two learn the same whether one of them waits or not.
  assert difference(waited.critic, end.critic) == 0


@pytest.mark.long
def test_sharded_update_equals_that_of_one_device():
  start, expected, rows = updated(OWN)
  _, actual, sharded = updated(OWN, shape=(1, 2, 2, 2))
  assert difference(expected.critic.params, start.critic.params) > 1e-3
  assert difference(actual.critic.opt_state, expected.critic.opt_state) < 1e-4
  for name in ("value/loss", "value/grad_norm", "grad_norm", "clip_fraction/value"):
    assert sharded[0][name] == pytest.approx(rows[0][name], rel=1e-4), name


@pytest.mark.long
def test_state_with_a_critic_is_restored_bit_for_bit(tmp_path):
  """A state without a critic has no further arrays."""
  mesh, critic = sharding.make_mesh(MeshConfig(1, 2, 2, 2)), critic_of(OWN)
  with jax.set_mesh(mesh):
    policy, params = critic_on(mesh, OWN)
    state = with_critic(new_state(policy, TX), params, critic.tx)
    like = abstract_state(MODEL, mesh, TX, critic=critic)
    save_state(tmp_path / "state", state)
    restored = restore_state(tmp_path / "state", like)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert difference(jax.device_get(restored), jax.device_get(state)) == 0
    for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
      assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    assert "fsdp" in sharding.spec_of(restored.critic.params.weight)  # D, by the same rules
  fields = [field.name for field in dataclasses.fields(new_state(initial(MODEL), TX))]
  assert fields == ["step", "params", "opt_state", "skipped", "clip_factor"]


def test_critic_of_name_model_is_initialised_from_the_policy():
  mesh = sharding.make_mesh(MESH, jax.devices()[:1])
  with jax.set_mesh(mesh):
    fresh = functools.partial(initial, MODEL)
    copied = new_critic(OWN, MODEL, mesh, 1, fresh)
  assert difference(copied.trunk.blocks, initial(MODEL).blocks) == 0 and copied.trunk.head is None
  assert not np.any(copied.weight) and not np.any(copied.bias)
  assert new_critic(HEAD, MODEL, mesh, 1, fresh).trunk is None


def test_critic_combines_with_packing_adapters_and_token_losses():
  for changes in (
    dict(rl__packed=True, rl__microbatches=2),
    dict(rl__group_size=1, rl__prompts=512),
    dict(lora__rank=4),
    dict(objective__name="gspo_token"),
    dict(critic__name="head"),
  ):
    config_of(tiny_ppo.get_config, **changes)
