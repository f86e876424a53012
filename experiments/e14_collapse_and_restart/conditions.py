"""E14: GRPO at a rate at which it collapses, and restarts from the checkpoints that it left."""

from experiments import figures, statistics
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown

GENTLE, HIGH = 5e-5, 1e-3
LONG, AGAIN = 20, 40  # iterations of the run that collapses, and of the others
# The checkpoint that restarts fall back on. On seed 0 the mean reward was 0.59, 0.72, 0.56, 0.20 in
# the first four iterations, and 0 after thirteen.
BEFORE = 2
LEARNED = "eval/final"
RECOVERED = 0.05  # of held-out accuracy below the run that did not collapse, at most
FALLEN = 0.1  # of held-out accuracy, by which a run that collapsed ends below its start

GRPO = {"objective.name": "grpo", "rl_optimizer.learning_rate": HIGH}
RESTARTS = {
  "same": GRPO,
  "lower": GRPO | {"rl_optimizer.learning_rate": GENTLE},
  "gspo": GRPO | {"objective.name": "gspo"},
  "r3": GRPO | {"objective.replay": "R3"},
}
FROM = {"before": BEFORE, "after": LONG}
TITLES = dict(same="nothing changed", lower="lower rate", gspo="GSPO", r3="R3")

EXPERIMENT = Experiment(
  question="Does rolling back to a checkpoint help after a collapse?",
  claim="once GRPO has collapsed, resuming is often unavailing, even from an earlier checkpoint "
  "and with other settings (§3)",
  hypothesis="no restart from the checkpoint before the collapse, with a lower rate, with GSPO or "
  "with Routing Replay, comes near to a run that did not collapse",
  statistic=f"paired difference of the final held-out accuracy after {AGAIN} further iterations, "
  "restart - GRPO at the lower rate from the cold start, for each of these three; 95 % t "
  "interval over seeds",
  falsified=f"the interval of one of them lies above -{RECOVERED:g}; it holds if all lie below; it "
  f"cannot be told if the run at the high rate does not end {FALLEN:g} below its start",
  conditions=(
    Condition("gentle", {"objective.name": "grpo", "rl_optimizer.learning_rate": GENTLE}),
    Condition(
      "collapse",
      GRPO | {"rl.iterations": LONG, "checkpoint.every": BEFORE, "checkpoint.keep_every": BEFORE},
    ),
    *(
      Condition(f"{restart}_{when}", changes, after=f"collapse/{step}")
      for when, step in FROM.items()
      for restart, changes in RESTARTS.items()
    ),
  ),
  seeds=(11, 12, 13),  # the rate was found on 0
  common={"rl.iterations": AGAIN},
  columns=(r"eval/response_length/mean", r"eval/truncated_fraction"),
  pod=False,  # a rate that collapses is to be found there anew
)


def report(results: Results) -> Report:
  fall = statistics.interval(
    (results.values("collapse", LEARNED) - results.values("collapse", "eval/start")).dropna()
  )
  gaps, rows = {}, []
  for restart, title in TITLES.items():
    for when in FROM:
      one = f"{restart}_{when}"
      gaps[restart, when] = gap = statistics.interval(results.paired(one, "gentle", LEARNED))
      ends = (results.interval(one, column).text() for column in ("eval/start", LEARNED))
      rows.append([title, f"{when} the collapse", str(gap.count), *ends, gap.text()])
  head = ["restart", "from", "seeds", "accuracy there", "at the end", "- that without a collapse"]
  runs = {"GRPO, lower rate": "gentle", "GRPO, high rate": "collapse"}
  columns = {"before": "eval/start", "after": LEARNED, "entropy": "entropy", "KL (k3)": "kl/k3"}
  primary = {r: gaps[r, "before"] for r in ("lower", "gspo", "r3")}
  outcome = OPEN
  if fall.count > 1 and fall.high < -FALLEN and all(gap.count > 1 for gap in primary.values()):
    if any(gap.low > -RECOVERED for gap in primary.values()):
      outcome = FAILS
    elif all(gap.high < -RECOVERED for gap in primary.values()):
      outcome = HOLDS
  because = f"at the high rate accuracy changes by {fall.text()}; restarts from before that end at "
  because += "; ".join(f"{TITLES[r]} {gap.text()}" for r, gap in primary.items())
  both, (left, right) = figures.new(9, 3.4, columns=2)
  shown = runs | {f"{TITLES[r]}, restarted": f"{r}_before" for r in primary}
  figures.curves(left, results, shown, "reward/mean", title="training reward")
  of = {f"{TITLES[r]}, {when}": gap for (r, when), gap in gaps.items()}
  figures.intervals(right, of, "final accuracy, - that without a collapse", line=-RECOVERED)
  tables = [results.table(runs, columns), markdown(head, rows)]
  return Report(Verdict(outcome, f"{because} of the run that did not"), tables, dict(restarts=both))
