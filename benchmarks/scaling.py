"""How cost grows with length T, group G, experts E and devices, against what it must.

Command:   python benchmarks/scaling.py [--series=T,G,E,devices] [--plot=docs/scaling.svg]
             [--table=FILE.md] [--save=FILE.json] [--quick]
Random float32 models of 4 layers and width 256, each size doubled from point to point:
  T        128 to 4,096. An update on 4,096 tokens in all, in sequences of T, with a vocabulary of
           4,096; and 32 responses of 32 tokens (2 prompts) that end at position T
  G        1 (nothing is shared), then 4 to 64. 64 responses of 32 tokens to 64/G prompts of 512
  E        8 to 128, of which 2 of width 128 are used per token: the active parameters stay. An
           update on 32 sequences of 128; and 32 responses of 32 tokens to 4 prompts of 32
  devices  1 to 8, simulated on the cores that are there, for the same batches as for E: what
           grows is what splitting costs. fsdp for the dense model, expert for the MoE (E = 16)
`sample` is a whole call of `generate`, `prefill` and `decode` are its parts, which simulated
devices do at the same time. Of every line:
  ms, tokens/s   median of calls, the one that compiled left out; tokens/s of an update are those of
                 whole sequences, of a prefill those of prompts, else those of responses
  time           growth of the time since the line's first point
  operations     growth of the operations that are needed: no padding, nothing computed twice
  excess         time / operations: above 1, it grows faster than the arithmetic
  bytes          growth of what has to be read or written: weights, gradients and moments of an
                 update; at every decoding step, weights that are used and cache that is visible
  memory         MB: temporary of the update, on one device; of sampling, the key/value cache
  whole          the same of an update that holds all scores and logits at once (not run)
A growth is of time, operations or bytes per call, which has the same tokens at every point of a
line (a prefill has not: there the sum over all prompts counts). The figure shows tokens/s, dashed
what they would be if the time grew as the operations do; the Markdown table tokens/s, excess and
memory, with the sizes side by side. About eight minutes on two cores.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import scaling_points
from machine import environment
from scaling_plot import svg
from scaling_points import DENSE, MOE, Point

ROOT = Path(__file__).resolve().parents[1]
FOREIGN = 0.1  # share of the machine that others may take
COLUMNS = (
  "line",
  "at",
  "ms",
  "tokens/s",
  "time",
  "operations",
  "excess",
  "bytes",
  "memory",
  "whole",
)

QUICK = dict(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
QUICK |= dict(intermediate_size=32, vocab_size=64)


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--series", default=",".join(SERIES))
  parser.add_argument("--plot", default="", help="SVG file for the figure")
  parser.add_argument("--table", default="", help="file for the table, as Markdown")
  parser.add_argument("--save", default="", help="file for all numbers, as JSON")
  parser.add_argument("--quick", action="store_true", help="toy sizes, two points each")
  options = parser.parse_args(arguments)
  names = options.series.split(",")
  if unknown := set(names) - set(SERIES):
    parser.error(f"--series={','.join(sorted(unknown))}: known are {', '.join(SERIES)}")
  print(about := environment(["jax"]), flush=True)
  rows = []
  for name in names:
    points = list(SERIES[name]())
    new_rows = run(quick(points) if options.quick else points)
    rows += with_growth(new_rows)
    print(f"\n{text(new_rows)}", flush=True)
  busy = max(row["foreign"] for row in rows)
  print(f"\nOthers took at most {busy:.0%} of the machine", end="")
  print(f": more than {FOREIGN:.0%}, measure again" if busy > FOREIGN else "")
  if options.table:
    Path(options.table).write_text(f"{about}\n\n{markdown(rows)}\n")
  if options.plot:
    Path(options.plot).write_text(svg(rows))
  if options.save:
    Path(options.save).write_text(json.dumps(dict(environment=about, rows=rows), indent=2))


def powers(first: int, last: int) -> list[int]:
  return [2**n for n in range(first.bit_length() - 1, last.bit_length())]


def lengths(tokens: int = 4096, new: int = 32) -> Iterator[Point]:
  wide = DENSE | dict(vocab_size=4096)  # logits that take more memory than activations
  for T in powers(128, 4096):
    update = dict(prompts=tokens // T, group=1, prompt=T // 4, new=T - T // 4)
    yield Point("T", T, "dense, update", wide, True, **update, whole=True)
    sampled = dict(prompts=2, group=16, prompt=T - new, new=new)
    yield Point("T", T, "dense, sample", DENSE, False, **sampled)


def groups(rows: int = 64) -> Iterator[Point]:
  for G in (1, *powers(4, 64)):
    sampled = dict(prompts=rows // G, group=G, prompt=512, new=32)
    yield Point("G", G, "dense, sample", DENSE, False, **sampled)


UPDATE = dict(prompts=32, group=1, prompt=32, new=96)
SAMPLE = dict(prompts=4, group=8, prompt=32, new=32)


def experts() -> Iterator[Point]:
  for E in powers(8, 128):
    model = MOE | dict(num_experts=E)
    yield Point("E", E, "MoE, update", model, True, **UPDATE)
    yield Point("E", E, "MoE, sample", model, False, **SAMPLE)


def devices() -> Iterator[Point]:
  for n in powers(1, 8):
    for name, model in dict(dense=DENSE, MoE=MOE).items():
      yield Point("devices", n, f"{name}, update", model, True, **UPDATE, devices=n)
      yield Point("devices", n, f"{name}, sample", model, False, **SAMPLE, devices=n)


SERIES = dict(T=lengths, G=groups, E=experts, devices=devices)


def quick(points: list[Point]) -> list[Point]:
  """The first two sizes of a series, with a toy model."""
  sizes = list(dict.fromkeys(point.x for point in points))[:2]
  return [
    dataclasses.replace(point, changes=point.changes | QUICK, seconds=0.0)
    for point in points
    if point.x in sizes
  ]


def run(points: list[Point]) -> list[dict[str, Any]]:
  """Measures rows with series and size; each number of devices in its own process."""
  measured = []
  for n in dict.fromkeys(point.devices for point in points):
    batch = [point for point in points if point.devices == n]
    spread = batch[0].series == "devices"
    results = simulated(n, batch) if spread else map(scaling_points.measure, batch)
    for point, rows in zip(batch, results):
      measured += [dict(series=point.series, at=point.x) | row for row in rows]
  return measured


def simulated(count: int, points: list[Point]) -> list[list[dict[str, Any]]]:
  flags = f"--xla_force_host_platform_device_count={count}"
  variables = dict(
    JAX_PLATFORMS="cpu",
    XLA_FLAGS=" ".join(filter(None, [os.environ.get("XLA_FLAGS"), flags])),
    PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
  )
  child = subprocess.run(
    [sys.executable, str(ROOT / "benchmarks" / "scaling_points.py")],
    input=json.dumps([dataclasses.asdict(point) for point in points]),
    env=os.environ | variables,
    capture_output=True,
    text=True,
  )
  if child.returncode:
    raise SystemExit(f"{count} devices failed:\n{child.stderr[-3000:]}")
  return json.loads(child.stdout)


def with_growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Adds each row's growth relative to the first of its line, in place."""
  first = {}
  for row in rows:
    start = first.setdefault(row["line"], row)
    row["time"] = row["seconds"] / start["seconds"]
    row["operations_growth"] = row["operations"] / start["operations"]
    row["bytes_growth"] = row["bytes"] / start["bytes"]
    row["excess"] = row["time"] / row["operations_growth"]
    # Tokens/s if the time grew as the operations do.
    row["ideal"] = row["tokens"] / start["seconds"] / row["operations_growth"]
  return rows


def cells(row: dict[str, Any]) -> list[str]:
  return [
    row["line"],
    f"{row['series']} = {row['at']:,}",
    f"{row['seconds'] * 1e3:,.0f}" if row["seconds"] > 0.0995 else f"{row['seconds'] * 1e3:.3g}",
    f"{row['tokens'] / row['seconds']:,.0f}",
    *(f"{row[key]:.2f}" for key in ("time", "operations_growth", "excess", "bytes_growth")),
    f"{row['memory'] / 1e6:,.0f}" if row["memory"] > 9.95e6 else f"{row['memory'] / 1e6:.1f}",
    f"{row['whole'] / 1e6:,.0f}" if "whole" in row else "",
  ]


def by_line(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Each line's rows together, the lines in their order."""
  lines = dict.fromkeys((row["series"], row["line"]) for row in rows)
  return [row for line in lines for row in rows if (row["series"], row["line"]) == line]


def text(rows: list[dict[str, Any]]) -> str:
  table = [COLUMNS, *map(cells, by_line(rows))]
  widths = [max(map(len, column)) for column in zip(*table)]
  lines = []
  for line in table:
    first, *others = (f"{cell:>{width}}" for cell, width in zip(line, widths))
    lines.append("  ".join([first.strip().ljust(widths[0]), *others]))
  return "\n".join(line.rstrip() for line in lines)


def markdown(rows: list[dict[str, Any]]) -> str:
  """Formats a table per series: tokens/s and excess, memory and bytes, by size."""
  tables = []
  for series in dict.fromkeys(row["series"] for row in rows):
    chosen = [row for row in rows if row["series"] == series]
    sizes = list(dict.fromkeys(row["at"] for row in chosen))
    lines = [["tokens/s (excess)", *(f"{series} = {size:,}" for size in sizes)]]
    lines.append(["---", *["---:"] * len(sizes)])
    others = []
    for line in dict.fromkeys(row["line"] for row in chosen):
      line_rows = [row for row in chosen if row["line"] == line]
      speeds = [f"{row['tokens'] / row['seconds']:,.0f} ({row['excess']:.2f})" for row in line_rows]
      lines.append([line, *speeds])
      if not line.endswith(("prefill", "decode")):  # whose cache is that of the whole
        others.append([f"{line}: MB", *(f"{row['memory'] / 1e6:,.0f}" for row in line_rows)])
      if all("whole" in row for row in line_rows):
        others.append([f"{line}: MB, whole", *(f"{row['whole'] / 1e6:,.0f}" for row in line_rows)])
      if line.endswith(("update", "decode")) and line_rows[-1]["bytes_growth"] > 1.05:
        others.append([f"{line}: bytes", *(f"× {row['bytes_growth']:.2f}" for row in line_rows)])
    tables.append("\n".join(f"| {' | '.join(line)} |" for line in lines + others))
  return "\n\n".join(tables)


if __name__ == "__main__":
  main()
