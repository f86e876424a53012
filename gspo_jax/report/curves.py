"""Builds the charts of a report, as JSON values, from the metrics of its runs.

`figures.py` declares the charts: a Section has Figures, and a Figure has Lines. This module builds
a dict for each section, chart and curve. The dict of a section has `figures`, its charts. The dict
of a chart has `series`, its curves. The dict of a curve has steps `x` and values `y`. If the curve
has a band, the dict also has the band's edges, `low` and `high`.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from gspo_jax.report.figures import (
  SECTIONS,
  STAGE_COLORS,
  UNDRAWN,
  Figure,
  Line,
  Section,
  stage_order,
)
from gspo_jax.runs.metrics import Row

ByPhase = Mapping[str, Sequence[Row]]  # Rows of metrics by phase: {phase: [row, ...]}.
Table = Mapping[str, Mapping[int, float | None]]  # Columns of metrics: {metric: {step: value}}.

# The next two limits let the page open quickly. More detail would not be visible. If a page has
# several runs, they share the limits.
MAX_POINTS = 800  # Points per curve. Curves of stacks and of charts with many curves have fewer.
MAX_CELLS = 16_000  # Cells of a heat map.
MIN_LOG_RATIO = 100  # Minimum ratio of large to small values for a logarithmic axis.
# In stacks and heat maps, values above this multiple of the 90th percentile are cut off.
CUT_RATIO = 2.5
INTERVAL = re.compile(r"eval/.+/(low|high)")  # Bounds of another metric's interval.
# Metrics without a declared chart that are shown in percent. All others have the unit "number".
SHARE = re.compile(r"eval/(.+/)?(accuracy|greedy|pass@\d+|truncated_fraction)")
VALUES = ("y", "low", "high")  # Fields of a curve's dict that have its values.
# Values with at most this relative difference count as equal. It is near float32's precision.
SAME = 1e-6


def build_sections(runs: Sequence[ByPhase], ratio_marks: Sequence[Row] = ()) -> list[Row]:
  """Returns the sections of the page with their charts.

  A metric without a declared chart has a chart at the end of the first section whose `rest` matches
  the metric. If no `rest` matches, the chart is in the section "Other metrics".

  Args:
    runs: rows of each run by phase.
    ratio_marks: values to mark in charts with unit="ratio". Each is a dict with the value, `at`,
      and its `label`.
  """
  figures = [figure for section in SECTIONS for figure in section.figures]
  runs = [{phase: _columns(rows) for phase, rows in run.items()} for run in runs]
  built = {figure: _build_figures(figure, runs) for figure in figures}
  drawn = {(s["phase"], s["key"]) for parts in built.values() for f in parts for s in f["series"]}
  undrawn = _undrawn(runs, drawn)
  sections = []
  for section in (*SECTIONS, Section("other", "Other metrics", "", (), ".*")):
    further = [figure for figure in undrawn if re.fullmatch(section.rest, figure.title)]
    undrawn = [figure for figure in undrawn if figure not in further]
    built |= {figure: _build_figures(figure, runs) for figure in further}
    parts = [part for figure in (*section.figures, *further) for part in built[figure]]
    for part in parts:
      part["marks"] = list(ratio_marks) if part["unit"] == "ratio" else []
    if parts:
      named = {"view": section.view, "title": section.title, "note": section.note}
      sections.append(named | {"figures": parts})
  return sections


def _columns(rows: Sequence[Row]) -> Table:
  """Transposes rows of metrics to columns."""
  table: dict[str, dict[int, float | None]] = {}
  for row in rows:
    for key, value in row.items():
      table.setdefault(key, {})[row["step"]] = value
  return table


def _undrawn(runs: Sequence[Mapping[str, Table]], drawn: set[tuple[str, str]]) -> list[Figure]:
  """Returns a chart for each metric without a declared chart.

  Excluded are alarms, edges of bands, metrics `minibatch/...` of the cold start, and metrics that
  match UNDRAWN.

  drawn: phase and metric of each curve in a declared chart.
  """
  lines = [line for section in SECTIONS for figure in section.figures for line in figure.lines]
  bands = {edge for line in lines for edge in (line.low, line.high)}
  names = {key for run in runs for table in run.values() for key in table}
  bounds = {key for key in names if INTERVAL.fullmatch(key) and key.rsplit("/", 1)[0] in names}

  def figure(key: str, phase: str, color: str) -> Figure:
    interval = (f"{key}/low", f"{key}/high") if f"{key}/low" in bounds else ("", "")
    unit = "percent" if SHARE.fullmatch(key) else "number"
    return Figure(key, "", (Line(key, "", color, *interval),), (phase,), unit, zero=False)

  return [
    figure(key, phase, color)
    for phase, color in (("rl", "blue"), ("sft", "amber"), ("eval", "blue"))
    for key in sorted({key for run in runs for key in run[phase]} - bands - bounds)
    if (phase, key) not in drawn and key not in ("phase", "step")
    if not key.startswith("warning/") and not (phase == "sft" and key.startswith("minibatch/"))
    if not UNDRAWN.fullmatch(key)
  ]


def _build_figures(figure: Figure, runs: Sequence[Mapping[str, Table]]) -> list[Row]:
  """Builds the charts of a figure; [] if no run has its metrics.

  If the figure's kind is "line", one chart has the curves of all runs. Otherwise each run has a
  chart.
  """
  series = [
    curve | {"run": i}
    for phase in figure.phases
    for i, by_phase in enumerate(runs)
    for curve in _build_curves(figure, phase, by_phase[phase], len(runs))
  ]
  mark_constants(series, figure.kind)
  if figure.kind == "line" or len(runs) == 1:
    parts = [series] if series else []
  else:
    parts = [[s for s in series if s["run"] == i] for i in range(len(runs))]
  common = {name: v for name, v in vars(figure).items() if name not in ("lines", "phases")}
  common["log"] = figure.log and figure.kind == "line" and wants_log(series)
  if figure.kind != "line":
    # The axis of a stack shows the sum of the bars at a step. The colours of a heat map show single
    # values.
    if figure.kind == "heat":
      sizes = [y for s in series for y in s["y"] if y is not None]
    else:
      sizes = [
        sum(y or 0 for y in ys)
        for part in parts
        for phase in figure.phases
        for ys in zip(*(s["y"] for s in part if s["phase"] == phase))
      ]
    common["top"], common["largest"] = _usual_top(sizes), max(sizes, default=0)
  if len(parts) > 1 or any(line.color == "stage" for line in figure.lines):
    common["labels"] = list(dict.fromkeys(s["label"] for s in series))
  if any(line.color == "stage" for line in figure.lines):
    common["labels"].sort(key=stage_order)
  if len(parts) > 1:  # The runs' charts are side by side.
    common["wide"] = False
  return [
    common
    | {"phases": [p for p in figure.phases if any(s["phase"] == p for s in part)], "series": part}
    for part in parts
    if part
  ]


def _usual_top(sizes: Sequence[float]) -> float:
  """Returns the largest size except outliers, such as steps with compilation.

  An outlier is larger than CUT_RATIO times the 90th percentile.
  """
  ordered = sorted(sizes) or [0.0]
  usual = ordered[int(0.9 * (len(ordered) - 1))]
  return max(v for v in ordered if v <= CUT_RATIO * usual) if usual > 0 else ordered[-1]


def mark_constants(series: Sequence[Row], kind: str = "line") -> None:
  """Sets `constant` (the value) and `count` (the number of values) of constant curves.

  A metric is constant if its values are equal within each run. The page prints such a metric as a
  line of text. A metric of stacked bars is constant only if it is 0, since any other value changes
  the height of the stack. A metric of a heat map is constant only if it has no values. Its
  `constant` is then None.

  Args:
    series: curves of a chart, changed in place.
    kind: the chart's `kind`.
  """

  def is_constant(curve: Row) -> bool:
    values = _all_values(curve)
    if not values or kind == "heat":
      return not values
    low, high = min(values), max(values)
    return low == high == 0 if kind == "stack" else high - low <= SAME * max(abs(low), abs(high))

  moving = {(curve["phase"], curve["key"]) for curve in series if not is_constant(curve)}
  for curve in series:
    if (curve["phase"], curve["key"]) not in moving:
      values = [v for v in curve["y"] if v is not None]
      curve["constant"], curve["count"] = values[0] if values else None, len(values)


def wants_log(series: Sequence[Row]) -> bool:
  """Whether a linear axis would hide the smaller values of these curves.

  Excludes constant curves. Returns True if all three conditions hold:

    - No value is negative.
    - At least five values, and at least four fifths of all values, are positive.
    - The largest value is at least MIN_LOG_RATIO times the fifth percentile of positive values.
  """
  values = sorted(v for s in series if "constant" not in s for v in _all_values(s))
  positive = [v for v in values if v > 0]
  if len(positive) < max(5, 0.8 * len(values)) or values[0] < 0:
    return False
  return positive[-1] >= MIN_LOG_RATIO * positive[len(positive) // 20]


def _build_curves(figure: Figure, phase: str, table: Table, runs: int) -> Iterable[Row]:
  """Yields the curves of a figure for one phase of a run.

  table: metrics of this phase and run.
  runs: number of runs on the page, which share the limits MAX_POINTS and MAX_CELLS.
  """
  lines = [(line, *pair) for line in figure.lines for pair in _expand(line.key, table)]
  limit = MAX_POINTS // runs // (3 if figure.kind == "stack" else 1)
  limit = limit * 4 // max(4, len(lines))
  if figure.kind == "heat":
    limit = MAX_CELLS // runs // max(60, len(lines))
  # In a stack, a missing value counts as 0, since the stage did not run. In other charts it stays
  # missing, since it was not measured.
  missing = 0.0 if figure.kind == "stack" else None
  common = sorted({step for _, key, _ in lines for step in table[key]})
  for line, key, name in lines:
    steps = list(table[key]) if figure.kind == "line" else common
    curve = {
      "phase": phase,
      "key": key,
      "label": line.label.replace("{i}", name).replace("{name}", name),
      "color": STAGE_COLORS.get(name, "cycle") if line.color == "stage" else line.color,
      "x": steps,
      "y": _values(table, key, steps, missing),
    }
    if line.low and line.low in table:
      curve["low"] = _values(table, line.low, steps)
      curve["high"] = _values(table, line.high, steps)
    curve = thin(curve, max(limit, 100))
    yield curve | {
      name: [v if v is None else float(f"{v:.7g}") for v in curve[name]]
      for name in VALUES
      if name in curve
    }


def _values(
  table: Table, key: str, steps: Sequence[int], missing: float | None = None
) -> list[float | None]:
  """Returns a metric's values at these steps; None for non-finite values.

  missing: value for steps without the metric.
  """
  values = [table.get(key, {}).get(step, missing) for step in steps]
  return [v if v is not None and math.isfinite(v) else None for v in values]


def _all_values(curve: Row) -> list[float]:
  """Returns all values of a curve and its band."""
  return [v for name in VALUES for v in curve.get(name, ()) if v is not None]


def _expand(pattern: str, keys: Iterable[str]) -> list[tuple[str, str]]:
  """Returns (metric, text at the braces) for each metric matching a `Line.key`.

  Example: for the pattern "lag/{name}", the metric "lag/mean" gives ("lag/mean", "mean").
  """
  if pattern in keys or not re.search(r"\{(i|name)\}", pattern):  # The name of a metric.
    return [(pattern, "")] if pattern in keys else []
  regex = re.escape(pattern).replace(r"\{i\}", r"(\d+)").replace(r"\{name\}", r"([^/]+)")
  pairs = [(key, match[1]) for key in keys if (match := re.fullmatch(regex, key))]
  order = int if "{i}" in pattern else stage_order
  return sorted(pairs, key=lambda pair: order(pair[1]))


def thin(curve: Row, limit: int) -> Row:
  """Pools neighbouring points of a curve to at most `limit` points.

  A pooled point has the last step, the mean value and the widest band of its points.
  """
  count = len(curve["x"])
  if count <= limit:
    return curve
  edges = [round(i * count / limit) for i in range(limit + 1)]
  spans = list(itertools.pairwise(edges))
  reduce = {"x": lambda v: v[-1], "y": lambda v: sum(v) / len(v), "low": min, "high": max}

  def pooled(name: str) -> list[float | None]:
    parts = ([v for v in curve[name][a:b] if v is not None] for a, b in spans)
    return [reduce[name](part) if part else None for part in parts]

  return curve | {name: pooled(name) for name in reduce if name in curve}
