"""E4: how many experts of a rollout one update changes, by depth."""

import numpy as np

from experiments import figures, statistics
from experiments.arms import LEARNED, SHORT
from experiments.definition import Condition, Experiment
from experiments.report import Report, Results, Verdict, compare, markdown

# Differences from the rollout's experts, in the mini-batch after the first update.
VOLATILITY = "minibatch/1/router/volatility/mean"
DEPTHS = (2, 4, 8)
EXPERTS = {"model.num_experts": 8, "model.experts_per_token": 2}
NAMES = [f"layers_{layers}_experts_8_2" for layers in DEPTHS]

EXPERIMENT = Experiment(
  question="Does one update change more experts in deeper models?",
  claim="about 10 % of the experts change with one update of a model with 48 layers, and more "
  "change in deeper models (§5.3)",
  hypothesis="with more layers one update changes more of a rollout's experts",
  statistic="slope of the share of experts that one update changes over log2 of the number of "
  "layers (2, 4 and 8; 8 experts, top 2); mean over seeds and 95 % t interval, of seeds whose cold "
  f"starts of all three depths are right on at least {LEARNED:.0%} of held-out problems",
  falsified="the interval lies below 0.0005 per doubling (0.1 % of the experts from 2 to 8 layers)",
  conditions=tuple(
    Condition(name, {"model.num_layers": layers} | EXPERTS) for name, layers in zip(NAMES, DEPTHS)
  ),
  seeds=(20, 21, 22, 23, 24),
  # A few updates, all at the same rate.
  common=SHORT
  | {
    "rl.iterations": 4,
    "rl_optimizer.warmup_steps": 0,
    "eval.problems": 64,
    "eval.batch": 64,
  },
  minutes=0.4,
  start_minutes=3.9,  # Mean: 1.5 of 2 layers, 6 of 8.
  columns=(r"minibatch/\d+/router/volatility/.*",),
  pod=False,
)


def slopes(results: Results) -> list[float]:
  """Returns slopes by seed in fractions of experts per doubling, if all depths learned."""
  every = []
  for name in NAMES:
    start = results.values(name, "eval/start")
    every.append(results.values(name, VOLATILITY)[start[start >= LEARNED].index])
  seeds = set.intersection(*(set(values.index) for values in every))
  return [statistics.slope(np.log2(DEPTHS), [v[seed] for v in every]) for seed in sorted(seeds)]


def report(results: Results) -> Report:
  slope = statistics.interval(slopes(results))
  columns = {
    "changed fraction of experts after one update": VOLATILITY,
    "after three updates": "minibatch/3/router/volatility/mean",
    "after one update, most volatile layer": "minibatch/1/router/volatility/max_layer",
    "accuracy at the start": "eval/start",
  }
  table = results.table(NAMES, columns, ".4f")
  rows = [["slope per doubling of the layers", str(slope.count), slope.text(".5f")]]
  figure, (axes,) = figures.new(6.4, 3.4)
  volatility = {name: results.interval(name, VOLATILITY) for name in NAMES}
  figures.intervals(axes, volatility, "share of a rollout's experts that one update changes")
  because = "the share of experts that one update changes rises by "
  because += f"{slope.text('.5f')} with each doubling of the layers"
  verdict = Verdict(compare(slope, negligible=5e-4), because)
  return Report(verdict, [table, markdown(["", "seeds", "slope"], rows)], dict(volatility=figure))
