"""Finds the mesh, the micro-batches and the formulations with which updates are fastest."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from gspo_jax import sharding
from gspo_jax.aot import chips, estimate, iteration
from gspo_jax.aot.compiler import check, compile_one, devices_of
from gspo_jax.aot.programs import Case, programs, resolved
from gspo_jax.aot.search import Search, print_outcome
from gspo_jax.aot.table import print_line, print_row
from gspo_jax.models import remat
from gspo_jax.settings.mesh import AXES, MeshConfig


@dataclasses.dataclass(frozen=True)
class Choice:
  """What a search of the training chooses."""

  mesh: MeshConfig
  microbatches: int
  remat: str
  expert_chunk: int
  logits_chunk: int

  def __str__(self) -> str:
    sizes = "x".join(str(getattr(self.mesh, axis)) for axis in AXES)
    chunks = f"{self.expert_chunk}/{self.logits_chunk}"
    return f"{sizes}, {self.microbatches} micro, {self.remat} {chunks}"

  def of(self, case: Case) -> Case:
    """The case with these settings. ValueError if a run cannot have them."""
    c, rl = case.config, case.config.rl
    compute = dataclasses.replace(
      c.compute,
      remat=self.remat,
      expert_chunk=self.expert_chunk,
      logits_chunk=self.logits_chunk,
    )
    if configured(case):
      rl = dataclasses.replace(rl, microbatches=self.microbatches)
    config = dataclasses.replace(c, mesh=self.mesh, compute=compute, rl=rl)
    return dataclasses.replace(case, config=config, microbatches=self.microbatches)

  def lines(self) -> str:
    """Lines for a configuration file."""
    mesh = ", ".join(f"{axis}={getattr(self.mesh, axis)}" for axis in AXES)
    return (
      f'compute=dict(expert_chunk={self.expert_chunk}, remat="{self.remat}", '
      f"logits_chunk={self.logits_chunk}),\nmesh=dict({mesh}),\n"
      f"rl=dict(microbatches={self.microbatches}),"
    )


def search(case: Case, topology: str, tries: int) -> tuple[list[dict[str, Any]], Choice | None]:
  """Searches, printing what is compiled, what was not and why, the best few and one's lines.

  Returns the rows of what was compiled, the best first, and the best choice if any fits.
  """
  print_line(
    f"updates on {topology}: {case.sequences} sequences x {case.length} tokens; data x fsdp x "
    "expert x tensor, micro-batches, remat, expert_chunk/logits_chunk"
  )
  shown = []

  def show(row: dict[str, Any], header: bool) -> None:
    print_row(row | dict(collectives={}), header=header)

  def told(row: dict[str, Any]) -> None:
    show(row, not shown)
    shown.append(row)

  found, devices = start(case, topology, tries, told), len(devices_of(topology))
  descend(found, start_of(case, devices), case, devices)
  print_outcome(found, show)
  ranked = found.ranked()
  if ranked:
    print_line(f"recommended:\n{ranked[0].lines()}")
  rows = [found.rows[choice] for choice in [*ranked, *(found.rows.keys() - set(ranked))]]
  return rows or [dict(program="train", fits=False, error=found.needs())], found.best


def descend(search: Search, begin: Choice, case: Case, devices: int) -> None:
  """Changes one setting at a time, until that makes nothing better or nothing may be compiled.

  `tensor` sends activations where `fsdp` sends weights, and grows only if nothing fits.
  """
  search.stage([begin], 1)
  before, tensor = None, 1
  while search.left and (before is None or search.best != before):
    before = search.best
    near = before or begin
    search.stage(list(meshes(case, devices, near, tensor)), 3)
    while not search.best and search.left and tensor < 4:
      tensor *= 2
      search.stage(list(meshes(case, devices, near, tensor)), 2)
    search.stage(list(remats(search.best or near)), 2)
    search.stage(list(expert_chunks(case, search.best or near)), 2)
    search.stage(list(logits_chunks(case, search.best or near)), 1)


def meshes(case: Case, devices: int, near: Choice, tensor: int) -> Iterator[Choice]:
  """Meshes of one slice: fsdp x expert x tensor, experts and heads divided evenly; each with every
  number of micro-batches that divides."""
  for mesh in candidates(case, devices, tensor):
    mesh = dataclasses.replace(near.mesh, **{axis: getattr(mesh, axis) for axis in AXES})
    for microbatches in divisors(case.sequences // (mesh.fsdp * mesh.expert)):
      yield dataclasses.replace(near, mesh=mesh, microbatches=microbatches)


def remats(near: Choice) -> Iterator[Choice]:
  for policy in ("none", *remat.POLICIES):
    yield dataclasses.replace(near, remat=policy)


def expert_chunks(case: Case, near: Choice) -> Iterator[Choice]:
  if case.model.num_experts:
    for chunk in sizes(tokens_of_a_device(case, near), 1024):
      yield dataclasses.replace(near, expert_chunk=chunk)


def logits_chunks(case: Case, near: Choice) -> Iterator[Choice]:
  for chunk in sizes(case.length, 256):
    yield dataclasses.replace(near, logits_chunk=chunk)


def tokens_of_a_device(case: Case, choice: Choice) -> int:
  """In one micro-batch."""
  mesh = choice.mesh
  return case.sequences * case.length // (choice.microbatches * mesh.data * mesh.fsdp * mesh.expert)


def sizes(most: int, least: int) -> list[int]:
  """Chunks of twice the last, from `least`; 0: all at once."""
  chunks = [least]
  while chunks[-1] * 2 < most:
    chunks.append(chunks[-1] * 2)
  return [chunk for chunk in chunks if chunk < most] + [0]


def candidates(case: Case, devices: int, tensor: int) -> Iterator[MeshConfig]:
  """Meshes of one slice: fsdp x expert x tensor, experts and heads divided evenly."""
  for expert in divisors(math.gcd(case.model.num_experts or 1, devices)):
    fsdp = devices // (expert * tensor)
    whole = fsdp * expert * tensor == devices and case.sequences % (fsdp * expert) == 0
    if whole and case.model.num_kv_heads % tensor == 0:
      yield MeshConfig(1, fsdp, expert, tensor)


def divisors(n: int) -> list[int]:
  return [d for d in range(1, n + 1) if n % d == 0]


def more_microbatches(one: Choice, other: Choice) -> str:
  """Why a choice that only has more micro-batches than another need not be tried."""
  same = dataclasses.replace(one, microbatches=other.microbatches) == other
  more = same and one.microbatches > other.microbatches
  return f"gathers more than {other}, which fits" if more else ""


def start_of(case: Case, devices: int) -> Choice:
  """The configuration's own settings."""
  mesh, compute = case.config.mesh, case.config.compute
  sizes = {axis: getattr(mesh, axis) for axis in AXES}
  known = -math.prod(sizes.values())
  sizes = {axis: max(1, devices // known) if n == -1 else n for axis, n in sizes.items()}
  return Choice(
    dataclasses.replace(mesh, **sizes),
    case.microbatches,
    compute.remat,
    compute.expert_chunk,
    compute.logits_chunk,
  )


def configured(case: Case) -> bool:
  """Whether its batch is that of the configuration, and not one given on the command line."""
  rl, window = case.config.rl, case.workload.window
  return (case.sequences, case.length) == (rl.prompts * rl.group_size // rl.minibatches, window)


def share(case: Case, shards: int) -> float:
  """Of the rows of an update, those that are read: packed, those that responses of the assumed
  lengths fill, in whole micro-batches."""
  rl = case.config.rl
  if not (rl.packed and configured(case)):
    return 1.0
  number = rl.prompts * rl.group_size
  read = iteration.positions(case, case.lengths.sample(number), shards)
  return read / (number * case.workload.window)


def start(
  case: Case, topology: str, tries: int, told: Callable[[dict[str, Any]], None] = lambda row: None
) -> Search:
  """A search that compiles for the topology, and tells of each row."""
  devices = devices_of(topology)

  def bound(choice: Choice) -> estimate.Least:
    tried, mesh = choice.of(case), sharding.make_mesh(choice.mesh, devices)
    check(tried, mesh)
    least = estimate.of_update(tried, mesh, topology)
    return least.times(share(tried, sharding.batch_shards(mesh)))

  def measure(choice: Choice) -> dict[str, Any]:
    tried, mesh = choice.of(case), sharding.make_mesh(choice.mesh, devices)
    tried = resolved(tried, mesh)
    with jax.set_mesh(mesh):
      _, program = next(programs(tried, mesh, ["train"]))
      policy = tried.config.compute.remat
      row = dict(program=str(choice), remat=policy) | compile_one(program, topology, policy)
    if "serial_s" in row:
      row["search_s"] = row["serial_s"] * share(tried, sharding.batch_shards(mesh))
    told(row)
    return row

  packed = case.config.rl.packed and configured(case)  # more micro-batches may leave more out
  beside = {} if packed else dict(beside=more_microbatches)
  return Search(bound, measure, chips.parse(topology)[0].hbm, tries, **beside)
