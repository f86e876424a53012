"""E23: GSPO and GRPO by the learning rate of routers."""

import numpy as np

from experiments import arms, figures, statistics
from experiments.arms import ARMS
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown
from experiments.statistics import Interval

FAR = 16  # Mini-batches of a rollout batch.
DOSES = (0, 1, 5, 10, 20)  # Factors on the learning rate of routers.
STRONG = 10  # In pilots 6 to 17 % of the experts changed.
REPLAYS = ("R2", "R3")
# Share of a rollout's experts that differ in the last mini-batch.
CHANGED = f"minibatch/{FAR - 1}/router/volatility/mean"
REWARD, START, END = "reward/mean", "eval/start", "eval/final"
PAPER = 0.10  # Share of the experts that one update changes in the paper (§5.3).
SEEDS, MORE = (40, 41, 42), (43, 44)
RATE = 2e-4
CONTROL_RATE = 5e-4
MODEL = {"model.num_layers": 4, "model.num_experts": 32, "model.experts_per_token": 4}  # As in E3.


def name(loss: str, dose: int, replay: str = "none") -> str:
  return f"{loss}_x{dose}" if replay == "none" else f"{loss}_{replay}_x{dose}"


def control(loss: str) -> str:
  return f"{loss}_rate"


def dialled(loss: str, dose: int, replay: str = "none") -> Condition:
  """Declares a loss at a dose; STRONG without replay has more seeds."""
  changes = {"rl_optimizer.router_rate": float(dose), "objective.replay": replay}
  seeds = SEEDS + MORE if dose == STRONG and replay == "none" else None
  return Condition(name(loss, dose, replay), ARMS[loss] | changes, seeds)


DIALLED = [dialled(loss, dose) for dose in (STRONG, 1, 5, 20, 0) for loss in ARMS]
REPLAYED = [dialled(loss, STRONG, replay) for replay in REPLAYS for loss in ARMS]
# A higher learning rate of all weights. In a pilot both losses fell.
CONTROLS = [
  Condition(control(loss), ARMS[loss] | {"rl_optimizer.learning_rate": CONTROL_RATE})
  for loss in ARMS
]

EXPERIMENT = Experiment(
  question="Is GSPO more stable than GRPO where routing changes as much as in the paper?",
  claim="about 10 % of the experts change with one update, so that GRPO does not converge without "
  "Routing Replay, and GSPO does (§5.3, Figure 3)",
  hypothesis="with routers that learn faster, until a tenth of a rollout's experts change, the "
  "mean reward of a run of GSPO is above that of GRPO, both without replay",
  statistic="mean reward over the run with GSPO less that with GRPO, paired by seed, at one factor "
  "on the learning rate of routers: the one whose share of changed experts in the last of "
  f"{FAR} mini-batches (mean of both losses) is nearest to {PAPER:g}, by ratio; mean over seeds "
  "and 95 % t interval",
  falsified="the interval includes 0 or lies below it. It cannot be told if that share is below "
  f"{PAPER / 2:g} or above {2 * PAPER:g}, or if the cold start is right on less than "
  f"{arms.LEARNED:.0%} of the problems",
  conditions=(*DIALLED, *REPLAYED, *CONTROLS),
  seeds=SEEDS,
  common=MODEL
  | arms.SHORT
  | {
    "rl.minibatches": FAR,
    "rl.iterations": 40,
    "rl_optimizer.learning_rate": RATE,
    "eval.every": 10,
    "objective.old_logp": "recompute",  # R2 needs it; all conditions have the same.
    "engine.cache_dtype": "bfloat16",  # Separates sampler from trainer, R2 from R3.
  },
  minutes=5.0,
  start_minutes=4.0,
  columns=(r"minibatch/\d+/router/volatility/mean", r"minibatch/\d+/ratio/max", r"mismatch/.*"),
  pod=False,  # The doses are of this model.
)


def share(results: Results, dose: int) -> float:
  """Returns the share of changed experts at a dose."""
  return float(np.mean([results.interval(name(loss, dose), CHANGED).value for loss in ARMS]))


def nearest(results: Results) -> int:
  """Returns the dose nearest to the paper's share; STRONG without results."""
  shares = {dose: share(results, dose) for dose in DOSES}
  distances = {dose: abs(np.log(x / PAPER)) for dose, x in shares.items() if x > 0}
  return min(distances, key=distances.__getitem__) if distances else STRONG


def gain(results: Results, dose: int, column: str = REWARD) -> Interval:
  """Returns GSPO - GRPO at a dose."""
  return statistics.interval(results.paired(name("gspo", dose), name("grpo", dose), column))


def outcome(results: Results, dose: int, primary: Interval) -> str:
  """Returns the outcome of the declared rule."""
  counts = {d: len(SEEDS + MORE if d == STRONG else SEEDS) for d in DOSES}
  sound = (
    all(gain(results, d).count >= count for d, count in counts.items())
    and PAPER / 2 <= share(results, dose) <= 2 * PAPER
    and results.interval(name("gspo", dose), START).value >= arms.LEARNED
  )
  if not sound:
    return OPEN
  return HOLDS if primary.low > 0 else FAILS


def report(results: Results) -> Report:
  dose = nearest(results)
  primary = gain(results, dose)
  columns = (CHANGED, REWARD, START, END)
  rows = []
  for condition in EXPERIMENT.conditions:
    values = [results.interval(condition.name, column) for column in columns]
    rows.append([condition.name, str(values[1].count), *(x.text() for x in values)])
  tables = [
    markdown(
      ["condition", "seeds", "changed fraction of experts", "reward", "accuracy before", "after"],
      rows,
    ),
    markdown(
      ["factor on routers", "reward, GSPO less GRPO", "final accuracy, GSPO less GRPO"],
      [[str(d), gain(results, d).text(), gain(results, d, END).text()] for d in DOSES]
      + [
        ["1, higher learning rate", *(_gain_of_controls(results, x).text() for x in (REWARD, END))]
      ],
    ),
    markdown(
      ["replay", *(f"reward, {loss.upper()} with less without" for loss in ARMS)],
      [[x, *(_gain_by_replay(results, loss, x).text() for loss in ARMS)] for x in REPLAYS],
    ),
  ]
  because = (
    f"if routers learn {dose} times as fast as other weights, {share(results, dose):.3f} of a "
    f"rollout's experts change, and the mean reward of GSPO less that of GRPO is {primary.text()}"
  )
  figure = dict(dial=_dial(results), course=_course(results, dose))
  return Report(Verdict(outcome(results, dose, primary), because), tables, figure)


def _gain_by_replay(results: Results, loss: str, replay: str) -> Interval:
  """Returns the gain in reward by replay at the strong dose."""
  pair = name(loss, STRONG, replay), name(loss, STRONG)
  return statistics.interval(results.paired(*pair, REWARD))


def _gain_of_controls(results: Results, column: str) -> Interval:
  """Returns GSPO - GRPO of the controls."""
  return statistics.interval(results.paired(control("gspo"), control("grpo"), column))


def _dial(results: Results):
  """Draws reward and final accuracy over the share of changed experts."""
  figure, panels = figures.new(7.2, 3.4, columns=2)
  shares = [share(results, dose) for dose in DOSES]
  for axes, column, title in zip(panels, (REWARD, END), ("reward of the run", "final accuracy")):
    lines = {
      loss.upper(): [results.interval(name(loss, dose), column) for dose in DOSES] for loss in ARMS
    }
    axes.axvline(PAPER, color="#888", lw=1, ls="--")
    figures.bands(axes, shares, lines, "share of experts that change", title)
  return figure


def _course(results: Results, dose: int):
  """Draws rewards over iterations at a dose."""
  figure, (axes,) = figures.new()
  conditions = {loss.upper(): name(loss, dose) for loss in ARMS}
  title = f"reward, routers {dose} times as fast"
  figures.curves(axes, results, conditions, REWARD, title=title)
  return figure
