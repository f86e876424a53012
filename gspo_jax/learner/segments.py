"""The parts of a response that have an importance ratio of their own, on the host."""

import numpy as np


def segment_ids(
  unit: str,
  tokens_BT: np.ndarray,
  mask_BT: np.ndarray,
  *,
  turn_BT: np.ndarray | None = None,
  size: int | None = None,
  ends_line_V: np.ndarray | None = None,
) -> np.ndarray:
  """Segments of each response, numbered from 0 in their order; 0 off the mask. int32 [B, T].

  A new one begins with every turn; with unit "line" also after a token that ends a line, with unit
  "tokens" after every `size` sampled tokens of a turn. Observations in between count for nothing.

  Args:
    turn_BT: turn of each sampled token, where there are several.
    ends_line_V: bool, tokens with a line break in their text; those beyond it have none.
  """
  ids_BT = np.zeros(mask_BT.shape, np.int32)
  row_X, time_X = np.nonzero(mask_BT > 0)
  if not len(row_X):
    return ids_BT
  place_X = np.arange(len(row_X))
  new_row_X = np.diff(row_X, prepend=-1) > 0
  begins_X = new_row_X.copy()
  if turn_BT is not None:
    begins_X |= np.diff(turn_BT[row_X, time_X], prepend=-1) != 0
  if unit == "tokens":
    begins_X |= (place_X - _latest(place_X, begins_X)) % size == 0
  if unit == "line":
    begins_X[1:] |= np.isin(tokens_BT[row_X, time_X], np.flatnonzero(ends_line_V))[:-1]
  number_X = np.cumsum(begins_X)
  ids_BT[row_X, time_X] = number_X - _latest(number_X, new_row_X)
  return ids_BT


def _latest(x_X: np.ndarray, where_X: np.ndarray) -> np.ndarray:
  """x at the latest place, this one included, that `where_X` marks; it marks the first."""
  return x_X[np.maximum.accumulate(np.where(where_X, np.arange(len(x_X)), 0))]
