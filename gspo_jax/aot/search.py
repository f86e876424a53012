"""Tries meshes and micro-batch sizes, and recommends one."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.aot import chips
from gspo_jax.aot.compiler import check, compile_one, devices_of
from gspo_jax.aot.programs import Case, programs
from gspo_jax.aot.table import print_line, print_row
from gspo_jax.hardware import GIB
from gspo_jax.structs import TrainState


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
      row = name | compile_one(program, topology, case.config.compute.remat)
    yield row
    if row["fits"]:
      return


def least_memory(case: Case, mesh, state: TrainState) -> float:
  """Bytes per device that a train step needs at least: its state, gradients, and of every layer
  the input, which no `compute.remat` drops."""

  def held(tree: Any) -> float:
    return sum(
      math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )

  model, rows = case.model, case.rows // sharding.batch_shards(mesh)
  inputs = rows * case.length * model.hidden_size * model.num_layers
  return held(state) + held(state.params) + inputs * jnp.dtype(case.config.compute.dtype).itemsize


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
