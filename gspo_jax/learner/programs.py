"""Jits the learner's functions with the XLA options chosen by key `compute.xla`.

The options let collectives on TPU overlap with other operations. Other platforms have no options.
"""

from collections.abc import Callable
from typing import Any

import jax

from gspo_jax import sharding
from gspo_jax.settings.model import ComputeConfig

# These options are undocumented. They exist in libtpu 0.0.42, but maybe not in other versions.
OPTIONS = dict(
  # Collectives run on SparseCores (TPU v5p, v6e and tpu7x), in parallel to all other operations.
  sparsecore=dict(
    xla_tpu_enable_async_collective_fusion_fuse_all_gather=False,
    xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter=False,
    xla_tpu_enable_sparse_core_collective_offload_all_gather=True,
    xla_tpu_enable_sparse_core_collective_offload_2d_all_gather=True,
    xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=True,
    xla_tpu_enable_sparse_core_collective_offload_all_reduce=True,
    # Scattering of rows would occupy SparseCores, and delay collectives.
    xla_tpu_enable_offloading_scatter_to_sparsecore=False,
    xla_tpu_use_tc_device_shape_on_sc=True,
    xla_sc_disable_megacore_partitioning=True,
  ),
  # A collective runs during fused operations that are scheduled between its start and its end.
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
  """Returns compiler options for the mesh's platform; {} except on TPU."""
  return OPTIONS[compute.xla] if sharding.platform() == "tpu" else {}


def jit(function: Callable, compute: ComputeConfig, **kwargs: Any) -> Callable:
  """Jits a function with the options of `compute.xla`; `kwargs` as in `jax.jit`."""
  return jax.jit(function, compiler_options=options(compute), **kwargs)
