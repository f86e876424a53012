"""E11: partly wrong rewards, under a ratio per response and one per token."""

import pandas as pd

from experiments import figures, statistics
from experiments.arms import ARMS
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown

RATES = (0.0, 0.3)
KINDS = {"positive": "reward.false_positive", "negative": "reward.false_negative"}
LEARNED = "eval/final"
NEGLIGIBLE = 0.1  # Accuracy per unit of the rate: 0.03 at the highest one.


def name(loss: str, kind: str, rate: float) -> str:
  return f"{loss}_{kind}_{round(100 * rate)}" if rate else f"{loss}_exact"


CONDITIONS = {
  name(loss, kind, rate): ARMS[loss] | ({key: rate} if rate else {})
  for loss in ARMS
  for kind, key in KINDS.items()
  for rate in RATES
}
EXPERIMENT = Experiment(
  question="Does learning with a ratio per response suffer less from noise of the reward?",
  claim='"how reward noise influences sequence-level learning" is left open; GSPO could be the '
  "more robust loss, since its ratio belongs to a whole response, as the reward does",
  hypothesis="accuracy falls less with the rate of wrong rewards under GSPO than under GRPO",
  statistic="slope of the final held-out accuracy (scored without noise) over the rate of wrong "
  "rewards (0 and 0.3) with GSPO, less the slope with GRPO, paired by seed; the mean of false "
  "positives and false negatives; mean over seeds and 95 % t interval",
  falsified="the 95 % interval lies below 0, or includes 0 and lies below "
  f"{NEGLIGIBLE:g}; if it includes 0 and {NEGLIGIBLE:g}, it cannot be told",
  conditions=tuple(Condition(key, changes) for key, changes in CONDITIONS.items()),
  seeds=(10, 11, 12, 13, 14, 15, 16, 17),
)


def accuracies(results: Results, loss: str, kind: str) -> pd.DataFrame:
  """Returns accuracies by seed (rows) and rate (columns)."""
  return pd.DataFrame({r: results.values(name(loss, kind, r), LEARNED) for r in RATES}).dropna()


def slopes(results: Results, loss: str, kind: str) -> pd.Series:
  accuracy = accuracies(results, loss, kind)
  return accuracy.apply(lambda row: statistics.slope(RATES, row), axis=1).astype(float)


def report(results: Results) -> Report:
  gaps, rows = [], []
  for kind in KINDS:
    each = {loss: slopes(results, loss, kind) for loss in ARMS}
    each["GSPO less GRPO"] = (each["gspo"] - each["grpo"]).dropna()
    gaps.append(each["GSPO less GRPO"])
    intervals = [statistics.interval(x) for x in each.values()]
    rows.append([f"false {kind}s", str(intervals[-1].count), *(x.text() for x in intervals)])
  gap = statistics.interval(((gaps[0] + gaps[1]) / 2).dropna())
  rows.append(["mean of both", str(gap.count), "", "", gap.text()])
  heads = ["slope of accuracy over the rate of", "seeds", "GSPO", "GRPO", "GSPO less GRPO"]
  columns = {"final accuracy": LEARNED, "mean accuracy over the run": "eval/area"}
  columns |= {"clipped fraction of tokens": "clip_fraction/token"}
  tables = [markdown(heads, rows), results.table([*CONDITIONS], columns)]
  outcome = OPEN
  if gap.count > 1:
    if gap.low > 0:
      outcome = HOLDS
    elif gap.high < NEGLIGIBLE:
      outcome = FAILS
  figure, panels = figures.new(9, 3.4, columns=2)
  for axes, kind in zip(panels, KINDS):
    points = {
      loss.upper(): [statistics.interval(x) for _, x in accuracies(results, loss, kind).items()]
      for loss in ARMS
    }
    figures.bands(axes, RATES, points, "rate", f"final accuracy, false {kind}s")
  because = "the slope of accuracy over the rate of wrong rewards with GSPO less that with GRPO is "
  because += gap.text()
  return Report(Verdict(outcome, because), tables, dict(noise=figure))
