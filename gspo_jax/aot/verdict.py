"""Verdict on compiled programs: whether they fit, their bounds, and the next command to try."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_jax.aot.programs import Case
from gspo_jax.aot.search import Search, settings

BOUNDS = dict(compute="compute", hbm="HBM", interconnect="ICI", network="the network")


def lines(
  rows: Sequence[Mapping[str, Any]],
  case: Case,
  topology: str,
  shards: int,
  arguments: Sequence[str],
) -> list[str]:
  """Returns the verdict's lines.

  Args:
    rows: rows of the report, one per program.
    case: compiled configuration and batch.
    topology: compiled topology.
    shards: devices that split a batch.
    arguments: command line, for the next command.
  """
  large = [row["program"] for row in rows if not row["fits"]]
  if large:
    text = f"verdict: {', '.join(large)} does not fit {topology}"
    change = smaller(large, case, shards)
    if not change:
      return [text, "next: take a larger topology"]
    return [text, f"next: {_command(arguments, change)}"]
  text = _fit_lines(rows, topology)
  if not any("binds" in row for row in rows):
    return [*text, "next: run on one of these GPUs, to measure times"]
  # A search is for train or decode.
  searched = {"train", "decode"} & {row["program"] for row in rows}
  names = [] if searched else ["--programs=train,decode"]
  return [*text, f"next: {_command(arguments, *names, '--search')}"]


def search_lines(searches: Sequence[Search], topology: str, arguments: Sequence[str]) -> list[str]:
  """Returns the verdict's lines of a search, and a command with the best settings."""
  large = [search.program for search in searches if not search.best]
  if large:
    text = f"verdict: {', '.join(large)} does not fit {topology} with any settings of the search"
    return [text, "next: take a larger topology"]
  rows = [search.rows[search.ranked()[0]] | dict(program=search.program) for search in searches]
  arguments = [x for x in arguments if x.lstrip("-").partition("=")[0] not in ("search", "slots")]
  changes = [flag for search in searches for flag in _changes(search)]
  return [*_fit_lines(rows, topology), f"next: {_command(arguments, *changes)}"]


def _fit_lines(rows: Sequence[Mapping[str, Any]], topology: str) -> list[str]:
  """Returns lines on the remaining memory, and on the programs' bounds."""
  room = {row["program"]: row["hbm_gib"] - row["peak_gib"] - row["held_gib"] for row in rows}
  least, chip = min(room, key=room.get), rows[0]["hbm_gib"]
  text = f"verdict: fits {topology}, with {room[least]:.1f} GiB of {chip:.0f} left ({least})"
  bounds = [f"{row['program']} by {BOUNDS[row['binds']]}" for row in rows if "binds" in row]
  return [text, f"bound: {', '.join(bounds)}"] if bounds else [text]


def _changes(search: Search) -> list[str]:
  """Returns flags from the configured settings, the first of the cases, to the best ones."""
  before, after = (
    settings(search.program, x) for x in (next(iter(search.cases.values())), search.best)
  )
  return [
    f"--config.{section}.{key}={value}"
    for section, keys in after.items()
    for key, value in keys.items()
    if value != before[section][key]
  ]


def smaller(large: Sequence[str], case: Case, shards: int) -> str:
  """Returns a flag for less memory in a program; "" without one."""
  if {"prefill", "decode"} & {*large}:
    slots = case.engine.slots_for(case.workload.trajectories) // 2
    return f"--config.engine.slots={slots}" if slots and slots % shards == 0 else ""
  if case.rows % 2 == 0 and (case.rows // 2) % shards == 0:
    return f"--config.rl.microbatches={2 * case.microbatches}"
  return "" if case.config.compute.remat == "full" else "--config.compute.remat=full"


def _command(arguments: Sequence[str], *changes: str) -> str:
  return shlex.join(["python", "-m", "gspo_jax.aot", *arguments, *changes])
