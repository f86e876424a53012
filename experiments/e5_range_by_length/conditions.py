"""E5: how GSPO's clip range goes with the length of responses."""

import numpy as np
import pandas as pd
from scipy.interpolate import BarycentricInterpolator

from experiments import figures, statistics
from experiments.definition import Condition, Experiment
from experiments.report import Report, Results, Verdict, inside, markdown
from experiments.statistics import Interval

TOKENS = 6  # Tokens of a line.
LINES = (8, 16, 32)
WIDTHS = {"third": 1 / 3, "one": 1.0, "three": 3.0, "ten": 10.0}
RANGE = (3e-4, 4e-4)  # §5.1
MIDDLE = (16, "one")  # Its clipped fraction is the target at other lengths.
CLIPPED, LEARNED = "clip_fraction/token", "eval/area"
EXPONENT = -0.5
NEAR = 0.25  # Largest distance of the exponent.


def length(lines: int) -> dict:
  """Returns changes for problems of equal numbers of lines."""
  return {"data.lines": (lines,), "sampling.max_new_tokens": TOKENS * lines}


def width(times: float) -> dict:
  return {"objective.clip_low": times * RANGE[0], "objective.clip_high": times * RANGE[1]}


FIXED = tuple(
  Condition(f"n{n}_{name}", length(n) | width(w)) for n in LINES for name, w in WIDTHS.items()
)
MIXED = Condition("mixed", width(1.0), secondary=True)

EXPERIMENT = Experiment(
  question="How must the clip range depend on the length of responses, and which clipped fraction "
  "is best?",
  claim='"How to systematically determine appropriate ranges?" is open; if tokens were '
  "independent, the standard deviation of log s, and with it the range, would be proportional to "
  "T^(-1/2) (s: ratio of a response, T: its tokens)",
  hypothesis="the range that clips a given fraction is proportional to about T^(-1/2)",
  statistic="per seed, the exponent over T of the range (interpolated between four widths) that "
  "clips as much as the paper's range does at 96 tokens; mean over seeds and 95 % t interval",
  falsified=f"the interval lies outside {EXPONENT:g} ± {NEAR:g}; it holds if it lies inside, else "
  "it cannot be told",
  conditions=(*FIXED, MIXED),
  seeds=(10, 11, 12, 13),
  columns=(r"ratio/effective_length",),
  minutes=2.0,
  pod=False,  # Lengths are the toy's.
)


def by_width(results: Results, lines: int, column: str) -> pd.DataFrame:
  """Returns a column by seed (rows) and width (columns)."""
  return pd.DataFrame(
    {w: results.values(f"n{lines}_{name}", column) for name, w in WIDTHS.items()}
  ).dropna()


def matching(clipped: pd.Series, fraction: float) -> float:
  """Returns the width for a clipped fraction, interpolated by a cubic of logarithms.

  The cubic goes through the clipped fractions at four widths. The result is NaN beyond them, and if
  fractions do not fall with the width.
  """
  logs = np.log(clipped.to_numpy(float).clip(1e-6))
  if (np.diff(logs) >= 0).any() or not logs[-1] <= np.log(max(fraction, 1e-9)) <= logs[0]:
    return np.nan
  log_clipped = np.log(clipped.index.to_numpy(float))
  fine = np.linspace(log_clipped[0], log_clipped[-1], 1001)
  falling = np.minimum.accumulate(BarycentricInterpolator(log_clipped, logs)(fine))
  return float(np.exp(np.interp(-np.log(fraction), -falling, fine)))


def widths(results: Results) -> pd.DataFrame:
  """Returns widths with MIDDLE's clipped fraction, by seed (rows) and lines (columns)."""
  lines, name = MIDDLE
  target = results.values(f"n{lines}_{name}", CLIPPED)
  fractions = {n: by_width(results, n, CLIPPED) for n in LINES}
  return pd.DataFrame(
    {
      n: pd.Series(
        {s: matching(row, target[s]) for s, row in f.iterrows() if s in target}, dtype=float
      )
      for n, f in fractions.items()
    }
  )


def by_lines(results: Results, column: str) -> pd.DataFrame:
  """Returns a column with the paper's range, by seed and lines."""
  return pd.DataFrame({n: results.values(f"n{n}_one", column) for n in LINES})


def exponent(values: pd.DataFrame, over: pd.DataFrame | None = None) -> Interval:
  """Returns exponents of values by seed and lines, over tokens or other values."""
  slopes = []
  for seed, row in values.dropna().iterrows():
    x = [TOKENS * n for n in LINES] if over is None else over.reindex([seed]).iloc[0]
    if np.isfinite(list(map(float, x))).all():
      slopes.append(statistics.slope(np.log(np.asarray(x, float)), np.log(row)))
  return statistics.interval(slopes)


def verdict(estimate: Interval) -> Verdict:
  because = "the range that clips a given fraction of the tokens is proportional to T^a with a = "
  because += f"{estimate.text()}, where T is the number of tokens of a response"
  return Verdict(inside(estimate, EXPONENT - NEAR, EXPONENT + NEAR), because)


def report(results: Results) -> Report:
  same = widths(results)
  lengths = by_lines(results, "ratio/effective_length")
  fits = {
    "range that clips the same fraction, over T": exponent(same),
    "the same range, over the effective length": exponent(same, lengths),
    "std of the ratios (the paper's range), over T": exponent(by_lines(results, "ratio/std")),
    "effective length, over T": exponent(lengths),
  }
  tables = [
    markdown(
      ["exponent of", "seeds", "95 % interval"],
      [[name, str(fit.count), fit.text()] for name, fit in fits.items()],
    )
  ]
  for title, column, form in (
    ("clipped fraction of tokens", CLIPPED, ".4f"),
    ("mean accuracy over the run", LEARNED, ".3f"),
  ):
    rows = [
      [f"n = {n}", *(results.interval(f"n{n}_{name}", column).text(form) for name in WIDTHS)]
      for n in LINES
    ]
    rows.append(["mixed", "", results.interval(MIXED.name, column).text(form), "", ""])
    tables.append(markdown([title, *(f"{w:.3g} times the ranges" for w in WIDTHS.values())], rows))
  figure, (left_axes, right_axes) = figures.new(9, 3.4, columns=2)
  tokens = np.array([TOKENS * n for n in LINES], float)
  intervals = [statistics.interval(same[n].dropna()) for n in LINES]
  if all(interval.count for interval in intervals):
    figures.band(left_axes, tokens, intervals, "clips the same fraction", 0)
  left_axes.plot(
    tokens, (tokens / (TOKENS * MIDDLE[0])) ** EXPONENT, "--", color="#888", label="T^(-1/2)"
  )
  left_axes.set_xscale("log")
  left_axes.set_yscale("log")
  left_axes.set_xlabel("tokens")
  left_axes.set_title("range, times the paper's", loc="left")
  left_axes.legend()
  figures.intervals(right_axes, fits, "exponents", line=EXPONENT)
  result = verdict(fits["range that clips the same fraction, over T"])
  return Report(result, tables, dict(exponents=figure))
