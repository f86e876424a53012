"""E20, Figure 1 with a pretrained model: GSPO and GRPO on word problems, each at the learning rate
that suits it best."""

from experiments import figures, statistics
from experiments.arms import ARMS
from experiments.definition import Condition, Experiment, Tuning
from experiments.report import Report, Results, Verdict, compare, markdown, tuned

FINAL = "eval/final"
NEGLIGIBLE = 0.03  # Held-out accuracy.
RATES = ("3e-06", "1e-05", "3e-05")
SHOWN = {"GSPO": "gspo", "GRPO": "grpo"}

EXPERIMENT = Experiment(
  question="Does GSPO train a pretrained model better than GRPO at equal compute?",
  claim="higher training accuracy and benchmark scores with the same compute and queries (§5.1, "
  "Figure 1)",
  hypothesis="with equally many iterations GSPO ends with a higher held-out accuracy than GRPO",
  statistic="final held-out accuracy (avg@4) with GSPO less that with GRPO, paired by seed, each "
  "at its own best learning rate; mean over seeds and 95 % t interval",
  falsified=f"the interval lies below {NEGLIGIBLE:g}: a smaller advantage does not matter",
  conditions=tuple(Condition(name, changes) for name, changes in ARMS.items()),
  seeds=(11, 12, 13, 14, 15),
  base="configs/smollm2.py",
  common={"rl.iterations": 10, "eval.samples": 4},
  tuning=Tuning(
    grid={rate: {"rl_optimizer.learning_rate": float(rate)} for rate in RATES},
    seeds=(101,),
    statistic=FINAL,
  ),
  minutes=4,
  start_minutes=4,
  pod=False,  # The flagship has other problems.
)


def report(results: Results) -> Report:
  columns = {
    "accuracy before": "eval/start",
    "after": FINAL,
    "greedy, after": "eval/greedy",
    "mean training reward": "reward/mean",
    "clipped fraction of tokens": "clip_fraction/token",
  }
  pair = {c: results.paired("gspo", "grpo", c) for c in (FINAL, "eval/greedy", "reward/mean")}
  more = statistics.interval(pair[FINAL])
  better = f"{(pair[FINAL] > 0).sum()} of {more.count}"
  head = ["", "final accuracy", "seeds above 0", "greedy", "mean training reward"]
  others = [statistics.interval(pair[c]).text() for c in ("eval/greedy", "reward/mean")]
  figure, (left_axes, right_axes) = figures.new(9.6, 3.4, columns=2)
  figures.curves(left_axes, results, SHOWN, "reward/mean", title="training reward")
  figures.curves(right_axes, results, SHOWN, "clip_fraction/token", title="clipped tokens")
  tables = [
    tuned(results, SHOWN, RATES, FINAL, "tuning seed, final accuracy"),
    results.table(SHOWN, columns, ".4f"),
    markdown(head, [["GSPO less GRPO", more.text(), better, *others]]),
  ]
  outcome = compare(more, negligible=NEGLIGIBLE)
  because = f"the final accuracy with GSPO less that with GRPO is {more.text()} "
  because += f"({more.count} seeds)"
  return Report(Verdict(outcome, because), tables, dict(curves=figure))
