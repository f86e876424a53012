"""Topologies of TPU chips, and the time that a program needs on one at least."""

import math
import re

import jax

from gspo_jax.system.accelerators import CHIPS, Chip


def sides(topology: str) -> tuple[int, ...]:
  """Chips along each axis of e.g. "v5p:4x4x4"."""
  return tuple(int(n) for n in topology.partition(":")[2].split("x"))


def parse(topology: str) -> tuple[Chip, int]:
  """The chip and their number in a slice of e.g. "v5p:4x4x4". ValueError says what is known."""
  name, _, shape = topology.partition(":")
  if name not in CHIPS or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
    raise ValueError(f"--topology={topology}: want CHIP:AxB or CHIP:AxBxC, CHIP of {list(CHIPS)}")
  return CHIPS[name], math.prod(sides(topology))


def of_mesh(topology: str, mesh: jax.sharding.Mesh) -> tuple[Chip, int]:
  """The chip, and how many of them a mesh of one or several slices has."""
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
  """Seconds that each resource needs at least; `bound` says of what."""
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
  """Seconds that each resource needs at least, which one binds, and utilisation if it were reached.

  `flops` and `useful` are of the whole batch; the bytes are per chip. `ring_bytes` are sent over
  both links of one axis of the torus (`links`: what has only one counts twice). `bound_s` takes all
  collectives to be overlapped; `serial_s` those of `hidden_bytes` and `hidden_network` only, and
  the others to add to the rest. `network_bytes` are those to other slices.
  """
  least = seconds(chip, chips, flops, hbm_bytes, ring_bytes, network_bytes)
  binds = max(least, key=least.get)
  hidden = least["interconnect"] * hidden_bytes / max(ring_bytes, 1e-12)
  beside = least["network"] * hidden_network / max(network_bytes, 1e-12)
  exposed = least["interconnect"] - hidden + least["network"] - beside
  return dict(
    **{f"{name}_s": value for name, value in least.items()},
    binds=binds,
    bound_s=least[binds],
    exposed_s=exposed,
    serial_s=max(least["compute"], least["hbm"], hidden, beside) + exposed,
    mfu=useful / chips / chip.flops / max(least[binds], 1e-12),
  )
