"""One self-contained HTML page of a run: its curves and the responses that were dumped.

`python -m gspo_jax.rollout_viewer DIR` reads `config.json`, `metrics.jsonl` and `rollouts/*.jsonl`
under DIR and writes DIR/report.html, which opens without a network. What is drawn is decided here
(and in `report_figures.py`); how, in the files of `report/`.
"""

import argparse
import dataclasses
import html
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_jax import metrics
from gspo_jax.report_figures import SECTIONS, STAGES, Figure, Line, Section

Row = dict[str, Any]

# Beyond these the page would be slow, and nobody could see or read more.
MAX_POINTS = 1200
MAX_CHARACTERS = 4000

SAMPLE_FIELDS = (
  "sample", "reward", "advantage", "length", "truncated", "stop_reason", "ratio", "clipped",
)  # fmt: skip


def write_report(
  workdir: str | os.PathLike,
  *,
  max_rollouts: int = 10_000,
  output: str | os.PathLike | None = None,
) -> Path:
  """Writes the report of a run, whole or not at all; returns its path (DIR/report.html)."""
  workdir = Path(workdir)
  output = workdir / "report.html" if output is None else Path(output)
  config_path = workdir / "config.json"
  config = json.loads(config_path.read_text("utf-8")) if config_path.exists() else {}
  rows = metrics.read_rows(workdir / "metrics.jsonl")
  page = render(
    describe(rows, config, name=workdir.resolve().name),
    read_rollouts(workdir / "rollouts", max_rollouts),
  )
  temporary = output.with_name(output.name + ".tmp")
  temporary.write_text(page, encoding="utf-8", errors="backslashreplace", newline="\n")
  os.replace(temporary, output)
  return output


def render(run: Row, rollouts: Row) -> str:
  """Fills the template in one pass, so that nothing inside the data is taken for a marker."""
  folder = Path(__file__).parent / "report"
  files = {
    "style": "style.css",
    "charts": "charts.js",
    "responses": "responses.js",
    "page": "page.js",
  }
  filled = {name: (folder / file).read_text("utf-8") for name, file in files.items()}
  filled |= {"title": html.escape(run["name"]), "run": _embed(run), "rollouts": _embed(rollouts)}
  template = (folder / "page.html").read_text("utf-8")
  return re.sub(r"\{\{(\w+)\}\}", lambda match: filled[match[1]], template)


def describe(rows: Sequence[Row], config: Mapping[str, Any], name: str) -> Row:
  """Everything on the page but the responses, as JSON values."""
  by_phase = join_steps(rows)
  flat = dict(flatten(config))
  objective = str(flat.get("objective.name", "rl")).upper().replace("_", "-")
  titles = {"sft": "Cold start", "rl": objective}
  return {
    "name": str(flat.get("name", name)),
    "summary": summarize(flat),
    "config": [[key, _text(value)] for key, value in flat.items()],
    "headline": headline(by_phase, titles),
    "phases": {
      phase: {"title": titles[phase], "from": rows[0]["step"], "to": rows[-1]["step"]}
      for phase, rows in by_phase.items()
      if rows
    },
    "sections": build_sections(by_phase, clip_bounds(flat)),
  }


def join_steps(rows: Sequence[Row]) -> dict[str, list[Row]]:
  """The rows of each training phase by step, those of one step (say, its evaluation) joined."""
  joined: dict[str, dict[int, Row]] = {phase: {} for phase in metrics.PHASES}
  for row, phase in zip(rows, metrics.training_phases(rows)):
    joined[phase].setdefault(row["step"], {}).update(row)
  return {phase: [steps[step] for step in sorted(steps)] for phase, steps in joined.items()}


def headline(by_phase: Mapping[str, Sequence[Row]], titles: Mapping[str, str]) -> list[Row]:
  """The figures on top: accuracy before and after the RL, steps, time."""
  sft, rl = by_phase["sft"], by_phase["rl"]
  items = []
  for key, label in (("eval/accuracy", "Held-out accuracy, avg@k"), ("eval/greedy", "Greedy")):
    trained = [row[key] for row in rl if row.get(key) is not None]
    cold = [row[key] for row in sft if row.get(key) is not None]
    # Before the RL: measured at its step 0, or else at the end of the cold start.
    at_zero = any(row["step"] == 0 and row.get(key) is not None for row in rl)
    if trained:
      before = trained[0] if at_zero or not cold else cold[-1]
      items.append({"label": label, "before": before, "after": trained[-1]})
    elif cold:
      items.append({"label": f"{label}, cold start", "after": cold[-1]})
  rewards = [row["reward/mean"] for row in rl if row.get("reward/mean") is not None]
  if rewards and not items:
    items.append({"label": "Reward", "value": f"{rewards[0]:.3g} → {rewards[-1]:.3g}"})
  for rows, phase in ((rl, "rl"), (sft, "sft")):
    if rows:
      items.append({"label": f"{titles[phase]} steps", "value": f"{rows[-1]['step']:,}"})
  times = [v for row in (*sft, *rl) for k, v in row.items() if k.startswith("time/") and v]
  if times:
    items.append({"label": "Time in stages", "value": metrics.clock_text(sum(times))})
  return items


def clip_bounds(flat: Mapping[str, Any]) -> list[Row]:
  """The clip range as levels to mark in a chart of the ratio, where the config has one."""
  bounds = (
    (flat.get("objective.clip_low"), -1, "1 − ε"),
    (flat.get("objective.clip_high"), 1, "1 + ε"),
  )
  return [
    {"at": 1 + sign * size, "label": f"{text} = {1 + sign * size:.7g}"}
    for size, sign, text in bounds
    if isinstance(size, float | int)
  ]


def build_sections(
  by_phase: Mapping[str, Sequence[Row]], ratio_marks: Sequence[Row] = ()
) -> list[Row]:
  """The charts for which the run has metrics; metrics that no chart names come last."""
  sections = [_build_section(section, by_phase) for section in SECTIONS]
  named = {
    (phase, key)
    for section in SECTIONS
    for figure in section.figures
    for phase in figure.phases
    for line in figure.lines
    for pattern in (line.key, line.low, line.high)
    if pattern
    for key, _ in _expand(pattern, by_phase[phase])
  }
  other = [
    Figure(key, "", (phase,), (Line(key, "", color),))
    for phase, color in (("rl", "blue"), ("sft", "amber"))
    for key in sorted({key for row in by_phase[phase] for key in row} - {"phase", "step"})
    if (phase, key) not in named and not (phase == "sft" and key.startswith("minibatch/"))
  ]
  sections.append(_build_section(Section("Other metrics", "", tuple(other)), by_phase))
  for figure in itertools.chain.from_iterable(section["figures"] for section in sections):
    figure["marks"] = list(ratio_marks) if figure["unit"] == "ratio" else []
  return [section for section in sections if section["figures"]]


def _build_section(section: Section, by_phase: Mapping[str, Sequence[Row]]) -> Row:
  figures = [_build_figure(figure, by_phase) for figure in section.figures]
  kept = [figure for figure in figures if figure["series"]]
  return {"title": section.title, "note": section.note, "figures": kept}


def _build_figure(figure: Figure, by_phase: Mapping[str, Sequence[Row]]) -> Row:
  series = [
    curve for phase in figure.phases for curve in _build_curves(figure, phase, by_phase[phase])
  ]
  names = {f.name for f in dataclasses.fields(Figure)} - {"lines", "phases"}
  present = [phase for phase in figure.phases if any(s["phase"] == phase for s in series)]
  return {name: getattr(figure, name) for name in names} | {"phases": present, "series": series}


def _build_curves(figure: Figure, phase: str, rows: Sequence[Row]) -> Iterable[Row]:
  stack = figure.kind == "stack"
  found = [(line, *pair) for line in figure.lines for pair in _expand(line.key, rows)]
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
    yield thin(curve, MAX_POINTS // 3 if stack else MAX_POINTS)


def _expand(pattern: str, rows: Sequence[Row]) -> list[tuple[str, str]]:
  """(metric, what the braces stand for) for each metric of the rows that a pattern names."""
  keys = {key for row in rows for key in row}
  regex = re.escape(pattern).replace(r"\{i\}", r"(\d+)").replace(r"\{name\}", r"(.+)")
  pairs = [(key, (*match.groups(), "")[0]) for key in keys if (match := re.fullmatch(regex, key))]
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


def read_rollouts(folder: Path, limit: int) -> Row:
  """Groups of responses to one prompt, at most `limit` responses, spread evenly over the dumps."""
  paths = sorted(folder.glob("*.jsonl")) if folder.exists() else []
  total, groups = 0, []
  wanted = _spread(paths, limit)  # at least one response of each
  for path in paths:
    total += path.read_bytes().count(b"\n")
    if path in wanted:
      groups += _some_groups(_group(metrics.read_rows(path), path), limit // len(wanted))
  groups.sort(key=lambda group: (group["phase"] != "sft", group["step"], group["eval"]))
  return {"total": total, "groups": groups}


def _group(records: Sequence[Row], path: Path) -> list[Row]:
  phase = path.stem.rpartition("_")[0]
  groups: dict[tuple, Row] = {}
  for record in records:
    identity = (record["step"], record["prompt_id"], bool(record.get("eval")))
    if identity not in groups:
      groups[identity] = {
        "phase": phase, "step": record["step"], "id": str(record["prompt_id"]),
        "eval": bool(record.get("eval")), "prompt": _shorten(record["prompt"]),
        "answer": _shorten(_text(record.get("answer", ""))), "samples": [],
      }  # fmt: skip
    sample = {name: record[name] for name in SAMPLE_FIELDS if record.get(name) is not None}
    groups[identity]["samples"].append(sample | {"response": _shorten(record["response"])})
  return list(groups.values())


def _some_groups(groups: list[Row], limit: int) -> list[Row]:
  size = max((len(group["samples"]) for group in groups), default=1)
  kept = _spread(groups, max(1, limit // size))
  return [group | {"samples": group["samples"][: max(1, limit)]} for group in kept]


def _spread(items: Sequence[Any], limit: int) -> list[Any]:
  """At most `limit` items, evenly spaced, the last one among them."""
  if len(items) <= limit:
    return list(items)
  return [items[len(items) - 1 - i * len(items) // limit] for i in reversed(range(limit))]


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
  """Nested mappings as dotted keys."""
  for key, value in config.items():
    if isinstance(value, Mapping):
      yield from flatten(value, f"{prefix}{key}.")
    else:
      yield f"{prefix}{key}", value


SUMMARY = (
  (r"objective\.name", "{}"),
  (r"clip_low", "clip −{}"),
  (r"clip_high", "+{}"),
  (r"model\.(name|size)", "{}"),
  (r"prompts(_per_step)?|batch_size", "{} prompts"),
  (r"group_size", "{} responses each"),
  (r"mini_?batches", "{} mini-batches"),
  (r"learning_rate", "learning rate {}"),
  (r"seed", "seed {}"),
)


def summarize(flat: Mapping[str, Any]) -> list[str]:
  """The settings that tell one run from another, for those that the config names."""
  found = []
  for pattern, text in SUMMARY:
    keys = [key for key in flat if re.search(rf"(^|\.)({pattern})$", key)]
    # The cold start has settings of the same names; the RL ones tell the run.
    keys.sort(key=lambda key: key.startswith("sft"))
    if keys and not isinstance(flat[keys[0]], list | tuple) and flat[keys[0]] is not None:
      found.append(text.format(_text(flat[keys[0]])))
  return found


def _embed(value: Any) -> str:
  """JSON that can stand inside a script element: no `<` can end it or open a comment."""
  text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
  return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _round(value: float | None) -> float | None:
  if value is None or not math.isfinite(value):
    return None
  return float(f"{value:.7g}")


def _text(value: Any) -> str:
  return value if isinstance(value, str) else json.dumps(value)


def _shorten(text: str) -> str:
  """Long texts lose their middle; half characters, which no browser can show, are spelled out."""
  text = text.encode("utf-8", "backslashreplace").decode("utf-8")
  if len(text) <= MAX_CHARACTERS:
    return text
  head, tail = MAX_CHARACTERS * 3 // 4, MAX_CHARACTERS // 4
  left_out = len(text) - head - tail
  return f"{text[:head]}\n… {left_out:,} characters left out …\n{text[-tail:]}"


def main(arguments: Sequence[str] | None = None) -> None:
  """Writes DIR/report.html."""
  parser = argparse.ArgumentParser(description="Writes the report of a run as one HTML page.")
  parser.add_argument("workdir", metavar="DIR", help="the run's directory, with metrics.jsonl")
  parser.add_argument("--max_rollouts", type=int, default=10_000, help="responses on the page")
  parser.add_argument("--output", help="where to write it (DIR/report.html)")
  options = parser.parse_args(arguments)
  if not (Path(options.workdir) / "metrics.jsonl").exists():
    parser.error(f"{options.workdir} holds no metrics.jsonl: is it the directory of a run?")
  path = write_report(options.workdir, max_rollouts=options.max_rollouts, output=options.output)
  sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
  main()
