"""Content of a report of runs, as JSON values: figures on top, warnings, differences, charts.

A report shows one run or compares several: the curves of a metric then share one chart.
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gspo_jax.report.figures import SECTIONS, STAGES, UNDRAWN, Figure, Line, Section
from gspo_jax.runs import metrics
from gspo_jax.runs.progress import clock_text

Row = dict[str, Any]
ByPhase = Mapping[str, Sequence[Row]]

# Beyond these the page would be slow, and nobody could see more.
MAX_POINTS = 1200  # of the curves of one metric


@dataclasses.dataclass(frozen=True)
class Run:
  """A run's directory, without its responses."""

  name: str
  rows: Sequence[Row]
  config: Mapping[str, Any]

  @property
  def flat(self) -> Row:
    """The settings under dotted keys."""
    return {k: v for k, v in flatten(self.config) if not k.startswith("provenance.")}

  @property
  def provenance(self) -> Row:
    """Code and packages that ran, and how they were started."""
    return dict(flatten(self.config.get("provenance") or {}))


def describe(runs: Sequence[Run]) -> Row:
  """Collects everything on the page but the responses."""
  by_phases = [
    {phase: [row for row in run.rows if row["phase"] == phase] for phase in metrics.PHASES}
    for run in runs
  ]
  titles = {"sft": "Cold start", "rl": _objective(runs), "eval": "Evaluation"}
  names = [run.name for run in runs]
  marks = [mark for run in runs for mark in clip_bounds(run.flat)]
  found = {phase: [step for one in by_phases for step in _ends(one[phase])] for phase in titles}
  return {
    "name": names[0] if len(names) == 1 else f"Comparison of {', '.join(names)}",
    "runs": [describe_run(run, by_phase, titles) for run, by_phase in zip(runs, by_phases)],
    "phases": {
      phase: {"title": titles[phase], "from": min(steps), "to": max(steps)}
      for phase, steps in found.items()
      if steps
    },
    "differences": {
      "settings": differences([run.flat for run in runs]),
      # Without the command, which differs between any two runs.
      "code": differences([{**run.provenance, "command": None} for run in runs]),
    },
    "sections": build_sections(by_phases, [m for i, m in enumerate(marks) if m not in marks[:i]]),
  }


def _objective(runs: Sequence[Run]) -> str:
  names = {str(run.flat.get("objective.name", "rl")).upper().replace("_", "-") for run in runs}
  return names.pop() if len(names) == 1 else "RL"


def _ends(rows: Sequence[Row]) -> list[int]:
  """The first and the last step, if there is any."""
  return [rows[0]["step"], rows[-1]["step"]] if rows else []


def describe_run(run: Run, by_phase: ByPhase, titles: Mapping[str, str]) -> Row:
  """One run's part of the page, without its charts."""
  return {
    "name": run.name,
    "summary": summarize(run),
    "config": [[key, as_text(value)] for key, value in run.flat.items()],
    "provenance": [[key, as_text(value)] for key, value in run.provenance.items()],
    "headline": headline(by_phase, titles),
    "warnings": list(warnings(by_phase)),
    "phases": {
      phase: dict(zip(("from", "to"), _ends(rows))) for phase, rows in by_phase.items() if rows
    },
  }


def headline(by_phase: ByPhase, titles: Mapping[str, str]) -> list[Row]:
  """The figures on top: accuracy before and after the RL, steps, time."""
  items = []
  for key, label in (("eval/accuracy", "Held-out accuracy, avg@k"), ("eval/greedy", "Greedy")):
    rl, alone = (_known(by_phase[phase], key) for phase in ("rl", "eval"))
    if rl:  # the first one is that of step 0
      items.append({"label": label, "before": rl[0], "after": rl[-1]})
    elif alone:
      items.append({"label": label, "after": alone[-1]})
  rewards = _known(by_phase["rl"], "reward/mean")
  if rewards and not items:
    items.append({"label": "Reward", "value": f"{rewards[0]:.3g} → {rewards[-1]:.3g}"})
  for phase in ("rl", "sft"):
    if rows := by_phase[phase]:
      items.append({"label": f"{titles[phase]} steps", "value": f"{rows[-1]['step']:,}"})
  times = [
    v for row in by_phase["rl"] for k, v in row.items() if re.fullmatch("time/[^/]+", k) and v
  ]
  if times:
    items.append({"label": "Time in stages", "value": clock_text(sum(times))})
  return items


def _known(rows: Sequence[Row], key: str) -> list[float]:
  return [row[key] for row in rows if row.get(key) is not None]


def warnings(by_phase: ByPhase) -> Iterable[Row]:
  """Spans of consecutive rows with the same alarm, in the order in which they began."""
  for phase, rows in by_phase.items():
    spans = []
    for name in sorted({key for row in rows for key in row if key.startswith("warning/")}):
      for alarm, span in itertools.groupby(rows, lambda row, name=name: bool(row.get(name))):
        steps = [row["step"] for row in span]
        if alarm:
          spans.append((steps[0], steps[-1], name.removeprefix("warning/")))
    for first, last, name in sorted(spans):
      yield {"phase": phase, "name": name, "from": first, "to": last}


def differences(runs: Sequence[Mapping[str, Any]]) -> list[Row]:
  """The keys whose values are not the same in all runs; a missing one is null."""
  keys = dict.fromkeys(key for run in runs for key in run)
  values = {key: [as_text(run[key]) if key in run else None for run in runs] for key in keys}
  return [{"key": key, "values": each} for key, each in values.items() if len(set(each)) > 1]


def clip_bounds(flat: Mapping[str, Any]) -> list[Row]:
  """The clip range as levels to mark in a chart of the ratio, where the config has one.

  Not GMPO's, which is of the log-ratios of tokens.
  """
  if flat.get("objective.name") == "gmpo":
    return []
  bounds = (
    (flat.get("objective.clip_low"), -1, "1 − ε"),
    (flat.get("objective.clip_high"), 1, "1 + ε"),
  )
  return [
    {"at": 1 + sign * size, "label": f"{text} = {1 + sign * size:.7g}"}
    for size, sign, text in bounds
    if isinstance(size, float | int)
  ]


def build_sections(runs: Sequence[ByPhase], ratio_marks: Sequence[Row] = ()) -> list[Row]:
  """The charts for which the runs have metrics; metrics that no chart names come last."""
  figures = [figure for section in SECTIONS for figure in section.figures]
  bands = {edge for figure in figures for line in figure.lines for edge in (line.low, line.high)}
  built = {figure: _build_figures(figure, runs) for figure in figures}
  drawn = {(s["phase"], s["key"]) for parts in built.values() for f in parts for s in f["series"]}
  other = [
    Figure(key, "", (Line(key, "", color),), (phase,), zero=False)
    for phase, color in (("rl", "blue"), ("sft", "amber"), ("eval", "blue"))
    for key in sorted({k for run in runs for row in run[phase] for k in row} - bands)
    if (phase, key) not in drawn and key not in ("phase", "step")
    if not key.startswith("warning/") and not (phase == "sft" and key.startswith("minibatch/"))
    if not UNDRAWN.fullmatch(key)
  ]
  built |= {figure: _build_figures(figure, runs) for figure in other}
  sections = []
  for section in (*SECTIONS, Section("Other metrics", "", tuple(other))):
    parts = [part for figure in section.figures for part in built[figure]]
    for part in parts:
      part["marks"] = list(ratio_marks) if part["unit"] == "ratio" else []
    if parts:
      sections.append({"title": section.title, "note": section.note, "figures": parts})
  return sections


def _build_figures(figure: Figure, runs: Sequence[ByPhase]) -> list[Row]:
  """One chart for all runs, or one each where bars are stacked; none without curves."""
  points = MAX_POINTS // len(runs)
  series = [
    curve | {"run": i}
    for phase in figure.phases
    for i, by_phase in enumerate(runs)
    for curve in _build_curves(figure, phase, by_phase[phase], points)
  ]
  if figure.kind != "stack" or len(runs) == 1:
    parts = [series] if series else []
  else:
    parts = [[s for s in series if s["run"] == i] for i in range(len(runs))]
  names = {f.name for f in dataclasses.fields(Figure)} - {"lines", "phases"}
  common = {name: getattr(figure, name) for name in names}
  if len(parts) > 1:  # side by side, on one axis and with the same colours
    common["top"] = max(max(_totals(part), default=0) for part in parts)
    common["labels"] = list(dict.fromkeys(s["label"] for s in series))
    common["wide"] = False
  return [
    common
    | {"phases": [p for p in figure.phases if any(s["phase"] == p for s in part)], "series": part}
    for part in parts
    if part
  ]


def _totals(series: Sequence[Row]) -> list[float]:
  return [sum(y or 0 for y in ys) for ys in zip(*(s["y"] for s in series))]


def _build_curves(figure: Figure, phase: str, rows: Sequence[Row], points: int) -> Iterable[Row]:
  stack = figure.kind == "stack"
  keys = {key for row in rows for key in row}
  found = [(line, *pair) for line in figure.lines for pair in _expand(line.key, keys)]
  stacked = [row for row in rows if any(key in row for _, key, _ in found)]
  for line, key, name in found:
    # Of a stack, what a step lacks was 0 (a stage that did not run); else it was not measured.
    picked = stacked if stack else [row for row in rows if key in row]
    curve = {
      "phase": phase,
      "key": key,
      "label": line.label.replace("{i}", name).replace("{name}", name),
      "color": line.color,
      "x": [row["step"] for row in picked],
      "y": [_round(row.get(key, 0.0)) for row in picked],
    }
    if line.low and any(line.low in row for row in picked):
      curve["low"] = [_round(row.get(line.low)) for row in picked]
      curve["high"] = [_round(row.get(line.high)) for row in picked]
    yield thin(curve, points // 3 if stack else points)


def _expand(pattern: str, keys: Iterable[str]) -> list[tuple[str, str]]:
  """(metric, what the braces stand for) for each metric that a pattern names."""
  if "{" not in pattern:
    return [(pattern, "")] if pattern in keys else []
  regex = re.escape(pattern).replace(r"\{i\}", r"(\d+)").replace(r"\{name\}", r"([^/]+)")
  pairs = [(key, match[1]) for key in keys if (match := re.fullmatch(regex, key))]
  if "{i}" in pattern:
    return sorted(pairs, key=lambda pair: int(pair[1]))
  return sorted(pairs, key=lambda p: (STAGES.index(p[1]) if p[1] in STAGES else 99, p[1]))


def thin(curve: Row, limit: int) -> Row:
  """Averages neighbours so that at most `limit` points remain; bands keep their extremes."""
  count = len(curve["x"])
  if count <= limit:
    return curve
  edges = [round(i * count / limit) for i in range(limit + 1)]
  spans = list(itertools.pairwise(edges))
  reduce = {"x": lambda v: v[-1], "y": lambda v: _round(sum(v) / len(v)), "low": min, "high": max}

  def pooled(name: str) -> list[float | None]:
    parts = ([v for v in curve[name][a:b] if v is not None] for a, b in spans)
    return [reduce[name](part) if part else None for part in parts]

  return curve | {name: pooled(name) for name in reduce if name in curve}


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
  """Nested mappings as dotted keys."""
  for key, value in config.items():
    if isinstance(value, Mapping):
      yield from flatten(value, f"{prefix}{key}.")
    else:
      yield f"{prefix}{key}", value


SUMMARY = {
  "objective.name": "{}",
  "objective.clip_low": "clip −{}",
  "objective.clip_high": "+{}",
  "rl.prompts": "{} prompts",
  "rl.group_size": "{} responses each",
  "rl.minibatches": "{} mini-batches",
  "rl_optimizer.learning_rate": "learning rate {}",
  "seed": "seed {}",
}


def summarize(run: Run) -> list[str]:
  """The settings that tell one run from another, for those that the config has, and the commit."""
  flat, code = run.flat, run.provenance
  found = [text.format(flat[key]) for key, text in SUMMARY.items() if flat.get(key) is not None]
  if commit := code.get("commit"):
    found.append(f"commit {commit[:8]}{' with changes' if code.get('dirty') else ''}")
  return found


def _round(value: float | None) -> float | None:
  if value is None or not math.isfinite(value):
    return None
  return float(f"{value:.7g}")


def as_text(value: Any) -> str:
  """A text as it is, anything else as JSON."""
  return value if isinstance(value, str) else json.dumps(value)
