"""Meshes of real devices, or of absent devices that `accelerators.Device` describes."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from gspo_jax.system.accelerators import Device


def abstract_mesh(device: Device, sizes: Sequence[int], axes: tuple[str, ...]) -> AbstractMesh:
  """Builds a mesh of absent devices, all like `device`, with explicit axes."""
  types = (AxisType.Explicit,) * len(axes)
  abstract = AbstractDevice(device.device_kind, None, device.platform)
  return AbstractMesh(tuple(sizes), axes, types, abstract_device=abstract)


def mesh_devices(mesh: jax.sharding.Mesh | AbstractMesh) -> list[Any]:
  """Returns the devices of a mesh, or descriptions of an abstract mesh's devices."""
  if not isinstance(mesh, AbstractMesh):
    return list(mesh.devices.flat)
  device = mesh.abstract_device
  return [Device(device.platform, device.device_kind)] * mesh.size


def use_mesh(mesh: jax.sharding.Mesh | AbstractMesh) -> contextlib.AbstractContextManager[Any]:
  """Returns a context that sets the current mesh. The mesh may be abstract."""
  abstract = isinstance(mesh, AbstractMesh)
  return jax.sharding.use_abstract_mesh(mesh) if abstract else jax.set_mesh(mesh)
