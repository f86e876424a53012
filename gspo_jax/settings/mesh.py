"""Sections `mesh` and `rollout_mesh`."""

import dataclasses
from typing import Annotated, Literal

from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import Range

AXES = ("data", "fsdp", "expert", "tensor")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices per axis; one of them may be -1: whatever is left.

  rollout_experts: over which chips the sampler's experts are split: `all` of a slice, those of the
    axis `expert`, or `auto`: all, if they divide the experts.
  """

  data: Annotated[int, Range(1, 1_000_000, also=-1)]
  fsdp: Annotated[int, Range(1, 1_000_000, also=-1)]
  expert: Annotated[int, Range(1, 1_000_000, also=-1)]
  tensor: Annotated[int, Range(1, 1_000_000, also=-1)]
  rollout_experts: Literal["auto", "all", "expert"] = "auto"

  def __post_init__(self):
    ranges.check(self, "mesh")


@dataclasses.dataclass(frozen=True)
class RolloutMeshConfig:
  """Devices per axis of a mesh that only samples; one of them may be -1: whatever is left. With 0
  devices, as by default, the sampler is on the mesh of the trainer."""

  data: Annotated[int, Range(0, 1_000_000, also=-1)]
  fsdp: Annotated[int, Range(0, 1_000_000, also=-1)]
  expert: Annotated[int, Range(0, 1_000_000, also=-1)]
  tensor: Annotated[int, Range(0, 1_000_000, also=-1)]

  def __post_init__(self):
    ranges.check(self, "rollout_mesh")

  @property
  def on(self) -> bool:
    return 0 not in _sizes(self)


def _sizes(config: "MeshConfig | RolloutMeshConfig") -> list[int]:
  return [getattr(config, axis) for axis in AXES]
