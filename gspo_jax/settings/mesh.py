"""Sections `mesh` and `rollout_mesh`."""

from typing import Annotated, Literal

from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import Range, key

AXES = ("data", "fsdp", "expert", "tensor")

Devices = Annotated[int, Range(1, 1_000_000, also=-1)]
AnyDevices = Annotated[int, Range(0, 1_000_000, also=-1)]


@ranges.section("mesh")
class MeshConfig:
  """Number of devices on each axis of the mesh. One axis may have -1: all remaining devices."""

  data: Devices = key(1, "number of replicas; a multiple of the number of TPU slices")
  fsdp: Devices = key(-1, "number of shards of the weights, and of a batch's rows")
  expert: Devices = key(1, "number of shards of the experts, and of a batch's rows")
  tensor: Devices = key(1, "number of shards of attention heads and layer widths")
  rollout_experts: Literal["auto", "all", "fsdp", "expert"] = key(
    "auto",
    "devices over which the sampler splits the experts. all: all devices of a slice | fsdp: "
    "those of axis fsdp | expert: those of axis expert | auto: like all if this splits the "
    "experts evenly, else like expert",
  )


@ranges.section("rollout_mesh")
class RolloutMeshConfig:
  """Number of devices on each axis of the sampler's own mesh. The trainer takes the first devices,
  and the sampler the next ones. One axis may have -1: all remaining devices. If an axis has 0, the
  sampler uses the trainer's mesh. docs/asynchronous.md"""

  data: AnyDevices = key(1, "as mesh.data")
  fsdp: AnyDevices = key(0, "as mesh.fsdp; 0: the sampler uses the trainer's mesh")
  expert: AnyDevices = key(1, "as mesh.expert")
  tensor: AnyDevices = key(1, "as mesh.tensor")

  @property
  def enabled(self) -> bool:
    return 0 not in axis_sizes(self)


def axis_sizes(config: MeshConfig | RolloutMeshConfig) -> list[int]:
  """Devices per axis, in the order of AXES."""
  return [getattr(config, axis) for axis in AXES]
