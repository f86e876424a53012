"""Accelerators: speeds and sizes, from their data sheets."""

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  flops: float  # bfloat16, per second
  hbm: float  # bytes
  hbm_speed: float  # bytes per second
  ici_speed: float  # bytes per second, sum over links, both directions
  network: float  # bytes per second to other slices, each way: a chip's share of its host's
  axes: int  # axes of the torus
  clock: float  # cycles per second
  host: str  # value of TPU_ACCELERATOR_TYPE for one host
  kinds: tuple[str, ...]  # JAX's names of a device
  devices: int = 1  # JAX devices of one chip
  vector_memory: int = 16 * 2**20  # default limit of a kernel in its compiler

  @property
  def ring_speed(self) -> float:
    """Bytes per second of a device over both links of a torus axis."""
    return self.ici_speed / 2 / self.axes / self.devices


_MORE = 32 * 2**20  # vector memory of a kernel on later chips

# As https://docs.cloud.google.com/tpu/docs/v5p and the other chips' pages give them, per chip.
# Where versions of a page differ: v5e's and v6e's 800 and 1600 GB/s are also printed as 819 and
# 1638, 1.024 times as much, which is what the tpu7x page has for v6e; the GB of capacities are
# GiB. The v4 page has no figure for the links: 6 of 50 GB/s each way is what others quote from
# arXiv:2304.01433, whose table we have not seen. Links in use reach less:
# https://jax-ml.github.io/scaling-book/tpus has 45 GB/s for each of v4 and v5e, and 90 for v5p,
# v6e and tpu7x, where the pages give 50 and 100. The network of the data centre: 50 Gbit/s a chip
# of v5p, 100 of v6e and tpu7x, 6.4 Tbit/s for the 256 chips of v5e; v4's page has no figure, and
# v5p's is taken. The clock is that at which the matrix units make the peak.
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


# Dense bfloat16 without sparsity, per second: data sheets of NVIDIA's SXM modules.
GPUS = {"NVIDIA A100": 312e12, "NVIDIA H100": 989e12, "NVIDIA H200": 989e12}


def peak_flops(kind: str) -> float | None:
  """Peak of one device, bfloat16, per second; None if `kind` (`Device.device_kind`) is unknown."""
  if chip := _chip(kind):
    return chip.flops / chip.devices
  return next((peak for name, peak in GPUS.items() if kind.startswith(name)), None)


def memory(kind: str) -> float | None:
  """Bytes of one device, as JAX counts devices; None if `kind` is unknown."""
  chip = _chip(kind)
  return chip and chip.hbm / chip.devices


def vector_memory(kind: str) -> int:
  """Bytes of vector memory for a Pallas kernel on one device.

  For an unknown `kind` it is the minimum.
  """
  return (_chip(kind) or Chip).vector_memory


def _chip(kind: str) -> Chip | None:
  return next((chip for chip in CHIPS.values() if kind in chip.kinds), None)
