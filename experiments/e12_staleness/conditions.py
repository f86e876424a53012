"""E12: rollouts that are older than the policy."""

from experiments import figures, statistics
from experiments.arms import ARMS
from experiments.definition import Condition, Experiment
from experiments.report import OPEN, Report, Results, Verdict, markdown

LAGS = (0, 1, 2, 4)  # iterations, of four mini-batches each
LEARNED = "eval/final"


def name(loss: str, lag: int) -> str:
  return f"{loss}_m4_lag{lag}" if lag else f"{loss}_m4"


EXPERIMENT = Experiment(
  question="Does GSPO suffer from data that is older, and more than GRPO?",
  claim='"under what conditions might GSPO struggle?" is left open. What is clipped teaches '
  "nothing, and GSPO clips more, the further the policy is from the one that sampled",
  hypothesis="none: what was declared was of the updates per rollout, of which no run was made; "
  "these runs were secondary",
  statistic="none; shown are, afterwards, paired differences of the final held-out accuracy, with "
  f"a lag of {', '.join(map(str, LAGS[1:]))} iterations - without, of each loss and between the "
  "two; means over seeds and 95 % t intervals",
  falsified="nothing could: the runs had been seen when the question became theirs, so whatever "
  "they show, it cannot be told",
  conditions=tuple(
    Condition(name(loss, lag), changes | {"rl.minibatches": 4} | ({"rl.lag": lag} if lag else {}))
    for loss, changes in ARMS.items()
    for lag in LAGS
  ),
  seeds=(10, 11, 12),
  minutes=3.3,
  start_minutes=5.9,
  columns=(r"lag/.*|by_age/.*|mismatch/by_age/.*",),
)


def report(results: Results) -> Report:
  costs, rows = {}, []
  for lag in LAGS[1:]:
    gspo, grpo = (results.paired(name(loss, lag), name(loss, 0), LEARNED) for loss in ARMS)
    costs[lag] = [statistics.interval(x) for x in (gspo, grpo, (gspo - grpo).dropna())]
    rows.append([str(lag), str(costs[lag][-1].count), *(x.text() for x in costs[lag])])
  columns = {"final accuracy": LEARNED, "area": "eval/area", "clipped": "clip_fraction/token"}
  columns |= {"mean |ratio - 1|": "ratio/deviation", "KL (k3)": "kl/k3"}
  conditions = {f"{loss.upper()}, lag {lag}": name(loss, lag) for loss in ARMS for lag in LAGS}
  heads = ["final accuracy, lag - 0", "seeds", "GSPO", "GRPO", "GSPO - GRPO"]
  tables = [markdown(heads, rows), results.table(conditions, columns, ".4f")]
  figure, (left_axes, right_axes) = figures.new(9, 3.4, columns=2)
  points = {x.upper(): [results.interval(name(x, lag), LEARNED) for lag in LAGS] for x in ARMS}
  figures.bands(left_axes, LAGS, points, "lag, iterations", "final accuracy")
  drawn = {f"{x.upper()}, lag {lag}": costs[lag][i] for i, x in enumerate(ARMS) for lag in costs}
  figures.intervals(right_axes, drawn, "accuracy, difference to no lag")
  gspo, grpo, apart = (x.text() for x in costs[LAGS[-1]])
  because = (
    f"a lag of {LAGS[-1]} iterations changes the accuracy by {gspo} with GSPO and by {grpo} with "
    f"GRPO, GSPO - GRPO {apart}; but the question was asked of these runs after they were seen"
  )
  return Report(Verdict(OPEN, because), tables, dict(staleness=figure))
