"""Advantages, critics, soft values and reward shaping: hand numbers and loops in NumPy."""

import jax
import numpy as np
import pytest
from support import objectives_reference as paper
from support.compiled import compiled

from gspo_jax import objectives as O


def test_the_papers_example():
  """With the population's standard deviation it would be ±1.22."""
  np.testing.assert_allclose(O.group_advantages([[0.8, 0.4, 0.6]]), [[1, -1, 0]], atol=1e-5)


@pytest.mark.parametrize(
  "reward, options, expected",
  [
    ([1.0, 0, 0, 0], dict(normalize="none"), [0.75, -0.25, -0.25, -0.25]),
    ([1.0, 0, 0, 0], dict(normalize="leave_one_out"), [1, -1 / 3, -1 / 3, -1 / 3]),
    ([1.0, 0, 0, 0], dict(epsilon=0.5), [0.75, -0.25, -0.25, -0.25]),
    ([3, 1], {}, [0.5**0.5, -(0.5**0.5)]),
  ],
)
def test_hand_numbers(reward, options, expected):
  np.testing.assert_allclose(
    compiled(O.group_advantages, np.array([reward]), **options), [expected], rtol=1e-6
  )


@pytest.mark.parametrize("normalize", ["std", "none", "leave_one_out"])
def test_invalid_members_leave_the_group(normalize):
  """The others get what they would get in a group without them; NaN rewards do not matter."""
  rng = np.random.default_rng(0)
  reward = rng.normal(size=(6, 5)).astype(np.float32)
  valid = rng.random((6, 5)) < 0.6
  valid[0], valid[1] = False, [True, False, False, False, False]
  dirty = np.where(valid, reward, np.nan)
  ours = compiled(O.group_advantages, dirty, normalize, valid_PG=valid)
  assert not np.any(np.asarray(ours)[~valid])
  for p in range(6):
    members = reward[p, valid[p]]
    if len(members) < 2:
      assert not np.any(ours[p])
    else:
      alone = compiled(O.group_advantages, members[None], normalize)[0]
      np.testing.assert_allclose(np.asarray(ours)[p, valid[p]], alone, rtol=1e-5, atol=1e-6)


def test_the_deviation_of_the_batch_in_float64():
  """Group means, one deviation for all; in neither is what is not valid, or a lone member."""
  rng = np.random.default_rng(3)
  reward = rng.normal(size=(5, 4)) * np.array([1, 10, 0.1, 1, 1])[:, None]
  reward[3] = 0.25  # equal: they count in the deviation
  valid = rng.random((5, 4)) < 0.8
  valid[3:] = True
  ours = compiled(O.group_advantages, np.where(valid, reward, np.nan), "batch", valid_PG=valid)
  expected = np.zeros_like(reward)
  for p in range(5):
    if valid[p].sum() > 1:
      members = reward[p, valid[p]]
      expected[p, valid[p]] = (members - members.mean()) / (reward[valid].std(ddof=1) + 1e-6)
  np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)
  assert not np.any(ours[3])


@pytest.mark.parametrize("normalize", ["std", "none", "leave_one_out"])
def test_groups_without_spread_get_exactly_zero(normalize):
  """0.1 added up eleven times and divided by eleven is not 0.1, in float32."""
  for value in 0.1, 1 / 3, 0.7, 1e6, -1e-6:
    assert not np.any(compiled(O.group_advantages, np.full((2, 11), value), normalize))
  assert not np.any(
    compiled(O.group_advantages, np.full((1, 1), 0.5), normalize)
  )  # a group of one is not its raw score


def test_advantages_are_constants():
  for normalize in "std", "none", "leave_one_out":
    grad = jax.jit(jax.grad(lambda r: O.group_advantages(r, normalize)[0, 0]))  # noqa: B023
    assert not np.any(grad(np.eye(3)[:2]))


def test_bad_groups_are_named():
  with pytest.raises(ValueError, match="reward_PG"):
    O.group_advantages([0.0, 1.0])
  with pytest.raises(ValueError, match="reward_PG"):
    O.group_advantages([[0.0, np.nan]])
  assert not np.any(O.group_advantages([[0.0, np.nan]], valid_PG=[[1, 0]]))
  with pytest.raises(ValueError, match="valid_PG"):
    O.group_advantages([[0.0, 1.0]], valid_PG=[[1]])
  with pytest.raises(ValueError, match="normalize"):
    O.group_advantages([[0.0, 1.0]], "max")


def test_constrained_advantages_standardise_before_they_combine(x64):
  """The cost's scale is a thousand times the reward's and must not matter."""
  rng = np.random.default_rng(1)
  reward, bonus, cost = rng.normal(size=(3, 4, 6)) * np.array([1, 0.1, 1000]).reshape(3, 1, 1)

  def z(x):
    return (x - x.mean(1, keepdims=True)) / (x.std(1, ddof=1, keepdims=True) + 1e-6)

  ours = compiled(O.constrained_advantages, [reward, bonus], [cost], [1.0, 0.5], [0.3])
  np.testing.assert_allclose(ours, z(reward) + 0.5 * z(bonus) - 0.3 * z(cost), rtol=1e-9)
  scalarised = compiled(O.group_advantages, reward + 0.5 * bonus - 0.3 * cost)
  assert abs(np.corrcoef(np.ravel(ours), np.ravel(scalarised))[0, 1]) < 0.9
  with pytest.raises(ValueError, match="multipliers"):
    O.constrained_advantages([reward], [cost], [1.0], [-0.1])
  with pytest.raises(ValueError, match="multipliers"):
    O.constrained_advantages([reward], [cost], [1.0], [])
  with pytest.raises(ValueError, match=r"costs\[0\] has shape \(6,\)"):
    O.constrained_advantages([reward], [cost[0]], [1.0], [1.0])
  with pytest.raises(ValueError, match=r"costs\[0\] has shape \(1, 6\), expected .* \(4, 6\)"):
    O.constrained_advantages([reward], [cost[:1]], [1.0], [1.0])
  with pytest.raises(ValueError, match="neither rewards nor costs"):
    O.gdpo_advantages([], [], [], [])


def test_gdpo_of_a_batch_without_spread_is_0_without_an_epsilon():
  equal = np.ones((2, 3))
  np.testing.assert_array_equal(O.gdpo_advantages([equal], [], [1.0], [], epsilon=0), 0 * equal)


def test_gdpo_divides_what_is_combined_by_its_deviation_over_the_batch(x64):
  """arXiv:2601.05242: Σ w_n (r_n − mean)/std by group, then less the mean and by the deviation of
  the batch; members that are not valid are in none of them."""
  rng = np.random.default_rng(2)
  rewards, weights = rng.normal(size=(3, 4, 6)) * [[[1]], [[0.1]], [[1000]]], [1.0, 0.5, 2.0]
  rewards[:, 1] = 0.25  # a group without spread counts in the deviation
  valid = rng.random((4, 6)) < 0.8

  def gdpo(rewards):
    combined = np.zeros(valid.shape)
    for weight, reward in zip(weights, rewards, strict=True):
      for p in set(range(4)) - {1}:
        some = reward[p][valid[p]]
        combined[p][valid[p]] += weight * (some - some.mean()) / (some.std(ddof=1) + 1e-6)
    values = combined[valid]
    return np.where(valid, (combined - values.mean()) / (values.std(ddof=1) + 1e-6), 0)

  ours = compiled(O.gdpo_advantages, list(rewards), [], weights, [], valid_PG=valid)
  np.testing.assert_allclose(ours, gdpo(rewards), atol=1e-9)
  assert valid[[0, 2, 3]].sum() < 18 and not ours[1].any()
  others = [np.where(valid, r, 9.0) for r in rewards]
  other = compiled(O.gdpo_advantages, others, [], weights, [], valid_PG=valid)
  np.testing.assert_array_equal(ours, other)


gae, turn_gae = jax.jit(O.gae), jax.jit(O.turn_gae)


@pytest.mark.parametrize("discount, trace", [(1.0, 0.95), (0.99, 0.9), (1.0, 0.0), (0.5, 1.0)])
def test_gae_against_the_recursion(discount, trace, x64):
  case = paper.case(2, dtype=np.float64, garbage=False)
  reward, value, mask = case["advantage_bt"], case["ref"], case["mask"]
  expected = paper.gae(reward, value, mask, discount, trace)
  dirty = [np.where(mask, x, np.nan) for x in (reward, value)]
  ours = gae(*dirty, mask, discount, trace)
  np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-14)
  packed = [x.reshape(4, -1) for x in (*dirty, mask)]
  ids = np.where(packed[2], np.repeat([7, 2], mask.shape[1]), -1)
  ours = gae(*packed, discount, trace, response_BT=ids)
  np.testing.assert_allclose(ours, [x.reshape(4, -1) for x in expected], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("discount, trace", [(1.0, 0.95), (0.9, 0.8), (1.0, 0.0)])
def test_gae_of_turns_against_the_recursion(discount, trace, x64):
  """Turns of several lengths, with holes of observations between them and within; some cut off."""
  case = paper.case(5, dtype=np.float64, garbage=False)
  reward, value, mask = case["advantage_bt"], case["ref"], case["mask"]
  turns = np.sort(case["rng"].integers(0, 4, mask.shape))
  last = np.where(np.arange(len(mask)) % 2, case["rng"].normal(size=len(mask)), 0)
  expected = paper.turn_gae(reward, value, mask, turns, discount, trace, last)
  dirty = [np.where(mask, x, np.nan) for x in (reward, value)]
  ids = np.where(mask, turns, -1)
  ours = turn_gae(*dirty, mask, ids, discount, trace, last_value_B=last)
  np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-14)
  each = np.broadcast_to(np.arange(mask.shape[1]), mask.shape)  # a token to a turn
  for values in last, np.zeros(len(mask)):
    token_gae = paper.gae(reward, value, mask, discount, trace, values)
    ours = gae(*dirty, mask, discount, trace, last_value_B=values)
    np.testing.assert_allclose(ours, token_gae, rtol=1e-12, atol=1e-14)
    ours = turn_gae(*dirty, mask, each, discount, trace, last_value_B=values)
    np.testing.assert_allclose(ours, token_gae, rtol=1e-12, atol=1e-14)


def test_what_follows_a_packed_row_belongs_to_no_response_of_it():
  x = np.ones((2, 4))
  with pytest.raises(ValueError, match="last_value_B has one value per row"):
    O.gae(x, x, x, last_value_B=np.ones(2), response_BT=np.zeros((2, 4), int))


def test_gae_with_a_trace_of_one_is_the_sum_of_rewards():
  advantage, returns = gae(np.eye(3)[2:], np.array([[0.2, 0.3, 0.4]]), np.ones((1, 3)), trace=1.0)
  np.testing.assert_allclose(returns, [[1, 1, 1]], rtol=1e-6)
  np.testing.assert_allclose(advantage, [[0.8, 0.7, 0.6]], rtol=1e-6)
  with pytest.raises(ValueError, match="discount"):
    O.gae([[0.0]], [[0.0]], [[1]], discount=1.5)


@pytest.mark.parametrize("eps", [0.2, None])
def test_value_loss_against_the_equation(eps, x64):
  case = paper.case(3, spread="mixed", dtype=np.float64)
  value, old, mask = case["logp"], case["old"], case["mask"]
  returns = np.where(mask, old + case["rng"].normal(0, 1, mask.shape), np.nan)

  def reference(x):
    return paper.value(x, old, returns, mask, eps)

  f = jax.value_and_grad(lambda x: O.value_loss(x, old, returns, mask, eps), has_aux=True)
  (loss, metrics), grad = jax.jit(f)(value)
  expected = paper.gradient(reference, value)
  np.testing.assert_allclose(loss, reference(value).real, rtol=1e-12)
  np.testing.assert_allclose(grad, expected, rtol=0, atol=1e-12 * abs(expected).max())
  assert (float(metrics["clip_fraction/value"]) > 0) == (eps is not None)


def test_spo_against_the_equation(x64):
  case = paper.case(4, dtype=np.float64)
  logp, ref, mask = case["logp"], case["ref"], case["mask"]
  reward, value = case["rng"].random((2, len(mask)))

  def reference(x):
    return paper.spo(x, ref, reward, value, mask, 0.3)

  f = jax.value_and_grad(lambda x: O.spo_loss(x, ref, reward, value, mask, 0.3)[0])
  loss, grad = jax.jit(f)(logp)
  expected = paper.gradient(reference, logp)
  np.testing.assert_allclose(loss, reference(logp).real, rtol=1e-12)
  np.testing.assert_allclose(grad, expected, rtol=0, atol=1e-12 * abs(expected).max())


def test_the_optimal_policy_has_no_spo_loss(x64):
  """π* ∝ π_ref exp(r/β): its log-ratio to the reference is what the soft value is short of."""
  rng = np.random.default_rng(5)
  ref, reward, beta = np.log(rng.dirichlet(np.ones(6))), rng.random(6), 0.2
  value = beta * np.log(np.sum(np.exp(ref + reward / beta)))
  optimal = ref + reward / beta - value / beta
  args = optimal[:, None], ref[:, None], reward, np.full(6, value), np.ones((6, 1)), beta
  assert compiled(O.spo_loss, *args)[0] < 1e-25
  sampled = compiled(O.soft_value, reward[None], beta)
  np.testing.assert_allclose(sampled, [beta * np.log(np.mean(np.exp(reward / beta)))], rtol=1e-12)
  valid = np.arange(6) < 3
  dirty = np.where(valid, reward, np.nan)[None]
  part = compiled(O.soft_value, dirty, beta, valid_PG=valid[None])
  np.testing.assert_allclose(part, compiled(O.soft_value, reward[None, :3], beta), rtol=1e-12)


def soft_by_hand(rewards, beta=0.2):
  return rewards - beta * np.log(np.mean(np.exp(rewards / beta)))


def best_by_hand(rewards):
  weights = np.zeros(len(rewards))
  if max(rewards) > 0:
    weights[list(rewards).index(max(rewards))] = 1
  return weights


OF_RESPONSES = {
  "soft": (lambda r, v: O.soft_advantages(r, 0.2, valid_PG=v), soft_by_hand),
  "best": (lambda r, v: O.selection_weights(r, valid_PG=v), best_by_hand),
  "reward": (lambda r, v: O.selection_weights(r, "reward", valid_PG=v), lambda r: np.maximum(r, 0)),
}


@pytest.mark.parametrize("kind", OF_RESPONSES)
def test_what_responses_are_worth_by_themselves(kind, x64):
  ours, by_hand = OF_RESPONSES[kind]
  rng = np.random.default_rng(3)
  reward = np.concatenate([rng.normal(0, 1, (6, 5)), rng.integers(0, 2, (6, 5))])
  reward = np.concatenate([reward, np.full((1, 5), 0.7), np.zeros((1, 5)), np.full((1, 5), -1.0)])
  valid = rng.random(reward.shape) < 0.8
  valid[0] = False
  valid[-3:] = True
  weights_PG = np.asarray(compiled(ours, np.where(valid, reward, np.nan), valid))
  for rewards, advantages, weights in zip(reward, valid, weights_PG):
    assert not weights[~advantages].any()
    if advantages.any():
      np.testing.assert_allclose(
        weights[advantages], by_hand(rewards[advantages]), rtol=1e-12, atol=1e-15
      )
  if kind == "soft":
    assert not weights_PG[-3:].any(), "in a group of equal rewards all get exactly 0"
    dirty = np.where(valid, reward, np.nan)
    advantages = compiled(O.soft_advantages, dirty, 0.2, 0.4, valid_PG=valid)
    np.testing.assert_allclose(advantages, np.where(valid, reward - 0.4, 0), rtol=1e-12)
  with pytest.raises(ValueError, match="finite"):
    ours(np.full((1, 2), np.nan), np.ones((1, 2)))
  assert not np.any(ours(np.full((1, 2), np.nan), np.zeros((1, 2))))


def test_an_unknown_selection():
  with pytest.raises(ValueError, match="'worst'"):
    O.selection_weights(np.ones((1, 2)), "worst")


def test_overlong_penalty():
  """DAPO's own numbers: free up to 16,384 tokens, −1 from 20,480."""
  length = np.array([[1, 16384, 18432], [20479, 20480, 99999]])
  expected = [[0, 0, -0.5], [-4095 / 4096, -1, -1]]
  np.testing.assert_allclose(O.overlong_penalty(length, 20480, 4096), expected, rtol=1e-6)
  for mistake, name in (dict(buffer=0), "buffer"), (dict(max_length=10), "max_length"):
    with pytest.raises(ValueError, match=name):
      O.overlong_penalty(length, **(dict(max_length=20480, buffer=4096) | mistake))


def test_token_cost():
  np.testing.assert_allclose(O.token_cost(np.array([0, 100]), 1e-3), [0, -0.1], rtol=1e-6)
  with pytest.raises(ValueError, match="price"):
    O.token_cost([1], -1.0)


@pytest.mark.parametrize("normalize", ["std", "none", "leave_one_out"])
@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_turn_advantages_against_loops(normalize, discount):
  rng = np.random.default_rng(0)
  P, G, U = 5, 6, 4
  turns = rng.integers(0, U + 1, (P, G))  # an empty conversation is possible
  valid = np.arange(U) < turns[..., None]
  reward = rng.normal(size=(P, G, U)).astype(np.float32)
  options = dict(discount=discount, normalize=normalize)
  ours = compiled(O.turn_advantages, np.where(valid, reward, np.nan), valid, **options)
  expected = np.zeros((P, G, U))
  for p in range(P):
    for u in range(U):
      returns = {
        i: sum(discount ** (v - u) * float(reward[p, i, v]) for v in range(u, turns[p, i]))
        for i in range(G)
        if turns[p, i] > u
      }
      if len(returns) < 2:
        continue
      mean, std = np.mean([*returns.values()]), np.std([*returns.values()], ddof=1)
      for i, value in returns.items():
        members = [x for j, x in returns.items() if j != i]
        expected[p, i, u] = dict(
          std=(value - mean) / (std + 1e-6),
          none=value - mean,
          leave_one_out=value - np.mean(members),
        )[normalize]
  np.testing.assert_allclose(ours, expected, rtol=2e-4, atol=1e-5)


def test_turn_advantages_by_hand():
  """Two of three ask before they answer, and one of these is right; asking badly costs the third
  0.1 in its first turn, which its second turn had no part in."""
  reward = np.array([[[0.0, 1.0], [0.0, 0.0], [-0.1, 1.0], [0.0, 7.0]]])
  valid = np.array([[[1, 1], [1, 0], [1, 1], [0, 0]]])
  ours = compiled(O.turn_advantages, reward, valid, normalize="none")
  first = np.array([1, 0, 0.9]) - 1.9 / 3
  np.testing.assert_allclose(ours[0, :3, 0], first, rtol=1e-5)
  assert not np.any(ours[0, :, 1])  # the same return; who has no second turn is not compared
  assert not np.any(ours[0, 3])


def test_with_a_reward_at_the_end_the_first_turn_gets_the_responses_advantage():
  rng = np.random.default_rng(1)
  turns, outcome = rng.integers(1, 4, (3, 8)), rng.integers(0, 2, (3, 8)).astype(np.float32)
  steps = np.arange(3)
  reward = np.where(steps == turns[..., None] - 1, outcome[..., None], 0)
  ours = compiled(O.turn_advantages, reward, steps < turns[..., None])
  np.testing.assert_allclose(ours[:, :, 0], compiled(O.group_advantages, outcome), rtol=1e-5)


@pytest.mark.parametrize("normalize", ["std", "none", "leave_one_out"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_rewards_that_differ_by_rounding_are_equal(normalize, scale):
  last_bit = np.nextafter(np.float32(10.1 * scale), np.float32(np.inf))
  reward = np.float32([[10.1 * scale, last_bit, 10.1 * scale]])
  assert reward[0, 0] != reward[0, 1]
  for signed in reward, -reward:
    assert not np.any(compiled(O.group_advantages, signed, normalize))
  assert not np.any(compiled(O.constrained_advantages, [reward], [reward], [1.0], [0.5]))
  assert not np.any(compiled(O.soft_advantages, reward, 0.5 * scale))
  assert compiled(O.selection_weights, reward).tolist() == [[1, 0, 0]]
  apart = np.float32([[10.1, 10.101, 10.1]]) * np.float32(scale)
  assert np.all(np.asarray(compiled(O.group_advantages, apart, normalize)) != 0)


def test_turns_that_cancel_out_are_worth_nothing():
  """A sum is as exact as the largest number in it."""
  reward = np.float32([[[10.1, 20.2, -30.3], [0, 0, 0], [30.3, -20.2, -10.1]]])
  assert np.ptp(reward.sum(axis=2)) > 0
  assert not np.any(compiled(O.turn_advantages, reward, np.ones(reward.shape))[:, :, 0])


def test_turn_advantages_refuse_what_is_wrong():
  reward, valid = np.ones((2, 3, 4)), np.ones((2, 3, 4))
  with pytest.raises(ValueError, match="reward_PGU"):
    O.turn_advantages(reward[0], valid[0])
  with pytest.raises(ValueError, match="valid_PGU"):
    O.turn_advantages(reward, valid[:1])
  with pytest.raises(ValueError, match="discount"):
    O.turn_advantages(reward, valid, discount=1.1)
  with pytest.raises(ValueError, match="reward_PGU is not finite"):
    O.turn_advantages(np.where(reward, np.nan, 0), valid)


@pytest.mark.long
def test_rewards_of_turns_that_are_not_valid_may_be_anything():
  reward, valid = np.full((2, 3, 4), np.nan), np.zeros((2, 3, 4))
  assert not np.any(O.turn_advantages(reward, valid))


def test_settings_are_one_number():
  x, pair = np.ones((2, 2)), np.ones(2)
  for wrong, argument in (
    (lambda: O.soft_advantages(x, 0.5, value=pair), "value"),
    (lambda: O.soft_value(x, pair), "beta"),
    (lambda: O.group_advantages(x, epsilon=pair), "epsilon"),
    (lambda: O.gae(x, x, x, discount=pair), "discount"),
    (lambda: O.distillation_advantages(x, x, x, discount=pair), "discount"),
    (lambda: O.turn_advantages(x[None], x[None], discount=pair), "discount"),
    (lambda: O.constrained_advantages([x], [], [pair], []), "reward_weights"),
    (lambda: O.value_loss(x, x, x, x, clip=pair), "clip"),
  ):
    with pytest.raises(ValueError, match=rf"^{argument} has shape \(2,\), expected one number"):
      wrong()
