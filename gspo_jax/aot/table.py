"""Prints the results of compilation as a table, with a line for each program."""

import sys
from typing import Any

import jax

from gspo_jax.aot import chips
from gspo_jax.aot.programs import Case
from gspo_jax.system.accelerators import GPU_FRACTION

GPU_NOTE = (
  f".\nMemory and traffic are per GPU. {GPU_FRACTION:g} of a GPU's memory is for arrays: set "
  f"XLA_PYTHON_CLIENT_MEM_FRACTION={GPU_FRACTION:g} in a run. Times are unknown, since matrix "
  "products are tuned on the GPU itself"
)
PACKED_NOTE = ". Attention of packed rows runs blockwise, but is counted as cuDNN's kernel"


def axes(mesh: jax.sharding.Mesh) -> str:
  """Formats the axes of a mesh with their sizes."""
  return " x ".join(f"{axis} {n}" for axis, n in mesh.shape.items())


def title(case: Case, topology: str, mesh, slices: int) -> str:
  """Returns the text above the table: topology, mesh and batch."""
  slots, network = case.engine.slots_for(case.workload.trajectories), ""
  if slices > 1:
    speed = chips.parse(topology)[0].network / 1e9
    network = f"; DCN GB are per host, sent at {speed:g} GB/s for each of its chips"
  if chips.parse(topology)[0].cuda:
    network = GPU_NOTE + (PACKED_NOTE if case.config.rl.packed else "")
  return (
    f"{slices_text(topology, slices)}, mesh {axes(mesh)}: {case.sequences} sequences x "
    f"{case.length} tokens per update in {case.microbatches} micro-batches, "
    f"compute.xla={case.config.compute.xla}; {slots} slots "
    f"of {case.workload.window} positions, {case.filled:.0f} of them filled on average"
    f"{network}"
  )


def slices_text(topology: str, slices: int) -> str:
  """Returns e.g. "v5p:4x4x4", or "2 slices of v5p:4x4x4"."""
  return topology if slices == 1 else f"{slices} slices of {topology}"


def print_row(row: dict[str, Any], header: bool) -> None:
  """Prints a program's row and its collectives.

  Args:
    row: result of `compiler.examine`, with the name as `program`.
    header: whether to print the names of the columns first.
  """
  if "peak_gib" not in row:
    print_line(f"{row['program']:<22}does not fit: {row['error']}")
    return
  if "product_flops" in row:
    _print_gpu_row(row, header)
  else:
    _print_tpu_row(row, header)
  for kind, moved in row["collectives"].items():
    print_line(f"    {kind:<20}{moved['count']:>8.0f} times{moved['bytes'] / 1e9:>10.3f} GB a chip")
  if not row["fits"]:
    print_line(f"    does not fit: {row['error']}")


def _print_gpu_row(row: dict[str, Any], header: bool) -> None:
  if header:
    print_line(
      f"{'program':<12}{'peak GiB':>9}{'+ held':>8}{'of':>7}{'TFLOP needed':>14}{'compiled':>10}"
      f"{'ratio':>7}{'GB needed':>11}{'compiled':>10}{'ratio':>7}{'NVLink GB':>11}"
      f"{'network GB':>12}{'compile':>9}"
    )
  needed, products = row["executed_flops"] / 1e12, row["product_flops"] / 1e12
  ratio = f"{products / needed:.2f}" if needed else ""
  print_line(
    f"{row['program']:<12}{row['peak_gib']:>9.2f}{row['held_gib']:>8.2f}{row['hbm_gib']:>7.1f}"
    f"{needed:>14,.4g}{products:>10,.4g}{ratio:>7}{_gigabytes(row['needed_bytes']):>11}"
    f"{_gigabytes(row['hbm_bytes']):>10}{row['moved_over_needed']:>7.2f}"
    f"{_gigabytes(row['wire_bytes']):>11}{_gigabytes(row['network_bytes']):>12}"
    f"{row['compile_s']:>8.0f}s"
  )


def _print_tpu_row(row: dict[str, Any], header: bool) -> None:
  several = row["slices"] > 1
  if header:
    network = f"{'DCN GB':>9}{'DCN':>9}" if several else ""
    print_line(
      f"{'program':<22}{'peak GiB':>10}{'+ held':>8}{'of':>5}{'PFLOP':>9}"
      f"{'HBM GB':>9}{'needed':>9}{'ratio':>8}"
      f"{'ICI GB':>9}{'alone':>9}{'compute':>9}{'HBM':>9}{'ICI':>9}{network}"
      f"  {'binds':<13}{'MFU':>6}{'compile':>9}"
    )
  start = f"{row['program']:<22}"
  needed = f"{'':>17}"
  if "needed_bytes" in row:
    needed = f" {_gigabytes(row['needed_bytes']):>8}{row['moved_over_needed']:>8.2f}"
  seconds = "".join(f"{row[f'{k}_s']:>9.3g}" for k in ("compute", "hbm", "interconnect"))
  network = f" {_gigabytes(row['network_bytes']):>8} {row['network_s']:>8.3g}" if several else ""
  print_line(
    f"{start}{row['peak_gib']:>10.2f}{row['held_gib']:>8.2f}{row['hbm_gib']:>5.0f}"
    f"{row['executed_flops'] / 1e15:>9.3g}"
    f"{_gigabytes(row['hbm_bytes']):>9}{needed} {_gigabytes(row['wire_bytes']):>8}"
    f" {_gigabytes(row['wire_bytes'] - row['hidden_bytes']):>8}{seconds}"
    f"{network}  {row['binds']:<13}{row['mfu']:>6.1%}"
    f"{row['compile_s']:>8.0f}s"
  )


def print_found(row: dict[str, Any], header: bool) -> None:
  """Prints a candidate's row without collectives, and the steps and speed of sampling.

  Arguments are as in `print_row`.
  """
  print_row(row | dict(collectives={}), header)
  if "steps" in row:
    print_line(f"    {row['steps']:,} steps, {row['speed']:,.0f} tokens/s/chip while sampling")


def print_search(rejected: dict[str, str], best: list[dict[str, Any]], most: int = 12) -> None:
  """Prints rejected candidates with reasons, and the rows of the best candidates.

  Args:
    rejected: reasons by name of the candidate.
    best: rows of the best candidates, fastest first.
    most: maximum number of printed reasons.
  """
  if rejected:
    print_line("not compiled:")
  for name, reason in list(rejected.items())[:most]:
    print_line(f"    {name:<44}{reason}")
  if len(rejected) > most:
    print_line(f"    and {len(rejected) - most} more")
  if best:
    print_line("best:")
  for i, row in enumerate(best):
    print_found(row, header=not i)


def _gigabytes(n: float) -> str:
  return f"{n / 1e9:,.0f}" if n >= 1e11 else f"{n / 1e9:.3g}"


def print_line(text: str) -> None:
  """Prints a line at once: flushes stdout, since a pipe would delay the line."""
  sys.stdout.write(text + "\n")
  sys.stdout.flush()
