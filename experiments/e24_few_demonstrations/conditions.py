"""E24: few demonstrations and many questions: imitation, GSPO after a cold start, and GSPO after
the best imitation."""

import pandas as pd

from experiments import figures, statistics
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
# It is judged after its only iteration, whose rate is too small to matter.
ALONE = {"rl.iterations": 1, "rl_optimizer.learning_rate": 1e-12}


def name(arm: str, count: int, stop: int) -> str:
  return f"{arm}_{count}_{stop}"


def condition(arm: str, count: int, stop: int) -> Condition:
  """Declares an arm with a number of demonstrations and of updates on them."""
  carries = count == FEW and (arm == "imitation" or stop == COLD)
  return Condition(
    name(arm, count, stop),
    {"sft.demonstrations": count, "sft.steps": stop} | (ALONE if arm == "imitation" else {}),
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


def best(results: Results, count: int, arm: str = "imitation") -> dict[str, pd.Series]:
  """Returns an arm's columns by seed, at the imitation's stop that validation prefers."""
  validation = pd.DataFrame(
    {stop: results.values(name("imitation", count, stop), VALIDATION) for stop in STOPS}
  ).dropna()
  stop = validation.idxmax(axis=1) if len(validation) else pd.Series(dtype=float)
  columns = dict(stop=stop)
  for column in SHOWN.values():
    values = {s: results.values(name(arm, count, s), column) for s in STOPS}
    columns[column] = pd.Series(
      {seed: values[s][seed] for seed, s in stop.items() if seed in values[s]}, dtype=float
    )
  return columns


def more(
  results: Results, count: int, column: str = ACCURACY, after_best: bool = False
) -> Interval:
  """Returns GSPO less the best imitation, after the cold start or the best imitation."""
  gspo = results.values(name("gspo", count, COLD), column)
  if after_best:
    gspo = best(results, count, "gspo")[column]
  return statistics.interval((gspo - best(results, count)[column]).dropna())


def report(results: Results) -> Report:
  primary = more(results, FEW)
  outcome = OPEN
  if primary.count >= len(SEEDS + FURTHER):
    outcome = HOLDS if primary.low > 0 else FAILS
  head = ["demonstrations", "updates on them", "", "seeds", *SHOWN]
  rows = []
  for count in (FEW, MORE):
    for stop in STOPS:
      for arm, title in ARMS.items():
        values = [results.interval(name(arm, count, stop), x) for x in SHOWN.values()]
        rows.append(
          [str(count), str(stop), title, str(values[0].count), *(x.text() for x in values)]
        )
  differences = []
  for count in (FEW, MORE):
    stops = ", ".join(f"{int(x)}" for x in best(results, count)["stop"])
    for title, after_best in {
      f"GSPO after {COLD} updates": False,
      "GSPO after the best": True,
    }.items():
      values = [more(results, count, x, after_best) for x in [*SHOWN.values()][:3]]
      row = [str(count), title, stops, str(values[0].count), *(x.text() for x in values)]
      differences.append(row)
  less = ["demonstrations", "less the best imitation", "its updates, by seed", "seeds"]
  because = (
    f"with {FEW} demonstrations, GSPO less the best imitation is {primary.text()}; with {MORE} it "
    f"is {more(results, MORE).text()}"
  )
  tables = [markdown([*less, *[*SHOWN][:3]], differences), markdown(head, rows)]
  return Report(Verdict(outcome, because), tables, dict(accuracy=_figure(results)))


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
