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
  question="With which rewards does GSPO-token learn more than GSPO?",
  claim="GSPO-token equals GSPO if all tokens of a response have the same advantage, and is meant "
  "for advantages that differ within a response (§4.3)",
  hypothesis="with a reward per line GSPO-token ends with a higher held-out accuracy than GSPO "
  "with the sum of these rewards, and with one reward per response it does not",
  statistic="final held-out accuracy of GSPO-token less that of GSPO, paired by seed, with process "
  "rewards and with terminal ones; means over seeds and 95 % t intervals",
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
    f"the final accuracy of GSPO-token less that of GSPO is {process.text()} with process rewards "
    f"and {terminal.text()} with terminal ones"
  )
  columns = {"accuracy before": "eval/start", "final accuracy": LEARNED}
  columns |= {"mean accuracy over the run": "eval/area"}
  columns |= {"clipped fraction of tokens": "clip_fraction/token"}
  rows = [[f"GSPO-token less GSPO, {s}", str(x.count), x.text()] for s, x in gains.items()]
  tables = [
    results.table([c.name for c in EXPERIMENT.conditions], columns),
    markdown(["difference, paired by seed", "seeds", "final accuracy"], rows),
  ]
  curves, (left_axes, right_axes) = figures.new(9, 3.4, columns=2)
  arms = {"GSPO, terminal": "gspo_terminal", "GSPO, process": "gspo_process"}
  arms |= {"GSPO-token, process": "token_process"}
  figures.curves(left_axes, results, arms, "eval/accuracy", title="held-out accuracy")
  figures.intervals(right_axes, gains, "final accuracy, GSPO-token less GSPO")
  return Report(Verdict(outcome, because), tables, dict(shapes=curves))
