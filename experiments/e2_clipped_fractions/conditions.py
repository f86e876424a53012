"""E2, Figure 2: the fractions of tokens that GSPO and GRPO clip, at four widths of their ranges."""

import numpy as np

from experiments import figures, statistics
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown

WIDTHS = {"third": 1 / 3, "one": 1.0, "three": 3.0, "ten": 10.0}
RANGES = dict(gspo=(3e-4, 4e-4), grpo=(0.2, 0.27))  # §5.1
APART = 30.0  # one and a half orders of magnitude
CLIPPED = "clip_fraction/token"


def condition(loss: str, name: str, width: float) -> Condition:
  low, high = (width * edge for edge in RANGES[loss])
  # A ratio is never below 0, so that a lower range of 1 clips as little as one of 2.
  edges = {"objective.clip_low": min(low, 1.0), "objective.clip_high": high}
  return Condition(f"{loss}_{name}", {"objective.name": loss} | edges)


EXPERIMENT = Experiment(
  question="Are the clipped fractions of GSPO and GRPO two orders of magnitude apart, whatever the "
  "ranges?",
  claim="0.15 and 0.0013, and adjusting the ranges does not alter the disparity (§5.2, Figure 2)",
  hypothesis=f"GSPO clips at least {APART:g} times as many tokens as GRPO, at each of four widths",
  statistic="ratio of the clipped fractions of tokens (means over a run's updates), geometric mean "
  "over seeds, at 1/3, 1, 3 and 10 times the paper's ranges",
  falsified=f"at any width the 95 % interval lies below {APART:g}",
  conditions=tuple(condition(loss, *item) for loss in RANGES for item in WIDTHS.items()),
  seeds=(10, 11, 12),
)


def report(results: Results) -> Report:
  ratios, rows = {}, []
  for name, width in WIDTHS.items():
    a, b = (results.values(f"{loss}_{name}", CLIPPED) for loss in RANGES)
    # A run that clips nothing clips less than one token of all that it was trained on.
    least = 1 / results.values(f"grpo_{name}", "tokens")
    logs = (np.log(np.maximum(a, least)) - np.log(np.maximum(b, least))).dropna()
    ratios[f"{width:.3g}"] = ratio = statistics.exp(statistics.interval(logs))
    fractions = [statistics.interval(x).text(".5f") for x in (a, b)]
    rows.append([f"{width:.3g}", str(ratio.count), *fractions, ratio.text(".0f")])
  table = markdown(["ranges, times the paper's", "seeds", "GSPO", "GRPO", "ratio"], rows)
  found = [(width, ratio) for width, ratio in ratios.items() if ratio.count > 1]
  if len(found) == len(ratios) and all(ratio.low >= APART for _, ratio in found):
    outcome = HOLDS
  else:
    outcome = FAILS if any(ratio.high < APART for _, ratio in found) else OPEN
  told = "; ".join(f"{ratio.text('.0f')} at {width} times the ranges" for width, ratio in found)
  both, (left, right) = figures.new(9, 3.4, columns=2)
  shown = {"GSPO": "gspo_one", "GRPO": "grpo_one"}
  figures.curves(left, results, shown, CLIPPED, title="clipped tokens, the paper's ranges")
  left.set_yscale("log")
  figures.intervals(right, ratios, "ratio GSPO / GRPO by width of the ranges", line=APART)
  right.set_xscale("log")
  because = f"the ratio is {told}" if told else "there are not two seeds of any width"
  return Report(Verdict(outcome, because), [table], dict(clipped=both))
