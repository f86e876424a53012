"""Builds the content of a report except its responses, as JSON values.

A report shows one run, or compares several runs in common charts. For each run, the report answers
three questions (`overview.py`), and lists warnings and settings. A comparison also lists the
settings that differ between the runs.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gspo_jax.report import overview
from gspo_jax.report.curves import ByPhase, build_sections
from gspo_jax.report.figures import VIEWS
from gspo_jax.runs import metrics
from gspo_jax.runs.alarms import ALARMS, Alarm
from gspo_jax.runs.metrics import Row


@dataclasses.dataclass(frozen=True)
class Run:
  """A run as stored in its directory, without its responses."""

  name: str  # Name on the page.
  rows: Sequence[Row]  # Rows of metrics.jsonl.
  config: Mapping[str, Any]  # Content of config.json.

  @property
  def flat(self) -> Row:
    """Settings by dotted key, without provenance."""
    return {k: v for k, v in flatten(self.config) if not k.startswith("provenance.")}

  @property
  def provenance(self) -> Row:
    """Provenance by dotted key, such as commit, package versions and command."""
    return dict(flatten(self.config.get("provenance") or {}))


def describe(runs: Sequence[Run]) -> Row:
  """Returns the content of the page except the responses."""
  by_phases = [
    {phase: [row for row in run.rows if row["phase"] == phase] for phase in metrics.PHASES}
    for run in runs
  ]
  losses = {str(run.flat.get("objective.name", "rl")) for run in runs}
  # The title is GSPO-TOKEN for "gspo_token", and my_loss for "my_module:my_loss".
  losses = {loss.partition(":")[2] or loss.upper().replace("_", "-") for loss in losses}
  objective = losses.pop() if len(losses) == 1 else "RL"
  titles = {"sft": "Cold start", "rl": objective, "eval": "Evaluation"}
  names = [run.name for run in runs]
  marks = [mark for run in runs for mark in clip_bounds(run.flat)]
  steps = {phase: [row["step"] for rows in by_phases for row in rows[phase]] for phase in titles}
  sections = build_sections(by_phases, [m for i, m in enumerate(marks) if m not in marks[:i]])
  # View and section of each curve, by phase and metric.
  places = {
    (series["phase"], series["key"]): {"view": section["view"], "section": section["title"]}
    for section in sections
    for figure in section["figures"]
    for series in figure["series"]
  }
  averages = {overview.average(run.flat) for run in runs}
  for series in (s for section in sections for f in section["figures"] for s in f["series"]):
    if series["label"] == "avg@k" and len(averages) == 1:
      series["label"] = next(iter(averages))
  return {
    "views": VIEWS,
    "name": names[0] if len(names) == 1 else f"Comparison of {', '.join(names)}",
    "runs": [describe_run(run, by_phase, places) for run, by_phase in zip(runs, by_phases)],
    "phases": {
      phase: {"title": title, "from": min(steps[phase]), "to": max(steps[phase])}
      for phase, title in titles.items()
      if steps[phase]
    },
    "differences": {
      "settings": differences([run.flat for run in runs]),
      # Command and date are excluded, since they usually differ between two runs.
      "code": differences([{**run.provenance, "command": None, "date": None} for run in runs]),
    },
    "sections": sections,
  }


def describe_run(run: Run, by_phase: ByPhase, places: Mapping[tuple[str, str], Row]) -> Row:
  """Returns the content of the page about one run, without charts.

  Args:
    run: the run.
    by_phase: the run's rows of metrics by phase.
    places: view and section of each curve, by phase and metric. A warning links to the section of
      its metric.
  """
  alarms = [
    alarm | {"place": find_place(places, alarm["phase"], alarm["metric"])}
    for alarm in warnings(by_phase)
  ]
  return {
    "name": run.name,
    "summary": summarize(run),
    "config": [[key, as_text(value)] for key, value in run.flat.items()],
    "provenance": [[key, as_text(value)] for key, value in run.provenance.items()],
    "answers": overview.answer(by_phase, alarms, run.flat),
    "warnings": alarms,
    "timeline": overview.timeline(by_phase["rl"]),
    "phases": {
      phase: {"from": rows[0]["step"], "to": rows[-1]["step"]}
      for phase, rows in by_phase.items()
      if rows
    },
  }


def find_place(places: Mapping[tuple[str, str], Row], phase: str, metric: str) -> Row | None:
  """Returns view and section of a metric's curve.

  If only evaluations (eval/.../METRIC) have a curve, returns theirs. Returns None without a curve.
  """
  names = [name for kind, name in places if kind == phase and name.startswith("eval/")]
  keys = (phase, metric), *((phase, name) for name in names if name.endswith(f"/{metric}"))
  return next((places[key] for key in keys if key in places), None)


def warnings(by_phase: ByPhase) -> Iterable[Row]:
  """Yields a dict for each period of an alarm.

  A period consists of successive rows with this alarm. The dict has the period's phase, first step
  and last step, and the alarm's name and texts.
  """
  for phase, rows in by_phase.items():
    spans = []
    for name in sorted({key for row in rows for key in row if key.startswith("warning/")}):
      for alarm, span in itertools.groupby(rows, lambda row, name=name: bool(row.get(name))):
        steps = [row["step"] for row in span]
        if alarm:
          spans.append((steps[0], steps[-1], name.removeprefix("warning/")))
    for first, last, name in sorted(spans):
      texts = ALARMS.get(name, Alarm(name, "", "", ""))._asdict()
      yield {"phase": phase, "name": name, "from": first, "to": last, **texts}


def differences(runs: Sequence[Mapping[str, Any]]) -> list[Row]:
  """Returns the keys with different values in different runs, and these values.

  A value is a text, or None if the run does not have the key.
  """
  keys = dict.fromkeys(key for run in runs for key in run)
  rows = [(key, [as_text(run[key]) if key in run else None for run in runs]) for key in keys]
  return [{"key": key, "values": values} for key, values in rows if len(set(values)) > 1]


def clip_bounds(flat: Mapping[str, Any]) -> list[Row]:
  """Returns the configured clip bounds of the importance ratio, for marks in charts.

  The list is empty for GMPO and DPPO, since they do not clip this ratio: GMPO clips log-ratios of
  tokens, and DPPO clips a divergence.
  """
  if flat.get("objective.name") in ("gmpo", "dppo"):
    return []
  marks = []
  for side, sign, text in (("low", -1, "1 − ε"), ("high", 1, "1 + ε")):
    size = flat.get(f"objective.clip_{side}")
    if isinstance(size, float | int):
      marks.append({"at": 1 + sign * size, "label": f"{text} = {1 + sign * size:.7g}"})
  return marks


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
  """Yields the leaves of nested mappings under dotted keys."""
  for key, value in config.items():
    if isinstance(value, Mapping):
      yield from flatten(value, f"{prefix}{key}.")
    else:
      yield f"{prefix}{key}", value


SUMMARY = {  # Formats of the settings in a run's summary, by key.
  "objective.name": "{}",
  "objective.clip_low": "clip −{}",
  "objective.clip_high": "+{}",
  "rl.prompts": "{} prompts",
  "rl.group_size": "{} responses each",
  "rl.minibatches": "{} mini-batches",
  "rl_optimizer.learning_rate": "learning rate {}",
  "seed": "seed {}",
}
COLD_START = {  # Formats of the settings in the summary of a run with job=sft.
  "sft.steps": "at most {} updates",
  "sft.batch": "{} demonstrations each",
  "sft.target_loss": "target loss {}",
  "sft_optimizer.learning_rate": "learning rate {}",
  "seed": "seed {}",
}
EVALUATION = {  # Formats of the settings in the summary of a run with job=eval.
  "weights": "{}",
  "eval.samples": "{} samples per problem",
  "eval.temperature": "temperature {}",
  "seed": "seed {}",
}


def summarize(run: Run) -> list[str]:
  """Returns texts about a run's main settings and its commit."""
  flat, code = run.flat, run.provenance
  texts = []
  for key, text in dict(sft=COLD_START, eval=EVALUATION).get(flat.get("job"), SUMMARY).items():
    if (value := flat.get(key)) is not None:
      texts.append(text.format(f"{value:.6g}" if isinstance(value, float) else value))
  if commit := code.get("commit"):
    texts.append(f"commit {commit[:8]}{' with changes' if code.get('dirty') else ''}")
  return texts


def as_text(value: Any) -> str:
  """Returns a text unchanged, anything else as JSON."""
  return value if isinstance(value, str) else json.dumps(value)
