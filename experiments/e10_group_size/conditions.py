"""E10: responses per prompt, at a constant number of responses per iteration."""

import numpy as np
import pandas as pd

from experiments import figures, statistics
from experiments.arms import ARMS
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown

RESPONSES = 128  # Per iteration.
GROUPS = (2, 4, 8, 32)
LEARNED = "eval/final"
NEGLIGIBLE = 0.02  # Accuracy per doubling.


def condition(loss: str, group: int) -> Condition:
  sizes = {"rl.group_size": group, "rl.prompts": RESPONSES // group}
  return Condition(f"{loss}_g{group}", ARMS[loss] | sizes)


EXPERIMENT = Experiment(
  question="Does the group size matter more to one of the losses?",
  claim='"systematic ablation across group sizes" is left open: a ratio per response and one per '
  "token may need different numbers of responses to tell advantages from noise",
  hypothesis="accuracy depends on the group size in another way under GSPO than under GRPO",
  statistic="slope of the final held-out accuracy over log2 G with GSPO, less the slope with GRPO, "
  f"paired by seed; G in {', '.join(map(str, GROUPS))} at {RESPONSES} responses per iteration; "
  "mean over seeds and 95 % t interval",
  falsified="the 95 % interval includes 0 and lies within "
  f"{NEGLIGIBLE:g} of it; if it includes 0 and is wider, it cannot be told",
  conditions=tuple(condition(loss, group) for loss in ARMS for group in GROUPS),
  seeds=(10, 11, 12, 13, 14),
  pod=False,  # The number of prompts fits the toy.
)


def accuracies(results: Results, loss: str) -> pd.DataFrame:
  """Returns accuracies by seed (rows) and group size (columns)."""
  return pd.DataFrame({g: results.values(f"{loss}_g{g}", LEARNED) for g in GROUPS}).dropna()


def slopes(results: Results, loss: str) -> pd.Series:
  """Returns accuracy per doubling of the group, by seed."""
  accuracy = accuracies(results, loss)
  return accuracy.apply(lambda row: statistics.slope(np.log2(GROUPS), row), axis=1).astype(float)


def report(results: Results) -> Report:
  each = {loss: slopes(results, loss) for loss in ARMS}
  intervals = {loss.upper(): statistics.interval(values) for loss, values in each.items()}
  intervals["GSPO less GRPO"] = gap = statistics.interval((each["gspo"] - each["grpo"]).dropna())
  tables = [
    markdown(
      ["", "seeds", "change of final accuracy per doubling of G"],
      [[name, str(values.count), values.text(".4f")] for name, values in intervals.items()],
    ),
    results.table(
      [c.name for c in EXPERIMENT.conditions],
      {
        "final accuracy": LEARNED,
        "mean accuracy over the run": "eval/area",
        "fraction of groups with equal rewards": "groups_without_spread",
        "clipped fraction of tokens": "clip_fraction/token",
      },
    ),
  ]
  because = "the slope of accuracy over log2 of the group size with GSPO less that with GRPO is "
  because += gap.text(".4f")
  outcome = OPEN
  if gap.count > 1:
    if gap.low > 0 or gap.high < 0:
      outcome = HOLDS
    elif max(-gap.low, gap.high) < NEGLIGIBLE:
      outcome = FAILS
  figure, (axes,) = figures.new()
  points = {
    loss.upper(): [statistics.interval(x) for _, x in accuracies(results, loss).items()]
    for loss in ARMS
  }
  axes.set_xscale("log", base=2)
  figures.bands(axes, GROUPS, points, "G", "final accuracy")
  return Report(Verdict(outcome, because), tables, dict(groups=figure))
