"""Last lines of the report: whether the programs fit, and the next command to try."""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_jax.aot.programs import Case
from gspo_jax.aot.search import Search, settings
from gspo_jax.sampling.requests import sizes
from gspo_jax.system.accelerators import GPU_FRACTION

# Printed names of the resources in `row["binds"]`.
BOUNDS = dict(compute="compute", hbm="HBM", interconnect="ICI", network="the network")


def lines(
  rows: Sequence[Mapping[str, Any]],
  case: Case,
  topology: str,
  shards: int,
  arguments: Sequence[str],
) -> list[str]:
  """Returns the verdict on compiled programs, as lines.

  The last line is the next step. If a program does not fit, the next step is a command that takes
  less memory, or a larger topology. If all programs fit, the next step is a search (TPUs) or a run
  (GPUs).

  Args:
    rows: results of `compiler.examine`, one per program.
    case: compiled configuration and batch.
    topology: name of the topology.
    shards: number of parts into which the mesh splits a batch.
    arguments: arguments of this command, which the next command repeats.
  """
  large = [row["program"] for row in rows if not row["fits"]]
  if large:
    text = f"verdict: {topology} is too small for {', '.join(large)}"
    # Beside arrays that already exceed the memory, no smaller program fits.
    overfull = any(row.get("held_gib", 0) > row["hbm_gib"] for row in rows if not row["fits"])
    change = "" if overfull else smaller(large, case, shards)
    if not change:
      return [text, "next: take a larger topology"]
    return [text, f"next: {_command(arguments, change)}"]
  text = _fit_lines(rows, topology)
  if not any("binds" in row for row in rows):
    unknown = "bound: unknown, since times on GPUs have to be measured"
    if not case.configured or case.one_batch:  # A run has another batch.
      return [*text, unknown, f"next: {_command(_drop(arguments, 'sequences', 'length'))}"]
    flags = [x for x in _with_values(arguments) if x.lstrip("-").startswith("config")]
    if case.slots:
      flags.append(f"--config.engine.slots={case.slots}")
    run = shlex.join(["python", "-m", "gspo_jax.main", *flags, "--workdir=DIR"])
    fraction = f"XLA_PYTHON_CLIENT_MEM_FRACTION={GPU_FRACTION:g}"  # As compiled.
    return [*text, unknown, f"next, on {topology}: {fraction} {run}"]
  # The flag --search needs one of these programs.
  searched = {"train", "decode"} & {row["program"] for row in rows}
  flags = arguments if searched else [*_drop(arguments, "programs"), "--programs=train,decode"]
  return [*text, f"next: {_command(flags, '--search')}"]


def search_lines(searches: Sequence[Search], topology: str, arguments: Sequence[str]) -> list[str]:
  """Returns the verdict on searches, with a command for the best settings.

  The command repeats `arguments` with these settings, and without --search. Arguments are as in
  `lines`.
  """
  large = [search.program for search in searches if not search.best]
  if large:
    text = (
      f"verdict: {topology} is too small for {', '.join(large)}, with any settings of the search"
    )
    return [text, "next: take a larger topology"]
  rows = [search.rows[search.ranked()[0]] | dict(program=search.program) for search in searches]
  changes = [flag for search in searches for flag in _changes(search)]
  flags = _drop(arguments, "search")
  return [*_fit_lines(rows, topology), f"next: {_command(flags, *changes)}"]


def _fit_lines(rows: Sequence[Mapping[str, Any]], topology: str) -> list[str]:
  """Returns lines on the remaining memory and on programs' slowest resources."""
  free = {row["program"]: row["hbm_gib"] - row["peak_gib"] - row["held_gib"] for row in rows}
  tightest, chip = min(free, key=free.get), rows[0]["hbm_gib"]
  text = f"verdict: fits {topology}, with {free[tightest]:.1f} GiB of {chip:.0f} left ({tightest})"
  bounds = [f"{row['program']} by {BOUNDS[row['binds']]}" for row in rows if "binds" in row]
  return [text, f"bound: {', '.join(bounds)}"] if bounds else [text]


def _changes(search: Search) -> list[str]:
  """Returns flags for the best settings, except settings equal to the configuration's."""
  configured = next(iter(search.cases.values()))  # A search begins with the configuration itself.
  before, after = (settings(search.program, x) for x in (configured, search.best))
  return [
    f"--config.{section}.{key}={value}"
    for section, keys in after.items()
    for key, value in keys.items()
    if value != before[section][key]
  ]


def smaller(large: Sequence[str], case: Case, shards: int) -> str:
  """Returns a flag for less memory: a smaller cache, smaller micro-batches, or full remat.

  If a program of the sampler does not fit, the flag halves the cache or, without a size of the
  cache, the slots. Otherwise it halves the rows of a micro-batch or, if this is not possible, sets
  full remat. Returns "" if cache or slots cannot be halved, full remat is set already, or the copy
  of the weights does not fit. Other arguments are as in `lines`.

  large: names of programs that do not fit.
  """
  if "publish" in large:
    return ""
  if {"prefill", "decode"} & {*large}:
    if case.engine.cache_tokens:
      size = sizes(case.workload, case.engine, shards)
      positions = size.pages * size.page * size.shards // 2
      try:
        sizes(case.workload, dataclasses.replace(case.engine, cache_tokens=positions), shards)
      except ValueError:
        return ""
      return f"--config.engine.cache_tokens={positions}"
    slots = case.engine.slots_for(case.workload.trajectories) // 2
    return f"--config.engine.slots={slots}" if slots and slots % shards == 0 else ""
  if case.rows % 2 == 0 and (case.rows // 2) % shards == 0:
    if case.one_batch:
      return f"--sequences={case.rows // 2}"
    return f"--config.rl.microbatches={2 * case.microbatches}"
  return "" if case.config.compute.remat == "full" else "--config.compute.remat=full"


def _command(arguments: Sequence[str], *changes: str) -> str:
  """Returns the command, with changes in place of earlier values of the same flags."""
  names = [change.lstrip("-").partition("=")[0] for change in changes]
  names += ["slots"] * ("config.engine.slots" in names)  # This flag would override the key.
  flags = _drop(arguments, *names) if names else arguments
  return shlex.join(["python", "-m", "gspo_jax.aot", *flags, *changes])


def _drop(arguments: Sequence[str], *names: str) -> list[str]:
  """Drops flags by name."""
  return [x for x in _with_values(arguments) if x.lstrip("-").partition("=")[0] not in names]


def _with_values(arguments: Sequence[str]) -> list[str]:
  """Joins each flag with a value after it: --slots 64 becomes --slots=64."""
  joined: list[str] = []
  for x in arguments:
    if x.startswith("-") and not x[1:].isdigit():
      joined.append(x)
    else:
      joined[-1] += f"={x}"
  return joined
