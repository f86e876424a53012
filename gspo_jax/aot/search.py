"""Finds the fastest settings of updates and of sampling, without compiling all of them.

The candidates are the configuration itself, and the configuration with one aspect changed, such as
the mesh. Compiling a candidate takes a minute or more. So lower bounds on memory and time
(`estimate`, `iteration`) rule out most candidates, and only some of the remaining candidates are
compiled.
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
from gspo_jax.aot.programs import Case, programs, resolve_remat, sampler_params
from gspo_jax.learner import programs as learner_programs
from gspo_jax.models import remat
from gspo_jax.settings.mesh import AXES
from gspo_jax.system.accelerators import GIB

Row: TypeAlias = dict[str, Any]
Lists: TypeAlias = Iterable[Iterable[Case]]
# Returns lower bounds of a case. Raises ValueError if its batch or weights do not divide over its
# mesh.
Bound: TypeAlias = Callable[[Case], estimate.LowerBounds]
# Compiles a case. The returned row has `fits`. If the case fits, `search_s` has the seconds to
# minimise.
Measure: TypeAlias = Callable[[Case], Row]
# A candidate is compiled only if its bound is at most (1 - MIN_GAIN) times the best time so far.
MIN_GAIN = 0.02
CHUNKS = (0, 512, 2048, 8192, 32_768)  # Tokens or positions per chunk; 0: a single chunk.
SETTINGS = dict(  # Keys whose values a search changes, by program and section.
  train=dict(
    compute=("expert_chunk", "remat", "logits_chunk", "prefetch", "xla"),
    mesh=AXES,
    rl=("microbatches",),
  ),
  decode=dict(engine=("slots", "cache_tokens", "prefill_tokens"), mesh=("rollout_experts",)),
)
NAMES = dict(  # Formats of a candidate's name, by program.
  train="{data}x{fsdp}x{expert}x{tensor}, {microbatches} micro, {remat} "
  "{expert_chunk}/{logits_chunk}, {xla}{ahead}",
  decode="{slots} slots, {cache_tokens:,}, {prefill_tokens}, {rollout_experts}",
)


@dataclasses.dataclass(frozen=True)
class Search:
  """Candidates of a search and its results so far, by the candidates' names."""

  program: str  # "train" or "decode".
  hbm: float  # Bytes of a chip's memory.
  cases: dict[str, Case] = dataclasses.field(default_factory=dict)
  least: dict[str, estimate.LowerBounds] = dataclasses.field(default_factory=dict)  # Lower bounds.
  rows: dict[str, Row] = dataclasses.field(default_factory=dict)  # Results of compiled candidates.
  rejected: dict[str, str] = dataclasses.field(default_factory=dict)  # Reasons for not compiling.

  def ranked(self) -> list[str]:
    """Returns the names of fitting candidates, fastest first.

    Candidates whose times are equal in the first two digits are ordered by peak memory.
    """

    def rank(name: str) -> tuple[float, float]:
      return float(f"{self.rows[name]['search_s']:.2g}"), self.rows[name]["peak_gib"]

    return sorted((name for name, row in self.rows.items() if row["fits"]), key=rank)

  @property
  def best(self) -> Case | None:
    """Fastest fitting candidate; None if there is none."""
    return next((self.cases[name] for name in self.ranked()), None)

  def needs(self) -> str:
    """Returns the error message if no candidate of a search fits."""
    if not self.least:
      return next(iter(self.rejected.values()), "batch and weights do not divide over any mesh")
    if self.rows:
      return list(self.rows.values())[-1]["error"]
    need = min(least.memory for least in self.least.values()) / GIB
    return f"needs at least {need:.1f} of {self.hbm / GIB:.0f} GiB per chip"

  def report(self) -> list[Row]:
    """Prints the results, and returns the rows of compiled candidates, best first.

    Prints the rejected candidates and the settings of the best candidate. If several candidates
    were compiled, also prints the rows of the best three. If no candidate was compiled, returns a
    single row with the reason as `error`.
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
  """Compiles candidates, at most `tries` of them and until `enough` fit.

  Takes a candidate from each list in turn. A list is ordered by the size of the `tensor` axis, and
  then by the lower bound on the time. (A larger `tensor` axis sends more activations.) Candidates
  are skipped if they cannot fit, or cannot be faster than the best so far.

  Args:
    search: empty search. This function adds the candidates and their results.
    lists: lists of candidates. A candidate in several lists counts once.
    bound: function from a candidate to its lower bounds.
    measure: function that compiles a candidate.
    tries: maximum number of compiled candidates.
    enough: number of fitting candidates to stop at; None for no such limit.
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
        search.rejected[name] = f"does not divide over the mesh: {error}"
    ordered.append(sorted((name for name in new if name in search.least), key=rank))
  for name in filter(None, itertools.chain(*itertools.zip_longest(*ordered))):
    reason = find_rejection(search, name)
    if not reason and (len(search.rows) >= tries or len(search.ranked()) == enough):
      reason = f"takes at least {search.least[name]}; enough other candidates were compiled"
    if reason:
      search.rejected[name] = reason
    else:
      search.rows[name] = measure(search.cases[name])


def find_rejection(search: Search, name: str) -> str:
  """Returns the reason not to compile a candidate; "" to compile it.

  Compares the candidate's lower bounds with the chip's memory and with compiled candidates.
  """
  case, least, best = search.cases[name], search.least[name], math.inf
  if least.memory > search.hbm:
    excess = (least.memory - search.hbm) / GIB
    return f"needs at least {least.memory / GIB:.0f} GiB a chip, {excess:.0f} GiB too much"
  for other, row in search.rows.items():
    compiled = search.cases[other]
    if row["fits"]:
      best = min(best, row["search_s"])
      if case.config.mesh.tensor > compiled.config.mesh.tensor:
        return f"sends more over its tensor axis than {other}, which fits"
      # More micro-batches gather the weights more often. In a packed update they may still save
      # time: empty micro-batches are skipped, and smaller micro-batches are empty more often.
      finer = case.microbatches > compiled.microbatches and not case.packed
      if finer and changed(case, compiled.microbatches) == compiled:
        return f"gathers weights more often than {other}, which fits"
    elif not row.get("of_kernel") and _is_no_smaller(case, least, compiled, search.least[other]):
      return f"needs at least {least.memory / GIB:.1f} GiB, no less than {other}, which did not fit"
  if least.bound_s > (1 - MIN_GAIN) * best:
    return f"takes at least {least}; the best so far takes {best:.3g} s"
  return ""


def _is_no_smaller(
  case: Case, least: estimate.LowerBounds, other: Case, least_of_other: estimate.LowerBounds
) -> bool:
  """Whether a candidate takes at least the memory of another one.

  The bounds include neither chunks nor XLA's options, and no remat has the bound of "both".
  """
  ours, theirs = case.config.compute, other.config.compute
  chunks = ((c.expert_chunk or math.inf, c.logits_chunk or math.inf) for c in (ours, theirs))
  return (
    least.memory >= least_of_other.memory
    and all(chunk >= before for chunk, before in zip(*chunks, strict=True))
    and (ours.xla, ours.prefetch) == (theirs.xla, theirs.prefetch)
    and (theirs.remat != "none" or ours.remat == "none")
  )


def find(
  program: str,
  lists: Lists,
  topology: str,
  tries: int,
  enough: int | None = None,
  slices: int = 1,
) -> Search:
  """Searches for the fastest candidate on a topology.

  Prints a line for each compiled candidate.

  Args:
    program: "train" or "decode".
    lists: candidates, as for `compile_best`.
    topology: chips of one slice, e.g. "v5p:4x4x4".
    tries: maximum number of compiled candidates.
    enough: number of fitting candidates to stop at; None for no such limit.
    slices: number of TPU slices.
  """
  chip, devices = chips.parse(topology)[0], devices_of(topology, slices)
  search = Search(program, chip.hbm)

  def bound(case: Case) -> estimate.LowerBounds:
    mesh = sharding.make_mesh(case.config.mesh, devices)
    if program == "decode":
      with jax.set_mesh(mesh):
        return iteration.sampling_bound(case, mesh, topology)
    check(case, mesh)
    sampler_params(case, mesh)  # Raises ValueError for an impossible mesh.rollout_experts.
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
  """Returns lists of candidates for updates.

  The first list is the configuration itself. Each further list changes one aspect: XLA's
  options with prefetching, mesh with micro-batches, remat policy, or chunk sizes.

  devices: number of devices over all slices.
  """
  mesh = {axis: getattr(case.config.mesh, axis) for axis in AXES}
  remaining = max(1, devices // -math.prod(mesh.values()))  # Size of an axis configured as -1.
  case = changed(case, mesh={axis: remaining if n == -1 else n for axis, n in mesh.items()})
  unchunked = dict(logits_chunk=case.length)  # Chunks of this size have no effect.
  if case.model.num_experts:
    unchunked["expert_chunk"] = case.rows * case.length * case.config.mesh.tensor // devices
  remats = [changed(case, compute=dict(remat=policy)) for policy in ("none", *remat.POLICIES)]
  sizes = ({key: size} for key, tokens in unchunked.items() for size in CHUNKS if size < tokens)
  chunks = [changed(case, compute=size) for size in sizes]
  compilers = [
    changed(case, compute=dict(xla=xla, prefetch=prefetch))
    for prefetch in ((True, False) if case.model.num_experts else (False,))
    for xla in learner_programs.OPTIONS
  ]
  return [case], compilers, meshes(case, devices, slices), remats, chunks


def meshes(case: Case, devices: int, slices: int = 1) -> Iterator[Case]:
  """Yields candidates with other meshes and numbers of micro-batches.

  The axis `tensor` is 1, 2 or 4. Each slice has a full copy of the weights (data = slices). The
  mesh divides experts, key/value heads and sequences evenly. The number of micro-batches divides a
  device's sequences, and is at least 2 for packed updates.
  """
  experts = case.model.num_experts or 1
  for tensor, expert in itertools.product((1, 2, 4), range(1, devices // slices + 1)):
    shards = devices // tensor
    heads = case.model.num_kv_heads % tensor or case.model.linear.key_heads % tensor
    if heads or devices % (slices * tensor * expert) or experts % expert or case.sequences % shards:
      continue
    rows, mesh = case.sequences // shards, dict(data=slices, fsdp=shards // expert // slices)
    for microbatches in range(2 if case.packed else 1, rows + 1):
      if rows % microbatches == 0:
        yield changed(case, microbatches, mesh=mesh | dict(expert=expert, tensor=tensor))


def sampling(case: Case, shards: int) -> Lists:
  """Returns lists of candidates for sampling.

  The first list is the configuration itself, the second has layouts, and the third has values of
  engine.prefill_tokens. A layout is a number of slots, a cache size and, if the model has experts,
  a value of mesh.rollout_experts. The number of slots doubles from one per shard to at most one
  per response. Cache sizes are a full window per slot and, unless engine.cache is "dense",
  `Case.pool`.

  shards: number of parts into which the mesh splits the slots.
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
  prefills = [changed(case, engine=dict(prefill_tokens=1 << power)) for power in range(11, 17, 2)]
  return [case], layouts, prefills


def changed(case: Case, microbatches: int = 0, **sections: dict[str, Any]) -> Case:
  """Replaces values in sections of the case's configuration.

  microbatches: also replaces the case's micro-batches per update; 0 to keep them.
  """
  config = case.config
  if microbatches:
    case = dataclasses.replace(case, microbatches=microbatches)
    sections |= dict(rl=dict(microbatches=microbatches)) if case.configured else {}
  parts = {name: dataclasses.replace(getattr(config, name), **sections[name]) for name in sections}
  return dataclasses.replace(case, config=dataclasses.replace(config, **parts))


def settings(program: str, case: Case) -> dict[str, Row]:
  """Returns a case's searched settings, by section and key; no micro-batches of `one_batch`."""
  values = {
    section: {key: getattr(getattr(case.config, section), key) for key in keys}
    for section, keys in SETTINGS[program].items()
    if not (section == "rl" and case.one_batch)
  }
  if "rl" in values:
    # A batch from the command line may have another number of micro-batches than the configuration.
    values["rl"]["microbatches"] = case.microbatches
  return values


def name_of(program: str, case: Case) -> str:
  """Formats a case's searched settings as its name."""
  sections = settings(program, case).values()
  values = {key: n for keys in sections for key, n in keys.items()}
  values |= dict(microbatches=case.microbatches)
  return NAMES[program].format(**values, ahead=", prefetch" if values.get("prefetch") else "")


def lines(program: str, case: Case) -> str:
  """Formats a case's searched settings as lines of a configuration file."""

  def literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)

  return "\n".join(
    f"{section}=dict({', '.join(f'{key}={literal(value)}' for key, value in keys.items())}),"
    for section, keys in settings(program, case).items()
  )
