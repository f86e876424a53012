"""E12: rollouts older than the policy."""

from experiments import figures, statistics
from experiments.arms import ARMS
from experiments.definition import Condition, Experiment
from experiments.report import OPEN, Report, Results, Verdict, markdown

LAGS = (0, 1, 2, 4)  # Iterations, of four mini-batches each.
LEARNED = "eval/final"


def name(loss: str, lag: int) -> str:
  return f"{loss}_m4_lag{lag}" if lag else f"{loss}_m4"


EXPERIMENT = Experiment(
  question="Does older data lower the accuracy of GSPO, and more than that of GRPO?",
  claim='"under what conditions might GSPO struggle?" is left open. Clipped tokens have no '
  "gradient, and GSPO clips more tokens, the further the policy is from the one that sampled",
  hypothesis="none: the declared one concerned the updates per rollout, and no run tested it; the "
  "runs with a lag were secondary",
  statistic="none declared; the tables show the final held-out accuracy with a lag of "
  f"{', '.join(map(str, LAGS[1:]))} iterations less that without a lag, paired by seed, for each "
  "loss, and GSPO's difference less GRPO's; means over seeds and 95 % t intervals",
  falsified="no result could falsify it: the question was asked after the runs had been seen, so "
  'the outcome is always "cannot be told"',
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
  columns = {"final accuracy": LEARNED, "mean accuracy over the run": "eval/area"}
  columns |= {"clipped fraction of tokens": "clip_fraction/token"}
  columns |= {"mean |ratio - 1|": "ratio/deviation", "KL (k3)": "kl/k3"}
  conditions = {f"{loss.upper()}, lag {lag}": name(loss, lag) for loss in ARMS for lag in LAGS}
  heads = ["lag, iterations", "seeds"]
  heads += [f"final accuracy less that without a lag, {loss.upper()}" for loss in ARMS]
  heads += ["GSPO's difference less GRPO's"]
  tables = [markdown(heads, rows), results.table(conditions, columns, ".4f")]
  figure, (left_axes, right_axes) = figures.new(9, 3.4, columns=2)
  points = {x.upper(): [results.interval(name(x, lag), LEARNED) for lag in LAGS] for x in ARMS}
  figures.bands(left_axes, LAGS, points, "lag, iterations", "final accuracy")
  drawn = {f"{x.upper()}, lag {lag}": costs[lag][i] for i, x in enumerate(ARMS) for lag in costs}
  figures.intervals(right_axes, drawn, "final accuracy less that without a lag")
  gspo, grpo, apart = (x.text() for x in costs[LAGS[-1]])
  because = (
    f"a lag of {LAGS[-1]} iterations changes the final accuracy by {gspo} with GSPO and by {grpo} "
    f"with GRPO, and GSPO's change less GRPO's is {apart}; but the question was asked after these "
    "runs had been seen"
  )
  return Report(Verdict(OPEN, because), tables, dict(staleness=figure))
