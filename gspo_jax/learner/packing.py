"""Packs several sequences into one model row, so that a mini-batch needs fewer rows.

A sequence is a prompt and its response. Response lengths are heavy-tailed. If each sequence had a
row of maximum length, most of a row would be padding, which costs as much as tokens. So the host
plans a place for each sequence (`plan`), and the model reads packed rows (`layout.packed`).

An update reads its rows in micro-batches of R rows. The shapes of micro-batches never change, so no
program is compiled again. Only the number of micro-batches depends on the number of tokens
(`count`). All devices have the same number of micro-batches. A sequence and its row are on the same
device, so packing needs no communication.

The sequences of a group can share one copy of their prompt in a row, if the maximum prompt length
is a third of a row or more (`shares`). For attention alone, such rows are expanded to longer rows,
with a copy of the prompt before each response.

In this file, "device" means a group of devices that have the same sequences (tensor parallelism).

  R  rows of a micro-batch on all devices; in host functions, maximum number of rows on one device
  T  length of a row
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import sharding
from gspo_jax.structs import ModelInputs, Places, TrainBatch


def plan(
  batch: TrainBatch, shards: int, group_size: int = 1, response_tokens: int = 0
) -> TrainBatch:
  """Reorders sequences and assigns each a place in rows, on the host.

  All devices have B / shards sequences each, and about the same number of tokens. Each device is
  packed independently. Sequences without tokens have no place (row -1).

  Args:
    batch: a mini-batch, in host arrays.
    shards: number of devices.
    group_size: number of consecutive sequences with the same prompt.
    response_tokens: maximum response length; the other positions of T are for the prompt. If it is
      0, no prompt is shared.
  """
  inputs = batch.inputs
  length_B, T = (inputs.segments_BT > 0).sum(1), inputs.tokens_BT.shape[1]
  sequence_places = places(length_B, T, shards, inputs.prompt_B, group_size, response_tokens)
  batch = jax.tree.map(lambda x: x[sequence_places.order_B], batch)
  return batch.replace(inputs=batch.inputs.replace(places=sequence_places))


def places(
  length_B: np.ndarray,
  T: int,
  shards: int,
  prompt_B: np.ndarray | None = None,
  group_size: int = 1,
  response_tokens: int = 0,
) -> Places:
  """Computes the order and the places of `plan`.

  In the body, arrays [X] are over the sequences of one device, and arrays [P] over groups.

  Args:
    length_B: number of tokens of each sequence, prompt included.
    T: length of a row.
    prompt_B: number of leading tokens shared by a group's sequences. None if prompts may differ.
  """
  order_B = balanced_order(length_B, shards)
  separate = _on_each(
    order_B, shards, lambda order_X: Places(order_X, *first_fit(length_B[order_X], T))
  )
  members = math.gcd(group_size, len(length_B) // shards)
  if prompt_B is None or not shares(T, response_tokens, members):
    return separate
  shared_B = np.clip(prompt_B - 1, 0, length_B)
  tokens_P = (length_B - shared_B).reshape(-1, members).sum(1)
  order_P = balanced_order(tokens_P + shared_B.reshape(-1, members).max(1), shards)
  grouped_B = (order_P[:, None] * members + np.arange(members)).reshape(-1).astype(np.int32)

  def fill(order_X: np.ndarray) -> Places:
    longest = with_prompts(T, response_tokens)
    group_X = order_X // members
    return Places(
      order_X, *first_fit_with_prompts(length_B[order_X], shared_B[order_X], group_X, T, longest)
    )

  grouped = _on_each(grouped_B, shards, fill)
  if grouped.row_B.max() <= separate.row_B.max():
    return grouped
  # Groups are larger units than sequences, so devices are less balanced. Shared prompts may need
  # more rows for this reason. Then each sequence has its own prompt.
  start_B = separate.start_B
  return Places(order_B, separate.row_B, start_B + shared_B[order_B], start_B, start_B)


def _on_each(order_B: np.ndarray, shards: int, fill: Callable) -> Places:
  """Calls `fill` with the sequences of each device, and concatenates the results."""
  devices = [fill(order_X) for order_X in np.split(order_B, shards)]
  return jax.tree.map(lambda *parts: np.concatenate(parts), *devices)


def shares(T: int, response_tokens: int, group_size: int) -> bool:
  """Whether the sequences of a group share their prompt in packed rows.

  Sharing has a cost: attention's rows become longer. So prompts are shared only if the maximum
  prompt length is at least a third of a row.

  Args:
    response_tokens: maximum response length. The maximum prompt length is T less this number.
    group_size: number of sequences with the same prompt on a device.
  """
  return group_size > 1 and 0 < response_tokens < T and 3 * (T - response_tokens) >= T


def with_prompts(T: int, response_tokens: int) -> int:
  """Returns the length of attention's rows if sequences share prompts.

  Attention's rows have a copy of the prompt for each response, so they exceed the length T of other
  rows. The difference is two prompts of maximum length.
  """
  return T + 2 * (T - response_tokens)


def undo(batch: TrainBatch) -> TrainBatch:
  """Reverses `plan`: restores the order of sequences, and drops their places."""
  plain = batch.replace(inputs=batch.inputs.replace(places=None))
  return jax.tree.map(lambda x: in_order(x, batch.order_B), plain)


def in_order(x_B: np.ndarray, order_B: np.ndarray | None) -> np.ndarray:
  """Restores the order before `plan`. If `order_B` is None, the order is unchanged."""
  return x_B if order_B is None else x_B[np.argsort(order_B)]


def balanced_order(length_B: np.ndarray, shards: int) -> np.ndarray:
  """Distributes sequences over devices; returns their indices by device, int32 [B].

  Each device has B / shards sequences. Sequences are dealt in descending length, one per device in
  each round. Within a round, the longest sequence goes to the device with the fewest tokens so far,
  the second longest to the device with the second fewest, and so on.
  """
  load, rounds = np.zeros(shards, np.int64), []
  for longest_first in np.argsort(-length_B, kind="stable").reshape(-1, shards):
    least_first = np.argsort(load, kind="stable")
    load[least_first] += length_B[longest_first]
    rounds.append(longest_first[np.argsort(least_first)])
  return np.sort(np.stack(rounds, axis=1), axis=1).reshape(-1).astype(np.int32)


def first_fit(length_B: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the row of each sequence, and its start in the row.

  First-fit decreasing: in descending length, each sequence goes into the first row with enough free
  positions. For example, sequences of 5, 4, 3 and 2 tokens fill two rows of 8: 5 + 3 and 4 + 2. The
  row of a sequence without tokens is -1.

  Args:
    size: length of a row.
  """
  row_B, start_B = np.full(len(length_B), -1, np.int32), np.zeros(len(length_B), np.int32)
  used = np.zeros(len(length_B), np.int32)
  for i in np.argsort(-length_B, kind="stable"):
    if length_B[i]:
      row_B[i] = row = np.argmax(used + length_B[i] <= size)
      start_B[i] = used[row]
      used[row] += length_B[i]
  return row_B, start_B


def first_fit_with_prompts(
  length_B: np.ndarray, shared_B: np.ndarray, group_B: np.ndarray, size: int, longest: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Returns places of sequences with shared prompts within a row.

  Returns (row, start, trunk, path), the fields of `Places`. Groups are placed in descending number
  of tokens, and the sequences of a group in descending length. A sequence goes into the first row
  that already has its group's trunk, and enough free positions for the rest of the sequence. If
  there is no such row, the sequence goes into the first row with enough free positions for trunk
  and rest. In both cases, attention's row must have enough free positions for trunk and rest.

  Args:
    length_B: number of tokens of each sequence, prompt included.
    shared_B: number of tokens of the trunk, the prompt without its last token.
    group_B: number of each sequence's group.
    size: length of a row.
    longest: length of attention's row, with a copy of the prompt per response.
  """
  B = len(length_B)
  row_B, (start_B, trunk_B, path_B) = np.full(B, -1, np.int32), np.zeros((3, B), np.int32)
  # For each row: used positions, used positions of attention's row, and start of the last trunk.
  used_R, used_by_attention_R, trunk_R = np.zeros((3, B), np.int32)
  numbers, index_B = np.unique(group_B, return_inverse=True)
  tokens_P = np.bincount(index_B, length_B, len(numbers))
  current = None
  for i in np.lexsort((-length_B, index_B, -tokens_P[index_B])):
    if not length_B[i]:
      continue
    if index_B[i] != current:
      current, has_R = index_B[i], np.zeros(B, bool)  # Mask of rows with this group's prompt.
    more_R = np.where(has_R, length_B[i] - shared_B[i], length_B[i])
    fits_R = (used_R + more_R <= size) & (used_by_attention_R + length_B[i] <= longest)
    row_B[i] = row = np.argmax(fits_R & has_R if (fits_R & has_R).any() else fits_R)
    if not has_R[row]:
      has_R[row], trunk_R[row] = True, used_R[row]
      used_R[row] += shared_B[i]
    trunk_B[i], start_B[i], path_B[i] = trunk_R[row], used_R[row], used_by_attention_R[row]
    used_R[row] += length_B[i] - shared_B[i]
    used_by_attention_R[row] += length_B[i]
  return row_B, start_B, trunk_B, path_B


def count(inputs: ModelInputs, R: int) -> jax.Array:
  """Returns the number of R-row micro-batches with tokens, at least 1."""
  return jnp.maximum(inputs.places.row_B.max() // sharding.rows_per_device(R) + 1, 1)


def part(inputs: ModelInputs, i: jax.Array | int, R: int) -> ModelInputs:
  """Returns micro-batch i of R rows.

  The micro-batch has all sequences of the mini-batch, since shapes are fixed. A sequence that is in
  the rows of another micro-batch has no place (row -1).
  """
  row_B = inputs.places.row_B - i * sharding.rows_per_device(R)
  inside_B = (row_B >= 0) & (row_B < sharding.rows_per_device(R))
  places = inputs.places.replace(row_B=jnp.where(inside_B, row_B, -1))
  return inputs.replace(places=places)
