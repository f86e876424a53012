"""Parts of trajectories: their ids, rewards of lines at tokens, and advantages of parts."""

import numpy as np
import pytest

from gspo_jax import segments
from gspo_jax.data.tokenizer import ByteTokenizer
from gspo_jax.segments import segment_ids

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
  ids_BT = segment_ids(unit, tokens_BT, mask_BT, turn_BT=turn_BT, size=size, breaks_V=breaks_V)
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
  assert not segment_ids(unit, tokens_BT, np.zeros((B, T)), breaks_V=breaks_V).any()


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
  found = segments.line_rewards(rewards, tokens, BREAKS_V)
  assert found.dtype == np.float32 and found.tolist() == expected.tolist()


def test_a_token_with_several_breaks_ends_several_lines():
  breaks_V = np.array([0, 1, 2])
  found = segments.line_rewards([1, 2, 4, 8], np.array([0, 2, 0, 1, 9]), breaks_V)
  assert found.tolist() == [0, 3, 0, 4, 8]  # token 9 is beyond the vocabulary


def test_advantages_of_lines_by_hand():
  """Two responses of two lines and one of three: a line is compared with the same one."""
  line_BL = np.array([[0, 0, 0, 1, 1], [0, 0, 0, 1, 0], [0, 0, 0, 1, 2]])
  mask_BL = np.array([[0, 1, 1, 1, 1], [0, 1, 1, 1, 0], [0, 1, 1, 1, 1]])
  reward_BL = np.array([[0, 0, 1, 0, 2], [0, 0, 0, 1, 9], [0, 0, 4, 0, 3]], np.float32)
  found = segments.advantages(reward_BL, line_BL, mask_BL, 3, 1.0, "none")
  returns = np.array([[3, 2], [1, 1], [7, 3]]) - [[11 / 3, 2]]
  expected = np.take_along_axis(returns, np.minimum(line_BL, 1), 1) * mask_BL
  expected[2, 4] = 0  # the third line of one response alone
  np.testing.assert_allclose(found, expected, atol=1e-6)
  found = segments.advantages(reward_BL, line_BL, mask_BL, 3, 0.0, "none")
  np.testing.assert_allclose(found[:, 1], np.array([1, 0, 4]) - 5 / 3, atol=1e-6)


def test_a_response_without_a_verdict_is_compared_with_nothing():
  line_BL, reward_BL = np.zeros((3, 2), int), np.array([[1, 0], [0, 0], [50, 50]], np.float32)
  mask_BL = np.array([[1, 1], [1, 1], [0, 0]])
  found = segments.advantages(reward_BL, line_BL, mask_BL, 3, 1.0, "none")
  assert found.tolist() == [[0.5, 0.5], [-0.5, -0.5], [0, 0]]
