"""E6: signal, noise and bias of group gradients of GSPO, GRPO, DAPO and raw importance weights."""

import numpy as np
import pandas as pd

from experiments import figures, statistics
from experiments.definition import Condition, Experiment
from experiments.gradients import LOSSES, UPDATES
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown
from experiments.statistics import Interval

LINES = (8, 16, 32)  # Lines have 6 tokens each.
TITLES = dict(gspo="GSPO", grpo="GRPO", dapo="DAPO", raw="raw product")

EXPERIMENT = Experiment(
  question="Does averaging over a sequence give gradients with less noise, and what bias does it "
  "cost?",
  claim="token-level weights bring noise that grows with the length of a response (§3, §5.3); "
  "bounds on the variance are an open question",
  hypothesis="off-policy a group's gradient has a higher signal-to-noise ratio under GSPO than "
  "under GRPO, the more so the longer the responses",
  statistic="ratio of the signal-to-noise ratios (squared norm of the mean over the trace of the "
  "covariance, of 64 group gradients; means over 1, 4 and 16 updates away from the policy that "
  "sampled) of GSPO and GRPO, geometric mean over seeds at each length; and the slope of its "
  "logarithm over log2 of the length",
  falsified="at the greatest length the 95 % interval of the ratio lies below 1.1, or that of the "
  "slope lies below 0",
  conditions=tuple(
    Condition(f"n{n}", {"data.lines": (n,), "sampling.max_new_tokens": 6 * n}) for n in LINES
  ),
  seeds=(10, 11, 12, 13, 14),
  common={
    "rl.prompts": 64,
    "rl.minibatches": UPDATES[-1],
    "rl_optimizer.warmup_steps": 0,  # θ moves as in the middle of a run.
  },
  minutes=3.0,
  columns=("gradient/.*",),
  measure="experiments.gradients:measure",
  pod=False,
)
NEGLIGIBLE = 1.1


def gaps(results: Results, a: str, b: str) -> dict[int, pd.Series]:
  """Returns log-ratios of two losses' signal-to-noise ratios, by length and seed."""
  differences = {}
  for n in LINES:
    mine, other = (results.values(f"n{n}", f"gradient/{x}/snr") for x in (a, b))
    # Estimated squares of noisy means may be negative, and have no ratio.
    differences[n] = (np.log(mine.where(mine > 0)) - np.log(other.where(other > 0))).dropna()
  return differences


def slope(gap: dict[int, pd.Series]) -> Interval:
  """Returns slopes of the logarithm per doubling of length, for complete seeds."""
  table = pd.DataFrame(gap).dropna()
  return statistics.interval([statistics.slope(np.log2(LINES), row) for row in table.to_numpy()])


def report(results: Results) -> Report:
  gap = gaps(results, "gspo", "grpo")
  ratio = {n: statistics.exp(statistics.interval(x)) for n, x in gap.items()}
  grows, longest = slope(gap), ratio[LINES[-1]]
  if longest.count > 1 and grows.count > 1:
    higher, growing = longest.low > 1, grows.low > 0
    lower, shrinking = longest.high < NEGLIGIBLE, grows.high < 0
    outcome = FAILS if lower or shrinking else HOLDS if higher and growing else OPEN
  else:
    outcome = OPEN
  because = (
    f"the signal-to-noise ratio of GSPO is {longest.text()} times that of GRPO at {6 * LINES[-1]} "
    f"tokens, and the logarithm of this factor changes by {grows.text()} with each doubling of the "
    "length"
  )
  figure, (left_axes, right_axes) = figures.new(9, 3.4, columns=2)
  x = [6 * n for n in LINES]
  for number, (loss, title) in enumerate(TITLES.items()):
    intervals = {
      metric: [results.interval(f"n{n}", f"gradient/{loss}/{metric}") for n in LINES]
      for metric in ("snr", "cosine")
    }
    figures.band(left_axes, np.array(x), intervals["snr"], title, number)
    figures.band(right_axes, np.array(x), intervals["cosine"], title, number)
  for axes, title in (
    (left_axes, "signal-to-noise ratio of a group"),
    (right_axes, "cosine to on-policy"),
  ):
    axes.set_xlabel("tokens of a response")
    axes.set_xticks(x)
    axes.set_title(title, loc="left")
  left_axes.legend()
  return Report(
    Verdict(outcome, because), [ratios(ratio, results), table(results)], dict(snr=figure)
  )


def ratios(ratio: dict[int, Interval], results: Results) -> str:
  rows = []
  for n, primary in ratio.items():
    others = [gaps(results, a, b)[n] for a, b in (("gspo", "dapo"), ("gspo", "raw"))]
    shown = [statistics.exp(statistics.interval(x)) for x in others]
    rows.append([str(6 * n), *(f"{x.text()} ({x.count} seeds)" for x in (primary, *shown))])
  return markdown(["tokens", "SNR of GSPO / GRPO", "GSPO / DAPO", "GSPO / raw product"], rows)


def table(results: Results) -> str:
  """Formats all measurements, after each number of updates."""
  rows = []
  columns = {"SNR": "snr", "cosine": "cosine", "bias": "bias", "scale": "scale"}
  columns |= {"clipped": "clip_fraction/token"}
  for n in LINES:
    for loss in LOSSES:
      for updates in UPDATES:
        cells = []
        for metric in columns.values():
          curve = results.curve(f"n{n}", f"gradient/{loss}/{metric}")
          measured = len(curve) and updates in curve.index
          values = curve.loc[updates].dropna() if measured else []
          cells.append(statistics.interval(values).text(".3g"))
        rows.append([str(6 * n), TITLES[loss], str(updates), *cells])
  return markdown(["tokens", "loss", "updates", *columns], rows)
