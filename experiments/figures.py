"""Draws SVG figures: curves with bands over seeds, and intervals."""

import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import statistics
from experiments.report import Results
from experiments.statistics import Interval

COLOURS = ("#2563c9", "#c2570c", "#2a8a4a", "#8a3fb0", "#b0303f", "#5f6b7a", "#a08000", "#0f8b8d")
STYLE = {
  "svg.hashsalt": "gspo_jax",  # Equal figures have equal files.
  "svg.fonttype": "none",
  "font.size": 9,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.grid": True,
  "grid.alpha": 0.3,
  "legend.frameon": False,
}


def new(width: float = 6.4, height: float = 3.4, columns: int = 1) -> tuple[Figure, list[Axes]]:
  """Returns an empty figure and its panels; sizes are in inches."""
  with mpl.rc_context(STYLE):
    figure = Figure((width, height), layout="constrained")
    return figure, list(np.atleast_1d(figure.subplots(1, columns)))


def band(axes: Axes, x: np.ndarray, intervals: list[Interval], label: str, number: int) -> None:
  """Draws a line with its 95 % band."""
  colour = COLOURS[number % len(COLOURS)]
  values, low, high = np.array([(i.value, i.low, i.high) for i in intervals]).T
  axes.plot(x, values, color=colour, label=label)
  finite = np.isfinite(low) & np.isfinite(high)
  x, low, high = np.asarray(x)[finite], low[finite], high[finite]
  axes.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)


def bands(
  axes: Axes, x: Sequence[float], groups: Mapping[str, Sequence[Interval]], under: str, title: str
) -> None:
  """Draws complete lines with bands by label, over the axis `under`."""
  for number, (label, points) in enumerate(groups.items()):
    if all(point.count for point in points):
      band(axes, np.asarray(x, float), points, label, number)
  axes.set_xlabel(under)
  axes.set_title(title, loc="left")
  if axes.get_legend_handles_labels()[0]:
    axes.legend()


def curves(
  axes: Axes,
  results: Results,
  conditions: Mapping[str, str],
  column: str,
  *,
  over: str = "step",
  title: str = "",
) -> None:
  """Draws a column of curves.csv over steps, or over another column, by label."""
  for number, (label, condition) in enumerate(conditions.items()):
    values = results.curve(condition, column)
    if values.empty:
      continue
    x = values.index.to_numpy(float)
    if over != "step":
      positions = results.curve(condition, over)
      x = positions.reindex(values.index).mean(axis=1).to_numpy()
    band(
      axes, x, [statistics.interval(row.dropna()) for _, row in values.iterrows()], label, number
    )
  axes.set_xlabel("iteration" if over == "step" else over)
  axes.set_title(title or column, loc="left")
  if axes.get_legend_handles_labels()[0]:
    axes.legend()


def intervals(
  axes: Axes, groups: Mapping[str, Interval], title: str = "", line: float = 0.0
) -> None:
  """Draws estimates with intervals, one per line; skips empty ones."""
  groups = {name: interval for name, interval in groups.items() if interval.count}
  for place, interval in enumerate(groups.values()):
    colour = COLOURS[place % len(COLOURS)]
    ends = [x for x in (interval.low, interval.high) if np.isfinite(x)]
    axes.plot(ends, [place] * len(ends), color=colour)
    axes.plot([interval.value], [place], "o", color=colour)
  axes.set_yticks(range(len(groups)), list(groups))
  axes.set_ylim(max(1, len(groups)) - 0.5, -0.5)
  axes.axvline(line, color="#888", lw=1, ls="--")
  axes.set_title(title, loc="left")


def save(figure: Figure, path: Path | io.StringIO) -> None:
  """Writes a figure as SVG. Equal figures give equal bytes."""
  with mpl.rc_context(STYLE):
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


@dataclasses.dataclass(frozen=True)
class Svg:
  """A figure shown as SVG in notebooks."""

  figure: Figure

  def _repr_svg_(self) -> str:
    text = io.StringIO()
    save(self.figure, text)
    return text.getvalue()
