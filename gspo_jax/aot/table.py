"""Prints what was compiled, a line for each program."""

import sys
from typing import Any

from gspo_jax.aot.programs import Case


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
    f"{start}{row['peak_gib']:>10.2f}{row['held_gib']:>8.2f}{row['hbm_gib']:>5.0f}"
    f"{row['executed_flops'] / 1e15:>9.3g}{row['hbm_bytes'] / 1e9:>9,.0f}"
    f"{row['wire_bytes'] / 1e9:>8,.1f}{seconds}"
    f"{row['interconnect_s']:>8.3g}  {row['binds']:<13}{row['mfu']:>6.1%}{row['compile_s']:>8.0f}s"
  )
  for kind, moved in row["collectives"].items():
    print_line(f"    {kind:<20}{moved['count']:>8.0f} times{moved['bytes'] / 1e9:>10.3f} GB a chip")
  if not row["fits"]:
    print_line(f"    does not fit: {row['error']}")


def print_line(text: str) -> None:
  sys.stdout.write(text + "\n")
  sys.stdout.flush()
