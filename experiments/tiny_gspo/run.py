"""Runs configs/tiny.py with many seeds: results.jsonl, README's table and the curve in docs/.

python experiments/tiny_gspo/run.py --workdir=DIR [--seeds=20] [--bfloat16=5] [--jobs=2]

Each run is a process of the command line in DIR/<dtype>_<seed>, on its share of the cores. The same
command continues. A failed run has a line with the reason, and counts as one that has learned
nothing. Runs without a line are repeated.
"""

import argparse
import concurrent.futures
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.jsonl"
START, END = (0.3, 0.6), 0.85  # Range of accuracy after the cold start; least at the end.
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 260, 48, 16, 20, 40
COLOURS = dict(float32="#2563c9", bfloat16="#c2570c")
Result = dict[str, Any]


def command(workdir: Path, dtype: str, seed: int) -> list[str]:
  program = [sys.executable, "-m", "gspo_jax.main", "--config=configs/tiny.py"]
  flags = [f"--config.seed={seed}", f"--config.compute.dtype={dtype}"]
  return [*program, f"--workdir={workdir}", *flags]


def make(workdir: Path, dtype: str, seed: int, cores: set[int]) -> Result:
  """Makes a run on these cores; returns its result."""
  started = time.monotonic()
  process = subprocess.Popen(
    command(workdir, dtype, seed), cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace"
  )
  if hasattr(os, "sched_setaffinity"):  # Linux
    os.sched_setaffinity(process.pid, cores)  # Its threads inherit them.
  _, stderr = process.communicate()
  seconds = round(time.monotonic() - started)
  last = stderr.strip().splitlines()[-1:] if process.returncode else []
  about = dict(seed=seed, dtype=dtype, cores=len(cores), seconds=seconds)
  about |= dict(returncode=process.returncode, failure=last[0] if last else "")
  return about | curve(workdir)


def curve(workdir: Path) -> Result:
  """Reads the end of the cold start, and evaluations (iteration, avg@4, greedy)."""
  path, config = workdir / "metrics.jsonl", workdir / "config.json"
  rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
  cold = [row for row in rows if row["phase"] == "sft"][-1:]
  points = [
    [row["step"], round(row["eval/accuracy"], 4), round(row["eval/greedy"], 4)]
    for row in rows
    if row["phase"] == "rl" and "eval/accuracy" in row
  ]
  commit = json.loads(config.read_text())["provenance"]["commit"] if config.exists() else None
  return dict(
    commit=commit,
    updates=cold[0]["step"] if cold else 0,
    held_out_loss=round(cold[0].get("held_out_loss", 0.0), 4) if cold else None,
    points=points,
  )


def make_all(entries: list[tuple[str, int]], workdir: Path, jobs: int, results: Path) -> None:
  """Makes the runs without a line in `results`; adds their lines."""
  finished = {(r["dtype"], r["seed"]) for r in read(results)}
  linux = hasattr(os, "sched_getaffinity")
  cores = sorted(os.sched_getaffinity(0)) if linux else [*range(os.cpu_count() or 1)]
  shares: queue.Queue[set[int]] = queue.Queue()
  for job in range(jobs):
    shares.put(set(cores[job % len(cores) :: jobs]))

  def run_one(dtype: str, seed: int) -> Result:
    share = shares.get()
    try:
      return make(workdir / f"{dtype}_{seed}", dtype, seed, share)
    finally:
      shares.put(share)

  with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
    remaining = [entry for entry in entries if entry not in finished]
    for future in concurrent.futures.as_completed(
      [pool.submit(run_one, *entry) for entry in remaining]
    ):
      with open(results, "a") as file:
        file.write(json.dumps(future.result()) + "\n")
      print(outcome(future.result()), flush=True)


def read(results: Path) -> list[Result]:
  lines = results.read_text().splitlines() if results.exists() else []
  return sorted(map(json.loads, lines), key=lambda r: (r["dtype"] != "float32", r["seed"]))


def ends(result: Result) -> tuple[float, float]:
  """Returns accuracy after the cold start and at the end; 0 if not reached."""
  finished = result["returncode"] == 0 and result["points"]
  start = result["points"][0][1] if result["points"] else 0.0
  return start, result["points"][-1][1] if finished else 0.0


def good(result: Result) -> bool:
  start, end = ends(result)
  return START[0] <= start <= START[1] and end >= END


def outcome(result: Result) -> str:
  start, end = ends(result)
  return (
    f"{result['dtype']} seed {result['seed']}: {result['updates']} updates, then {start:.3f} -> "
    f"{end:.3f}, {result['seconds']} s{'' if good(result) else ': NOT GOOD'} {result['failure']}"
  )


def table(results: list[Result]) -> str:
  """Formats minimum, median and maximum over seeds, per precision."""
  lines = [
    "| | updates of SFT | accuracy after SFT | GSPO iteration 10 | iteration 20 | iteration 40 "
    f"| ended at {END} or above |",
    "| --- | --- | --- | --- | --- | --- | --- |",
  ]
  for dtype in COLOURS:
    runs = [r for r in results if r["dtype"] == dtype]
    if not runs:
      continue
    columns = [spread([r["updates"] for r in runs], "d"), spread([ends(r)[0] for r in runs], ".2f")]
    for step in (10, 20, 40):
      values = [next((p[1] for p in r["points"] if p[0] == step), 0.0) for r in runs]
      columns.append(spread(values, ".2f"))
    count = f"{sum(map(good, runs))} of {len(runs)}"
    lines.append("| " + " | ".join([f"{dtype}, {len(runs)} seeds", *columns, count]) + " |")
  return "\n".join(lines)


def spread(values: list[float], form: str) -> str:
  middle = statistics.median_low(values)
  return f"{min(values):{form}} · **{middle:{form}}** · {max(values):{form}}"


def svg(results: list[Result]) -> str:
  """Draws each run as a thin line."""
  last = max((step for r in results for step, *_ in r["points"]), default=1)

  def x(step):
    return LEFT + (WIDTH - LEFT - RIGHT) * step / last

  def y(value):
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value

  parts = []
  for tick in (0, 0.25, 0.5, 0.75, 1):
    parts.append(
      f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" '
      f'stroke="#8884"/><text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>'
    )
  for step in range(0, last + 1, 20):
    parts.append(
      f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>'
    )
  parts.append(
    f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
    "GSPO iterations after the cold start</text>"
  )
  for r in results:
    line = " ".join(f"{x(step):.1f},{y(accuracy):.1f}" for step, accuracy, _ in r["points"])
    parts.append(
      f'<polyline points="{line}" fill="none" stroke="{COLOURS[r["dtype"]]}" stroke-opacity="0.6">'
      f"<title>{r['dtype']} seed {r['seed']}</title></polyline>"
    )
  for i, (dtype, colour) in enumerate(COLOURS.items()):
    number = sum(r["dtype"] == dtype for r in results)
    parts.append(
      f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - BOTTOM - 30 + 16 * i}" text-anchor="end" '
      f'style="fill:{colour}">{dtype}: {number} seeds</text>'
    )
  style = "text{font:12px system-ui,sans-serif;fill:#888}"
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">'
    f"<title>Held-out accuracy, avg@4</title><style>{style}</style>{''.join(parts)}</svg>\n"
  )


def show(results: list[Result], readme: Path, picture: Path) -> None:
  """Puts the table into the README, between its marks, and draws the curves."""
  marks = re.compile(r"(<!-- tiny_gspo -->\n).*?(\n<!-- /tiny_gspo -->)", re.DOTALL)
  text = readme.read_text()
  readme.write_text(marks.sub(lambda m: m[1] + table(results) + m[2], text))
  picture.write_text(svg(results))


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--workdir", type=Path, required=True)
  parser.add_argument("--seeds", type=int, default=20, help="in float32: 0, 1, ...")
  parser.add_argument("--bfloat16", type=int, default=5, help="seeds in bfloat16")
  parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
  parser.add_argument("--results", type=Path, default=RESULTS)
  args = parser.parse_args(argv)
  entries = [("float32", seed) for seed in range(args.seeds)]
  entries += [("bfloat16", seed) for seed in range(args.bfloat16)]
  make_all(entries, args.workdir.absolute(), args.jobs, args.results)
  results = read(args.results)
  show(results, ROOT / "README.md", ROOT / "docs" / "tiny_curve.svg")
  bad = [r for r in results if not good(r)]
  print(f"{len(results) - len(bad)} of {len(results)} runs learned")
  return 1 if bad else 0


if __name__ == "__main__":
  sys.exit(main())
