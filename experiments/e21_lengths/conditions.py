"""E21, Figure 2 with a pretrained model: what GSPO and GRPO clip, by the length of responses."""

import numpy as np
import pandas as pd

from experiments import figures, statistics
from experiments.arms import ARMS
from experiments.definition import Condition, Experiment
from experiments.report import OPEN, Report, Results, Verdict, inside, markdown

TOKENS = 6  # Tokens of a line.
LINES = (2, 8, 16)
CLASSES = {
  12: "le_16",
  48: "le_64",
  96: "le_128",
}  # Tokens of a right response.
SPREAD, CLIPPED = "by_length/log_ratio_std/", "by_length/clip_fraction/"
EXPONENT, NEAR = -0.5, 0.25

EXPERIMENT = Experiment(
  question="With a pretrained model, how do the fractions that GSPO and GRPO clip depend on the "
  "length of responses?",
  claim="with responses of thousands of tokens, GSPO clips 0.15 of the tokens and GRPO 0.0013 "
  "(§5.2, Figure 2). If tokens were independent, the standard deviation of log s over responses "
  "would be proportional to T^(-1/2), where s is a response's ratio in GSPO and T its number of "
  "tokens",
  hypothesis="the standard deviation of log s is proportional to about T^(-1/2)",
  statistic="slope of the logarithm of that standard deviation over log T, at 12, 48 and 96 "
  "tokens, with GSPO; mean over seeds and 95 % t interval",
  falsified=f"the interval lies outside {EXPONENT:g} ± {NEAR:g}; it holds if it lies inside, else "
  "it cannot be told",
  conditions=tuple(Condition(name, changes) for name, changes in ARMS.items()),
  seeds=(11, 12, 13),
  base="configs/smollm2.py",
  common={
    "data.train": "recurrence:train",
    "data.eval": "recurrence:heldout",
    "data.prompt_template": "{question}",
    "data.lines": LINES,
    "data.max_prompt_tokens": 2 * TOKENS,
    "sampling.max_new_tokens": TOKENS * max(LINES),
    "reward.name": "recurrence",
    "reward.partial": 0.9,  # Gives groups a spread long before a last line is right.
    "rl.iterations": 4,
    "eval.every": 1000,
  },
  columns=(r"by_length/.*",),
  minutes=4,
  start_minutes=5,
  pod=False,  # The flagship has other problems.
)


def by_length(results: Results, loss: str, column: str) -> pd.DataFrame:
  """Returns a column by seed (rows) and tokens of a response (columns)."""
  return pd.DataFrame({n: results.values(loss, column + name) for n, name in CLASSES.items()})


def slopes(values: pd.DataFrame) -> list[float]:
  """Returns slopes of logarithms over log tokens, by seed; seeds with a 0 have none."""
  positive = values[(values > 0).all(axis=1)]
  lengths = np.log(values.columns.to_numpy(float))
  return [statistics.slope(lengths, np.log(row)) for row in positive.to_numpy(float)]


def report(results: Results) -> Report:
  exponent = statistics.interval(slopes(by_length(results, "gspo", SPREAD)))
  outcome = OPEN
  if exponent.count >= len(EXPERIMENT.seeds):
    outcome = inside(exponent, EXPONENT - NEAR, EXPONENT + NEAR)
  tables, intervals = [], {}
  for title, column in {"clipped fraction": CLIPPED, "standard deviation of log s": SPREAD}.items():
    rows = []
    for loss in ARMS:
      values = by_length(results, loss, column)
      fractions = [statistics.interval(values[n].dropna()) for n in CLASSES]
      intervals[column, loss] = fractions
      slope = statistics.interval(slopes(values))
      rows.append(
        [loss.upper(), str(fractions[0].count), *(x.text(".4f") for x in (*fractions, slope))]
      )
    heads = [title, "seeds", *(f"{n} tokens" for n in CLASSES), "exponent of T"]
    tables.append(markdown(heads, rows))
  figure, panels = figures.new(9.6, 3.4, columns=2)
  for axes, (title, column) in zip(panels, {"clipped": CLIPPED, "deviation": SPREAD}.items()):
    lines = {loss.upper(): intervals[column, loss] for loss in ARMS}
    figures.bands(axes, [*CLASSES], lines, "tokens of a response", title)
    axes.set_xscale("log", base=2)
  because = "with GSPO, the standard deviation of log s is proportional to T^a with a = "
  because += exponent.text()
  return Report(Verdict(outcome, because), tables, dict(lengths=figure))
