"""Verdict on compiled programs: whether they fit, their bounds, and the next command to try."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_jax.aot.programs import Case

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
  room = {row["program"]: row["hbm_gib"] - row["peak_gib"] - row["held_gib"] for row in rows}
  least = min(room, key=room.get)
  chip = rows[0]["hbm_gib"]
  text = [f"verdict: fits {topology}, with {room[least]:.1f} GiB of {chip:.0f} left ({least})"]
  bounds = [f"{row['program']} by {BOUNDS[row['binds']]}" for row in rows if "binds" in row]
  if not bounds:
    return [*text, "next: a run on one of these GPUs has the times"]
  # A search is for one of these two.
  names = [] if {"train", "decode"} & room.keys() else ["--programs=train,decode"]
  search = _command(arguments, *names, "--search")
  return [*text, f"bound: {', '.join(bounds)}", f"next: {search}"]


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
