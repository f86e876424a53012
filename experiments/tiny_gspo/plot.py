"""Held-out accuracy of several runs: results.json, and the curve that the README shows.

python experiments/tiny_gspo/plot.py RUN_DIR [RUN_DIR ...]
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 260, 48, 16, 92, 40
COLOURS = ("#2563c9", "#0e8a7d", "#c2570c")


def curve(workdir: str) -> dict:
  """Seed and (iteration, avg@4, greedy) at every evaluation of a run."""
  config = json.loads(Path(workdir, "config.json").read_text())
  rows = [json.loads(line) for line in Path(workdir, "metrics.jsonl").read_text().splitlines()]
  points = [
    [row["step"], round(row["eval/accuracy"], 4), round(row["eval/greedy"], 4)]
    for row in rows
    if row["phase"] == "rl" and "eval/accuracy" in row
  ]
  return dict(seed=config["seed"], points=points)


def svg(curves: list[dict]) -> str:
  last = max(step for c in curves for step, *_ in c["points"])
  x = lambda step: LEFT + (WIDTH - LEFT - RIGHT) * step / last  # noqa: E731
  y = lambda value: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value  # noqa: E731
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
  for i, (c, colour) in enumerate(zip(curves, COLOURS)):
    line = " ".join(f"{x(step):.1f},{y(accuracy):.1f}" for step, accuracy, _ in c["points"])
    parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    parts.append(
      f'<text x="{WIDTH - RIGHT + 10}" y="{TOP + 16 * (i + 1)}" style="fill:{colour}">'
      f"seed {c['seed']}</text>"
    )
  style = "text{font:12px system-ui,sans-serif;fill:#888}"
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">'
    f"<title>Held-out accuracy, avg@4</title><style>{style}</style>{''.join(parts)}</svg>\n"
  )


if __name__ == "__main__":
  curves = sorted(map(curve, sys.argv[1:]), key=lambda c: c["seed"])
  (HERE / "results.json").write_text(json.dumps(curves, indent=1) + "\n")
  (HERE.parents[1] / "docs" / "tiny_curve.svg").write_text(svg(curves))
