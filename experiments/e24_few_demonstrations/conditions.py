"""E24: few demonstrations and many questions: imitation, GSPO after a cold start, and GSPO after
the best imitation."""

import itertools
from collections.abc import Callable

import pandas as pd

from experiments import figures, statistics
from experiments.arms import COLD_START_ALONE
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown
from experiments.statistics import Interval

COLD, ITERATIONS, UPDATES = 40, 30, 4  # Updates of a cold start; iterations; updates of each.
END = COLD + ITERATIONS * UPDATES
STOPS = (COLD, 80, END)  # Updates of imitation.
FEW, MORE = 64, 640  # Different demonstrations.
SEEDS, FURTHER = (21, 22, 23), (24, 25)
ACCURACY, VALIDATION = "eval/heldout/accuracy", "eval/final"
SHOWN = {
  "held-out accuracy": ACCURACY,
  "greedy": "eval/heldout/greedy",
  "pass@8": "eval/heldout/pass@8",
  "validation": VALIDATION,
}
ARMS = {"imitation": "imitation", "gspo": "GSPO after imitation"}


def name(arm: str, count: int, stop: int) -> str:
  return f"{arm}_{count}_{stop}"


def condition(arm: str, count: int, stop: int) -> Condition:
  """Declares an arm with a number of demonstrations and of updates on them."""
  carries = count == FEW and (arm == "imitation" or stop == COLD)
  alone = COLD_START_ALONE if arm == "imitation" else {}
  return Condition(
    name(arm, count, stop),
    {"sft.demonstrations": count, "sft.steps": stop} | alone,
    seeds=SEEDS + FURTHER if carries else None,
    secondary=not carries,
  )


EXPERIMENT = Experiment(
  question="Where demonstrations are few and questions with answers are many, does GSPO reach "
  "what imitation does not?",
  claim="GSPO trained Qwen3 (§5); the paper claims nothing about the number of demonstrations",
  hypothesis=f"with {FEW} demonstrations, GSPO after a cold start of {COLD} updates is above the "
  f"best imitation, which has up to {END} updates and its stop chosen by validation",
  statistic=f"final held-out accuracy at temperature 1 after {ITERATIONS} iterations of GSPO less "
  "that of the imitation whose validation accuracy is highest, paired by seed; mean over seeds and "
  "95 % t interval",
  falsified="this interval includes 0 or lies below it",
  conditions=tuple(
    condition(arm, count, stop) for count in (FEW, MORE) for stop in STOPS for arm in ARMS
  ),
  seeds=SEEDS,
  base="experiments/e24_few_demonstrations/config.py",
  columns=(r"eval/heldout/(accuracy|greedy|pass@8)",),
  minutes=6,
  start_minutes=3,
  pod=False,  # The flagship has other problems.
)


def best_stops(results: Results, count: int) -> pd.Series:
  """Returns the imitation's stop with the highest validation accuracy, by seed."""
  columns = {s: results.values(name("imitation", count, s), VALIDATION) for s in STOPS}
  validation = pd.DataFrame(columns).dropna()
  return validation.idxmax(axis=1) if len(validation) else pd.Series(dtype=float)


def at_best(results: Results, arm: str, count: int, column: str) -> pd.Series:
  """Returns a column of an arm at the best stops, by seed."""
  values = {stop: results.values(name(arm, count, stop), column) for stop in STOPS}
  stops = best_stops(results, count)
  chosen = {seed: values[stop][seed] for seed, stop in stops.items() if seed in values[stop]}
  return pd.Series(chosen, dtype=float)


def at_cold_start(results: Results, arm: str, count: int, column: str) -> pd.Series:
  """Returns a column of an arm after as many updates as a cold start has, by seed."""
  return results.values(name(arm, count, COLD), column)


def less_best(results: Results, gspo: Callable, count: int, column: str) -> Interval:
  """Returns GSPO, at stops that a function chooses, less the best imitation."""
  imitation = at_best(results, "imitation", count, column)
  return statistics.interval((gspo(results, "gspo", count, column) - imitation).dropna())


def report(results: Results) -> Report:
  primary, more = (less_best(results, at_cold_start, n, ACCURACY) for n in (FEW, MORE))
  outcome = OPEN
  if primary.count >= len(SEEDS + FURTHER):
    outcome = HOLDS if primary.low > 0 else FAILS
  because = f"with {FEW} demonstrations, GSPO less the best imitation is {primary.text()}"
  if more.count:
    because += f"; with {MORE} it is {more.text()}"
  tables = [_differences(results), _accuracies(results)]
  return Report(Verdict(outcome, because), tables, dict(accuracy=_figure(results)))


def _differences(results: Results) -> str:
  """Tabulates GSPO less the best imitation."""
  shown = {title: column for title, column in SHOWN.items() if column != VALIDATION}
  titles = {f"GSPO after {COLD} updates": at_cold_start, "GSPO after the best": at_best}
  rows = []
  for count, title in itertools.product((FEW, MORE), titles):
    stops = ", ".join(f"{int(stop)}" for stop in best_stops(results, count))
    less = [less_best(results, titles[title], count, column) for column in shown.values()]
    rows.append([str(count), title, stops, str(less[0].count), *(x.text() for x in less)])
  head = ["demonstrations", "less the best imitation", "its updates, by seed", "seeds", *shown]
  return markdown(head, rows)


def _accuracies(results: Results) -> str:
  """Tabulates held-out accuracy and pass@8 of imitation, and of GSPO after it."""
  rows, shown = [], [*itertools.product(("held-out accuracy", "pass@8"), ARMS)]
  for count, stop in itertools.product((FEW, MORE), STOPS):
    values = [results.interval(name(arm, count, stop), SHOWN[title]) for title, arm in shown]
    rows.append([str(count), str(stop), *(x.text() for x in values)])
  titles = [f"{ARMS[arm]}: {title}" for title, arm in shown]
  return markdown(["demonstrations", "updates on them", *titles], rows)


def _figure(results: Results):
  """Draws the accuracy over the updates of imitation, before and after GSPO."""
  figure, panels = figures.new(7.2, 3.4, columns=2)
  for axes, count in zip(panels, (FEW, MORE)):
    lines = {
      title: [results.interval(name(arm, count, stop), ACCURACY) for stop in STOPS]
      for arm, title in ARMS.items()
    }
    figures.bands(axes, STOPS, lines, f"updates on {count} demonstrations", "held-out accuracy")
  return figure
