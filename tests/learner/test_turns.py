"""Learning from conversations: what is trained on, and by how much."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cases import long
from support.compiled import compiled
from support.configs import config_of
from support.environments import TALK, Teacher
from support.sampling import sample
from support.small_models import SHALLOW, initial
from support.small_updates import learner, rl_step, scalars

from configs import tiny_tools
from gspo_jax import objectives as O
from gspo_jax.learner import batch as batches
from gspo_jax.learner import step as train_step
from gspo_jax.learner.state import new_state
from gspo_jax.objectives.reductions import compute
from gspo_jax.rollouts.advantages import part_advantages

OBJECTIVE = config_of(tiny_tools.get_config).objective
G = 4


@pytest.fixture(scope="module")
def rollout():
  environments = [Teacher([30 + p] * (1 + p % 3)) for p in range(4) for _ in range(G)]
  options = dict(group_size=G, max_new_tokens=30, stop_ids=tuple(range(16)), prompt_length=3)
  return sample(
    initial(SHALLOW), SHALLOW, environments=environments, max_turns=TALK.max_turns, **options
  )


@pytest.fixture(scope="module")
def batch(rollout):
  advantage_PG = np.asarray(O.group_advantages(rollout.rewards.sum(1).reshape(-1, G)))
  parts = rollout.rewards, rollout.turns, rollout.mask
  advantage_BL = part_advantages(*parts, G, TALK.discount, "std")
  turns_BL = np.where(rollout.mask > 0, rollout.turns, -1)
  batch = batches.train_batch(rollout, advantage_PG, advantage_BL, turns_BL, shared_prompts=False)
  return batch.replace(old_logp_BT=batch.sampler_logp_BT)


def test_batch_holds_whole_conversations(batch, rollout):
  B, T = batch.inputs.tokens_BT.shape
  assert T == 33
  observed = (batch.inputs.segments_BT == 1) & (batch.mask_BT == 0)
  for row in range(B):
    end, start = rollout.ends[row], rollout.prompt_lengths[row]
    assert batch.inputs.segments_BT[row].sum() == end
    assert batch.mask_BT[row].sum() == rollout.lengths[row]
    assert observed[row].sum() == end - rollout.lengths[row]
    assert observed[row, start:].sum() == 3 * rollout.turns[row].max()
  assert (batch.unit_BT >= 0).sum() == batch.mask_BT.sum()
  assert not batch.advantage_BT[batch.mask_BT == 0].any()
  assert rollout.turns.max() == 2
  assert batch.inputs.prompt_B is None, "conversations of a group may begin differently"


def test_advantages_of_turns_equal_loops(batch, rollout):
  """Tokens have the advantage of their turn, from its discounted return."""
  turns, rewards = rollout.turns, rollout.rewards
  for first in range(0, len(turns), G):
    for u in range(3):
      returns = {
        row: sum(0.5 ** (v - u) * rewards[row][turns[row] == v].sum() for v in range(u, 3))
        for row in range(first, first + G)
        if (turns[row] == u).any()
      }
      values = np.array([*returns.values()])
      for row, value in returns.items():
        actual = batch.advantage_BT[row, : turns.shape[1]][turns[row] == u]
        assert np.ptp(actual) == 0
        expected = (value - values.mean()) / (values.std(ddof=1) + 1e-6) if len(values) > 1 else 0
        assert actual[0] == pytest.approx(expected, rel=1e-3, abs=1e-5)


WIDE = dict(clip_low=0.2, clip_high=0.28)


def objective(name, **changes):
  ranges = {k: v for k, v in WIDE.items() if k in O.POLICY_LOSSES[name].options}
  unset = dict.fromkeys(O.POLICY_LOSSES[OBJECTIVE.name].options)
  return dataclasses.replace(OBJECTIVE, **unset | ranges | changes, name=name)


@functools.partial(jax.jit, static_argnums=0)
def loss(name, logp_BT, batch):
  batch = batch.replace(ref_logp_BT=batch.old_logp_BT)
  total, metrics, _ = train_step.configured_loss(
    objective(name), logp_BT, jnp.zeros_like(logp_BT), batch, 30
  )
  return total.numerator / total.denominator, compute(metrics)


def moved(batch):
  """Log-probs with drift, observations included."""
  noise = np.random.default_rng(0).normal(size=batch.mask_BT.shape).astype(np.float32)
  return batch.sampler_logp_BT + 0.1 * noise


OTHERS = [name for name in O.POLICY_LOSSES if name not in ("gspo", "gspo_token", "segment")]


@pytest.mark.parametrize(
  "name",
  ["gspo", "gspo_token", "segment", *long(OTHERS)],
)
def test_observations_have_no_effect(batch, name):
  logp_BT = moved(batch)

  @jax.jit
  def value_and_grad(logp_BT, batch):
    return jax.value_and_grad(lambda x: loss(name, x, batch)[0])(logp_BT)

  value, grad_BT = value_and_grad(logp_BT, batch)
  off = batch.mask_BT == 0
  assert not np.any(np.asarray(grad_BT)[off]) and np.any(np.asarray(grad_BT)[~off])
  garbage = np.where(off, np.nan, 1)
  garbled = batch.replace(
    old_logp_BT=batch.old_logp_BT * garbage, advantage_BT=batch.advantage_BT * garbage
  )
  assert value_and_grad(logp_BT * garbage, garbled)[0] == pytest.approx(float(value), rel=1e-6)


@pytest.mark.parametrize("name", ["segment", "gspo_token"])
def test_loss_uses_the_advantages_of_turns(batch, name):
  """With "segment", each turn has a ratio too."""
  logp_BT = moved(batch)
  units = dict(segment_BT=batch.unit_BT) if name == "segment" else {}
  arrays = logp_BT, batch.old_logp_BT, batch.advantage_BT, batch.mask_BT
  by_hand, _ = compiled(O.POLICY_LOSSES[name], *arrays, **units, **WIDE)
  value, _ = loss(name, logp_BT, batch)
  assert value == pytest.approx(float(by_hand), rel=1e-6)
  for changes in dict(unit_BT=None, advantage_BT=None), dict(advantage_BT=None):
    assert value != pytest.approx(float(loss(name, logp_BT, batch.replace(**changes))[0]), rel=1e-3)


def test_segment_without_turns_is_the_response(batch):
  above_B = batch.advantage_B + 1  # A mean that is not near 0.
  logp_BT, plain = moved(batch), batch.replace(unit_BT=None, advantage_BT=None, advantage_B=above_B)
  segment, token = loss("segment", logp_BT, plain), loss("gspo_token", logp_BT, plain)
  assert segment[0] == pytest.approx(float(token[0]), rel=1e-5)
  assert token[0] != pytest.approx(float(loss("gspo_token", logp_BT, batch)[0]), rel=1e-2)


@pytest.mark.parametrize("name", ["gspo_token", pytest.param("segment", marks=pytest.mark.long)])
def test_an_update_on_conversations(batch, name):
  tx = optax.sgd(1e-2)
  step = rl_step(learner(SHALLOW), objective(name), tx)
  _, metrics = step(new_state(initial(SHALLOW), tx), jax.tree.map(jnp.asarray, batch))
  row = scalars(metrics)
  assert row["mismatch/abs/max"] < 1e-4  # the trainer's log-probs are the sampler's
  assert row["ratio/deviation"] < 1e-4 and row["grad_norm"] > 0
