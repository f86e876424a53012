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
  """Devices per axis; one of them may be -1: whatever is left."""

  data: Devices = key(1, "replicas; of several TPU slices, a multiple of their number")
  fsdp: Devices = key(-1, "devices that share weights and the rows of a batch")
  expert: Devices = key(1, "devices that share the experts, and rows")
  tensor: Devices = key(1, "devices that share heads and widths of layers")
  rollout_experts: Literal["auto", "all", "expert"] = key(
    "auto",
    "chips that the sampler's experts are split over: all of a slice, those of the axis expert, "
    "or auto: all, if they divide the experts",
  )

  def __post_init__(self):
    ranges.check(self, "mesh")


@dataclasses.dataclass(frozen=True)
class RolloutMeshConfig:
  """Devices per axis of a mesh that only samples, after those of `mesh`; one of them may be -1:
  whatever is left. With 0 devices the sampler has the trainer's. docs/asynchronous.md"""

  data: AnyDevices = key(1, "as mesh.data")
  fsdp: AnyDevices = key(0, "as mesh.fsdp; 0: the sampler is on the mesh of the trainer")
  expert: AnyDevices = key(1, "as mesh.expert")
  tensor: AnyDevices = key(1, "as mesh.tensor")

  def __post_init__(self):
    ranges.check(self, "rollout_mesh")

  @property
  def on(self) -> bool:
    return 0 not in _sizes(self)


def _sizes(config: "MeshConfig | RolloutMeshConfig") -> list[int]:
  return [getattr(config, axis) for axis in AXES]
