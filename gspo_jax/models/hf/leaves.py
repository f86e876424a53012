"""Parameters, and the tensors of Hugging Face's files from which they are stacked.

A leaf is an array of the parameter tree, such as the query projections [l, D, N, H] of a block of
layers. Files have a tensor [N·H, D] for each layer, and for each expert.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import sharding
from gspo_jax.models import finite
from gspo_jax.models.hf.config import CheckpointError
from gspo_jax.models.weights import Dense, Params


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One parameter and its tensors in the files.

  A letter "2" of an axis means that the tensor has two parameters as halves, gate and up.
  """

  key: str  # Key of `architectures.names`, such as "attention.q".
  letters: str  # Axes of the parameter, such as "lDNH".
  shape: tuple[int, ...]  # Shape of the parameter.
  name: str  # Name of its tensors, such as "model.layers.{l}.self_attn.q_proj.weight".
  axes: tuple[str, ...]  # Axes of each tensor; letters of merged axes together: ("NH", "D").
  first_layer: int  # First layer of the block; -1 for the embedding, l for final norm and head.

  @property
  def stacked(self) -> str:
    """Letters of the stacked axes.

    These letters are in the name of the tensors. They come first in every parameter.
    """
    return "".join(x for x in self.letters if f"{{{x}}}" in self.name)

  @property
  def order(self) -> list[int]:
    """Indices of the unstacked axes, in the tensor's order."""
    inner = self.letters[len(self.stacked) :]
    return [inner.index(x) for axis in self.axes for x in axis if x != "2"]

  @property
  def sizes(self) -> dict[str, int]:
    """Sizes of the axes by letter."""
    return dict(zip(self.letters, self.shape)) | {"2": 2}

  @property
  def is_half(self) -> bool:
    """Whether the leaf is a gate in the same tensors as the next leaf."""
    return self.key.startswith("Moe.gate") and any("2" in axis for axis in self.axes)

  @property
  def is_second(self) -> bool:
    """Whether the leaf is an up in the same tensors as the previous leaf."""
    return self.key.startswith("Moe.up") and any("2" in axis for axis in self.axes)

  def joined(self, values: Sequence[np.ndarray]) -> np.ndarray:
    """Arranges a slice of the parameter as its tensor.

    values: one slice without the stacked axes, or the two halves of a shared tensor.
    """
    values, letters = [x.transpose(self.order) for x in values], "".join(self.axes)
    if "2" in letters:
      values = [np.stack(values, axis=letters.index("2"))]
    return values[0].reshape(self.tensor_shape)

  @property
  def tensor_shape(self) -> tuple[int, ...]:
    """Shape of each tensor."""
    return tuple(math.prod(self.sizes[x] for x in axis) for axis in self.axes)

  def tensor(self, position: tuple[int, ...]) -> str:
    """Returns the tensor's name at a position on the stacked axes."""
    index = dict(zip(self.stacked, position))
    return self.name.format(l=self.first_layer + index.get("l", 0), E=index.get("E", 0))

  def positions(self, box: dict[str, range]) -> Iterator[tuple[int, ...]]:
    """Yields the positions of a box on the stacked axes.

    box: a range of indices for each letter of the parameter.
    """
    return itertools.product(*(box[x] for x in self.stacked))


def leaves_of(table: Params, names: dict[str, tuple[str, str]]) -> list[Leaf]:
  """Returns the leaves of a table, in its order.

  names: name and axes of tensors by key, as from `architectures.names`.
  """
  starts = list(itertools.accumulate(table.depths, initial=0))
  leaves = []
  for path, w in jax.tree_util.tree_flatten_with_path(table)[0]:
    keys, first_layer = path, starts[-1] if path[0].name != "embed" else -1
    if path[0].name == "blocks":
      keys, first_layer = path[2:], starts[path[1].idx]
    key = ".".join(k.name for k in keys)
    if keys[0].name == "ffn":
      dense = isinstance(table.blocks[path[1].idx].ffn, Dense)
      key = ("Dense" if dense else "Moe") + key.removeprefix("ffn")
    name, axes = names[key]
    leaves.append(Leaf(key, w.letters, w.shape, name, tuple(axes.split()), first_layer))
  return leaves


def by_layer(leaves: Sequence[Leaf]) -> list[tuple[int, int, tuple[int, ...]]]:
  """Returns (layer, index of leaf, position) of tensors, by layer.

  With this order, the tensors of a layer are in one file or in neighbouring files. A tensor of two
  halves is listed once, for the first half.
  """
  return sorted(
    (leaf.first_layer + (position[0] if leaf.stacked else 0), i, position)
    for i, leaf in enumerate(leaves)
    for position in leaf.positions(whole(leaf))
    if not (i and leaves[i - 1].is_half)
  )


def whole(leaf: Leaf) -> dict[str, range]:
  """Returns the box of the whole parameter."""
  return {letter: range(size) for letter, size in zip(leaf.letters, leaf.shape)}


def require_finite(
  path: Any, leaves: Sequence[Leaf], arrays: Sequence[Any], kinds: Sequence[Any] | None = None
) -> None:
  """Raises CheckpointError, naming the tensor, for NaN and infinite values.

  All processes must call this function with the same arrays.

  Args:
    path: directory of the tensors, for the message.
    leaves: parameters and their tensors.
    arrays: values of the parameters.
    kinds: dtypes of the written tensors. None means the arrays' own.
  """
  counts = finite.nonfinite(arrays, kinds)
  counts = [n + (counts[i + 1] if leaves[i].is_half else 0) for i, n in enumerate(counts)]
  plan = [(layer, i, position) for layer, i, position in by_layer(leaves) if counts[i]]
  for (_, i, position), tensor in zip(plan, tensors_of(leaves, arrays, plan)):
    kind = jnp.dtype(arrays[i].dtype if kinds is None else kinds[i])
    with np.errstate(over="ignore"):
      values = tensor.astype(kind).astype(np.float32)
    if count := int((~np.isfinite(values)).sum()):
      named = finite.describe(leaves[i].tensor(position), count, kind)
      raise CheckpointError(f"{path}: {named}")


def tensors_of(leaves, arrays, plan) -> Iterator[np.ndarray]:
  """Yields the tensors of `plan`.

  One layer of one parameter, or of gate and up, is on the host at a time.

  plan: entries of `by_layer`.
  """
  current, host = None, []
  for layer, i, position in plan:
    leaf = leaves[i]
    if (layer, i) != current:
      current, host = (layer, i), []  # Frees the old arrays before fetching.
      parts = arrays[i : i + 1 + leaf.is_half]
      host = [np.asarray(sharding.fetch(x[position[0]] if leaf.stacked else x)) for x in parts]
    yield leaf.joined([x[position[1:]] for x in host])
