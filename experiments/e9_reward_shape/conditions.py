"""E9: GSPO-token by the shape of the reward."""

from experiments import figures, statistics
from experiments.arms import GSPO
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown

LEARNED = "eval/final"
NEGLIGIBLE = 0.03
SHAPES = {"terminal": {}, "process": {"reward.per_line": True}}
TOKEN = GSPO | {"objective.name": "gspo_token"}

EXPERIMENT = Experiment(
  question="When does GSPO-token gain on GSPO?",
  claim="GSPO-token is GSPO where advantages are constant, and is for finer ones (§4.3)",
  hypothesis="with a reward per line GSPO-token ends with a higher held-out accuracy than GSPO "
  "with their sum, and with one reward per response it does not",
  statistic="paired differences of the final held-out accuracy, GSPO-token - GSPO with process "
  "rewards and with terminal ones; mean over seeds and 95 % t interval",
  falsified=f"the first interval lies below {NEGLIGIBLE:g}, or the second above 0",
  conditions=tuple(
    Condition(f"{loss}_{shape}", changes | more)
    for loss, changes in {"gspo": GSPO, "token": TOKEN}.items()
    for shape, more in SHAPES.items()
  ),
  seeds=(10, 11, 12, 13, 14),
  minutes=3.4,
)


def report(results: Results) -> Report:
  gains = {
    shape: statistics.interval(results.paired(f"token_{shape}", f"gspo_{shape}", LEARNED))
    for shape in SHAPES
  }
  terminal, process = gains.values()
  outcome = OPEN
  if min(process.count, terminal.count) > 1:
    if process.high < NEGLIGIBLE or terminal.low > 0:
      outcome = FAILS
    elif process.low > 0:
      outcome = HOLDS
  because = (
    f"GSPO-token gains {process.text()} on GSPO with process rewards and {terminal.text()} with "
    "terminal ones"
  )
  columns = {"before": "eval/start", "final accuracy": LEARNED, "area": "eval/area"}
  columns |= {"clipped": "clip_fraction/token"}
  rows = [[f"GSPO-token - GSPO, {s}", str(x.count), x.text()] for s, x in gains.items()]
  tables = [
    results.table([c.name for c in EXPERIMENT.conditions], columns),
    markdown(["paired difference of final accuracy", "seeds", ""], rows),
  ]
  curves, (left_axes, right_axes) = figures.new(9, 3.4, columns=2)
  arms = {"GSPO, terminal": "gspo_terminal", "GSPO, process": "gspo_process"}
  arms |= {"GSPO-token, process": "token_process"}
  figures.curves(left_axes, results, arms, "eval/accuracy", title="held-out accuracy")
  figures.intervals(right_axes, gains, "final accuracy, GSPO-token - GSPO")
  return Report(Verdict(outcome, because), tables, dict(shapes=curves))
