"""Command line: python -m gspo_jax.aot --config=configs/moe_aime.py --topology=v5p:4x4x4

Compiles every program of a run for a TPU topology on a machine that has no TPU, and says for each
what it needs and how fast it could be. Needs libtpu: `pip install -e '.[tpu]'`. Exits with an error
if a program does not fit.
"""

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # with libtpu installed JAX would look for a TPU

import jax
import jax.numpy as jnp
from absl import app, flags, logging
from jax.experimental import topologies
from ml_collections import config_flags

from gspo_jax import config as configuration
from gspo_jax import sharding
from gspo_jax.aot import chips, explain, hlo_costs
from gspo_jax.aot.programs import PROGRAMS, Case, Program, make_case, programs
from gspo_jax.hardware import GIB
from gspo_jax.models import transformer
from gspo_jax.structs import TrainState

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, e.g. configs/moe_aime.py.")
_TOPOLOGY = flags.DEFINE_string("topology", "v5p:4x4x4", "CHIP:AxBxC, of v4, v5e, v5p, v6e, tpu7x.")
_SEQUENCES = flags.DEFINE_integer(
  "sequences", 0, "Of train and score: per update, in one micro-batch; 0: as configured."
)
_LENGTH = flags.DEFINE_integer(
  "length", 0, "Of train and score: tokens per sequence; 0: as configured."
)
_SLOTS = flags.DEFINE_integer("slots", 0, "Of the sampler, over all devices; 0: as configured.")
_PROGRAMS = flags.DEFINE_list("programs", list(PROGRAMS), "Which to compile.")
_SEARCH = flags.DEFINE_bool("search", False, "Try meshes and micro-batch sizes, recommend one.")
_EXPLAIN = flags.DEFINE_integer(
  "explain", 0, "Also print so many source lines of each program, those that move most bytes."
)
_TEXT = flags.DEFINE_string("text", "", "Also write the compiled programs into this directory.")
_JSON = flags.DEFINE_string("json", "", "Also write the report to this file.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  logging.set_verbosity(logging.WARNING)
  try:
    config = configuration.from_dict(_CONFIG.value.to_dict())
    case = make_case(config, _SEQUENCES.value, _LENGTH.value, _SLOTS.value)
    unknown = set(_PROGRAMS.value) - set(PROGRAMS)
    if unknown:
      raise ValueError(f"--programs={','.join(sorted(unknown))}: known are {', '.join(PROGRAMS)}")
    if _SEARCH.value:
      rows = search(case, _TOPOLOGY.value)
    else:
      rows = report(case, _TOPOLOGY.value, _PROGRAMS.value)
  except ValueError as error:
    sys.exit(f"gspo_jax.aot: {error}")
  if _JSON.value:
    Path(_JSON.value).write_text(json.dumps(rows, indent=2) + "\n")
  if not any(row["fits"] for row in rows) if _SEARCH.value else not all(r["fits"] for r in rows):
    failed = "; ".join(f"{r['program']} {r['error']}" for r in rows if not r["fits"])
    sys.exit(f"gspo_jax.aot: does not fit {_TOPOLOGY.value}: {failed}")


def devices_of(topology: str) -> list:
  """Descriptions of the devices of a topology. ValueError without libtpu or with a wrong name."""
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
  try:
    return list(topologies.get_topology_desc(topology, "tpu", **options).devices)
  except Exception as error:  # whatever the plugin raises
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise ValueError(
      f"--topology={topology}: {reason} (is libtpu installed? pip install -e '.[tpu]')"
    ) from error


def report(case: Case, topology: str, names: list[str]) -> list[dict[str, Any]]:
  """Compiles the named programs, prints a line for each, and returns the lines."""
  mesh = sharding.make_mesh(case.config.mesh, devices_of(topology))
  check(case, mesh)
  print_line(title(case, topology, mesh))
  rows = []
  with jax.set_mesh(mesh):
    for name, program in programs(case, mesh, names):
      compiled, row = compile_one(program, topology, case.config.compute.remat)
      row = dict(program=name) | row
      print_row(row, header=not rows)
      if _TEXT.value and compiled:
        Path(_TEXT.value, f"{name}.txt").write_text(compiled.as_text())
      if _EXPLAIN.value and compiled:
        costs = hlo_costs.costs(compiled.as_text(), program.rates)
        for line in explain.lines(costs, _EXPLAIN.value, 1 / program.turns):
          print_line(line)
      rows.append(row)
  return rows


def check(case: Case, mesh: jax.sharding.Mesh) -> None:
  """ValueError if rows or weights do not divide over the mesh."""
  shards = sharding.batch_shards(mesh)
  if case.rows % shards:
    raise ValueError(
      f"{case.rows} sequences of a micro-batch do not divide over the {shards} devices of "
      "mesh.data x mesh.fsdp x mesh.expert: change mesh, sequences or micro-batches"
    )
  transformer.shardings(case.model, sharding.TRAIN, mesh)


def compile_one(program: Program, topology: str, remat: str) -> tuple[Any, dict[str, Any]]:
  """The compiled program, None if it does not fit; memory per chip, work, traffic and the time that
  they need at least."""
  chip, number = chips.parse(topology)
  per_chip = jax.sharding.get_mesh().size / number  # devices: two on chips whose cores are apart
  started = time.perf_counter()
  row: dict[str, Any] = dict(fits=False, hbm_gib=chip.hbm / GIB)
  try:
    compiled = program.function.trace(*program.arguments).lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    message = next((x for x in str(error).splitlines() if "exceed" in x.lower()), str(error))
    return None, row | dict(error=message.strip()[:300], compile_s=time.perf_counter() - started)
  memory = compiled.memory_analysis()
  costs = hlo_costs.costs(compiled.as_text(), program.rates)
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
  traffic = [n * per_chip / program.turns for n in (costs.memory, costs.wire)]
  return compiled, row | dict(
    compile_s=time.perf_counter() - started,
    model_flops=useful,
    executed_flops=flops,
    hbm_bytes=traffic[0],
    wire_bytes=traffic[1],
    collectives={
      kind: dict(
        count=costs.count[kind] / program.turns,
        bytes=costs.moved[kind] * per_chip / program.turns,
      )
      for kind in sorted(costs.count)
    },
    **chips.bound(chip, number, flops, useful, *traffic),
  )


def search(case: Case, topology: str) -> list[dict[str, Any]]:
  """Compiles the train step on the meshes that divide, and recommends the one that fits with the
  shortest bound.

  Per mesh it takes the fewest micro-batches that fit: more of them only gather the weights more
  often. `tensor` sends activations where `fsdp` sends weights, and grows only if nothing fits.
  """
  devices = devices_of(topology)
  print_line(f"{topology}: {case.sequences} sequences x {case.length} tokens per update")
  rows: list[dict[str, Any]] = []
  for tensor in (1, 2, 4):
    for mesh_config in candidates(case, len(devices), tensor):
      for row in fewest_microbatches(case, topology, mesh_config, devices):
        print_row(row, header=not rows)
        rows.append(row)
    if any(row["fits"] for row in rows):
      break
  by_time = lambda row: (row["bound_s"], row["interconnect_s"])  # noqa: E731
  best = min((row for row in rows if row["fits"]), key=by_time, default=None)
  if best:
    print_line(f"recommended: data x fsdp x expert x tensor = {best['program']}-batches")
  return rows


def fewest_microbatches(
  case: Case, topology: str, mesh_config: sharding.MeshConfig, devices: list
) -> Iterator[dict[str, Any]]:
  """A row for each number of micro-batches, up to the first that fits."""
  chip, number = chips.parse(topology)
  mesh = sharding.make_mesh(mesh_config, devices)
  shape = "x".join(str(n) for n in mesh.devices.shape)
  config = dataclasses.replace(case.config, mesh=mesh_config)
  for microbatches in divisors(case.sequences):
    tried = dataclasses.replace(case, config=config, microbatches=microbatches)
    try:
      check(tried, mesh)
    except ValueError:
      return  # more micro-batches divide no better
    name = dict(program=f"{shape}, {microbatches} micro")
    with jax.set_mesh(mesh):
      _, program = next(programs(tried, mesh, ["train"]))
      least = least_memory(tried, mesh, program.arguments[0]) * len(devices) / number
      if least > chip.hbm:  # there is no need to compile it
        error = f"needs more than {least / GIB:.0f} GiB a chip of {chip.hbm / GIB:.0f}"
        yield dict(**name, fits=False, hbm_gib=chip.hbm / GIB, error=error)
        continue
      row = name | compile_one(program, topology, case.config.compute.remat)[1]
    yield row
    if row["fits"]:
      return


def least_memory(case: Case, mesh, state: TrainState) -> float:
  """Bytes per device that a train step needs at least: its state, gradients, and of every layer
  the input, which no `compute.remat` drops."""
  model, rows = case.model, case.rows // sharding.batch_shards(mesh)
  inputs = rows * case.length * model.hidden_size * model.num_layers
  return held(state) + held(state.params) + inputs * jnp.dtype(case.config.compute.dtype).itemsize


def held(tree: Any) -> float:
  """Bytes of arrays on each device."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )


def candidates(case: Case, devices: int, tensor: int) -> Iterator[sharding.MeshConfig]:
  """Meshes of one slice: fsdp x expert x tensor, experts and heads divided evenly."""
  experts = case.model.num_experts or 1
  for expert in divisors(math.gcd(experts, devices)):
    fsdp = devices // (expert * tensor)
    whole = fsdp * expert * tensor == devices and case.sequences % (fsdp * expert) == 0
    # Between these expert widths lies the least traffic: weights on one side, tokens on the other.
    if whole and case.model.num_kv_heads % tensor == 0 and (experts == 1 or 4 <= expert <= 16):
      yield sharding.MeshConfig(1, fsdp, expert, tensor)


def divisors(n: int) -> list[int]:
  return [d for d in range(1, n + 1) if n % d == 0]


def title(case: Case, topology: str, mesh) -> str:
  shape = " x ".join(f"{axis} {n}" for axis, n in mesh.shape.items())
  return (
    f"{topology}, mesh {shape}: {case.sequences} sequences x {case.length} tokens per update in "
    f"{case.microbatches} micro-batches"
  )


def print_row(row: dict[str, Any], header: bool) -> None:
  if header:
    print_line(
      f"{'program':<22}{'peak GiB':>10}{'+ held':>8}{'of':>5}{'PFLOP':>9}{'HBM GB':>9}{'ICI GB':>8}"
      f"{'compute':>9}{'HBM':>8}{'ICI':>8}  {'binds':<13}{'MFU':>6}{'compile':>9}"
    )
  start = f"{row['program']:<22}"
  if "bound_s" not in row:
    print_line(f"{start}does not fit: {row['error']}")
    return
  seconds = "".join(f"{row[k]:>{w}.3g}" for k, w in zip(("compute_s", "hbm_s"), (9, 8)))
  print_line(
    f"{start}{row['peak_gib']:>10.2f}{row['held_gib']:>8.2f}{row['hbm_gib']:>5.0f}{row['executed_flops'] / 1e15:>9.3g}"
    f"{row['hbm_bytes'] / 1e9:>9,.0f}{row['wire_bytes'] / 1e9:>8,.1f}{seconds}"
    f"{row['interconnect_s']:>8.3g}  {row['binds']:<13}{row['mfu']:>6.1%}{row['compile_s']:>8.0f}s"
  )
  for kind, moved in row["collectives"].items():
    print_line(f"    {kind:<20}{moved['count']:>8.0f} times{moved['bytes'] / 1e9:>10.3f} GB a chip")
  if not row["fits"]:
    print_line(f"    does not fit: {row['error']}")


def print_line(text: str) -> None:
  sys.stdout.write(text + "\n")
  sys.stdout.flush()


if __name__ == "__main__":
  flags.mark_flags_as_required(["config"])
  app.run(main)
