"""Reports of experiments: tables, figures and a verdict, from two CSV files."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments import statistics
from experiments.statistics import Interval

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told"
TRAINED = ("eval/", "reward/")  # Columns in which a diverged run counts as 0.


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The declared rule's outcome, and its figures."""

  outcome: Literal["holds", "does not hold", "cannot be told"]
  because: str  # One sentence.


@dataclasses.dataclass(frozen=True)
class Report:
  verdict: Verdict
  tables: Sequence[str]  # Markdown
  figures: Mapping[str, Figure]  # NAME -> figure in NAME.svg.


@dataclasses.dataclass(frozen=True)
class Results:
  """Results by run (`runs`), and by run and step (`curves`)."""

  runs: pd.DataFrame
  curves: pd.DataFrame

  def conditions(self) -> list[str]:
    return list(dict.fromkeys(self.runs.condition[self.runs.stage == "final"]))

  def values(self, condition: str, column: str, stage: str = "final") -> pd.Series:
    """Returns a condition's column by seed, without failed and interrupted runs.

    A diverged run counts as 0 for measures of learning, and with its last values elsewhere.
    """
    runs = self.runs
    if column not in runs:
      return pd.Series(dtype=float)
    rows = runs[(runs.condition == condition) & (runs.stage == stage)]
    rows = rows[rows.status.isin(("done", "nan"))].set_index("seed")
    values = rows[column].astype(float)
    if column.startswith(TRAINED) and column != "eval/start":
      values = values.where(rows.status == "done", 0.0)
    return values.dropna().sort_index()

  def interval(self, condition: str, column: str) -> Interval:
    return statistics.interval(self.values(condition, column))

  def paired(self, a: str, b: str, column: str, log: bool = False) -> pd.Series:
    """Returns differences a - b by common seed; with `log`, of logarithms."""
    first, second = self.values(a, column), self.values(b, column)
    if log:
      first, second = np.log(first), np.log(second)
    return (first - second).dropna()

  def gains(self, condition: str) -> pd.Series:
    """Returns gains in held-out accuracy by seed."""
    return (self.values(condition, "eval/final") - self.values(condition, "eval/start")).dropna()

  def curve(self, condition: str, column: str) -> pd.DataFrame:
    """Returns a column of the second stage by step (rows) and seed (columns)."""
    rows = self.curves[(self.curves.condition == condition) & (self.curves.stage == "final")]
    if column not in rows:
      return pd.DataFrame()
    return rows.pivot(index="step", columns="seed", values=column).dropna(how="all")

  def table(
    self,
    conditions: Mapping[str, str] | Sequence[str],
    columns: Mapping[str, str],
    form: str = ".3f",
  ) -> str:
    """Formats intervals over seeds: conditions down, columns (title -> name) across."""
    names = conditions if isinstance(conditions, Mapping) else {c: c for c in conditions}
    rows = []
    for title, condition in names.items():
      intervals = [self.interval(condition, column) for column in columns.values()]
      count = max((x.count for x in intervals), default=0)
      rows.append([title, str(count), *(x.text(form) for x in intervals)])
    return markdown(["", "seeds", *columns], rows)


def tuned(
  results: Results, conditions: Mapping[str, str], settings: Sequence[str], column: str, title: str
) -> str:
  """Formats means of the first stage by setting, the best in bold."""
  rows = []
  for shown, name in conditions.items():
    means = [results.values(f"{name}/{x}", column, "tuning").mean() for x in settings]
    best = max(means)
    rows.append([shown, *(f"**{x:.3f}**" if x == best else f"{x:.3f}" for x in means)])
  return markdown([title, *settings], rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Formats a table, with bars in cells escaped, without rows of missing runs.

  Their conditions are listed below the tables.
  """
  measured = (row for row in rows if statistics.NONE not in row or any("[" in x for x in row))
  lines = [head, ["---"] * len(head), *measured]
  cells = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
  return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def compare(estimate: Interval, *, above: float = 0.0, negligible: float = 0.0) -> str:
  """Judges a difference claimed to exceed a value.

  It holds if the interval does; it does not if the interval lies below `above + negligible`: the
  difference is then smaller than what would matter. Otherwise it cannot be told.
  """
  if estimate.count < 2:
    return OPEN
  if estimate.low > above:
    return HOLDS
  return FAILS if estimate.high < above + negligible or estimate.high <= above else OPEN


def inside(estimate: Interval, low: float, high: float) -> str:
  """Judges an estimate claimed to lie between two values.

  It holds if the whole interval lies there, and fails if the interval lies outside.
  """
  if estimate.count < 2:
    return OPEN
  if low <= estimate.low and estimate.high <= high:
    return HOLDS
  return FAILS if estimate.low > high or estimate.high < low else OPEN
