"""Parts of trajectories: their ids, rewards of lines at tokens, and advantages of parts."""

import functools

import jax
import numpy as np
import pytest
from support import objectives_reference as paper
from support.cases import long

from gspo_jax import objectives as O
from gspo_jax.data.tokenizer import ByteTokenizer
from gspo_jax.rollouts.advantages import part_advantages
from gspo_jax.sampling import parts as segments
from gspo_jax.sampling.parts import segment_ids

BREAKS_V = np.array([ByteTokenizer().decode([i]).count("\n") for i in range(259)])


@pytest.mark.parametrize("unit", ["turn", "line", "tokens"])
@pytest.mark.parametrize("turns", [False, True])
def test_segments_against_loops(unit, turns):
  rng = np.random.default_rng(3)
  B, T, size, breaks_V = 20, 40, 3, np.arange(6) < 2
  tokens_BT = rng.integers(0, 8, (B, T))
  mask_BT = (rng.random((B, T)) < 0.7) & (np.arange(T) >= 4)
  mask_BT[5] = False
  turn_BT = np.where(mask_BT, np.cumsum(rng.random((B, T)) < 0.1, axis=1), -1) if turns else None
  ends_BT = segments.breaks(tokens_BT, breaks_V) > 0
  options = dict(turn={}, line=dict(ends_BT=ends_BT), tokens=dict(size=size))[unit]
  ids_BT = segment_ids(mask_BT, turn_BT=turn_BT, **options)
  for b in range(B):
    number, before, inside = -1, None, 0
    for t in np.flatnonzero(mask_BT[b]):
      turn = turn_BT[b, t] if turns else 0
      new = before is None or turn != before[1]
      new |= unit == "line" and before is not None and before[0] < 2
      new |= unit == "tokens" and inside == size
      number, inside = number + new, 1 if new else inside + 1
      assert ids_BT[b, t] == number
      before = tokens_BT[b, t], turn
  assert ids_BT.dtype == np.int32 and not ids_BT[~mask_BT].any() and ids_BT.max() < T
  assert (ids_BT.max() > 0) == (turns or unit != "turn")
  assert not segment_ids(np.zeros((B, T)), **options).any()


@pytest.mark.parametrize(
  "text, rewards, ends",
  [
    ("ab\ncd\nef", [1, 2, 4], [2, 5, 7]),
    ("ab\n", [1, 2], [2, 2]),  # nothing after the last break: what is left stays with the response
    ("ab", [3], [1]),
    ("\n\n\n", [1, 2, 4], [0, 1, 2]),
    ("a\nb\nc", [1], [1]),
  ],
)
def test_rewards_of_lines_stand_where_they_end(text, rewards, ends):
  tokens = np.array(ByteTokenizer().encode(text), np.int32)
  expected = np.zeros(len(tokens))
  np.add.at(expected, ends, rewards)
  result = segments.line_rewards(rewards, tokens, BREAKS_V)
  assert result.dtype == np.float32 and result.tolist() == expected.tolist()


def test_a_token_with_several_breaks_ends_several_lines():
  breaks_V = np.array([0, 1, 2])
  result = segments.line_rewards([1, 2, 4, 8], np.array([0, 2, 0, 1, 9]), breaks_V)
  assert result.tolist() == [0, 3, 0, 4, 8]  # token 9 is beyond the vocabulary


def test_advantages_of_lines_by_hand():
  """Two responses of two lines and one of three: a line is compared with the same one."""
  line_BL = np.array([[0, 0, 0, 1, 1], [0, 0, 0, 1, 0], [0, 0, 0, 1, 2]])
  mask_BL = np.array([[0, 1, 1, 1, 1], [0, 1, 1, 1, 0], [0, 1, 1, 1, 1]])
  reward_BL = np.array([[0, 0, 1, 0, 2], [0, 0, 0, 1, 9], [0, 0, 4, 0, 3]], np.float32)
  result = part_advantages(reward_BL, line_BL, mask_BL, 3, 1.0, "none")
  returns = np.array([[3, 2], [1, 1], [7, 3]]) - [[11 / 3, 2]]
  expected = np.take_along_axis(returns, np.minimum(line_BL, 1), 1) * mask_BL
  expected[2, 4] = 0  # the third line of one response alone
  np.testing.assert_allclose(result, expected, atol=1e-6)
  result = part_advantages(reward_BL, line_BL, mask_BL, 3, 0.0, "none")
  np.testing.assert_allclose(result[:, 1], np.array([1, 0, 4]) - 5 / 3, atol=1e-6)


def test_a_response_without_a_verdict_is_compared_with_nothing():
  line_BL, reward_BL = np.zeros((3, 2), int), np.array([[1, 0], [0, 0], [50, 50]], np.float32)
  mask_BL = np.array([[1, 1], [1, 1], [0, 0]])
  result = part_advantages(reward_BL, line_BL, mask_BL, 3, 1.0, "none")
  assert result.tolist() == [[0.5, 0.5], [-0.5, -0.5], [0, 0]]


@pytest.mark.parametrize("size", [1, 24, 10_000, *long((6, 96))])
def test_segments_of_so_many_tokens_lie_between_token_and_sequence(size):
  """Value, gradient and what is clipped: of one token as in GRPO, of all of them as in GSPO, and in
  between the equation."""
  rng, (B, T) = np.random.default_rng(0), (6, 192)
  mask = (np.arange(T) >= 8) & (np.arange(T) < np.array([9, 30, 100, 150, 192, 192])[:, None])
  old = -rng.exponential(0.5, (B, T)).astype(np.float32)
  logp = old + 0.02 * rng.standard_normal((B, T)).astype(np.float32)
  advantage = rng.standard_normal((B, 1)).astype(np.float32) * np.ones((1, T), np.float32)
  ranges = dict(clip_low=1e-3, clip_high=1.2e-3)
  ids = segment_ids(mask, size=size)
  assert ids.max() == (184 - 1) // size

  def found(loss, advantage, **options):
    value = functools.partial(loss, **ranges, **options)
    (total, metrics), gradient = jax.jit(jax.value_and_grad(value, has_aux=True))(
      logp, old, advantage, mask
    )
    return total, metrics, gradient

  total, metrics, gradient = found(O.segment_loss, advantage, segment_BT=ids)
  same = {1: (O.grpo_loss, advantage), 10_000: (O.gspo_loss, advantage[:, 0])}
  if size in same:
    other_total, other_metrics, other_gradient = found(*same[size])
    np.testing.assert_allclose(total, other_total, rtol=1e-6)
    np.testing.assert_allclose(gradient, other_gradient, rtol=1e-5, atol=1e-9)
    for name in ("clip_fraction/token", "ratio/deviation", "ratio/max"):
      np.testing.assert_allclose(metrics[name], other_metrics[name], rtol=1e-5)
  wide = [np.asarray(x, np.float64) for x in (logp, old, advantage)]
  reference = paper.segment(*wide, mask, ids, low=1e-3, high=1.2e-3)
  np.testing.assert_allclose(total, np.real(reference), rtol=1e-5)
  assert 0 < metrics["clip_fraction/token"] < 1
