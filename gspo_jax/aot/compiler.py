"""Compiles programs for chips of another machine, and reports the programs' memory and traffic."""

import contextlib
import dataclasses
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.experimental import topologies

from gspo_jax import sharding
from gspo_jax.aot import chips, cuda, hlo_costs, links
from gspo_jax.aot.estimate import device_bytes
from gspo_jax.aot.programs import Case, Program
from gspo_jax.models import transformer
from gspo_jax.system.accelerators import GIB, Chip
from gspo_jax.system.text import clock_text


def devices_of(topology: str, slices: int = 1, target: str = "") -> list:
  """Returns descriptions of a topology's devices, to compile for.

  Args:
    topology: chips of one slice, e.g. "v5p:4x4x4", or GPUs, e.g. "h100:2x8".
    slices: number of TPU slices.
    target: text that describes a GPU to XLA; "" for `cuda.target_text`.

  Raises:
    ValueError: the compiler is not installed, or does not know the topology; or several `slices`
      are set for GPUs, or a `target` for TPUs.
  """
  chip, number = chips.parse(topology)
  if chip.cuda:
    if slices > 1:
      raise ValueError(
        f"--slices={slices} is for TPUs: write several hosts of GPUs as {topology[:4]}:2x8"
      )
    return cuda.devices_of(topology, target)
  if target:
    raise ValueError(f"--topology={topology}: --target describes GPUs; leave it out for TPUs")
  os.environ.update(
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE=chip.host,
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # Several processes may compile, since nothing is executed.
  )
  # A v4 chip has two cores, and is one device in a run. By default, the compiler has a device for
  # each core.
  options = dict(chip_config_name="megacore") if topology.startswith("v4:") else {}
  if number == 1:  # By default the compiler assumes a whole host of four chips.
    options["chips_per_host_bounds"] = (1, 1, 1)
  if slices > 1:
    options["num_slices"] = slices
  try:
    return list(topologies.get_topology_desc(topology, "tpu", **options).devices)
  except Exception as error:  # The plugin may raise any type.
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise ValueError(
      f"--topology={topology}: {reason} (is libtpu installed? pip install -e '.[tpu]')"
    ) from error


def check(case: Case, mesh: jax.sharding.Mesh) -> None:
  """Raises ValueError if the sequences or the weights do not divide over the mesh."""
  shards = sharding.batch_shards(mesh)
  if case.rows % shards:
    raise ValueError(
      f"{case.rows} sequences of a micro-batch do not divide over the {shards} devices of "
      "mesh.data x mesh.fsdp x mesh.expert: change the mesh, --sequences or rl.microbatches"
    )
  transformer.shardings(case.model, sharding.TRAIN, mesh)


@contextlib.contextmanager
def announce(name: str, interval: float = 10.0) -> Iterator[None]:
  """Prints the elapsed time of a compilation on stderr, every `interval` seconds.

  name: label of the compiled program.
  """
  done, start = threading.Event(), time.monotonic()

  def print_times() -> None:
    while not done.wait(interval):
      sys.stderr.write(f"{name}: compiling, {clock_text(time.monotonic() - start)} so far\n")
      sys.stderr.flush()

  threading.Thread(target=print_times, daemon=True).start()
  try:
    yield
  finally:
    done.set()


@dataclasses.dataclass(frozen=True)
class Compiled:
  """Results of a compilation."""

  row: dict[str, Any]  # Results by name, for a row of the report: see `examine`.
  costs: hlo_costs.Costs = dataclasses.field(default_factory=hlo_costs.Costs)
  text: str = ""  # Compiled program as HLO text; "" if the compiler ran out of device memory.


def examine(program: Program, topology: str, remat: str) -> Compiled:
  """Compiles a program for the current mesh; returns memory, operations, traffic and times.

  The results are in `Compiled.row`. Operations are those of the whole batch. Memory and bytes are
  per chip, but `network_bytes` are per host. Operations, traffic and times of a decode program are
  those of one step. `compile_s` is the measured time of compilation. All other times are lower
  bounds, and are computed for TPUs only. If a program does not fit, its row has `fits=False` and an
  `error`.

  Args:
    program: program to compile.
    topology: chips of one slice, e.g. "v5p:4x4x4", or GPUs.
    remat: policy of the program, not "auto". It determines the number of recomputed operations.

  Raises:
    ValueError: attention on a GPU needs cuDNN, which is not installed.
  """
  mesh = jax.sharding.get_mesh()
  chip, _ = chips.mesh_chips(topology, mesh)
  started = time.perf_counter()
  slices = len(set(map(sharding.slice_of, mesh.devices.flat)))
  row: dict[str, Any] = dict(fits=False, hbm_gib=chip.usable / GIB, slices=slices)
  try:
    with cuda.tracing_for(chip):
      traced = program.function.trace(*program.arguments)
    compiled = traced.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    row |= parse_memory_error(str(error)) | dict(compile_s=time.perf_counter() - started)
    return Compiled(row)
  except RuntimeError as error:
    if "cuDNN" not in str(error):
      raise
    raise ValueError(
      f"--topology={topology}: {error} Attention on this GPU needs cuDNN: install it with pip "
      "install -e '.[aot-cuda]', or set compute.attention to blockwise"
    ) from error
  memory, text = compiled.memory_analysis(), compiled.as_text()
  costs = hlo_costs.costs(text, program.rates, links.torus_of(topology, mesh), chip)
  peak = memory.peak_memory_in_bytes + memory.generated_code_size_in_bytes
  row["peak_gib"] = peak * chip.devices / GIB
  row["held_gib"] = device_bytes(program.resident) * chip.devices / GIB
  total = row["peak_gib"] + row["held_gib"]
  row["fits"] = total <= row["hbm_gib"]
  if not row["fits"]:
    row["error"] = f"needs {total:.1f} of {row['hbm_gib']:.0f} GiB per chip"
  row |= dict(compile_s=time.perf_counter() - started) | _traffic(program, costs, chip, mesh, remat)
  if chip.cuda:
    row["product_flops"] = costs.products * mesh.size / program.steps
  else:
    row |= _time_bounds(program, costs, topology, mesh, row)
  return Compiled(row, costs, text)


def _traffic(
  program: Program, costs: hlo_costs.Costs, chip: Chip, mesh: jax.sharding.Mesh, remat: str
) -> dict[str, Any]:
  """Returns operations of the whole batch, and traffic per chip.

  Only `network_bytes` are per host. The figures of a decode program are those of one step.
  """
  useful = flops = 0.0
  if program.work:
    useful = program.work.training() if program.trains else program.work.forward()
    flops = program.work.executed(remat) if program.trains else useful
  scale = chip.devices / program.steps
  hosts = [device.process_index for device in mesh.devices.flat]
  return dict(
    model_flops=useful / program.steps,
    executed_flops=flops / program.steps,
    hbm_bytes=costs.memory * scale,
    wire_bytes=costs.wire * scale,
    hidden_bytes=costs.hidden * scale,
    network_bytes=costs.network / program.steps * hosts.count(hosts[0]),  # Bytes per host.
    collectives={
      kind: dict(count=costs.count[kind] / program.steps, bytes=costs.moved[kind] * scale)
      for kind in sorted(costs.count)
    },
  )


def _time_bounds(
  program: Program,
  costs: hlo_costs.Costs,
  topology: str,
  mesh: jax.sharding.Mesh,
  work: Mapping[str, Any],
) -> dict[str, Any]:
  """Returns the lower bounds of `chips.bound` on the seconds of a program.

  For decode, these are the seconds of one step. Decode has a further entry, `idle_s`. It is the
  bound `serial_s` of a step in which no slot has a response, so paged attention reads no cache.

  work: row with the result of `_traffic`.
  """
  chip, number = chips.mesh_chips(topology, mesh)
  scale = chip.devices / program.steps

  def bound(moved: float, flops: float = work["executed_flops"]) -> dict[str, float | str]:
    return chips.bound(
      chip,
      number,
      flops,
      work["model_flops"],
      moved * scale,
      costs.ring_wire * scale,
      costs.ring_hidden * scale,
      costs.network * scale,
      costs.network_hidden * scale,
    )

  row: dict[str, Any] = bound(costs.memory)
  if program.slot_kernel:
    idle = costs.memory - hlo_costs.kernel_bytes(costs, program.slot_kernel)
    attention = program.work.attention / program.steps
    row["idle_s"] = bound(idle, work["executed_flops"] - attention)["serial_s"]
  return row


def parse_memory_error(error: str) -> dict[str, Any]:
  """Extracts the reason from the compiler's message on exhausted memory.

  Returns a dict with the reason as `error`. `of_kernel` is True if a single kernel exhausted a
  core's vector memory. Such a message does not state the memory that the whole program needs.
  """
  line = next((x for x in error.splitlines() if "exceed" in x.lower()), error).strip()
  kernel = re.search(r"memory space vmem .*?(%\S+ = \w+\[[\d,]*\])", line)
  if kernel:
    return dict(error=f"{kernel[1]}: {line[line.find('Scoped') :][:100]}", of_kernel=True)
  return dict(error=line[:300], of_kernel=False)
