"""Chips of a collective, and its share of the speed of a torus axis.

A chip has two links along each axis. In a ring it sends over both: a share of 1. Rings are whole
sides of the slice with wraparound links, and groups over several sides. Otherwise the share is 1/2:
for a row of chips without wraparound (its last chip receives over one link), for a group with other
chips in between, and for a permutation (each chip sends in one direction).

Wraparound: all sides of v4, v5p and tpu7x slices of cubes of 4x4x4, none of smaller ones
(https://docs.cloud.google.com/tpu/docs/v5p: "All 4x4x4 and larger slices have full 3D torus");
sides of 16 on v5e and v6e (https://jax-ml.github.io/scaling-book/tpus). Twisted tori count as
plain ones.

GPUs of a host are joined by switches: a share of 1 for any of them. Between hosts, equal parts of a
collective go through the network adapters of its members on each host.
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
  """Coordinates of a mesh's chips, in the order of a program's partitions."""

  sides: tuple[int, ...]
  coords: tuple[tuple[int, ...], ...]

  @functools.cached_property
  def joined(self) -> tuple[bool, ...]:
    """Whether each side has wraparound links."""
    if len(self.sides) == 3:
      return (all(side % 4 == 0 for side in self.sides),) * 3
    return tuple(side == 16 for side in self.sides)

  def share(self, members: Sequence[int], one_way: bool = False) -> float:
    """Share of an axis' speed for a collective of these partitions; 1 on one chip."""
    spans = [len(set(xs)) for xs in zip(*(self.coords[i] for i in members))]
    spanned = [axis for axis, span in enumerate(spans) if span > 1]
    if one_way and spanned:
      return 0.5
    if len(spanned) != 1:
      return 1.0
    (axis,) = spanned
    return 1.0 if spans[axis] == self.sides[axis] and self.joined[axis] else 0.5

  def network(self, kind: str, members: Sequence[int]) -> float:
    """Share of a collective's bytes for other hosts: none, a slice has links between them."""
    return 0.0


@dataclasses.dataclass(frozen=True)
class Switches:
  """Hosts of a mesh's GPUs, in the order of a program's partitions."""

  hosts: tuple[int, ...]

  def share(self, members: Sequence[int], one_way: bool = False) -> float:
    """Share of NVLink's speed for a collective."""
    return 1.0

  def network(self, kind: str, members: Sequence[int]) -> float:
    """Least bytes per GPU for other hosts, per byte of the collective."""
    near = [self.hosts[i] for i in members].count(self.hosts[members[0]])
    outside = 1 - near / len(members)
    if kind == "collective-permute":
      return float(outside > 0)
    factors = {"all-to-all": 1.0, "all-reduce": 2 / near}
    return outside * factors.get(kind, 1 / near)


Links: TypeAlias = Torus | Switches


def torus_of(topology: str, mesh: jax.sharding.Mesh) -> Links:
  """Returns the links of a mesh of a topology's devices, e.g. "v5p:4x4x4".

  Devices without coordinates (simulated ones) count as one chip.
  """
  if chips.parse(topology)[0].cuda:
    return Switches(tuple(device.process_index for device in mesh.devices.flat))
  sides = chips.sides(topology)
  nowhere = (0,) * len(sides)
  coords = (getattr(device, "coords", nowhere) for device in mesh.devices.flat)
  return Torus(sides, tuple(tuple(place[: len(sides)]) for place in coords))


def along(mesh: jax.sharding.Mesh, axis: str) -> list[int]:
  """Returns the partitions along a mesh axis, starting at the first device."""
  place = np.arange(mesh.size).reshape(mesh.devices.shape)
  index = tuple(slice(None) if name == axis else 0 for name in mesh.axis_names)
  return place[index].tolist()


def members(text: str) -> list[int]:
  """Returns the partitions of a collective's first group, parsed from its text.

  For a permutation it is the first pair; [] for a text without groups.
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
  """Partitions in the order of e.g. [2,4] or [2,4]T(1,0)."""
  order = np.arange(math.prod(int(n) for n in shape.split(",")))
  if not transposed:
    return order
  axes = [int(n) for n in transposed.split(",")]
  return order.reshape([int(n) for n in shape.split(",")]).transpose(axes).ravel()
