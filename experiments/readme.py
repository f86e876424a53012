"""Generates the parts of READMEs between marks. All other text is written by hand."""

import re
from collections.abc import Callable
from pathlib import Path

from experiments import definition, figures, runs
from experiments.definition import HERE, Experiment
from experiments.report import OPEN, Report, Results, Verdict, markdown
from experiments.results import SETTLED, Store

NOTHING = Verdict(OPEN, "no run has been made yet")


def assess(
  folder: Path, experiment: Experiment, report: Callable[[Results], Report]
) -> tuple[Verdict, Report | None]:
  """Returns the verdict and its report.

  The verdict is open while runs are missing, except those of secondary conditions.
  """
  store = Store(folder)
  jobs = [job for job in runs.plan(experiment, store) if job.stage != runs.START]
  if not any(store.settled(job) for job in jobs):
    return NOTHING, None
  primary = runs.primary(experiment)
  settled = sum(store.settled(job) for job in jobs if runs.condition_of(job) in primary)
  results, total = report(store.results(jobs)), runs.number(experiment, primary)
  if settled < total:
    because = f"{settled} of {total} runs are done; so far, {results.verdict.because}"
    return Verdict(OPEN, because), results
  return results.verdict, results


def write(folder: Path, experiment: Experiment, report: Callable[[Results], Report]) -> Verdict:
  """Writes the figures and the generated part of a README."""
  verdict, results = assess(folder, experiment, report)
  for name, figure in (results.figures if results else {}).items():
    figures.save(figure, folder / f"{name}.svg")
  path = folder / "README.md"
  text = path.read_text() if path.exists() else f"# {folder.name}\n\n{_marked('outcome', '')}\n"
  path.write_text(replace_section(text, "outcome", outcome(folder, experiment, verdict, results)))
  return verdict


def outcome(folder: Path, experiment: Experiment, verdict: Verdict, results: Report | None) -> str:
  """Formats the generated part: declaration, verdict, tables, figures, runs."""
  e = experiment
  parts = [
    f"**Outcome: {verdict.outcome}.** {_sentence(verdict.because)}",
    markdown(
      ["declared beforehand", ""],
      [
        ["question", e.question],
        ["claim", e.claim],
        ["hypothesis", e.hypothesis],
        ["statistic", e.statistic],
        ["falsified if", e.falsified],
        ["seeds", _seeds(e)],
      ],
    ),
  ]
  if results:
    parts += results.tables
    parts += [f"![{name}]({name}.svg)" for name in results.figures]
    parts.append(count_runs(e, Store(folder)))
  parts.append(f"`python -m experiments.run {folder.name.split('_')[0]}`")
  return "\n\n".join(parts)


def count_runs(experiment: Experiment, store: Store) -> str:
  """Counts runs by status, with versions and missing conditions."""
  table = store.runs[store.runs.stage != runs.START]
  counts = table.status.value_counts()
  ended = ": " + ", ".join(f"{counts[s]} {s}" for s in sorted(counts.index))
  ended = ", all done" if [*counts.index] == ["done"] else ended
  minutes = table.seconds.sum() / 60
  lines = [
    f"{len(table)} runs{ended}. Their run times add up to {minutes:.0f} minutes. Commits "
    f"{', '.join(sorted({c[:8] + c[40:] for c in table.commit if c}))}; "
    f"{', '.join(sorted({v for v in table.versions if v}))}."
  ]
  for row in table[~table.status.isin(["done"])].itertuples():
    lines.append(f"- {row.condition}, seed {row.seed}: {row.status}, {row.reason}")
  started = {name.split("/")[0] for name in table.condition}
  if missing := [c.name for c in experiment.conditions if c.name not in started]:
    lines.append(f"\nConditions without a run: {', '.join(missing)}.")
  return "\n".join(lines)


def write_overview() -> None:
  """Writes the table of experiments/README.md."""
  path = HERE / "README.md"
  path.write_text(replace_section(path.read_text(), "experiments", overview()))


def overview() -> str:
  rows = []
  for folder in definition.names():
    experiment, module = definition.load(folder)
    verdict, results = assess(HERE / folder, experiment, module.report)
    number = folder.split("_")[0]
    figure = next(iter(results.figures), None) if results else None
    rows.append(
      [
        f"[{number.upper()}]({folder}/README.md)",
        experiment.question,
        experiment.claim,
        f"**{verdict.outcome}**: {verdict.because}",
        f"[{figure}]({folder}/{figure}.svg)" if figure else "",
        f"`python -m experiments.run {number}`",
        minutes(HERE / folder, experiment),
      ]
    )
  return markdown(
    ["", "question", "claim", "outcome", "figure", "command", "minutes on two cores"], rows
  )


def minutes(folder: Path, experiment: Experiment) -> str:
  """Returns measured or estimated minutes of all runs, two at a time.

  They are measured once all runs are done. Each run counts with its condition's median, since some
  were paused.
  """
  store = Store(folder)
  settled = store.runs[store.runs.status.isin(SETTLED)] if len(store.runs) else store.runs
  final = settled[settled.stage != runs.START] if len(settled) else settled
  if len(final) >= runs.number(experiment):
    alike = settled.groupby(["stage", "condition"]).seconds
    return f"{alike.transform('median').sum() / 120:.0f}"
  e = experiment
  seeds = {s for c in e.conditions for s in c.seeds or e.seeds}
  seeds |= {*e.tuning.seeds} if e.tuning else set()
  return f"~{(runs.number(e) * e.minutes + len(seeds) * e.start_minutes) / 2:.0f}"


def write_all() -> None:
  for folder in definition.names():
    experiment, module = definition.load(folder)
    write(HERE / folder, experiment, module.report)
  write_overview()


def replace_section(text: str, name: str, content: str) -> str:
  """Replaces the content between named marks; ValueError if they are missing."""
  marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
  if len(marks.findall(text)) != 1:
    raise ValueError(f"a README needs the marks <!-- {name} --> and <!-- /{name} --> once")
  return marks.sub(lambda m: f"{m[1]}{content}\n{m[2]}", text)


def _marked(name: str, content: str) -> str:
  return f"<!-- {name} -->\n{content}\n<!-- /{name} -->"


def _sentence(text: str) -> str:
  return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _seeds(e: Experiment) -> str:
  seeds = ", ".join(map(str, e.seeds))
  if not e.tuning:
    return seeds
  tuned = ", ".join(map(str, e.tuning.seeds))
  statistic = e.tuning.statistic.replace("eval/final", "final held-out accuracy")
  return f"{seeds}; settings are chosen by {statistic} on other seeds ({tuned})"
