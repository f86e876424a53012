"""Several responses in one row, for the model only: fewer rows hold all tokens of a mini-batch.

Lengths of responses are heavy-tailed: a row for each of them, as long as the longest may become, is
mostly padding, and padding costs as much as tokens. So the host plans where each response goes
(`plan`), and the model reads `layout.packed`.

Shapes are fixed. What varies is how many micro-batches of R rows there is something to do for
(`count`), the same number on all devices. A response's row is on the device that holds the
response, so nothing moves between devices.

  R  rows of a micro-batch, over all devices
"""

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import sharding
from gspo_jax.structs import ModelInputs, TrainBatch


def plan(batch: TrainBatch, shards: int) -> TrainBatch:
  """The batch with a place for each response, on the host; its responses in another order.

  Each of the `shards` devices gets B / shards responses, about as many tokens as the others, and
  packs them on its own. Rows without tokens get no place.
  """
  T = batch.inputs.tokens_BT.shape[1]
  length_B = (batch.inputs.segments_BT > 0).sum(1)
  order_B = balanced_order(length_B, shards)
  places = [first_fit(length_b, T) for length_b in np.split(length_B[order_B], shards)]
  row_B, start_B = (np.concatenate(x) for x in zip(*places))
  batch = jax.tree.map(lambda x: x[order_B], batch)
  inputs = batch.inputs.replace(row_B=row_B, start_B=start_B)
  return batch.replace(inputs=inputs, order_B=order_B)


def undo(batch: TrainBatch) -> TrainBatch:
  """Undoes `plan`."""
  inputs = batch.inputs.replace(row_B=None, start_B=None)
  plain = batch.replace(inputs=inputs, order_B=None)
  return jax.tree.map(lambda x: in_order(x, batch.order_B), plain)


def in_order(x_B: np.ndarray, order_B: np.ndarray | None) -> np.ndarray:
  """[B, ...] in the order that the responses had before `plan`; None: they have it."""
  return x_B if order_B is None else x_B[np.argsort(order_B)]


def balanced_order(length_B: np.ndarray, shards: int) -> np.ndarray:
  """int32 [B]: the responses of the first device, of the second, ...; B / shards of each.

  From the longest to the shortest, one for each device in turn: the longer, the fewer tokens the
  device has so far.
  """
  load, turns = np.zeros(shards, np.int64), []
  for longest_first in np.argsort(-length_B, kind="stable").reshape(-1, shards):
    least_first = np.argsort(load, kind="stable")
    load[least_first] += length_B[longest_first]
    turns.append(longest_first[np.argsort(least_first)])
  return np.sort(np.stack(turns, axis=1), axis=1).reshape(-1).astype(np.int32)


def first_fit(length_B: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
  """int32 [B] ×2: row of each response, -1 for an empty one, and where it starts there.

  First-fit decreasing: from the longest to the shortest, each into the first row with room for it.
  """
  row_B, start_B = np.full(len(length_B), -1, np.int32), np.zeros(len(length_B), np.int32)
  used = np.zeros(len(length_B), np.int32)
  for i in np.argsort(-length_B, kind="stable"):
    if length_B[i]:
      row_B[i] = row = np.argmax(used + length_B[i] <= size)
      start_B[i] = used[row]
      used[row] += length_B[i]
  return row_B, start_B


def count(inputs: ModelInputs, R: int) -> jax.Array:
  """int32 []: micro-batches of R rows up to the last one that holds a response; at least 1."""
  return jnp.maximum(inputs.row_B.max() // sharding.rows_of_a_device(R) + 1, 1)


def part(inputs: ModelInputs, i: jax.Array | int, R: int) -> ModelInputs:
  """Micro-batch i: all sequences, but those that lie in other rows are in none."""
  row_B = inputs.row_B - i * sharding.rows_of_a_device(R)
  inside_B = (row_B >= 0) & (row_B < sharding.rows_of_a_device(R))
  return inputs.replace(row_B=jnp.where(inside_B, row_B, -1))
