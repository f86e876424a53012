"""Compiles programs for a TPU topology on a machine without TPUs, and says what they need."""

import dataclasses
import os
import re
import time
from typing import Any

import jax
from jax.experimental import topologies

from gspo_jax import sharding
from gspo_jax.aot import chips, hlo_costs, links
from gspo_jax.aot.estimate import held
from gspo_jax.aot.programs import Case, Program
from gspo_jax.models import transformer
from gspo_jax.system.accelerators import GIB


def devices_of(topology: str, slices: int = 1) -> list:
  """Descriptions of the devices of a topology, or of several slices of it. ValueError without
  libtpu or with a wrong name."""
  chip, number = chips.parse(topology)
  os.environ.update(
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE=chip.host,
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # nothing is executed: several may compile at once
  )
  # A v4 chip is one device to a run, but two to this compiler unless its cores are joined.
  options = dict(chip_config_name="megacore") if topology.startswith("v4:") else {}
  if number == 1:  # a whole host has four
    options["chips_per_host_bounds"] = (1, 1, 1)
  if slices > 1:
    options["num_slices"] = slices
  try:
    return list(topologies.get_topology_desc(topology, "tpu", **options).devices)
  except Exception as error:  # whatever the plugin raises
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise ValueError(
      f"--topology={topology}: {reason} (is libtpu installed? pip install -e '.[tpu]')"
    ) from error


def check(case: Case, mesh: jax.sharding.Mesh) -> None:
  """ValueError if rows or weights do not divide over the mesh."""
  shards = sharding.batch_shards(mesh)
  if case.rows % shards:
    raise ValueError(
      f"{case.rows} sequences of a micro-batch do not divide over the {shards} devices of "
      "mesh.data x mesh.fsdp x mesh.expert: change mesh, sequences or micro-batches"
    )
  transformer.shardings(case.model, sharding.TRAIN, mesh)


@dataclasses.dataclass(frozen=True)
class Compiled:
  row: dict[str, Any]  # of a report
  costs: hlo_costs.Costs = dataclasses.field(default_factory=hlo_costs.Costs)
  text: str = ""  # "": it did not compile


def examine(program: Program, topology: str, remat: str) -> Compiled:
  """Memory per chip, work, traffic and the time that they need at least; of one turn, if the
  program is a loop of several."""
  mesh = jax.sharding.get_mesh()
  chip, number = chips.of_mesh(topology, mesh)
  per_chip = chip.devices  # two on chips whose cores are apart
  started = time.perf_counter()
  slices = len(set(map(sharding.slice_of, mesh.devices.flat)))
  row: dict[str, Any] = dict(fits=False, hbm_gib=chip.hbm / GIB, slices=slices)
  try:
    compiled = program.function.trace(*program.arguments).lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    row |= too_little(str(error)) | dict(compile_s=time.perf_counter() - started)
    return Compiled(row)
  memory, text = compiled.memory_analysis(), compiled.as_text()
  torus = links.torus_of(topology, mesh)
  costs = hlo_costs.costs(text, program.rates, torus, chip)
  peak = memory.peak_memory_in_bytes + memory.generated_code_size_in_bytes
  row["peak_gib"] = peak * per_chip / GIB
  row["held_gib"] = held(program.held) * per_chip / GIB
  needed = row["peak_gib"] + row["held_gib"]
  row["fits"] = needed <= row["hbm_gib"]
  if not row["fits"]:
    row["error"] = f"needs {needed:.1f} GiB a chip of {row['hbm_gib']:.0f}"
  useful = flops = 0.0
  if program.work:
    useful = program.work.training() if program.trains else program.work.forward()
    flops = program.work.executed(remat) if program.trains else useful
  useful, flops = useful / program.turns, flops / program.turns
  scale = per_chip / program.turns

  def bound(moved: float) -> dict[str, float | str]:
    return chips.bound(
      chip,
      number,
      flops,
      useful,
      moved * scale,
      costs.ring_wire * scale,
      costs.ring_hidden * scale,
      costs.network * scale,
      costs.network_hidden * scale,
    )

  row |= dict(
    compile_s=time.perf_counter() - started,
    model_flops=useful,
    executed_flops=flops,
    hbm_bytes=costs.memory * scale,
    wire_bytes=costs.wire * scale,
    hidden_bytes=costs.hidden * scale,
    network_bytes=costs.network / program.turns * _of_a_host(mesh),
    collectives={
      kind: dict(count=costs.count[kind] / program.turns, bytes=costs.moved[kind] * scale)
      for kind in sorted(costs.count)
    },
    **bound(costs.memory),
  )
  if program.of_slots:
    idle = costs.memory - hlo_costs.of_kernel(costs, program.of_slots)
    row["idle_s"] = bound(idle)["serial_s"]
  return Compiled(row, costs, text)


def _of_a_host(mesh: jax.sharding.Mesh) -> int:
  """Devices of the mesh that the first device's host has."""
  hosts = [device.process_index for device in mesh.devices.flat]
  return hosts.count(hosts[0])


def too_little(error: str) -> dict[str, Any]:
  """What the compiler had too little of, in short; and whether one kernel had, of vector memory,
  which says nothing about what the whole program needs."""
  line = next((x for x in error.splitlines() if "exceed" in x.lower()), error).strip()
  kernel = re.search(r"memory space vmem .*?(%\S+ = \w+\[[\d,]*\])", line)
  if kernel:
    return dict(error=f"{kernel[1]}: {line[line.find('Scoped') :][:100]}", of_kernel=True)
  return dict(error=line[:300], of_kernel=False)
