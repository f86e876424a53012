"""Parses topologies of TPUs and GPUs, and computes lower bounds on a program's time.

A TPU slice is written as CHIP:AxB or CHIP:AxBxC, where A, B and C are the sides of the slice in
chips. GPUs are written as GPU:N or GPU:HOSTSxN, where N is the number of GPUs in each host.
"""

import math
import re

import jax

from gspo_jax.system.accelerators import CHIPS, GPUS, Chip, Device


def sides(topology: str) -> tuple[int, ...]:
  """Returns the numbers of a topology, e.g. (4, 4, 4) for "v5p:4x4x4"."""
  return tuple(int(n) for n in topology.partition(":")[2].split("x"))


def parse(topology: str) -> tuple[Chip, int]:
  """Returns the kind of chip and the number of chips of a topology.

  Raises:
    ValueError: the chip is unknown, the format is wrong, or no slice has such a side.
  """
  name, _, shape = topology.partition(":")
  tpu = name in CHIPS and re.fullmatch(rf"\d+(x\d+){{1,{CHIPS[name].axes - 1}}}", shape)
  gpu = name in GPUS and re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", shape)
  if not tpu and not gpu:
    prefix = re.match("|".join(sorted((*CHIPS, *GPUS), key=len, reverse=True)), topology)
    if prefix and prefix[0] in CHIPS:
      example = f"{prefix[0]}:{'x'.join('442'[: CHIPS[prefix[0]].axes])}"
      raise ValueError(
        f"--topology={topology}: write the sides of the slice in chips, such as {example}"
      )
    if prefix:
      raise ValueError(
        f"--topology={topology}: write the number of GPUs, such as {prefix[0]}:8, or of hosts and "
        f"of GPUs in each, such as {prefix[0]}:2x8"
      )
    raise ValueError(
      f"--topology={topology}: write CHIP:AxB or CHIP:AxBxC, where CHIP is one of "
      f"{', '.join(CHIPS)}, or GPU:N or GPU:HOSTSxN, where GPU is one of {', '.join(GPUS)}"
    )
  if tpu and any(n not in (1, 2) and (n % 4 or not n) for n in sides(topology)):
    raise ValueError(f"--topology={topology}: a side of a slice is 1, 2, or a multiple of 4")
  return (CHIPS | GPUS)[name], math.prod(sides(topology))


def described(topology: str) -> list[Device]:
  """Describes a topology's devices without a compiler.

  Raises:
    ValueError: as `parse`.
  """
  chip, number = parse(topology)
  device = Device("gpu", chip.kinds[0]) if chip.cuda else Device("tpu", chip.kinds[-1])
  return [device] * (number * chip.devices)


def mesh_chips(topology: str, mesh: jax.sharding.Mesh) -> tuple[Chip, int]:
  """Returns the topology's kind of chip, and the number of chips of a mesh."""
  chip, _ = parse(topology)
  return chip, mesh.size // chip.devices


def seconds(
  chip: Chip,
  chips: int,
  flops: float,
  hbm_bytes: float,
  ring_bytes: float = 0.0,
  network_bytes: float = 0.0,
) -> dict[str, float]:
  """Returns the minimum seconds by resource. Arguments are as in `bound`."""
  return dict(
    compute=flops / chips / chip.flops,
    hbm=hbm_bytes / chip.hbm_speed,
    interconnect=ring_bytes / (chip.ring_speed * chip.devices),
    network=network_bytes / chip.network,
  )


def bound(
  chip: Chip,
  chips: int,
  flops: float,
  useful: float,
  hbm_bytes: float,
  ring_bytes: float,
  hidden_bytes: float = 0.0,
  network_bytes: float = 0.0,
  hidden_network: float = 0.0,
) -> dict[str, float | str]:
  """Returns lower bounds on a program's time, and the utilisation at the bound.

  Returns a dict. `compute_s`, `hbm_s`, `interconnect_s` and `network_s` are the times of the four
  resources. Each time is an amount of work divided by the resource's full speed (`Chip`). `binds`
  names the slowest resource, and `bound_s` is its time. This bound assumes that all resources work
  in parallel. `mfu` is `useful` divided by the operations that the chips could do in `bound_s`.

  The other two bounds are about transfers. `exposed_s` is the time of transfers that the compiler
  does not overlap with other work. `serial_s` is `exposed_s` plus the longest time of computation,
  memory traffic or overlapped transfers.

  Args:
    chip: kind of chip.
    chips: number of chips.
    flops: operations of the whole batch, including recomputation.
    useful: operations of the whole batch, excluding recomputation.
    hbm_bytes: bytes that a chip reads from and writes to its memory.
    ring_bytes: bytes that a chip sends within its slice. `Chip.ring_speed` is the speed of both
      links of a torus axis, so bytes that use only one link count twice (`links`).
    hidden_bytes: part of `ring_bytes` that overlaps other work.
    network_bytes: bytes that a chip sends to other slices.
    hidden_network: part of `network_bytes` that overlaps other work.
  """
  least = seconds(chip, chips, flops, hbm_bytes, ring_bytes, network_bytes)
  binds = max(least, key=least.get)
  hidden = least["interconnect"] * hidden_bytes / max(ring_bytes, 1e-12)
  hidden_dcn = least["network"] * hidden_network / max(network_bytes, 1e-12)
  exposed = least["interconnect"] - hidden + least["network"] - hidden_dcn
  return dict(
    **{f"{name}_s": value for name, value in least.items()},
    binds=binds,
    bound_s=least[binds],
    exposed_s=exposed,
    serial_s=max(least["compute"], least["hbm"], hidden, hidden_dcn) + exposed,
    mfu=useful / chips / chip.flops / max(least[binds], 1e-12),
  )
