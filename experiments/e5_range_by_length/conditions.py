"""E5: how GSPO's clip range goes with the length of responses, and a range that finds itself."""

import numpy as np
import pandas as pd
from scipy.interpolate import BarycentricInterpolator

from experiments import figures, statistics
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown
from experiments.statistics import Interval

TOKENS = 6  # of a line
LINES = (8, 16, 32)
WIDTHS = {"third": 1 / 3, "one": 1.0, "three": 3.0, "ten": 10.0}
RANGE = (3e-4, 4e-4)  # §5.1
MIDDLE = (16, "one")  # what is clipped there is looked for at the other lengths
TARGET = 0.15  # of tokens: the paper's fraction
CLIPPED, LEARNED = "clip_fraction/token", "eval/area"
EXPONENT = -0.5
NEAR = 0.25  # how far from it the exponent may lie


def length(lines: int) -> dict:
  """All problems ask for so many lines."""
  return {"data.lines": (lines,), "sampling.max_new_tokens": TOKENS * lines}


def width(times: float) -> dict:
  return {"objective.clip_low": times * RANGE[0], "objective.clip_high": times * RANGE[1]}


ADAPTIVE = {"objective.adaptive_clip.target": TARGET, "objective.adaptive_clip.gain": 2.0}
BY_LENGTH = {"objective.clip_exponent": 0.5, "objective.clip_length": float(TOKENS * MIDDLE[0])}
FIXED = tuple(
  Condition(f"n{n}_{name}", length(n) | width(w)) for n in LINES for name, w in WIDTHS.items()
)
FOUND = tuple(
  Condition(f"n{n}_adaptive", length(n) | width(1.0) | ADAPTIVE, secondary=True) for n in LINES
)
MIXED = (
  Condition("mixed", width(1.0), secondary=True),
  Condition("mixed_by_length", width(1.0) | BY_LENGTH, secondary=True),
)

EXPERIMENT = Experiment(
  question="How must the clip range go with the length of responses, and which clipped fraction is "
  "best?",
  claim='"How to systematically determine appropriate ranges?" is open; were tokens independent, '
  "the noise of log s, and with it the range, would go with T^(-1/2)",
  hypothesis="the range that clips a given fraction goes with about T^(-1/2)",
  statistic="per seed, the exponent over T of the range (interpolated between four widths) that "
  "clips as much as the paper's range does at 96 tokens; mean over seeds and 95 % t interval",
  falsified=f"the interval lies outside {EXPONENT:g} ± {NEAR:g}; it holds if it lies inside, else "
  "it cannot be told",
  conditions=(*FIXED, *FOUND, *MIXED),
  seeds=(10, 11, 12, 13),
  columns=(r"ratio/effective_length",),
  minutes=2.0,
  pod=False,  # lengths are the toy's
)


def by_width(results: Results, lines: int, column: str) -> pd.DataFrame:
  """A column by seed (rows) and width (columns)."""
  return pd.DataFrame(
    {w: results.values(f"n{lines}_{name}", column) for name, w in WIDTHS.items()}
  ).dropna()


def matching(clipped: pd.Series, fraction: float) -> float:
  """The width at which a fraction is clipped, by the cubic through what is clipped at four, all in
  logarithms; NaN beyond them, and where what is clipped does not fall with the width."""
  logs = np.log(clipped.to_numpy(float).clip(1e-6))
  if (np.diff(logs) >= 0).any() or not logs[-1] <= np.log(max(fraction, 1e-9)) <= logs[0]:
    return np.nan
  at = np.log(clipped.index.to_numpy(float))
  fine = np.linspace(at[0], at[-1], 1001)
  falling = np.minimum.accumulate(BarycentricInterpolator(at, logs)(fine))
  return float(np.exp(np.interp(-np.log(fraction), -falling, fine)))


def widths(results: Results) -> pd.DataFrame:
  """By seed (rows) and lines (columns): the width that clips as much as MIDDLE does."""
  lines, name = MIDDLE
  wanted = results.values(f"n{lines}_{name}", CLIPPED)
  found = {n: by_width(results, n, CLIPPED) for n in LINES}
  return pd.DataFrame(
    {
      n: pd.Series(
        {s: matching(row, wanted[s]) for s, row in f.iterrows() if s in wanted}, dtype=float
      )
      for n, f in found.items()
    }
  )


def best_fractions(results: Results) -> pd.DataFrame:
  """By seed and lines: the fraction that is clipped at the width with which most is learned, from
  the parabola through the best of four and its two neighbours."""
  found = {}
  for n in LINES:
    learned, clipped = by_width(results, n, LEARNED), by_width(results, n, CLIPPED)
    seeds = [s for s in learned.index if s in clipped.index]
    logs = np.log(clipped.clip(lower=1e-6))
    found[n] = pd.Series({s: peak(logs.loc[s], learned.loc[s]) for s in seeds}, dtype=float)
  return np.exp(pd.DataFrame(found))


def peak(x: pd.Series, y: pd.Series) -> float:
  """Where y is largest: the top of a parabola through the largest and its two neighbours; NaN where
  it is the first or the last, and the largest may lie beyond."""
  x, y = x.to_numpy(float), y.to_numpy(float)
  i = int(y.argmax())
  if i in (0, len(y) - 1) or (np.diff(x) >= 0).any():
    return np.nan
  a, b, _ = np.polyfit(x[i - 1 : i + 2] - x[i], y[i - 1 : i + 2], 2)
  return float(np.clip(x[i] - b / (2 * a), x[i + 1], x[i - 1]))


def adapted(results: Results) -> pd.DataFrame:
  """By seed and lines: the range in the second half of a run in which it adapts, as a width."""
  found = {}
  for n in LINES:
    curve = results.curve(f"n{n}_adaptive", "clip_range")
    late = curve[curve.index > curve.index.max() / 2] if len(curve) else curve
    found[n] = late.mean() / min(RANGE) if len(late) else pd.Series(dtype=float)
  return pd.DataFrame(found)


def of_column(results: Results, column: str) -> pd.DataFrame:
  """By seed and lines: a column with the paper's range."""
  return pd.DataFrame({n: results.values(f"n{n}_one", column) for n in LINES})


def exponent(values: pd.DataFrame, over: pd.DataFrame | None = None) -> Interval:
  """Of values by seed and lines, over the number of tokens, or over other values."""
  slopes = []
  for seed, row in values.dropna().iterrows():
    x = [TOKENS * n for n in LINES] if over is None else over.reindex([seed]).iloc[0]
    if np.isfinite(list(map(float, x))).all():
      slopes.append(statistics.slope(np.log(np.asarray(x, float)), np.log(row)))
  return statistics.interval(slopes)


def verdict(of: Interval) -> Verdict:
  because = f"the range that clips a given fraction goes with T to the {of.text()}"
  outcome, low, high = OPEN, EXPONENT - NEAR, EXPONENT + NEAR
  if of.count > 1:
    if of.low > high or of.high < low:
      outcome = FAILS
    elif of.low >= low and of.high <= high:
      outcome = HOLDS
  return Verdict(outcome, because)


def report(results: Results) -> Report:
  same, best = widths(results), best_fractions(results)
  lengths = of_column(results, "ratio/effective_length")
  fits = {
    "range that clips the same fraction, over T": exponent(same),
    "the same, over the effective length": exponent(same, lengths),
    "range in the second half of adaptive runs, over T": exponent(adapted(results)),
    "std of the ratios (the paper's range), over T": exponent(of_column(results, "ratio/std")),
    "effective length, over T": exponent(lengths),
    "fraction clipped where most is learned, over T": exponent(best),
  }
  tables = [
    markdown(
      ["exponent of", "seeds", "95 % interval"],
      [[name, str(found.count), found.text()] for name, found in fits.items()],
    )
  ]
  for title, column, form in (
    ("clipped tokens", CLIPPED, ".4f"),
    ("area under the accuracy curve", LEARNED, ".3f"),
  ):
    names = [*WIDTHS, "adaptive"]
    rows = [
      [f"n = {n}", *(results.interval(f"n{n}_{name}", column).text(form) for name in names)]
      for n in LINES
    ]
    heads = [*(f"{w:.3g} times" for w in WIDTHS.values()), "adaptive"]
    tables.append(markdown([title, *heads], rows))
  mixed = statistics.interval(results.paired("mixed_by_length", "mixed", LEARNED))
  tables.append(
    markdown(
      ["mixed lengths", "seeds", "difference of the area"],
      [["range by length - one range for all", str(mixed.count), mixed.text()]],
    )
  )
  both, (left, right) = figures.new(9, 3.4, columns=2)
  tokens = np.array([TOKENS * n for n in LINES], float)
  for number, (label, values) in enumerate(
    {"clips the same fraction": same, "adaptive": adapted(results)}.items()
  ):
    of = [statistics.interval(values[n].dropna()) for n in LINES]
    if all(one.count for one in of):
      figures.band(left, tokens, of, label, number)
  left.plot(
    tokens, (tokens / (TOKENS * MIDDLE[0])) ** EXPONENT, "--", color="#888", label="T^(-1/2)"
  )
  left.set_xscale("log")
  left.set_yscale("log")
  left.set_xlabel("tokens")
  left.set_title("range, times the paper's", loc="left")
  left.legend()
  figures.intervals(right, fits, "exponents", line=EXPONENT)
  found = verdict(fits["range that clips the same fraction, over T"])
  return Report(found, tables, dict(exponents=both))
