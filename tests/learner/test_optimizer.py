"""The optimizer is that of Optax; its rate begins and ends where the configuration says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.configs import config_of
from support.small_models import HYBRID_MOE, SHALLOW, SHALLOW_MOE, initial

from configs import tiny_ppo
from gspo_jax.learner.critic import optimizers
from gspo_jax.learner.optimizer import decayed, last_rate, make, rate
from gspo_jax.models import transformer
from gspo_jax.settings.training import OptimizerConfig

CONFIG = OptimizerConfig(
  learning_rate=1e-3, schedule="linear", warmup_steps=0, final_fraction=0.1, b1=0.9, b2=0.95,
  weight_decay=0.0, clip_norm=1.0,
)  # fmt: skip


def rates(config, updates):
  """Rates of all updates of a run."""
  return np.asarray(rate(make(config, updates).hyperparameters, np.arange(updates)))


@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_last_update_has_the_final_fraction(schedule, warmup, final):
  config = dataclasses.replace(CONFIG, schedule=schedule, warmup_steps=warmup, final_fraction=final)
  values = rates(config, 40)
  np.testing.assert_allclose(values[-1], 1e-3 * final, rtol=1e-5, atol=1e-10)
  np.testing.assert_allclose(values[warmup], 1e-3, rtol=1e-5)  # the first one after the warm-up
  assert values.max() <= 1e-3 * (1 + 1e-5)
  assert (np.diff(values[warmup:]) < 0).all() or final == 1


def test_constant_and_short_schedules_have_the_expected_rates():
  np.testing.assert_allclose(rates(dataclasses.replace(CONFIG, schedule="constant"), 5), 1e-3)
  np.testing.assert_allclose(rates(CONFIG, 1), [1e-3])
  np.testing.assert_allclose(rates(CONFIG, 2), [1e-3, 1e-4], rtol=1e-5)
  rising = rates(dataclasses.replace(CONFIG, warmup_steps=10), 5)
  assert (np.diff(rising) > 0).all() and rising[-1] < 1e-3


def test_reported_rate_is_the_one_used():
  """With equal gradients Adam moves a weight by the rate."""
  config = dataclasses.replace(CONFIG, warmup_steps=2, clip_norm=0.0)
  tx, params, shown, used = make(config, 5), initial(SHALLOW), [], []
  state, ones, update = tx.init(params), jax.tree.map(jnp.ones_like, params), jax.jit(tx.update)
  assert float(last_rate(tx.hyperparameters, state)) == 0
  for _ in range(7):
    updates, state = update(ones, state, params, tx.hyperparameters)
    shown.append(float(last_rate(tx.hyperparameters, state)))
    used.append(-float(jax.tree.leaves(updates)[0].ravel()[0]))
  np.testing.assert_allclose(shown, used, rtol=1e-5)
  np.testing.assert_allclose(shown[:5], rates(config, 5), rtol=1e-6)


def test_schedule_and_warm_up_of_a_critic_are_counted_in_updates_of_all_iterations():
  keys = dict(rl__iterations=10, critic__warmup_iterations=3, rl__minibatches=2, rl__epochs=2)
  c = config_of(tiny_ppo.get_config, **keys)
  policy, critic = optimizers(c)
  assert c.rl.updates == 4 and critic.hyperparameters["warmup"] == 3 * 4
  for tx, updates in ((policy, 7 * 4), (critic.tx, 10 * 4)):
    assert tx.hyperparameters["warmup"] + tx.hyperparameters["decay_updates"] + 1 == updates
  least = c.rl_optimizer.learning_rate * c.rl_optimizer.final_fraction
  before, last = rate(policy.hyperparameters, np.array([26, 27]))
  assert before > last == pytest.approx(least)


@pytest.mark.parametrize(
  "changes", [{}, dict(weight_decay=0.0, clip_norm=0.0), dict(schedule="cosine")]
)
def test_update_equals_optax(changes):
  fields = dict(learning_rate=1e-2, warmup_steps=2, weight_decay=0.1) | changes
  config = dataclasses.replace(CONFIG, **fields)
  rise = optax.linear_schedule(5e-3, 1e-2, 2)
  after = optax.linear_schedule(1e-2, 1e-3, 6)
  if config.schedule == "cosine":
    after = optax.cosine_decay_schedule(1e-2, 6, alpha=0.1)
  adamw = optax.adamw(
    optax.join_schedules([rise, after], [2]), b1=0.9, b2=0.95, eps=1e-8,
    weight_decay=config.weight_decay, mask=decayed,
  )  # fmt: skip
  if config.clip_norm:
    adamw = optax.chain(optax.clip_by_global_norm(1.0), adamw)
  ours = make(config, 9)
  params = theirs = optimizer_tree(0)
  states = ours.init(params), adamw.init(params)
  assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
  for i in range(1, 10):
    grads = optimizer_tree(i)
    updates, state = jax.jit(ours.update)(grads, states[0], params, ours.hyperparameters)
    their_updates, their_state = jax.jit(adamw.update)(grads, states[1], theirs)
    states = state, their_state
    params = optax.apply_updates(params, updates)
    theirs = optax.apply_updates(theirs, their_updates)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), params, theirs
    )


def optimizer_tree(seed, model=SHALLOW):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), initial(model))


def test_norms_biases_convolutions_and_decays_have_no_weight_decay():
  shapes = jax.eval_shape(lambda: transformer.init(HYBRID_MOE, jax.random.key(0)))
  paths = jax.tree.leaves_with_path(decayed(shapes))
  without = {path[-1].name for path, has_decay in paths if not has_decay}
  convolutions, norms = {"q_conv", "k_conv", "v_conv"}, {"attention_norm", "ffn_norm", "final_norm"}
  norms |= {"norm", "q_norm", "k_norm"}
  assert without == convolutions | norms | {"log_decay", "decay_bias"}


@pytest.mark.parametrize("factor", [0.0, pytest.param(10.0, marks=pytest.mark.long)])
def test_router_rate_scales_updates_of_routers_alone(factor):
  plain = dataclasses.replace(CONFIG, weight_decay=0.1)
  params, grads = optimizer_tree(0, SHALLOW_MOE), optimizer_tree(1, SHALLOW_MOE)
  updates, states = [], []
  for config in (plain, dataclasses.replace(plain, router_rate=factor)):
    tx = make(config, 9)
    update, state = jax.jit(tx.update)(grads, tx.init(params), params, tx.hyperparameters)
    updates.append(update), states.append(state)
  jax.tree.map(np.testing.assert_array_equal, *states)
  routers = []

  def check(path, before, after):
    is_router = path[-1].name == "router"
    routers.extend([path] * is_router)
    np.testing.assert_allclose(after, before * (factor if is_router else 1), rtol=1e-6)

  jax.tree.map_with_path(check, *updates)
  assert len(routers) == 1
