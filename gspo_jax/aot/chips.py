"""Topologies of TPUs and GPUs, and lower bounds of a program's time on one."""

import math
import re

import jax

from gspo_jax.system.accelerators import CHIPS, GPUS, Chip, Device


def sides(topology: str) -> tuple[int, ...]:
  """Returns the chips along each axis of e.g. "v5p:4x4x4"; hosts and GPUs of "h100:2x8"."""
  return tuple(int(n) for n in topology.partition(":")[2].split("x"))


def parse(topology: str) -> tuple[Chip, int]:
  """Returns chip and number of chips of e.g. "v5p:4x4x4" or "h100:2x8".

  Raises:
    ValueError: lists the supported chips and the format.
  """
  name, _, shape = topology.partition(":")
  tpu = name in CHIPS and re.fullmatch(r"\d+(x\d+){1,2}", shape)
  gpu = name in GPUS and re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", shape)
  if not tpu and not gpu:
    raise ValueError(
      f"--topology={topology}: write CHIP:AxB or CHIP:AxBxC, CHIP one of {list(CHIPS)}, or GPU:N "
      f"or GPU:HOSTSxN, GPU one of {list(GPUS)}"
    )
  return (CHIPS | GPUS)[name], math.prod(sides(topology))


def described(topology: str) -> list[Device]:
  """Describes a topology's devices without a compiler. Raises ValueError as `parse`."""
  chip, number = parse(topology)
  return [Device("gpu" if chip.cuda else "tpu", chip.kinds[0])] * (number * chip.devices)


def mesh_chips(topology: str, mesh: jax.sharding.Mesh) -> tuple[Chip, int]:
  """Returns chip and number of chips of a mesh of one or several slices."""
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
  """Returns the minimum seconds of each resource; arguments as in `bound`."""
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
  """Returns minimum seconds per resource, the binding resource, and utilisation.

  `flops` and `useful` are for the whole batch; the bytes are per chip. `ring_bytes` are sent over
  both links of one axis of the torus (`links`: with a single link they count twice).
  `network_bytes` go to other slices. `bound_s` assumes that all collectives are overlapped with
  other work. `serial_s` assumes it of `hidden_bytes` and `hidden_network` alone, and adds the
  seconds of the others. `mfu` is the utilisation at `bound_s`.
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
