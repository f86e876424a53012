"""Parameters, and the tensors of Hugging Face's files from which they are stacked.

A leaf is an array of the parameter tree, such as the query projections [l, D, N, H] of a block of
layers. For this leaf, files have a tensor [N·H, D] for each layer. For a leaf of experts, most
files have a tensor for each layer and expert.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import sharding
from gspo_jax.models import finite
from gspo_jax.models.hf.config import CheckpointError
from gspo_jax.models.weights import Dense, GatedDelta, Params
from gspo_jax.settings.model import ModelConfig


class Part(NamedTuple):
  """One parameter's elements on one axis of a tensor.

  The axis has a run of `total` elements for each index of the outer letters. The first run begins
  at `offset`. In each run, the parameter's elements begin at `start`, and the inner letters index
  them. Examples:

    "F+", gate and up alternate: up has outer "F", inner "", offset 0, start 1, total 2.
    "+F", up follows gate: up has outer "F", inner "", offset F, start 0, total 1.
    "N+H", each head has a query, then its gate [H]: the gate has outer "N", inner "H", offset 0,
      start H, total 2 H.
  """

  outer: str
  inner: str
  offset: int
  start: int
  total: int


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One parameter and its tensors in the files.

  Several parameters of a block may share a tensor, such as gate and up. Then an axis has a "+". Its
  elements are sorted by the letters before the "+", then by parameter, then by the letters after
  the "+". On "+F", all of up follows all of gate; on "F+", the two alternate. A tensor may have an
  axis O of size 1 that the parameter lacks.
  """

  key: str  # Key of `architectures.names`, such as "attention.q".
  letters: str  # Axes of the parameter, such as "lDNH".
  shape: tuple[int, ...]  # Shape of the parameter.
  name: str  # Name of its tensors, such as "model.layers.{l}.self_attn.q_proj.weight".
  axes: tuple[str, ...]  # Axes of each tensor; letters of merged axes together: ("NH", "D").
  # Layers of the block. (-1,): embedding. (number of layers,): final norm and head.
  layers: tuple[int, ...]
  start: int = 0  # Offset of the parameter's elements for one index of the letters before a "+".
  total: int = 1  # Number of all parameters' elements for such an index.

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
    return [inner.index(x) for axis in self.axes for x in axis if x in inner]

  @property
  def sizes(self) -> dict[str, int]:
    """Sizes of the axes by letter."""
    return dict(zip(self.letters, self.shape))

  def size(self, letters: str) -> int:
    """Counts elements of merged axes; an axis absent from the parameter counts 1."""
    return math.prod(self.sizes.get(x, 1) for x in letters)

  @property
  def width(self) -> int:
    """Number of the parameter's elements for one index of the letters before a "+"."""
    return math.prod(self.size(axis.partition("+")[2]) for axis in self.axes)

  @property
  def parts(self) -> list[Part]:
    """Parts of the tensor's axes.

    On an axis such as "+F" each parameter is in one piece, so `offset` alone tells its place.
    """
    parts = []
    for axis in self.axes:
      outer, plus, inner = axis.partition("+")
      outer, inner = ("".join(x for x in y if x in self.letters) for y in (outer, inner))
      if plus and outer:
        parts.append(Part(outer, inner, 0, self.start, self.total))
      else:
        parts.append(Part(outer or inner, "", self.start if plus else 0, 0, 1))
    return parts

  def arranged(self, values: np.ndarray) -> np.ndarray:
    """Brings a slice's axes into the tensor's order.

    The slice has no stacked axes. In the result, an axis with a "+" is two axes, split there.
    """
    axes = " ".join(self.axes).replace("+", " ").split(" ")
    return values.transpose(self.order).reshape([self.size(axis) for axis in axes])

  @property
  def tensor_shape(self) -> tuple[int, ...]:
    """Shape of each tensor."""
    axes = (axis.partition("+") for axis in self.axes)
    return tuple(
      self.size(outer) * (self.total if plus else self.size(inner)) for outer, plus, inner in axes
    )

  def tensor(self, position: tuple[int, ...]) -> str:
    """Returns the tensor's name at a position on the stacked axes."""
    index = dict(zip(self.stacked, position))
    return self.name.format(l=self.layers[index.get("l", 0)], E=index.get("E", 0))

  def positions(self, box: dict[str, range]) -> Iterator[tuple[int, ...]]:
    """Yields the positions of a box on the stacked axes.

    box: a range of indices for each letter of the parameter.
    """
    return itertools.product(*(box[x] for x in self.stacked))


def leaves_of(config: ModelConfig, table: Params, names: dict[str, tuple[str, str]]) -> list[Leaf]:
  """Returns the leaves of a parameter tree, in the tree's order.

  table: tree whose leaves have `letters` and `shape`.
  names: dict, key -> (name, axes) of its tensors, as from `architectures.names`.
  """
  stacks, leaves = config.stacks(), []
  for path, w in jax.tree_util.tree_flatten_with_path(table)[0]:
    keys, layers = path, (-1 if path[0].name == "embed" else config.num_layers,)
    if path[0].name == "blocks":
      keys, layers = path[2:], stacks[path[1].idx].layers
    key = ".".join(k.name for k in keys)
    if keys[0].name == "ffn":
      dense = isinstance(table.blocks[path[1].idx].ffn, Dense)
      key = ("Dense" if dense else "Moe") + key.removeprefix("ffn")
    elif keys[0].name == "attention":
      linear = isinstance(table.blocks[path[1].idx].attention, GatedDelta)
      key = ("GatedDelta" if linear else "attention") + key.removeprefix("attention")
    name, axes = names[key]
    leaves.append(Leaf(key, w.letters, w.shape, name, tuple(axes.split()), layers))
  groups = sharing(leaves)
  widths = [[leaves[j].width for j in group] for group in groups]
  starts = [sum(w[: group.index(i)]) for i, (group, w) in enumerate(zip(groups, widths))]
  return [
    dataclasses.replace(leaf, start=start, total=sum(w))
    for leaf, start, w in zip(leaves, starts, widths)
  ]


def sharing(leaves: Sequence[Leaf]) -> list[list[int]]:
  """Returns, for each leaf, the indices of all leaves in the same tensors, itself included."""
  groups = collections.defaultdict(list)
  for i, leaf in enumerate(leaves):
    groups[leaf.layers, leaf.name].append(i)
  return [groups[leaf.layers, leaf.name] for leaf in leaves]


def joined(leaves: Sequence[Leaf], values: Sequence[np.ndarray]) -> np.ndarray:
  """Joins the parameters of a tensor.

  values: one slice of each parameter, without the stacked axes.
  """
  parts = [leaf.arranged(x) for leaf, x in zip(leaves, values)]
  before, plus, _ = " ".join(leaves[0].axes).partition("+")
  whole = np.concatenate(parts, axis=before.count(" ") + 1) if plus else parts[0]
  return whole.reshape(leaves[0].tensor_shape)


def by_layer(leaves: Sequence[Leaf]) -> list[tuple[int, int, tuple[int, ...]]]:
  """Returns (layer, index of leaf, position) of tensors, by layer.

  Files written in this order have each layer in one file or in neighbouring files. A shared tensor
  is listed once, for its first parameter.
  """
  groups = sharing(leaves)
  return sorted(
    (leaf.layers[position[0] if leaf.stacked else 0], i, position)
    for i, leaf in enumerate(leaves)
    for position in leaf.positions(whole(leaf))
    if groups[i][0] == i
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
  counts = [sum(counts[i] for i in group) for group in sharing(leaves)]
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

  Parameters are fetched to the host layer by layer. Those that share a tensor are fetched together.

  plan: entries of `by_layer`.
  """
  groups, current, host = sharing(leaves), None, []
  for layer, i, position in plan:
    leaf = leaves[i]
    if (layer, i) != current:
      current, host = (layer, i), []  # Frees the old arrays before fetching.
      parts = [arrays[j] for j in groups[i]]
      host = [np.asarray(sharding.fetch(x[position[0]] if leaf.stacked else x)) for x in parts]
    yield joined([leaves[j] for j in groups[i]], [x[position[1:]] for x in host])
