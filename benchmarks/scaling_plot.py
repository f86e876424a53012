"""The figure of benchmarks/scaling.py: one panel per series, both axes logarithmic, as SVG."""

import math
from typing import Any

WIDTH, HEIGHT = 420, 260  # Size of a panel.
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 30, 36
# Of what a line says after its model; they read on white and on black.
FIRST = dict(update="#3b7de0", sample="#d2691e", prefill="#0e9a8b", decode="#8b5cf6")
SECOND = dict(
  update="#64829b", sample="#db4f8f", prefill="#6b9e1f", decode="#b08d1a"
)  # a 2nd model
MOST = 4  # lines of a panel; of more, the parts of sampling are left out
TITLES = dict(
  T="length T, tokens",
  G="responses per prompt, G",
  E="experts, 2 of them used",
  devices="simulated devices",
)


def svg(rows: list[dict[str, Any]]) -> str:
  """Plots rows with series, line, at, tokens, seconds and `ideal` tokens/s."""
  names = list(dict.fromkeys(row["series"] for row in rows))
  panels = []
  for i, name in enumerate(names):
    chosen = [row for row in rows if row["series"] == name]
    place = f"translate({i % 2 * WIDTH},{i // 2 * HEIGHT})"
    panels.append(f'<g transform="{place}">{panel(name, chosen)}</g>')
  width, height = WIDTH * min(2, len(names)), HEIGHT * math.ceil(len(names) / 2)
  style = "text{font:12px system-ui,sans-serif;fill:#888}"
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
    "<title>Tokens per second by size; dashed: if time grew as the operations do</title>"
    f"<style>{style}</style>{''.join(panels)}</svg>\n"
  )


def panel(name: str, rows: list[dict[str, Any]]) -> str:
  sizes = sorted({row["at"] for row in rows})
  speeds = [value for row in rows for value in (row["tokens"] / row["seconds"], row["ideal"])]
  low, high = math.floor(math.log2(min(speeds))), math.ceil(math.log2(max(speeds)))
  wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
  across = math.log2(sizes[-1] / sizes[0]) or 1

  def x(size):
    return LEFT + wide * math.log2(size / sizes[0]) / across

  def y(speed):
    return HEIGHT - BOTTOM - tall * (math.log2(speed) - low) / (high - low or 1)

  parts = []
  for power in range(low, high + 1, max(1, (high - low + 3) // 6)):
    parts.append(
      f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(2**power):.1f}" y2="{y(2**power):.1f}" '
      f'stroke="#8884"/>{label(LEFT - 6, y(2**power) + 4, number(2**power), "end")}'
    )
  parts += [label(x(size), HEIGHT - BOTTOM + 16, f"{size:,}", "middle") for size in sizes]
  parts.append(label(LEFT + wide / 2, HEIGHT - 5, TITLES.get(name, name), "middle"))
  lines = list(dict.fromkeys(row["line"] for row in rows))
  legend_x = LEFT - 26
  for line in lines if len(lines) <= MOST else [line for line in lines if whole(line)]:
    colour = colour_of(line, lines[0])
    chosen = sorted((row for row in rows if row["line"] == line), key=lambda row: row["at"])
    measured = [(x(row["at"]), y(row["tokens"] / row["seconds"])) for row in chosen]
    parts.append(polyline([(x(row["at"]), y(row["ideal"])) for row in chosen], colour, 1, "3 3"))
    parts.append(polyline(measured, colour, 2))
    parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{colour}"/>' for a, b in measured]
    parts.append(label(legend_x, TOP - 14, line, "start", colour))
    legend_x += (WIDTH - LEFT + 16) / MOST
  return "".join(parts)


def whole(line: str) -> bool:
  return not line.endswith(("prefill", "decode"))


def colour_of(line: str, first: str) -> str:
  (model, job), (first_model, _) = line.split(", "), first.split(", ")
  return (FIRST if model == first_model else SECOND)[job]


def polyline(points: list[tuple[float, float]], colour: str, width: int, dashes: str = "") -> str:
  path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
  dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
  return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>'


def label(x: float, y: float, text: str, anchor: str, colour: str = "") -> str:
  style = f' style="fill:{colour}"' if colour else ""
  return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{text}</text>'


def number(value: float) -> str:
  """A power of two, briefly: 512, 1k, 16k."""
  return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"
