"""Compiles the learner's programs with the XLA options chosen by `compute.xla`.

On TPU, these options let collectives overlap with other work.
"""

from collections.abc import Callable
from typing import Any

import jax

from gspo_jax import sharding
from gspo_jax.settings.model import ComputeConfig

# Undocumented options of libtpu 0.0.42; another version may not know them.
OPTIONS = dict(
  # Collectives run on SparseCores (v5p, v6e and tpu7x), in parallel to all other work.
  sparsecore=dict(
    xla_tpu_enable_async_collective_fusion_fuse_all_gather=False,
    xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter=False,
    xla_tpu_enable_sparse_core_collective_offload_all_gather=True,
    xla_tpu_enable_sparse_core_collective_offload_2d_all_gather=True,
    xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=True,
    xla_tpu_enable_sparse_core_collective_offload_all_reduce=True,
    # A SparseCore busy with scattering rows would run no collective.
    xla_tpu_enable_offloading_scatter_to_sparsecore=False,
    xla_tpu_use_tc_device_shape_on_sc=True,
    xla_sc_disable_megacore_partitioning=True,
  ),
  # A collective runs during the fusions between its start and its end.
  fusion=dict(
    xla_tpu_enable_async_collective_fusion=True,
    xla_tpu_enable_async_collective_fusion_fuse_all_gather=True,
    xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter=True,
    xla_tpu_enable_async_collective_fusion_multiple_steps=True,
    xla_tpu_overlap_compute_collective_tc=True,
  ),
  none={},
)


def options(compute: ComputeConfig) -> dict[str, bool]:
  """Returns compiler options for the mesh; empty except on TPU."""
  return OPTIONS[compute.xla] if sharding.platform() == "tpu" else {}


def jit(function: Callable, compute: ComputeConfig, **kwargs: Any) -> Callable:
  """Jits a function with the options of `compute.xla`."""
  return jax.jit(function, compiler_options=options(compute), **kwargs)
