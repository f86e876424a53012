"""Finds the fastest settings of updates and of sampling, without compiling all of them.

A candidate changes one aspect of the configuration, such as the mesh. It takes a minute or more to
compile, so most are ruled out by their lower bounds; few are compiled, smallest bound first.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax

from gspo_jax import sharding
from gspo_jax.aot import chips, estimate, iteration, table
from gspo_jax.aot.compiler import announce, check, devices_of, examine
from gspo_jax.aot.programs import Case, programs, resolve_remat
from gspo_jax.learner import programs as learner_programs
from gspo_jax.models import remat
from gspo_jax.settings.mesh import AXES
from gspo_jax.system.accelerators import GIB

Row: TypeAlias = dict[str, Any]
Lists: TypeAlias = Iterable[Iterable[Case]]
# Lower bounds of a case. Raises ValueError if the mesh does not divide the case.
Bound: TypeAlias = Callable[[Case], estimate.LowerBounds]
# Compiles a case. The row has `fits`, and `search_s` if it fits.
Measure: TypeAlias = Callable[[Case], Row]
# A candidate is compiled if its bound is below (1 - MIN_GAIN) times the best time so far.
MIN_GAIN = 0.02
CHUNKS = (0, 512, 2048, 8192, 32_768)  # 0: all at once
SETTINGS = dict(  # Keys searched for each program.
  train=dict(
    compute=("expert_chunk", "remat", "logits_chunk", "prefetch", "xla"),
    mesh=AXES,
    rl=("microbatches",),
  ),
  decode=dict(engine=("slots", "cache_tokens", "prefill_tokens"), mesh=("rollout_experts",)),
)
NAMES = dict(
  train="{data}x{fsdp}x{expert}x{tensor}, {microbatches} micro, {remat} "
  "{expert_chunk}/{logits_chunk}, {xla}{ahead}",
  decode="{slots} slots, {cache_tokens:,}, {prefill_tokens}, {rollout_experts}",
)


@dataclasses.dataclass(frozen=True)
class Search:
  """Candidates by name, with bounds and compiled rows."""

  program: str
  hbm: float  # Bytes of a chip.
  cases: dict[str, Case] = dataclasses.field(default_factory=dict)
  least: dict[str, estimate.LowerBounds] = dataclasses.field(default_factory=dict)
  rows: dict[str, Row] = dataclasses.field(default_factory=dict)  # Rows of compiled candidates.
  rejected: dict[str, str] = dataclasses.field(default_factory=dict)  # Reasons not to compile.

  def ranked(self) -> list[str]:
    """Returns names of fitting candidates, fastest first, equal times by memory."""

    def rank(name: str) -> tuple[float, float]:
      return float(f"{self.rows[name]['search_s']:.2g}"), self.rows[name]["peak_gib"]

    return sorted((name for name, row in self.rows.items() if row["fits"]), key=rank)

  @property
  def best(self) -> Case | None:
    """Fastest fitting candidate; None without one."""
    return next((self.cases[name] for name in self.ranked()), None)

  def needs(self) -> str:
    """Returns the error message if nothing fits."""
    if not self.least:
      return next(iter(self.rejected.values()), "no mesh divides it")
    if self.rows:
      return list(self.rows.values())[-1]["error"]
    need = min(least.memory for least in self.least.values()) / GIB
    return f"needs {need:.1f} GiB a chip at least of {self.hbm / GIB:.0f}"

  def report(self) -> list[Row]:
    """Prints rejected candidates, the best few, and settings of the best.

    Returns the compiled rows, the best first.
    """
    rows = [self.rows[name] for name in self.ranked()]
    table.print_search(self.rejected, rows[:3] if len(self.rows) > 1 else [])
    if self.best:
      table.print_line(f"recommended:\n{lines(self.program, self.best)}")
    rows += [row for row in self.rows.values() if not row["fits"]]
    return rows or [dict(program=self.program, fits=False, error=self.needs())]


def compile_best(
  search: Search,
  lists: Lists,
  bound: Bound,
  measure: Measure,
  tries: int,
  enough: int | None = None,
) -> None:
  """Compiles at most `tries` candidates until `enough` fit.

  Candidates come from the lists in turn, each list ordered by lower bounds. Candidates are skipped
  if they cannot fit, or cannot be faster than the best so far. Small `tensor` axes come first: they
  send activations, in place of weights over `fsdp`.
  """

  def rank(name: str) -> tuple[float, ...]:
    least, tensor = search.least[name], search.cases[name].config.mesh.tensor
    return tensor, least.bound_s, sum(least.seconds.values()), least.memory

  ordered = []
  for cases in lists:
    candidates = {name_of(search.program, case): case for case in cases}
    new = [name for name in candidates if name not in search.cases]
    search.cases.update(candidates)
    for name in new:
      try:
        search.least[name] = bound(candidates[name])
      except ValueError as error:
        search.rejected[name] = f"does not divide: {error}"
    ordered.append(sorted((name for name in new if name in search.least), key=rank))
  for name in filter(None, itertools.chain(*itertools.zip_longest(*ordered))):
    reason = find_rejection(search, name)
    if not reason and (len(search.rows) >= tries or len(search.ranked()) == enough):
      reason = f"takes at least {search.least[name]}; not compiled, as enough others were"
    if reason:
      search.rejected[name] = reason
    else:
      search.rows[name] = measure(search.cases[name])


def find_rejection(search: Search, name: str) -> str:
  """Returns the reason not to compile a candidate; "" without a reason."""
  case, least, best = search.cases[name], search.least[name], math.inf
  if least.memory > search.hbm:
    too_many = (least.memory - search.hbm) / GIB
    return f"needs at least {least.memory / GIB:.0f} GiB a chip, {too_many:.0f} too many"
  for other, row in search.rows.items():
    compiled = search.cases[other]
    if row["fits"]:
      best = min(best, row["search_s"])
      if case.config.mesh.tensor > compiled.config.mesh.tensor:
        return f"sends more than {other}, which fits"
      finer = case.microbatches > compiled.microbatches and not case.packed
      if finer and changed(case, compiled.microbatches) == compiled:
        return f"gathers more than {other}, which fits"
    elif not row.get("of_kernel") and least.memory >= search.least[other].memory:
      return f"needs at least {least.memory / GIB:.1f} GiB, no less than {other}, which did not fit"
  if least.bound_s > (1 - MIN_GAIN) * best:
    return f"takes at least {least}; the best so far takes {best:.3g} s"
  return ""


def find(
  program: str,
  lists: Lists,
  topology: str,
  tries: int,
  enough: int | None = None,
  slices: int = 1,
) -> Search:
  """Compiles the best candidates for a topology; prints a line for each."""
  chip, devices = chips.parse(topology)[0], devices_of(topology, slices)
  search = Search(program, chip.hbm)

  def bound(case: Case) -> estimate.LowerBounds:
    mesh = sharding.make_mesh(case.config.mesh, devices)
    if program == "decode":
      with jax.set_mesh(mesh):
        return iteration.sampling_bound(case, mesh, topology)
    check(case, mesh)
    return estimate.update_bound(case, mesh, topology).times(iteration.share(case, mesh))

  def measure(case: Case) -> Row:
    mesh = sharding.make_mesh(case.config.mesh, devices)
    name, case = name_of(program, case), resolve_remat(case, mesh)
    policy = case.config.compute.remat
    with jax.set_mesh(mesh), announce(name):
      ((_, compiled),) = programs(case, mesh, [program])
      row = dict(program=name, remat=policy) | examine(compiled, topology, policy).row
      if "serial_s" in row and program == "decode":
        row |= iteration.sampling_row(case, mesh, topology, row)
      elif "serial_s" in row:
        row["search_s"] = row["serial_s"] * iteration.share(case, mesh)
    table.print_found(row, header=not search.rows)
    return row

  compile_best(search, lists, bound, measure, tries, enough)
  return search


def updates(case: Case, devices: int, slices: int = 1) -> Lists:
  """Returns candidates for updates: configuration, XLA options, meshes, remats, chunks.

  devices: number of devices over all slices.
  """
  mesh = {axis: getattr(case.config.mesh, axis) for axis in AXES}
  remaining = max(1, devices // -math.prod(mesh.values()))  # Size of an axis of -1.
  case = changed(case, mesh={axis: remaining if n == -1 else n for axis, n in mesh.items()})
  at_once = dict(logits_chunk=case.length)
  if case.model.num_experts:
    at_once["expert_chunk"] = case.rows * case.length * case.config.mesh.tensor // devices
  remats = [changed(case, compute=dict(remat=policy)) for policy in ("none", *remat.POLICIES)]
  sizes = ({key: size} for key, most in at_once.items() for size in CHUNKS if size < most)
  chunks = [changed(case, compute=size) for size in sizes]
  compilers = [
    changed(case, compute=dict(xla=xla, prefetch=prefetch))
    for prefetch in ((True, False) if case.model.num_experts else (False,))
    for xla in learner_programs.OPTIONS
  ]
  return [case], compilers, meshes(case, devices, slices), remats, chunks


def meshes(case: Case, devices: int, slices: int = 1) -> Iterator[Case]:
  """Yields candidates with other meshes (fsdp x expert x tensor) and micro-batches.

  Each slice is a replica. Experts, heads, sequences and micro-batches divide evenly.
  """
  experts = case.model.num_experts or 1
  for tensor, expert in itertools.product((1, 2, 4), range(1, devices // slices + 1)):
    shards = devices // tensor
    heads = case.model.num_kv_heads % tensor
    if heads or devices % (slices * tensor * expert) or experts % expert or case.sequences % shards:
      continue
    rows, mesh = case.sequences // shards, dict(data=slices, fsdp=shards // expert // slices)
    for microbatches in range(2 if case.packed else 1, rows + 1):
      if rows % microbatches == 0:
        yield changed(case, microbatches, mesh=mesh | dict(expert=expert, tensor=tensor))


def sampling(case: Case, shards: int) -> Lists:
  """Returns candidates for sampling: configuration, layouts, prefill sizes.

  The slots of layouts double from one per device to all responses. Each number is combined with two
  caches, for full windows and for the assumed lengths, and with the values of
  mesh.rollout_experts.
  """
  most = case.workload.trajectories
  slots = case.engine.slots_for(most)
  case = changed(dataclasses.replace(case, slots=0), engine=dict(slots=slots))
  splits = (
    ("auto", "fsdp", "expert") if case.model.num_experts else (case.config.mesh.rollout_experts,)
  )
  layouts = []
  for power in range((most // shards).bit_length()):
    slots = shards << power
    caches = {0} if case.engine.cache == "dense" else {0, case.pool(slots, shards)}
    for cache, split in itertools.product(sorted(caches), splits):
      engine, mesh = dict(slots=slots, cache_tokens=cache), dict(rollout_experts=split)
      layouts.append(changed(case, engine=engine, mesh=mesh))
  pieces = [changed(case, engine=dict(prefill_tokens=1 << power)) for power in range(11, 17, 2)]
  return [case], layouts, pieces


def changed(case: Case, microbatches: int = 0, **sections: dict[str, Any]) -> Case:
  """Replaces values in sections of the case's configuration."""
  config = case.config
  if microbatches:
    case = dataclasses.replace(case, microbatches=microbatches)
    sections |= dict(rl=dict(microbatches=microbatches)) if case.configured else {}
  parts = {name: dataclasses.replace(getattr(config, name), **sections[name]) for name in sections}
  return dataclasses.replace(case, config=dataclasses.replace(config, **parts))


def settings(program: str, case: Case) -> dict[str, Row]:
  """Returns a case's searched settings, by section and key."""
  values = {
    section: {key: getattr(getattr(case.config, section), key) for key in keys}
    for section, keys in SETTINGS[program].items()
  }
  if "rl" in values:
    values["rl"]["microbatches"] = case.microbatches  # The command line may set the batch.
  return values


def name_of(program: str, case: Case) -> str:
  """Returns a case's name: its searched settings."""
  sections = settings(program, case).values()
  values = {key: n for keys in sections for key, n in keys.items()}
  return NAMES[program].format(**values, ahead=", prefetch" if values.get("prefetch") else "")


def lines(program: str, case: Case) -> str:
  """Formats a case's searched settings as lines of a configuration file."""

  def literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)

  return "\n".join(
    f"{section}=dict({', '.join(f'{key}={literal(value)}' for key, value in keys.items())}),"
    for section, keys in settings(program, case).items()
  )
