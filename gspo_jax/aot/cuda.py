"""Describes NVIDIA GPUs to XLA's compiler, on a machine without GPUs."""

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator

from jax._src.cudnn import fused_attention_stablehlo as fused_attention
from jax.experimental import topologies

from gspo_jax.aot import chips
from gspo_jax.system.accelerators import Chip

CUDA, CUDNN = "13.0.0", "9.19.0"  # Versions installed by the extra aot-cuda.
# GpuTargetConfigProto of XLA in text format. `chip` is a GPU's entry in `system/accelerators.py`;
# `cuda` is this entry's field. Numbers in this text are the same for all supported GPUs.
TEXT = """gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {cuda.shared_memory}
  shared_memory_per_block_optin: {block_memory}
  threads_per_core_limit: 2048
  core_count: {cuda.cores}
  fpus_per_core: {cuda.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {chip.hbm_speed:.0f}
  l2_cache_size: {cuda.cache}
  clock_rate_ghz: {clock_rate}
  device_memory_size: {chip.hbm:.0f}
  cuda_compute_capability {{ major: {cuda.capability[0]} minor: {cuda.capability[1]} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  dnn_version: "{dnn}"
  driver_version: "{version}"
  runtime_version: "{version}"
  compile_time_toolkit_version: "{version}"
  name: "{name}"
}}
platform_name: "CUDA"
device_description_str: "{name}"
"""


def target_text(chip: Chip) -> str:
  """Returns a GPU's GpuTargetConfigProto in text format."""
  return TEXT.format(
    chip=chip,
    cuda=chip.cuda,
    block_memory=chip.cuda.shared_memory - 1024,  # CUDA reserves 1 KiB per block.
    clock_rate=chip.clock / 1e9,
    version=CUDA,
    dnn=CUDNN,
    name=chip.kinds[0],
  )


def devices_of(topology: str, target: str = "") -> list:
  """Returns descriptions of a topology's GPUs, e.g. for "h100:8" or "h100:2x8".

  target: GpuTargetConfigProto in text format; "" means the result of `target_text`.

  Raises:
    ValueError: the extra aot-cuda is not installed, or XLA refuses the description.
  """
  chip, _ = chips.parse(topology)
  hosts, number = (1, *chips.sides(topology))[-2:]
  shape = f"1x{hosts}x{number}"
  with _native_stderr() as output:
    try:
      description = topologies.get_topology_desc(
        platform="cuda", topology=shape, target_config=target or target_text(chip)
      )
      return list(description.devices)
    except NotImplementedError as error:
      raise ValueError(
        f"--topology={topology}: the compiler for GPUs is missing; install it with pip install -e "
        "'.[aot-cuda]'"
      ) from error
    except Exception as error:  # The plugin may raise any type.
      reason = str(error).splitlines()[0] if str(error) else type(error).__name__
      # XLA prints line and column of a syntax error in `target` on stderr alone.
      detail = re.search(r"Proto: (.*)", output())
      raise ValueError(
        f"--topology={topology}: {reason}{' ' + detail[1] if detail else ''}"
      ) from error


@contextlib.contextmanager
def tracing_for(chip: Chip) -> Iterator[None]:
  """Lets JAX trace cuDNN's attention for another chip than the local device.

  The supported widths of heads depend on a GPU's compute capability. JAX 0.10 always checks the
  capability of the local GPU. On a machine without GPUs, JAX refuses heads wider than 128. So this
  context replaces JAX's private check by a check of the capability of `chip`.
  """

  def supports(capability: str) -> bool:
    return chip.cuda is not None and chip.cuda.capability >= tuple(map(int, capability.split(".")))

  original = fused_attention.check_compute_capability
  fused_attention.check_compute_capability = supports
  try:
    yield
  finally:
    fused_attention.check_compute_capability = original


@contextlib.contextmanager
def _native_stderr() -> Iterator[Callable[[], str]]:
  """Captures the process's stderr, including output of native code.

  Yields a function that returns the captured text.
  """
  stderr = os.dup(2)
  with tempfile.TemporaryFile() as file:

    def read() -> str:
      file.seek(0)
      return file.read().decode(errors="replace")

    os.dup2(file.fileno(), 2)
    try:
      yield read
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)
