"""E12: more updates on the same rollout, or older ones; and all runs of all experiments at once."""

import shlex

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments import figures, results, runs, statistics
from experiments.arms import ARMS
from experiments.definition import HERE, Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown

MINIBATCHES = (1, 4, 16)
EPOCHS = (1, 2, 4)  # of four mini-batches
LAGS = (0, 1, 2, 4)  # iterations, of four mini-batches each
SEEDS = (13, 14, 15, 16, 17)
# Their cold starts were lost before the other runs were made, so these have seeds of their own.
LAG_SEEDS = (10, 11, 12)
LEARNED = "eval/final"
NEGLIGIBLE = 0.02  # of accuracy, per doubling


def name(loss: str, minibatches: int, epochs: int = 1, lag: int = 0) -> str:
  more = (f"_e{epochs}" if epochs > 1 else "") + (f"_lag{lag}" if lag else "")
  return f"{loss}_m{minibatches}{more}"


def condition(loss: str, minibatches: int, epochs: int = 1, lag: int = 0) -> Condition:
  changes = ARMS[loss] | {"rl.minibatches": minibatches}
  if epochs > 1:
    changes["rl.epochs"] = epochs
  if lag:
    changes["rl.lag"] = lag
  seeds = LAG_SEEDS if lag else SEEDS
  if (minibatches, epochs, lag) == (4, 1, 0):  # all others are compared with it
    seeds = LAG_SEEDS + SEEDS
  return Condition(
    name(loss, minibatches, epochs, lag), changes, seeds, secondary=epochs > 1 or lag > 0
  )


EXPERIMENT = Experiment(
  question="Does GSPO struggle as its data gets staler?",
  claim='"under what conditions might GSPO struggle?" is left open. What is clipped teaches '
  "nothing, and GSPO clips more, the further the policy is from the one that sampled",
  hypothesis="GSPO stands to GRPO with 16 updates per rollout as it does with one",
  statistic="slope of the difference GSPO - GRPO of final held-out accuracy over log2 of the "
  f"updates per rollout, {', '.join(map(str, MINIBATCHES))} mini-batches of the same responses, "
  "per seed; 95 % t interval over seeds",
  falsified=f"the 95 % interval lies below -{NEGLIGIBLE:g}; it holds if it lies above, else it "
  "cannot be told",
  conditions=tuple(
    condition(loss, m, e, lag)
    for loss in ARMS
    for m, e, lag in (
      *((m, 1, 0) for m in MINIBATCHES),
      *((4, e, 0) for e in EPOCHS if e > 1),
      *((4, 1, lag) for lag in LAGS if lag),
    )
  ),
  seeds=SEEDS,
  minutes=3.0,
  columns=(r"lag/.*|by_age/.*|mismatch/by_age/.*",),
)


def gaps(found: Results) -> pd.DataFrame:
  """GSPO - GRPO by seed (rows) and mini-batches (columns)."""
  return pd.DataFrame(
    {m: found.paired(*(name(loss, m) for loss in ARMS), LEARNED) for m in MINIBATCHES}
  ).dropna()


def report(found: Results) -> Report:
  apart = gaps(found)
  slope = statistics.interval(
    apart.apply(lambda row: statistics.slope(np.log2(MINIBATCHES), row), axis=1).astype(float)
  )
  by_updates = {f"{m} mini-batches": statistics.interval(apart[m]) for m in apart}
  reuse = {
    f"{loss.upper()}, {e} epochs - 1": statistics.interval(
      found.paired(name(loss, 4, e), name(loss, 4), LEARNED)
    )
    for loss in ARMS
    for e in EPOCHS[1:]
  }
  older = {
    f"{loss.upper()}, lag {lag} - 0": statistics.interval(
      found.paired(name(loss, 4, lag=lag), name(loss, 4), LEARNED)
    )
    for loss in ARMS
    for lag in LAGS[1:]
  }
  lines = {"GSPO - GRPO, per doubling of updates": slope}
  lines |= {f"GSPO - GRPO, {key}": value for key, value in by_updates.items()} | reuse | older
  columns = {"final accuracy": LEARNED, "area": "eval/area", "clipped": "clip_fraction/token"}
  columns |= {"mean \\|ratio - 1\\|": "ratio/deviation", "KL (k3)": "kl/k3", "age": "lag/mean"}
  tables = [
    markdown(
      ["accuracy", "seeds", "difference"],
      [[key, str(value.count), value.text(".4f")] for key, value in lines.items()],
    ),
    found.table([c.name for c in EXPERIMENT.conditions], columns, ".4f"),
  ]
  outcome = OPEN
  if slope.count > 1:
    if slope.high < -NEGLIGIBLE:
      outcome = FAILS
    elif slope.low > -NEGLIGIBLE:
      outcome = HOLDS
  both, (left, middle, right) = figures.new(13, 3.4, columns=3)
  for number, loss in enumerate(ARMS):
    points = [found.interval(name(loss, m), LEARNED) for m in MINIBATCHES]
    if all(p.count for p in points):
      figures.band(left, np.array(MINIBATCHES, float), points, loss.upper(), number)
    points = [found.interval(name(loss, 4, lag=lag), LEARNED) for lag in LAGS]
    if all(p.count for p in points):
      figures.band(middle, np.array(LAGS, float), points, loss.upper(), number)
  left.set_xscale("log", base=2)
  left.set_xlabel("mini-batches")
  middle.set_xlabel("lag, iterations")
  for axes in (left, middle):
    axes.set_title("final accuracy", loc="left")
    if axes.get_legend_handles_labels()[0]:
      axes.legend()
  figures.intervals(right, reuse, "accuracy, difference to one epoch")
  because = f"GSPO - GRPO changes by {slope.text('.4f')} per doubling of the updates"
  drawn = dict(staleness=both, all_runs=all_runs(everything()))
  return Report(Verdict(outcome, because), tables, drawn)


def everything() -> pd.DataFrame:
  """All runs of all experiments that are done, once each: what each learned, and where it stood."""
  rows = []
  for path in sorted(HERE.glob("e*_*/results.csv")):
    table = results.Store(path.parent).runs
    table = table[(table.status == results.DONE) & (table.stage != runs.START)]
    rows += [described(row) for row in table.to_dict("records") if "eval/final" in row]
  frame = pd.DataFrame(rows, columns=["run", "loss", "gain", *AXES])
  return frame.dropna(subset="gain").drop_duplicates("run")


AXES = {
  "tokens": "tokens of a response",
  "updates": "updates per rollout",
  "rate": "learning rate",
  "noise": "share of wrong rewards",
}


def described(row: dict) -> dict:
  """A line of results.csv as a point of `all_runs`."""
  changes = dict(
    word.partition("=")[::2] for word in shlex.split(row["changes"].replace(", ", ","))
  )
  own = runs.flat(runs.applied(EXPERIMENT.base, {}))

  def value(key):
    return float(changes.get(key, own[key]))

  return dict(
    run=row["run"],
    loss=changes.get("objective.name", own["objective.name"]),
    gain=row["eval/final"] - row["eval/start"],
    tokens=row.get("response_length/mean"),
    updates=value("rl.minibatches") * value("rl.epochs"),
    rate=value("rl_optimizer.learning_rate"),
    noise=value("reward.false_positive") + value("reward.false_negative"),
  )


def all_runs(frame: pd.DataFrame) -> Figure:
  """What was gained in accuracy by every run, over length, staleness, rate and noise."""
  figure, panels = figures.new(11, 3.2, columns=len(AXES))
  for axes, (column, title) in zip(panels, AXES.items()):
    for number, loss in enumerate(ARMS):
      mine = frame[frame.loss == loss]
      colour = figures.COLOURS[number]
      axes.scatter(mine[column], mine.gain, s=8, color=colour, alpha=0.5, label=loss.upper())
    if column != "noise" and len(frame):
      axes.set_xscale("log")
    axes.set_xlabel(title)
  panels[0].set_title("accuracy gained", loc="left")
  panels[0].legend()
  return figure
