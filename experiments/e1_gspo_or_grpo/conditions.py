"""E1, Figure 1: does GSPO train better than GRPO, each at the learning rate that suits it best?"""

from experiments import figures, statistics
from experiments.definition import Condition, Experiment, Tuning
from experiments.report import Report, Results, Verdict, compare, markdown, tuned

FINAL, AREA = "eval/final", "reward/mean"
NEGLIGIBLE = 0.03  # Held-out accuracy.
RATES = ("5e-05", "1e-04", "2e-04")
GRPO = {"objective.name": "grpo", "objective.clip_low": 0.2, "objective.clip_high": 0.27}

EXPERIMENT = Experiment(
  question="Does GSPO train better than GRPO at equal compute?",
  claim="higher training accuracy and benchmark scores with the same compute and queries, where "
  "GRPO has Routing Replay (§5.1, Figure 1)",
  hypothesis="with equally many iterations GSPO ends with a higher held-out accuracy than GRPO",
  statistic="final held-out accuracy (avg@4) with GSPO less that with GRPO, paired by seed, each "
  "at its own best learning rate; mean over seeds and 95 % t interval",
  falsified=f"the interval lies below {NEGLIGIBLE:g}: a smaller advantage does not matter",
  conditions=(
    Condition(
      "gspo",
      {"objective.name": "gspo", "objective.clip_low": 3e-4, "objective.clip_high": 4e-4},
    ),
    Condition("grpo", GRPO),
    # R2 replays what the trainer's own pass over the rollouts chose. Sampler and trainer agree in
    # float32 to 3e-8, so that this pass changes nothing else.
    Condition("grpo_r2", GRPO | {"objective.replay": "R2", "objective.old_logp": "recompute"}),
  ),
  seeds=(10, 11, 12, 13, 14, 15, 16),
  tuning=Tuning(
    grid={rate: {"rl_optimizer.learning_rate": float(rate)} for rate in RATES},
    seeds=(100, 101),
    statistic=FINAL,
  ),
)

SHOWN = {"GSPO": "gspo", "GRPO": "grpo", "GRPO with R2": "grpo_r2"}
PAIRS = {"GSPO less GRPO": ("gspo", "grpo"), "GSPO less (GRPO with R2)": ("gspo", "grpo_r2")}
PAIRS |= {"(GRPO with R2) less GRPO": ("grpo_r2", "grpo")}


def report(results: Results) -> Report:
  columns = {
    "accuracy before": "eval/start",
    "after": FINAL,
    "mean training reward": AREA,
    "clipped fraction of tokens": "clip_fraction/token",
    "mean |ratio - 1|": "ratio/deviation",
  }
  ends = results.table(SHOWN, columns, ".4f")
  pairs = {
    title: {c: statistics.interval(results.paired(a, b, c)) for c in (FINAL, AREA)}
    for title, (a, b) in PAIRS.items()
  }
  rows = []
  for title, (a, b) in PAIRS.items():
    each = results.paired(a, b, FINAL)
    better = f"{(each > 0).sum()} of {len(each)}"
    rows.append([title, pairs[title][FINAL].text(), better, pairs[title][AREA].text()])
  head = ["difference, paired by seed", "final accuracy", "seeds above 0", "mean training reward"]
  primary = pairs["GSPO less GRPO"][FINAL]
  outcome = compare(primary, negligible=NEGLIGIBLE)
  because = f"the final accuracy with GSPO less that with GRPO is {primary.text()} "
  verdict = Verdict(outcome, f"{because}({primary.count} seeds)")
  curves, (over_steps, over_path) = figures.new(9, 3.4, columns=2)
  figures.curves(over_steps, results, SHOWN, AREA, title="training reward")
  figures.curves(over_path, results, SHOWN, AREA, over="path", title="over nats per token moved")
  differences, (axes,) = figures.new(6.4, 2.2)
  finals = {title: pair[FINAL] for title, pair in pairs.items()}
  figures.intervals(axes, finals, "difference of final held-out accuracy")
  return Report(
    verdict,
    [
      tuned(results, SHOWN, RATES, FINAL, "tuning seeds, final accuracy"),
      ends,
      markdown(head, rows),
    ],
    dict(curves=curves, differences=differences),
  )
