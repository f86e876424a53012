"""Parts of a trajectory, on the host: its turns, steps or lines, so many tokens of it. They can
have an importance ratio of their own, and rewards."""

from collections.abc import Sequence

import numpy as np


def segment_ids(
  mask_BT: np.ndarray,
  *,
  turn_BT: np.ndarray | None = None,
  size: int | None = None,
  ends_BT: np.ndarray | None = None,
) -> np.ndarray:
  """Segments of each response, numbered from 0 in their order; 0 off the mask. int32 [B, T].

  A new one begins with every turn, behind every token that ends a line (`breaks`) or a step
  (`delimiters.step_ends`), and after every `size` sampled tokens of a turn. Observations in between
  count for nothing.

  Args:
    turn_BT: turn of each sampled token, where there are several.
    size: None: segments may have any.
    ends_BT: tokens that end a segment.
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
    begins_X |= (place_X - _latest(place_X, begins_X)) % size == 0
  if ends_BT is not None:
    begins_X[1:] |= ends_BT[row_X, time_X][:-1]
  number_X = np.cumsum(begins_X)
  ids_BT[row_X, time_X] = number_X - _latest(number_X, new_row_X)
  return ids_BT


def _latest(x_X: np.ndarray, where_X: np.ndarray) -> np.ndarray:
  """x at the latest position marked in `where_X`, this one included; position 0 is marked."""
  return x_X[np.maximum.accumulate(np.where(where_X, np.arange(len(x_X)), 0))]


def breaks(tokens: np.ndarray, breaks_V: np.ndarray) -> np.ndarray:
  """Counts line breaks in the text of each token; tokens beyond the table have none."""
  in_table = (tokens >= 0) & (tokens < len(breaks_V))
  return np.append(breaks_V, 0)[np.where(in_table, tokens, -1)]


def line_rewards(
  reward_U: Sequence[float], tokens_X: np.ndarray, breaks_V: np.ndarray
) -> np.ndarray:
  """Rewards of a response's lines, each on the last token of its line. float32 [X].

  That is the token with its line break, and the last token for the last line. Where a token has
  several breaks, it gets the rewards of all the lines that it ends.

  Args:
    reward_U: of the lines of its text, at most one more than it has line breaks.
    tokens_X: the response.
    breaks_V: as in `breaks`.
  """
  broken_X = np.cumsum(breaks(tokens_X, breaks_V))
  end_U = np.searchsorted(broken_X, np.arange(1, len(reward_U) + 1))
  reward_X = np.zeros(len(tokens_X), np.float32)
  np.add.at(reward_X, np.minimum(end_U, len(tokens_X) - 1), np.asarray(reward_U, np.float32))
  return reward_X
