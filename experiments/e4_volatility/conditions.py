"""E4: how many experts of a rollout one update changes, by depth, experts and learning rate."""

import numpy as np

from experiments import figures, statistics
from experiments.arms import LEARNED, SHORT
from experiments.definition import Condition, Experiment
from experiments.report import Report, Results, Verdict, compare, markdown

# Against the experts when the rollout was made, in the mini-batch after the first update.
VOLATILITY = "minibatch/1/router/volatility/mean"
DEPTHS = (2, 4, 8)
EXPERTS = {"8_2": (8, 2), "32_4": (32, 4), "64_8": (64, 8)}
RATE = "rl_optimizer.learning_rate"


def model(layers: int, experts: str = "8_2", rate: float | None = None) -> Condition:
  number, per_token = EXPERTS[experts]
  changes = {"model.num_layers": layers}
  changes |= {"model.num_experts": number, "model.experts_per_token": per_token}
  name = f"layers_{layers}_experts_{experts}"
  if rate is not None:
    name, changes = f"{name}_rate_{rate:.0e}", changes | {RATE: rate}
  primary = experts == "8_2" and rate is None and layers in DEPTHS
  return Condition(name, changes, secondary=not primary)


EXPERIMENT = Experiment(
  question="How does expert volatility depend on depth, experts, top-k and learning rate?",
  claim="about 10 % of the experts change with one update of a model with 48 layers, and it is "
  "more prominent in deeper models (§5.3)",
  hypothesis="with more layers one update changes more of a rollout's experts",
  statistic="slope of the share of experts that one update changes over log2 of the number of "
  "layers (2, 4 and 8; 8 experts, top 2); mean over seeds and 95 % t interval, of seeds whose cold "
  f"starts are right on {LEARNED:.0%} of held-out problems at least, all three",
  falsified="the interval lies below 0.0005 per doubling (0.1 % of the experts from 2 to 8 layers)",
  conditions=(
    *(model(layers) for layers in DEPTHS),
    model(4, "32_4"),
    model(4, "64_8"),
    model(8, "32_4"),
    model(16),
    model(4, rate=4e-4),
    model(8, "32_4", rate=4e-4),
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
  minutes=0.7,
  start_minutes=5.0,  # in the mean: 1 of 2 layers, and about 15 of 16
  columns=(r"minibatch/\d+/router/volatility/.*",),
  pod=False,
)


def slopes(results: Results) -> list[float]:
  """Of each seed that has learned at all depths, in shares of the experts per doubling."""
  every = []
  for name in (f"layers_{layers}_experts_8_2" for layers in DEPTHS):
    begun = results.values(name, "eval/start")
    every.append(results.values(name, VOLATILITY)[begun[begun >= LEARNED].index])
  seeds = set.intersection(*(set(values.index) for values in every))
  return [statistics.slope(np.log2(DEPTHS), [v[seed] for v in every]) for seed in sorted(seeds)]


def report(results: Results) -> Report:
  slope = statistics.interval(slopes(results))
  columns = {
    "after one update": VOLATILITY,
    "after three": "minibatch/3/router/volatility/mean",
    "most volatile layer, one update": "minibatch/1/router/volatility/max_layer",
    "accuracy at the start": "eval/start",
  }
  names = [condition.name for condition in EXPERIMENT.conditions]
  table = results.table(names, columns, ".4f")
  rows = [["slope per doubling of the layers", str(slope.count), slope.text(".5f")]]
  figure, (axes,) = figures.new(6.4, 3.4)
  of = {name: results.interval(name, VOLATILITY) for name in names}
  figures.intervals(axes, of, "share of a rollout's experts that one update changes")
  because = f"the slope is {slope.text('.5f')} per doubling of the layers"
  verdict = Verdict(compare(slope, negligible=5e-4), because)
  return Report(verdict, [table, markdown(["", "seeds", "slope"], rows)], dict(volatility=figure))
