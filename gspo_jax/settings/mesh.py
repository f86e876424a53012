"""Sections `mesh` and `rollout_mesh`."""

import dataclasses
from typing import Annotated, Literal

from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import Range, key

AXES = ("data", "fsdp", "expert", "tensor")

Devices = Annotated[int, Range(1, 1_000_000, also=-1)]
AnyDevices = Annotated[int, Range(0, 1_000_000, also=-1)]


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices per axis; -1 in one axis: all remaining devices."""

  data: Devices = key(1, "replicas; a multiple of the number of TPU slices")
  fsdp: Devices = key(-1, "shards of weights and of a batch's rows")
  expert: Devices = key(1, "shards of the experts, and of rows")
  tensor: Devices = key(1, "shards of heads and layer widths")
  rollout_experts: Literal["auto", "all", "fsdp", "expert"] = key(
    "auto",
    "devices over which the sampler's experts are split: all of a slice | those of the axis fsdp "
    "or expert | auto: all, if they divide the number of experts, else expert",
  )

  def __post_init__(self):
    ranges.check(self, "mesh")


@dataclasses.dataclass(frozen=True)
class RolloutMeshConfig:
  """Devices per axis of the sampler's own mesh, after the devices of `mesh`. -1 in one axis: all
  remaining devices; 0: the sampler uses the trainer's mesh. docs/asynchronous.md"""

  data: AnyDevices = key(1, "as mesh.data")
  fsdp: AnyDevices = key(0, "as mesh.fsdp; 0: the sampler uses the trainer's mesh")
  expert: AnyDevices = key(1, "as mesh.expert")
  tensor: AnyDevices = key(1, "as mesh.tensor")

  def __post_init__(self):
    ranges.check(self, "rollout_mesh")

  @property
  def enabled(self) -> bool:
    return 0 not in axis_sizes(self)


def axis_sizes(config: MeshConfig | RolloutMeshConfig) -> list[int]:
  """Devices per axis, in the order of AXES."""
  return [getattr(config, axis) for axis in AXES]
