"""Mini-batches of an iteration, and the way back to the order of the rollout."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support.configs import config_of
from support.small_updates import with_inputs

from configs import common
from gspo_jax import objectives as O
from gspo_jax import sharding
from gspo_jax.learner.batch import fed_to, in_rollout_order, minibatches, place, train_batch
from gspo_jax.settings.critic import DistillationConfig
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.structs import AdvantageInputs, ModelInputs, Rollout, TrainBatch

T = 5
ONE = sharding.make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])


def batch(rows, old):
  tokens = np.repeat(np.arange(rows)[:, None], T, 1).astype(np.int32)
  ones = np.ones((rows, T), np.float32)
  inputs = ModelInputs(tokens, ones.astype(np.int32))
  return TrainBatch(inputs, ones, np.arange(rows, dtype=np.float32) + 1, old, old)


def test_missing_groups_are_padding_in_every_mini_batch():
  groups, G = 4, 3
  old = np.zeros((groups * G, T), np.float32)
  parts = minibatches(batch(groups * G, old), 3, prompts=6, group_size=G, mesh=ONE, packed=False)
  parts = jax.device_get(parts)
  groups_of = [sorted({int(a - 1) // G for a in part.advantage_B if a > 0}) for part in parts]
  assert groups_of == [[0, 3], [1], [2]]
  assert [part.first_B.tolist() for part in parts] == [[True] * 6, [False] * 6, [False] * 6]
  for part in parts:
    assert part.mask_BT.shape == (6, T)
    np.testing.assert_array_equal(part.mask_BT.any(1), part.advantage_B > 0)
    np.testing.assert_array_equal(part.inputs.segments_BT.any(1), part.advantage_B > 0)


def test_padding_has_no_experts_and_no_support():
  """Zeros would be read as an expert and a token."""
  sampled = with_inputs(
    batch(2, np.zeros((2, T), np.float32)),
    sampler_experts_BTlk=np.ones((2, T, 1, 2), np.int8),
    support_BTX=np.ones((2, T, 3), np.int32),
  )
  (padded,) = minibatches(sampled, 1, prompts=4, group_size=1, mesh=ONE, packed=False)
  for field in padded.inputs.sampler_experts_BTlk, padded.inputs.support_BTX:
    assert np.unique(field[:2]) == 1 and np.unique(field[2:]) == -1
  assert padded.inputs.sampler_experts_BTlk.dtype == np.int8


def test_log_ratios_are_in_the_order_of_the_rollout():
  rows = 4 * 3  # two groups are missing
  old = np.arange(rows * T, dtype=np.float32).reshape(rows, T)
  parts = minibatches(batch(rows, old), 3, prompts=6, group_size=3, mesh=ONE, packed=False)
  ratios = [2 * part.old_logp_BT + 1 for part in parts]
  np.testing.assert_array_equal(in_rollout_order(ratios, parts, rows, group_size=3), 2 * old + 1)


def rollout():
  """Trajectories of several weights; the second is a truncated conversation."""
  version = np.array([[-1, -1, 3, 3, 4, -1], [-1, 3, -1, 4, 4, -1]], np.int32)
  mask, zeros = (version >= 0).astype(np.float32), np.zeros(version.shape, np.float32)
  experts = np.ones((*version.shape, 2, 1), np.int8)
  experts[[0, 1], [4, 4]] = -1  # the last tokens were never fed
  return Rollout(
    version, mask, version, zeros, zeros, version, zeros, np.array([2, 1]), mask.sum(1).astype(int),
    np.array([5, 5]), np.array([True, False]), experts,
  )  # fmt: skip


def test_version_of_the_input_is_that_of_the_next_token():
  fed = [[3, 3, 3, 4, -1, -1], [3, 4, 4, 4, -1, -1]]
  np.testing.assert_array_equal(fed_to(rollout().version), fed)


def test_tokens_of_older_weights_are_marked():
  batch = train_batch(rollout(), np.ones(2), shared_prompts=False, version=4)
  current_BT = batch.metric_inputs.current_BT
  np.testing.assert_array_equal(current_BT, [[0, 0, 0, 0, 1, 0], [0, 0, 0, 1, 1, 0]])
  recorded = [[0, 0, 0, 1, 0, 0], [0, 1, 1, 1, 0, 0]]
  np.testing.assert_array_equal(batch.inputs.sampler_experts_BTlk[..., 0, 0] >= 0, recorded)
  replayed = train_batch(
    rollout(), np.ones(2), shared_prompts=False, version=4, replays_sampler=True
  )
  np.testing.assert_array_equal(replayed.inputs.sampler_experts_BTlk[:, :4] >= 0, True)
  # Replayed experts of older weights make another network.
  assert not replayed.metric_inputs.current_BT.any()
  alone = train_batch(rollout(), np.ones(2), shared_prompts=False)
  assert alone.metric_inputs.current_BT is None


def test_truncated_responses_are_masked():
  sampled = rollout()
  batch = train_batch(sampled, np.ones(2), shared_prompts=False, mask_truncated=True)
  np.testing.assert_array_equal(batch.mask_BT, sampled.mask * [[1], [0]])
  np.testing.assert_array_equal(
    batch.inputs.segments_BT.sum(1), sampled.ends
  )  # the model reads them still


JUDGED = dict(reward_PG=np.ones((1, 2)), advantage_PG=np.zeros((1, 2)), advantage_BL=None, step=4)


def scored(rollout, **fields):
  """A rollout with rewards and advantages."""
  return SimpleNamespace(rollout=rollout, **fields)


def placing(name, **distillation):
  """Configuration with one group of two, and a loss."""
  sizes = dict(rl__prompts=1, rl__group_size=2, rl__minibatches=1)
  recorded = {}
  if O.POLICY_LOSSES[name].recorded:
    recorded = dict(job="offline", offline__data="x", objective__old_logp="recompute")
  config = config_of(common.base, objective__name=name, **sizes, **recorded)
  return dataclasses.replace(config, distillation=DistillationConfig(**distillation))


def test_batch_has_the_inputs_of_its_configuration_and_no_others():
  """Covers truncated responses and turns of tokens."""
  sampled, judged = rollout(), JUDGED | dict(reward_PG=np.array([[1.0, 0.0]]))
  sizes = dict(rl__prompts=1, rl__group_size=2, rl__minibatches=1)
  ppo = dict(objective__name="ppo_clip", critic__name="head", environment__name="calculator")
  (batch,) = place(
    config_of(common.base, **sizes), ONE, scored(sampled, known_B=np.ones(2, bool), **judged)
  )
  assert batch.advantage_inputs == AdvantageInputs()
  keys = dict(critic__bootstrap=True, objective__advantage="turn_gae")
  config = config_of(common.base, **ppo, **sizes, **keys)
  turned = dataclasses.replace(sampled, rewards=np.float32(sampled.turns == 4))
  (batch,) = place(config, ONE, scored(turned, known_B=np.ones(2, bool), **judged))
  assert batch.advantage_inputs.cut_off_B.tolist() == (~sampled.stopped).tolist() == [False, True]
  np.testing.assert_array_equal(batch.advantage_inputs.turn_BT, sampled.turns)
  assert batch.mixed_B is None
  np.testing.assert_array_equal(batch.advantage_inputs.reward_BT, turned.rewards)
  config = config_of(common.base, objective__reward_kl_coef=0.1, **sizes)
  (batch,) = place(config, ONE, scored(sampled, known_B=np.ones(2, bool), **judged))
  assert batch.advantage_inputs.reward_BT.sum() == 1
  assert batch.advantage_inputs.cut_off_B is batch.advantage_inputs.turn_BT is None


@pytest.mark.parametrize("verdicts", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", O.POLICY_LOSSES)
def test_responses_without_a_verdict_are_masked_for_every_loss(name, verdicts):
  sampled, known_B = rollout(), np.array(verdicts)
  (batch,) = place(placing(name), ONE, scored(sampled, known_B=known_B, **JUDGED))
  np.testing.assert_array_equal(batch.mask_BT, sampled.mask * known_B[:, None])


def test_distillation_without_rewards_needs_no_verdict():
  config, sampled = placing("ppo_clip", teacher="t", reward_weight=0.0), rollout()
  (batch,) = place(config, ONE, scored(sampled, known_B=np.zeros(2, bool), **JUDGED))
  np.testing.assert_array_equal(batch.mask_BT, sampled.mask)


BY_LINE = dict(reward__name="recurrence", reward__per_line=True, data__train="recurrence:train")
BY_LINE |= dict(data__eval="recurrence:heldout")
LIMIT = dict(constraints__costs__length__bound="at_most", constraints__costs__length__limit=6.0)
# A configuration, advantages of the two responses and of their tokens, and the groups with KL.
TEACHING = {
  "different rewards": ({}, [0.7, -0.7], None, True),
  "equal rewards": ({}, [0, 0], None, False),
  "equal rewards, other costs": (LIMIT, [0.7, -0.7], None, True),
  "equal rewards, both imitated": (dict(objective__name="rft"), [1, 0], None, True),
  "equal sums of other lines": (
    BY_LINE | dict(objective__name="gspo_token"), [0, 0], [[0.7], [-0.7]], True,
  ),
  "equal lines": (BY_LINE | dict(objective__name="gspo_token"), [0, 0], [[0], [0]], False),
  "lines of a loss of whole responses": (
    BY_LINE | dict(objective__name="gspo"), [0, 0], [[0.7], [-0.7]], False,
  ),
  "a critic": (
    dict(objective__name="ppo_clip", critic__name="head"), [0, 0], None, None,
  ),
  "a teacher": (
    dict(objective__name="ppo_clip", distillation__teacher="/t"), [0, 0], None, None,
  ),
  "a price in the reward": (dict(objective__reward_kl_coef=0.1), [0, 0], None, None),
}  # fmt: skip


@pytest.mark.parametrize("keys, responses, tokens, teaches", TEACHING.values(), ids=TEACHING)
def test_groups_that_teach_have_a_kl_penalty(keys, responses, tokens, teaches):
  """Advantages count, whatever they are made of; those of devices are never all 0."""
  sizes = dict(rl__prompts=1, rl__group_size=2, rl__minibatches=1)
  mixed = dict(objective__kl_groups="mixed", objective__kl_coef=0.1)
  config, sampled = config_of(common.base, **keys | sizes | mixed), rollout()
  advantages = dict(advantage_PG=np.float32([responses]), advantage_BL=None)
  if tokens:
    advantages["advantage_BL"] = sampled.mask * np.float32(tokens)
  judged = scored(sampled, known_B=np.ones(2, bool), **JUDGED | advantages)
  (batch,) = place(config, ONE, judged)
  assert (batch.mixed_B is None) == (teaches is None)
  assert teaches is None or batch.mixed_B.tolist() == [teaches] * 2
