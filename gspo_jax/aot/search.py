"""Finds the mesh, the micro-batches and the formulations with which an update is fastest.

Every candidate takes a compilation of a minute or more, so that few are compiled: one setting is
changed at a time, what arithmetic rules out (`estimate`) is not compiled, and the rest is tried in
the order of its lower bounds.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from gspo_jax import sharding
from gspo_jax.aot import chips, estimate
from gspo_jax.aot.compiler import check, compile_one, devices_of
from gspo_jax.aot.programs import Case, programs
from gspo_jax.aot.table import print_line, print_row
from gspo_jax.hardware import GIB
from gspo_jax.models import transformer

WORTH = 0.02  # of the best time so far: what a candidate has to promise to be compiled


@dataclasses.dataclass(frozen=True)
class Choice:
  """What a search of the training chooses."""

  mesh: sharding.MeshConfig
  microbatches: int
  remat: str
  expert_chunk: int
  logits_chunk: int

  def __str__(self) -> str:
    sizes = "x".join(str(getattr(self.mesh, axis)) for axis in sharding.AXES)
    chunks = f"{self.expert_chunk}/{self.logits_chunk}"
    return f"{sizes}, {self.microbatches} micro, {self.remat} {chunks}"

  def of(self, case: Case) -> Case:
    """The case with these settings."""
    compute = dataclasses.replace(
      case.config.compute,
      remat=self.remat,
      expert_chunk=self.expert_chunk,
      logits_chunk=self.logits_chunk,
    )
    config = dataclasses.replace(case.config, mesh=self.mesh, compute=compute)
    return dataclasses.replace(case, config=config, microbatches=self.microbatches)

  def lines(self) -> str:
    """Lines for a configuration file."""
    mesh = ", ".join(f"{axis}={getattr(self.mesh, axis)}" for axis in sharding.AXES)
    return (
      f'compute=dict(expert_chunk={self.expert_chunk}, remat="{self.remat}", '
      f"logits_chunk={self.logits_chunk}),\nmesh=dict({mesh}),\n"
      f"rl=dict(microbatches={self.microbatches}),"
    )


@dataclasses.dataclass
class Search:
  """What is known of every candidate that was looked at."""

  bound: Callable[[Choice], estimate.Least]  # ValueError: it does not divide
  measure: Callable[[Choice], dict[str, Any]]  # compiles
  hbm: float  # bytes of a chip
  left: int  # compilations that may still be made
  rows: dict[Choice, dict[str, Any]] = dataclasses.field(default_factory=dict)
  rejected: dict[Choice, str] = dataclasses.field(default_factory=dict)
  least: dict[Choice, estimate.Least] = dataclasses.field(default_factory=dict)

  @property
  def best(self) -> Choice | None:
    fits = [choice for choice, row in self.rows.items() if row["fits"]]
    return min(fits, key=lambda choice: _order(self.rows[choice]), default=None)

  def ranked(self, number: int) -> list[Choice]:
    """The best ones that fit."""
    fits = [choice for choice, row in self.rows.items() if row["fits"]]
    return sorted(fits, key=lambda choice: _order(self.rows[choice]))[:number]

  def stage(self, choices: list[Choice], most: int) -> None:
    """Compiles at most so many of the candidates: the fastest by their lower bounds, of those that
    may fit and may be faster than the best so far."""
    found = []
    for choice in dict.fromkeys(choices):
      if choice in self.rows:
        continue
      self.rejected.pop(choice, None)
      try:
        least = self.least[choice] = self.bound(choice)
      except ValueError as error:
        self.rejected[choice] = f"does not divide: {error}"
        continue
      found.append((least, choice))
    found.sort(key=lambda one: (one[0].bound_s, one[0].sum_s, one[0].memory))
    for least, choice in found:
      reason = self._against(choice, least)
      if not reason and (most <= 0 or self.left <= 0):
        reason = f"not compiled: {self._says(least)}, and enough others were"
      if reason:
        self.rejected[choice] = reason
        continue
      self.rows[choice] = dict(program=str(choice)) | self.measure(choice)
      most, self.left = most - 1, self.left - 1

  def least_needed(self) -> str:
    """What is said where nothing fits."""
    if not self.least:
      return f"{next(iter(self.rejected.values()), 'no mesh divides it')}"
    need = min(least.memory for least in self.least.values())
    return f"needs {need / GIB:.1f} GiB a chip at least, of {self.hbm / GIB:.0f}"

  def _against(self, tried: Choice, least: estimate.Least) -> str:
    """Why a candidate need not be compiled; "" if it has to be."""
    if least.memory > self.hbm:
      need = (least.memory - self.hbm) / GIB
      return f"needs {least.memory / GIB:.0f} GiB a chip at least, {need:.0f} too many"
    for choice, row in self.rows.items():
      if not row["fits"] and least.memory >= self.least[choice].memory:
        return f"{least.memory / GIB:.1f} GiB at least, not fewer than {choice}, which did not fit"
      if row["fits"] and _more_microbatches(tried, choice):
        return f"gathers more than {choice}, which fits"
    best = self.best
    if best and least.bound_s > (1 - WORTH) * self.rows[best]["bound_s"]:
      return f"{self._says(least)}; {self.rows[best]['bound_s']:.3g} s was reached"
    return ""

  def _says(self, least: estimate.Least) -> str:
    names = ("compute_s", "hbm_s", "interconnect_s")
    binds = max(names, key=lambda name: getattr(least, name)).removesuffix("_s")
    return f"takes {least.bound_s:.3g} s at least ({binds})"


def _order(row: dict[str, Any]) -> tuple[float, ...]:
  """Rows whose bounds are within a hundredth are told apart by the other two resources."""
  seconds = [row[f"{name}_s"] for name in ("compute", "hbm", "interconnect")]
  return float(f"{row['bound_s']:.2g}"), sum(seconds), row["peak_gib"]


def _more_microbatches(a: Choice, b: Choice) -> bool:
  """Whether `a` differs from `b` in having more micro-batches, and in nothing else."""
  same = dataclasses.replace(a, microbatches=b.microbatches) == b
  return same and a.microbatches > b.microbatches


def descend(search: Search, start: Choice, case: Case, devices: int) -> None:
  """Changes one setting at a time, until that makes nothing better or nothing may be compiled."""
  search.stage([start], 1)
  before = None
  while search.left and (before is None or search.best != before):
    before = search.best
    for values, most in (
      (meshes(case, devices, search.best or start), 4),
      (remats(search.best or start), 3),
      (expert_chunks(case, search.best or start), 3),
      (logits_chunks(case, search.best or start), 2),
    ):
      search.stage(list(values), most)


def meshes(case: Case, devices: int, near: Choice) -> Iterator[Choice]:
  """Meshes of one slice: fsdp x expert x tensor, experts and heads divided evenly; each with every
  number of micro-batches that divides."""
  for tensor in (1, 2, 4):
    for mesh in candidates(case, devices, tensor):
      for microbatches in divisors(case.sequences // (mesh.fsdp * mesh.expert)):
        yield dataclasses.replace(near, mesh=mesh, microbatches=microbatches)


def remats(near: Choice) -> Iterator[Choice]:
  for remat in ("none", *transformer.REMAT):
    yield dataclasses.replace(near, remat=remat)


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


def search(case: Case, topology: str, tries: int) -> list[dict[str, Any]]:
  """Searches, printing what is compiled, what was not and why, the best few and one's lines.

  Returns the rows of what was compiled, the best first.
  """
  print_line(
    f"{topology}: {case.sequences} sequences x {case.length} tokens per update; data x fsdp x "
    "expert x tensor, micro-batches, remat, expert_chunk/logits_chunk"
  )
  shown = []

  def told(row: dict[str, Any]) -> None:
    print_row(row | dict(collectives={}), header=not shown)
    shown.append(row)

  found = open_search(case, topology, tries, told)
  devices = len(devices_of(topology))
  descend(found, start_of(case, devices), case, devices)
  print_rejected(found.rejected)
  ranked = found.ranked(len(found.rows))
  if len(ranked) > 1:
    print_line("best:")
    for i, choice in enumerate(ranked[:3]):
      print_row(found.rows[choice] | dict(collectives={}), header=not i)
  if ranked:
    print_line(f"recommended:\n{ranked[0].lines()}")
  order = [*ranked, *(choice for choice in found.rows if choice not in ranked)]
  return [found.rows[choice] for choice in order] or [
    dict(program="train", fits=False, error=found.least_needed())
  ]


def print_rejected(rejected: dict[Choice, str], most: int = 12) -> None:
  """The candidates that were not compiled, those that came nearest first."""
  if rejected:
    print_line("not compiled:")
  for choice, reason in list(rejected.items())[:most]:
    print_line(f"    {choice!s:<40}{reason}")
  if len(rejected) > most:
    print_line(f"    and {len(rejected) - most} more (all of them in --json)")


def start_of(case: Case, devices: int) -> Choice:
  """The configuration's own settings."""
  mesh, compute = case.config.mesh, case.config.compute
  sizes = [getattr(mesh, axis) for axis in sharding.AXES]
  if -1 in sizes:
    sizes[sizes.index(-1)] = max(1, devices // -math.prod(sizes))
  return Choice(
    sharding.MeshConfig(*sizes),
    case.microbatches,
    compute.remat,
    compute.expert_chunk,
    compute.logits_chunk,
  )


def open_search(case: Case, topology: str, tries: int, told: Callable = lambda row: None) -> Search:
  """A search that compiles for the topology, and tells of each row."""
  devices = devices_of(topology)

  def bound(choice: Choice) -> estimate.Least:
    tried, mesh = choice.of(case), sharding.make_mesh(choice.mesh, devices)
    check(tried, mesh)
    return estimate.of_update(tried, mesh, topology)

  def measure(choice: Choice) -> dict[str, Any]:
    tried, mesh = choice.of(case), sharding.make_mesh(choice.mesh, devices)
    with jax.set_mesh(mesh):
      _, program = next(programs(tried, mesh, ["train"]))
      row = compile_one(program, topology, choice.remat)
    told(dict(program=str(choice)) | row)
    return row

  return Search(bound, measure, chips.parse(topology)[0].hbm, tries)
