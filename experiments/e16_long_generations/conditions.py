"""E16: GSPO and GRPO on responses of 192 and of 768 tokens."""

import numpy as np
import pandas as pd

from experiments import arms, figures, statistics
from experiments.definition import Condition, Experiment
from experiments.report import OPEN, Report, Results, Verdict, compare, markdown

LINES, TOKENS = (32, 128), 6  # of a response; of a line
LOSSES = ("gspo", "grpo")
BEFORE, LEARNED = "eval/start", "eval/final"
NEGLIGIBLE = 0.03  # of accuracy, per doubling


def condition(loss: str, lines: int) -> Condition:
  own = {"data.lines": (lines,), "sampling.max_new_tokens": TOKENS * lines}
  return Condition(f"{loss}_n{lines}", own | {"objective.name": loss})


EXPERIMENT = Experiment(
  question="Does GSPO's advantage grow with the length of responses?",
  claim="token-level ratios are noise that accumulates over long responses (§3): what GSPO gains "
  "should grow with them; very long generations are an open question",
  hypothesis="the longer the responses, the larger GSPO's advantage over GRPO",
  statistic="slope of the difference GSPO - GRPO of final held-out accuracy over log2 of the "
  "length, 192 and 768 tokens, per seed; 95 % t interval over seeds",
  falsified=f"the 95 % interval lies below {NEGLIGIBLE:g} per doubling; it holds if it lies above "
  "0, else it cannot be told; nor if cold starts are right on less than "
  f"{arms.LEARNED:.0%} of the problems of one of the two lengths",
  conditions=tuple(condition(loss, lines) for lines in LINES for loss in LOSSES),
  seeds=(10, 11, 12, 13, 14, 15),
  base="configs/tiny_long.py:long",
  # A pupil who forgets as often as that of shorter tasks is hardly ever right after 128 lines.
  common={"data.carry_errors": 0.02},
  columns=(r"ratio/effective_length",),
  minutes=9.0,
  start_minutes=12.0,
  pod=False,  # lengths are the toy's
)


def gaps(results: Results) -> pd.DataFrame:
  """GSPO - GRPO by seed (rows) and lines (columns)."""
  found = {n: results.paired(*(f"{loss}_n{n}" for loss in LOSSES), LEARNED) for n in LINES}
  return pd.DataFrame(found).dropna()


def report(results: Results) -> Report:
  apart = gaps(results)
  slopes = apart.apply(lambda row: statistics.slope(np.log2(LINES), row), axis=1).astype(float)
  slope = statistics.interval(slopes)
  by_length = {f"{TOKENS * n} tokens": statistics.interval(apart[n]) for n in LINES}
  found = {"per doubling": slope} | by_length
  tables = [
    markdown(
      ["accuracy, GSPO - GRPO", "seeds", "difference"],
      [[title, str(one.count), one.text(".4f")] for title, one in found.items()],
    ),
    results.table(
      [c.name for c in EXPERIMENT.conditions],
      {
        "before": BEFORE,
        "after": LEARNED,
        "clipped": "clip_fraction/token",
        "mean \\|ratio - 1\\|": "ratio/deviation",
        "std of log ratio": "ratio/std",
      },
      ".4f",
    ),
  ]
  figure, (left, right) = figures.new(9, 3.4, columns=2)
  for number, loss in enumerate(LOSSES):
    points = [results.interval(f"{loss}_n{n}", LEARNED) for n in LINES]
    if all(p.count for p in points):
      figures.band(left, np.array(LINES, float) * TOKENS, points, loss.upper(), number)
  left.set_xscale("log", base=2)
  left.set_xlabel("tokens of a response")
  left.set_title("final accuracy", loc="left")
  if left.get_legend_handles_labels()[0]:
    left.legend()
  figures.intervals(right, by_length, "accuracy, GSPO - GRPO")
  started = [results.interval(f"gspo_n{n}", BEFORE).value for n in LINES]
  learned = all(accuracy >= arms.LEARNED for accuracy in started)
  outcome = compare(slope, negligible=NEGLIGIBLE) if learned else OPEN
  because = f"GSPO - GRPO changes by {slope.text('.4f')} of accuracy per doubling of the length"
  return Report(Verdict(outcome, because), tables, dict(lengths=figure))
