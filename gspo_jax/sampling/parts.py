"""Segments of trajectories, on the host: turns, steps, lines, or blocks of equal size.

Each segment can have its own importance ratio. Only turns and lines can have rewards. Suffixes of
arrays: X, sampled tokens; U, lines of a response; V, token ids.
"""

from collections.abc import Sequence

import numpy as np


def segment_ids(
  mask_BT: np.ndarray,
  *,
  turn_BT: np.ndarray | None = None,
  size: int | None = None,
  ends_BT: np.ndarray | None = None,
) -> np.ndarray:
  """Numbers each response's segments from 0, int32 [B, T]; 0 for masked tokens.

  A new segment begins at the first token of a turn, after every `size` sampled tokens of a turn,
  and after a token marked in `ends_BT`. Observations belong to no segment.

  Args:
    mask_BT: 1 for sampled tokens, 0 elsewhere.
    turn_BT: turn of each sampled token; None if every response is a single turn.
    size: maximum number of tokens in a segment; None for no maximum.
    ends_BT: bool, True at the last token of each line (`breaks` > 0) or step
      (`delimiters.step_ends`). None if segments are neither lines nor steps.
  """
  ids_BT = np.zeros(mask_BT.shape, np.int32)
  row_X, time_X = np.nonzero(mask_BT > 0)
  if not len(row_X):
    return ids_BT
  new_row_X = np.diff(row_X, prepend=-1) > 0
  begins_X = new_row_X.copy()
  if turn_BT is not None:
    begins_X |= np.diff(turn_BT[row_X, time_X], prepend=-1) != 0
  if size is not None:
    place_X = np.arange(len(row_X))
    begins_X |= (place_X - _at_last_mark(place_X, begins_X)) % size == 0
  if ends_BT is not None:
    begins_X[1:] |= ends_BT[row_X, time_X][:-1]
  number_X = np.cumsum(begins_X)
  ids_BT[row_X, time_X] = number_X - _at_last_mark(number_X, new_row_X)
  return ids_BT


def _at_last_mark(x_X: np.ndarray, mark_X: np.ndarray) -> np.ndarray:
  """Returns, for each position, x at the latest mark up to this position.

  For example, x = [5, 6, 7, 8] with marks at positions 0 and 2 gives [5, 5, 7, 7]. Position 0 must
  be marked in `mark_X`.
  """
  return x_X[np.maximum.accumulate(np.where(mark_X, np.arange(len(x_X)), 0))]


def breaks(tokens: np.ndarray, breaks_V: np.ndarray) -> np.ndarray:
  """Looks up each token's number of line breaks; 0 for ids outside `breaks_V`."""
  in_table = (tokens >= 0) & (tokens < len(breaks_V))
  return np.append(breaks_V, 0)[np.where(in_table, tokens, -1)]


def line_rewards(
  reward_U: Sequence[float], tokens_X: np.ndarray, breaks_V: np.ndarray
) -> np.ndarray:
  """Places each line's reward on the line's last token, float32 [X].

  A line ends with the token that contains its line break; the last line ends with the response. A
  token with several line breaks receives the sum of the rewards of all lines that end in it.

  Args:
    reward_U: reward of each line. A response with n line breaks has at most n + 1 lines.
    tokens_X: token ids of the response.
    breaks_V: number of line breaks in the text of each token id.
  """
  breaks_X = np.cumsum(breaks(tokens_X, breaks_V))
  end_U = np.searchsorted(breaks_X, np.arange(1, len(reward_U) + 1))
  reward_X = np.zeros(len(tokens_X), np.float32)
  if not len(tokens_X):  # The response could not be sampled.
    return reward_X
  np.add.at(reward_X, np.minimum(end_U, len(tokens_X) - 1), np.asarray(reward_U, np.float32))
  return reward_X
