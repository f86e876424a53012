"""E4: how many experts of a rollout one update changes, by depth, experts and learning rate."""

import numpy as np

from experiments import figures, statistics
from experiments.definition import Condition, Experiment
from experiments.report import Report, Results, Verdict, compare, markdown

# Against the experts when the rollout was made, in the mini-batch after the first update.
VOLATILITY = "minibatch/1/router/volatility/mean"
DEPTHS = (2, 4, 8, 16)
EXPERTS = {"8_2": (8, 2), "32_4": (32, 4), "64_8": (64, 8)}
RATE = "rl_optimizer.learning_rate"


def model(layers: int, experts: str = "8_2", rate: float | None = None) -> Condition:
  number, per_token = EXPERTS[experts]
  changes = {"model.num_layers": layers}
  changes |= {"model.num_experts": number, "model.experts_per_token": per_token}
  name = f"layers_{layers}_experts_{experts}"
  if rate is None:
    return Condition(name, changes)
  return Condition(f"{name}_rate_{rate:.0e}", changes | {RATE: rate})


EXPERIMENT = Experiment(
  question="How does expert volatility depend on depth, experts, top-k and learning rate?",
  claim="about 10 % of the experts change with one update of a model with 48 layers, and it is "
  "more prominent in deeper models (§5.3)",
  hypothesis="with more layers one update changes more of a rollout's experts",
  statistic="slope of the share of experts that one update changes over log2 of the number of "
  "layers (2 to 16; 8 experts, top 2); mean over seeds and 95 % t interval",
  falsified="the interval lies below 0.0005 per doubling (0.1 % of the experts from 2 to 8 layers)",
  conditions=(
    *(model(layers) for layers in DEPTHS),
    model(4, "32_4"),
    model(4, "64_8"),
    model(8, "32_4"),
    model(4, rate=4e-4),
    model(8, "32_4", rate=4e-4),
  ),
  seeds=(20, 21, 22),
  # A few updates, all at the same rate; cold starts that end sooner, for deep models are slow.
  common={
    "rl.iterations": 4,
    "rl_optimizer.warmup_steps": 0,
    "sft.steps": 500,
    "eval.problems": 32,
    "eval.batch": 32,
  },
  minutes=2.0,
  start_minutes=9.0,  # in the mean: 2 of 2 layers, and about 20 of 16
  columns=(r"minibatch/\d+/router/volatility/.*",),
  pod=False,
)


def slopes(results: Results) -> list[float]:
  """Of each seed that has all depths, in shares of the experts per doubling."""
  every = [results.values(f"layers_{layers}_experts_8_2", VOLATILITY) for layers in DEPTHS]
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
