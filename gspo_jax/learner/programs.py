"""How the learner's programs are compiled: with options of XLA for TPU that let collectives run
beside other work, as `compute.xla` names them."""

from collections.abc import Callable
from typing import Any

import jax

from gspo_jax import sharding
from gspo_jax.settings.model import ComputeConfig

# Of libtpu 0.0.42, which says nothing about them; another version may refuse one by its name.
OPTIONS = dict(
  # It runs on the chip's SparseCores, which v5p, v6e and tpu7x have, whatever runs beside.
  sparsecore=dict(
    xla_tpu_enable_async_collective_fusion_fuse_all_gather=False,
    xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter=False,
    xla_tpu_enable_sparse_core_collective_offload_all_gather=True,
    xla_tpu_enable_sparse_core_collective_offload_2d_all_gather=True,
    xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=True,
    xla_tpu_enable_sparse_core_collective_offload_all_reduce=True,
    # Where they were scattering rows, no collective would run.
    xla_tpu_enable_offloading_scatter_to_sparsecore=False,
    xla_tpu_use_tc_device_shape_on_sc=True,
    xla_sc_disable_megacore_partitioning=True,
  ),
  # A collective is started, carried along by fusions that follow, and waited for.
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
  """Options of the compiler, on the platform of the mesh in use."""
  return OPTIONS[compute.xla] if sharding.platform() == "tpu" else {}


def jit(function: Callable, compute: ComputeConfig, **kwargs: Any) -> Callable:
  """`jax.jit` with these options."""
  return jax.jit(function, compiler_options=options(compute), **kwargs)
