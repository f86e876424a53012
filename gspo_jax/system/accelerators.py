"""Speeds and memory sizes of TPUs and NVIDIA GPUs, mostly from data sheets."""

import dataclasses

GIB = 2**30
# Assumed fraction of a GPU's memory for arrays. A run has it only if the environment variable
# XLA_PYTHON_CLIENT_MEM_FRACTION has this value. The rest is for CUDA, buffers of NCCL, and
# workspaces of cuDNN and cuBLAS.
GPU_FRACTION = 0.92


@dataclasses.dataclass(frozen=True)
class Cuda:
  """Properties of an NVIDIA GPU that XLA needs to compile for it."""

  capability: tuple[int, int]
  cores: int  # Streaming multiprocessors.
  lanes: int  # Float32 units of a core.
  shared_memory: int  # Bytes of shared memory of a core.
  cache: int  # Bytes of the L2 cache.


@dataclasses.dataclass(frozen=True)
class Chip:
  """Speeds and sizes of one TPU chip or GPU."""

  flops: float  # bfloat16, per second
  hbm: float  # bytes
  hbm_speed: float  # bytes per second
  ici_speed: float  # bytes per second, summed over all links and both directions
  # Bytes per second in each direction, from a TPU to other slices, or from a GPU to other hosts.
  network: float
  axes: int  # axes of the torus; 1 for GPUs
  clock: float  # cycles per second
  host: str  # value of TPU_ACCELERATOR_TYPE for one host; "" for GPUs
  kinds: tuple[str, ...]  # values of JAX's `Device.device_kind`
  devices: int = 1  # JAX devices of one chip
  vector_memory: int = 16 * 2**20  # the compiler's default limit for a Pallas kernel, in bytes
  cuda: Cuda | None = None  # None for TPUs.

  @property
  def usable(self) -> float:
    """Bytes of the chip's memory that arrays may use."""
    return self.hbm * GPU_FRACTION if self.cuda else self.hbm

  @property
  def ring_speed(self) -> float:
    """Bytes per second that a device sends along one axis of the torus.

    This is the speed in one direction, summed over the axis's two links, one to each neighbour. A
    GPU's NVLink counts as one axis.
    """
    return self.ici_speed / 2 / self.axes / self.devices


_MORE = 32 * 2**20  # the limit of vector memory on later chips

# Values per chip, from https://docs.cloud.google.com/tpu/docs/v5p and the pages of the other chips.
# Speed of memory: some versions of the pages name 800 GB/s for v5e and 1600 GB/s for v6e, other
# versions 819 and 1638. CHIPS has the larger values. The tpu7x page confirms the value for v6e.
# Capacity: n GB on a page count as n GiB.
# Links: the v4 page has no figure. Other sources cite arXiv:2304.01433 for 6 links of 50 GB/s in
# each direction; the table of that paper was not checked. Measured speeds are lower than those in
# CHIPS: a link of v4 and v5e has 45 GB/s instead of 50, and a link of v5p, v6e and tpu7x has 90
# instead of 100 (https://jax-ml.github.io/scaling-book/tpus).
# Network of the data centre: 50 Gbit/s per chip of v5p, 100 Gbit/s per chip of v6e and tpu7x, and
# 6.4 Tbit/s for 256 chips of v5e. The v4 page has no figure, so v4 has the speed of v5p.
# Clock: the frequency at which the matrix units reach the peak.
CHIPS = {
  "v4": Chip(275e12, 32 * GIB, 1.2e12, 600e9, 6.25e9, 3, 1.05e9, "v4-8", ("TPU v4",)),
  "v5e": Chip(197e12, 16 * GIB, 0.819e12, 400e9, 3.125e9, 2, 1.5e9, "v5litepod-4",
              ("TPU v5 lite", "TPU v5e")),
  "v5p": Chip(459e12, 95 * GIB, 2.765e12, 1200e9, 6.25e9, 3, 1.75e9, "v5p-8",
              ("TPU v5", "TPU v5p")),
  "v6e": Chip(918e12, 32 * GIB, 1.638e12, 800e9, 12.5e9, 2, 1.75e9, "v6e-4",
              ("TPU v6 lite", "TPU v6e"), vector_memory=_MORE),
  "tpu7x": Chip(2307e12, 192 * GIB, 7.38e12, 1200e9, 12.5e9, 3, 2.2e9, "tpu7x-8",
                ("TPU7x",), devices=2, vector_memory=_MORE),
}  # fmt: skip


_HOPPER = Cuda((9, 0), 132, 128, 228 * 1024, 50 * 2**20)
_AMPERE = Cuda((8, 0), 108, 64, 164 * 1024, 40 * 2**20)
_BLACKWELL = Cuda((10, 0), 148, 128, 228 * 1024, 126 * 2**20)

# Values from NVIDIA's data sheets of the SXM modules. FLOP/s are those of dense bfloat16 without
# sparsity. The speed of NVLink is the sum of both directions. Each GPU of a DGX has one network
# adapter, with 200 Gbit/s for A100 and 400 Gbit/s for the other GPUs. Switches connect all GPUs of
# a host by NVLink, so there is one axis. The memory is the size that CUDA reports. Its number of
# GiB is a little below the data sheet's number of GB.
GPUS = {
  "a100": Chip(312e12, 79.2 * GIB, 2.039e12, 600e9, 25e9, 1, 1.41e9, "",
               ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), cuda=_AMPERE),
  "a100-40": Chip(312e12, 39.4 * GIB, 1.555e12, 600e9, 25e9, 1, 1.41e9, "",
                  ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), cuda=_AMPERE),
  "h100": Chip(989e12, 79.1 * GIB, 3.35e12, 900e9, 50e9, 1, 1.98e9, "",
               ("NVIDIA H100 80GB HBM3",), cuda=_HOPPER),
  "h200": Chip(989e12, 139.8 * GIB, 4.8e12, 900e9, 50e9, 1, 1.98e9, "",
               ("NVIDIA H200",), cuda=_HOPPER),
  "b200": Chip(2250e12, 178.3 * GIB, 7.7e12, 1800e9, 50e9, 1, 1.965e9, "",
               ("NVIDIA B200",), cuda=_BLACKWELL),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Device:
  """Description of an absent device, with attributes of `jax.Device`."""

  platform: str  # "tpu" or "gpu"
  device_kind: str
  process_index: int = 0

  def memory_stats(self) -> dict[str, float]:
    return dict(bytes_limit=memory(self.device_kind))


def peak_flops(kind: str) -> float | None:
  """Returns the peak FLOP/s of one device in bfloat16. None for an unknown device.

  For another board of a GPU in GPUS, such as "NVIDIA H100 PCIe", returns the SXM module's peak.

  Args:
    kind: `Device.device_kind`.
  """
  if chip := find(kind):
    return chip.flops / chip.devices
  boards = (gpu.flops for name, gpu in GPUS.items() if kind.startswith(f"NVIDIA {name.upper()}"))
  return next(boards, None)


def memory(kind: str) -> float | None:
  """Returns the bytes for arrays on one JAX device. None for an unknown `kind`."""
  chip = find(kind)
  return chip and chip.usable / chip.devices


def vector_memory(kind: str) -> int:
  """Returns the vector memory that a Pallas kernel may use on one TPU device, in bytes.

  Returns 16 MiB, the smallest value, for an unknown `kind`.
  """
  return (find(kind) or Chip).vector_memory


def find(kind: str) -> Chip | None:
  """Returns the chip of a device. None for an unknown `kind`."""
  chips = (*CHIPS.values(), *GPUS.values())
  return next((chip for chip in chips if kind in chip.kinds), None)
