"""E2, Figure 2: the fractions of tokens that GSPO and GRPO clip, at four widths of their ranges."""

import numpy as np
import pandas as pd

from experiments import figures, statistics
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown

WIDTHS = {"third": 1 / 3, "one": 1.0, "three": 3.0, "ten": 10.0}
RANGES = dict(gspo=(3e-4, 4e-4), grpo=(0.2, 0.27))  # §5.1
APART = 30.0  # One and a half orders of magnitude.
CLIPPED = "clip_fraction/token"


def condition(loss: str, name: str, width: float) -> Condition:
  low, high = (width * edge for edge in RANGES[loss])
  # Ratios are positive, so a lower range of 1 clips as little as one of 2.
  edges = {"objective.clip_low": min(low, 1.0), "objective.clip_high": high}
  return Condition(f"{loss}_{name}", {"objective.name": loss} | edges)


EXPERIMENT = Experiment(
  question="Does GSPO clip about a hundred times as many tokens as GRPO, whatever the clip ranges?",
  claim="GSPO clips 0.15 of the tokens and GRPO 0.0013, and adjusting the ranges does not alter "
  "the disparity (§5.2, Figure 2)",
  hypothesis=f"GSPO clips at least {APART:g} times as many tokens as GRPO, at each of four widths, "
  "and the width does not matter",
  statistic="ratio of the clipped fractions of tokens (means over a run's updates), geometric mean "
  "over seeds, at 1/3, 1, 3 and 10 times the paper's ranges; and the exponent a, if "
  "the ratio is proportional to the width of the ranges to the power a",
  falsified=f"at any width the 95 % interval lies below {APART:g}, or that of a does not include 0",
  conditions=tuple(condition(loss, *item) for loss in RANGES for item in WIDTHS.items()),
  seeds=(10, 11, 12),
)


def log_ratios(results: Results, width: str) -> pd.Series:
  """Returns log-ratios of clipped fractions, GSPO over GRPO, by seed."""
  gspo, grpo = (results.values(f"{loss}_{width}", CLIPPED) for loss in RANGES)
  # A run without clipped tokens counts as clipping less than one token.
  least = 1 / results.values(f"grpo_{width}", "tokens")
  return (np.log(np.maximum(gspo, least)) - np.log(np.maximum(grpo, least))).dropna()


def report(results: Results) -> Report:
  logs, rows = {}, []
  for name, width in WIDTHS.items():
    logs[width] = log_ratios(results, name)
    ratio = statistics.exp(statistics.interval(logs[width]))
    fractions = [results.interval(f"{loss}_{name}", CLIPPED).text(".5f") for loss in RANGES]
    rows.append([f"{width:.3g}", str(ratio.count), *fractions, ratio.text(".0f")])
  ratios = {f"{w:.3g}": statistics.exp(statistics.interval(x)) for w, x in logs.items()}
  measured = {width: ratio for width, ratio in ratios.items() if ratio.count > 1}
  seed_logs = pd.DataFrame(logs).dropna().to_numpy()
  power = statistics.interval(
    [statistics.slope(np.log([*logs]), logs_of_seed) for logs_of_seed in seed_logs]
  )
  rows.append(["exponent a of the width", str(power.count), "", "", power.text(".2f")])
  table = markdown(
    ["ranges, times the paper's", "seeds", *(f"clipped by {x.upper()}" for x in RANGES), "ratio"],
    rows,
  )
  outcome = OPEN
  if any(ratio.high < APART for ratio in measured.values()):
    outcome = FAILS
  elif len(measured) == len(ratios) and power.count > 1:
    if power.low > 0 or power.high < 0:
      outcome = FAILS
    elif all(ratio.low >= APART for ratio in measured.values()):
      outcome = HOLDS
  because = "there are not two seeds of any width"
  if measured:
    texts = (f"{ratio.text('.0f')} at {width} times" for width, ratio in measured.items())
    because = f"GSPO's clipped fraction over GRPO's is {', '.join(texts)} the paper's ranges; "
    because += f"this ratio is proportional to the ranges' width to the power {power.text('.2f')}"
  figure, (left_axes, right_axes) = figures.new(9, 3.4, columns=2)
  shown = {"GSPO": "gspo_one", "GRPO": "grpo_one"}
  figures.curves(left_axes, results, shown, CLIPPED, title="clipped tokens, the paper's ranges")
  left_axes.set_yscale("log")
  figures.intervals(right_axes, ratios, "ratio GSPO / GRPO by width of the ranges", line=APART)
  right_axes.set_xscale("log")
  return Report(Verdict(outcome, because), [table], dict(clipped=figure))
