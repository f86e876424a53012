"""Speed of a collective over the links of its chips.

The chips of a TPU slice form a torus, with two links per chip along each axis. The share of a
collective is the fraction of an axis' speed that the collective uses:

  1    Chips send over both links of an axis. This is so if the collective spans several axes, or
       a whole side of the slice with wraparound links (a ring).
  1/2  Chips send over one link of an axis. This is so if the collective spans one axis alone, and
       does not span a whole side with wraparound links. It is also so for permutations, since each
       chip sends in one direction.

On v4, v5p and tpu7x, all sides of a slice have wraparound links if each side is a multiple of 4
chips. Otherwise no side has them (https://docs.cloud.google.com/tpu/docs/v5p: "All 4x4x4 and larger
slices have full 3D torus"). On v5e and v6e, sides of 16 chips have wraparound links
(https://jax-ml.github.io/scaling-book/tpus). A twisted torus counts as a plain torus.

The GPUs of a host are connected by switches, so their collectives have a share of 1. Between hosts,
each GPU sends an equal part of a collective through its own network adapter.

The devices of a compiled program are its partitions, numbered in the order of the mesh.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np

from gspo_jax.aot import chips


@dataclasses.dataclass(frozen=True)
class Torus:
  """Links between the chips of a TPU slice."""

  sides: tuple[int, ...]  # Chips along each axis of the slice.
  coords: tuple[tuple[int, ...], ...]  # Coordinates of each partition's chip.

  @functools.cached_property
  def joined(self) -> tuple[bool, ...]:
    """Whether each side has wraparound links."""
    if len(self.sides) == 3:
      return (all(side % 4 == 0 for side in self.sides),) * 3
    return tuple(side == 16 for side in self.sides)

  def share(self, members: Sequence[int], one_way: bool = False) -> float:
    """Returns the share of an axis' speed for a collective.

    Args:
      members: partitions that take part. If all are on one chip, the share is 1.
      one_way: whether each chip sends in one direction only, as in a permutation.
    """
    spans = [len(set(xs)) for xs in zip(*(self.coords[i] for i in members))]
    spanned = [axis for axis, span in enumerate(spans) if span > 1]
    if one_way and spanned:
      return 0.5
    if len(spanned) != 1:
      return 1.0
    (axis,) = spanned
    return 1.0 if spans[axis] == self.sides[axis] and self.joined[axis] else 0.5

  def network(self, kind: str, members: Sequence[int]) -> float:
    """Returns a chip's bytes over a network, per byte of a collective.

    The result is 0, since the links of a slice also connect its hosts.
    """
    return 0.0


@dataclasses.dataclass(frozen=True)
class Switches:
  """Links between GPUs: switches within a host, a network between hosts."""

  hosts: tuple[int, ...]  # Host of each partition's GPU.

  def share(self, members: Sequence[int], one_way: bool = False) -> float:
    """Returns the share of NVLink's speed for a collective."""
    return 1.0

  def network(self, kind: str, members: Sequence[int]) -> float:
    """Returns a GPU's minimum bytes to other hosts, per byte of a collective.

    Args:
      kind: one of `traffic.COLLECTIVES`.
      members: partitions that take part. Each host has the same number of them.
    """
    per_host = [self.hosts[i] for i in members].count(self.hosts[members[0]])
    outside = 1 - per_host / len(members)  # Fraction of members on other hosts.
    if kind == "collective-permute":
      return float(outside > 0)
    factors = {"all-to-all": 1.0, "all-reduce": 2 / per_host}
    return outside * factors.get(kind, 1 / per_host)


Links: TypeAlias = Torus | Switches


def torus_of(topology: str, mesh: jax.sharding.Mesh) -> Links:
  """Returns the links between the devices of a mesh.

  Devices without coordinates, such as simulated ones, count as one chip.

  topology: chips of one slice, e.g. "v5p:4x4x4", or GPUs, e.g. "h100:2x8".
  """
  if chips.parse(topology)[0].cuda:
    return Switches(tuple(device.process_index for device in mesh.devices.flat))
  sides = chips.sides(topology)
  nowhere = (0,) * len(sides)
  coords = (getattr(device, "coords", nowhere) for device in mesh.devices.flat)
  return Torus(sides, tuple(tuple(place[: len(sides)]) for place in coords))


def along(mesh: jax.sharding.Mesh, axis: str) -> list[int]:
  """Returns the partitions along a mesh axis, starting at the first device."""
  partitions = np.arange(mesh.size).reshape(mesh.devices.shape)
  index = tuple(slice(None) if name == axis else 0 for name in mesh.axis_names)
  return partitions[index].tolist()


def members(text: str) -> list[int]:
  """Returns the partitions of a collective's first group.

  For a permutation this is the first pair of source and target. Returns [] for an instruction
  without groups.

  text: attributes of the instruction in HLO text.
  """
  if match := re.search(r"(?:source_target_pairs|replica_groups)=\{\{([\d,]*)\}", text):
    return [int(n) for n in match[1].split(",")]
  if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
    size = int(match[2])
    return _order(match[3], match[4]).reshape(-1, size)[0].tolist()
  if match := re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", text):
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
    together = re.findall(r"'(\w+)'", match[2])
    turned = re.search(r"device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\)", match[0])
    order = _order(*turned.groups()) if turned else np.arange(math.prod(sizes.values()))
    order = order.reshape(*sizes.values())
    last = [list(sizes).index(axis) for axis in together]
    order = np.moveaxis(order, last, range(-len(last), 0))
    return order.reshape(-1, math.prod(sizes[axis] for axis in together))[0].tolist()
  return []


def _order(shape: str, transposed: str | None) -> np.ndarray:
  """Returns the partitions listed by HLO in short form.

  For example, [2,4]T(1,0) lists the partitions 0, 4, 1, 5, 2, 6, 3 and 7.

  Args:
    shape: shape to which the partitions 0, 1, ... are reshaped, e.g. "2,4".
    transposed: order of axes after a transpose, e.g. "1,0"; None for no transpose.
  """
  order = np.arange(math.prod(int(n) for n in shape.split(",")))
  if not transposed:
    return order
  axes = [int(n) for n in transposed.split(",")]
  return order.reshape([int(n) for n in shape.split(",")]).transpose(axes).ravel()
