"""E26: SmolLM2-135M learns word problems from rollouts with keys and values in eight bits."""

from experiments import figures, statistics
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown

INT8 = {"engine.cache_dtype": "int8"}
FLOAT32, RECOMPUTED, WEIGHTED, OWN = "float32", "recomputed", "weighted", "own"
TITLES = {
  FLOAT32: "float32",
  RECOMPUTED: "int8, recomputed old log-probs",
  WEIGHTED: "int8, recomputed old log-probs and truncated weights",
  OWN: "int8, old log-probs of the sampler",
}
LOSS = 0.03  # Loss of held-out accuracy above this would matter.
REWARD, START, END = "reward/mean", "eval/start", "eval/final"
MISMATCH, FIRST = "mismatch/sequence/abs/mean", "minibatch/0/clip_fraction/token"

EXPERIMENT = Experiment(
  question="Does a pretrained model learn as well from rollouts with an int8 cache?",
  claim="training with a ratio per sequence tolerates a less precise sampler (§5.4)",
  hypothesis="with an int8 cache and recomputed old log-probs, GSPO loses at most "
  f"{LOSS:g} of the held-out accuracy",
  statistic="final held-out accuracy with an int8 cache and recomputed old log-probs less that "
  "with a float32 cache, paired by seed; mean over seeds and 95 % t interval",
  falsified=f"the interval lies below -{LOSS:g}; it holds if the interval lies above -{LOSS:g}, "
  "else it cannot be told",
  conditions=(
    Condition(FLOAT32),  # As in E18.
    Condition(RECOMPUTED, INT8 | {"objective.old_logp": "recompute"}),
    Condition(OWN, INT8 | {"objective.old_logp": "sampler"}, secondary=True),
    Condition(
      WEIGHTED,
      INT8 | {"objective.old_logp": "recompute", "objective.correction.name": "truncated"},
      secondary=True,
    ),
  ),
  seeds=(11, 12, 13),
  base="configs/smollm2.py",
  columns=(r"mismatch/.*|ratio/tail", r"minibatch/0/clip_fraction/token"),
  minutes=10,
  start_minutes=3,
  pod=False,  # E7 asks it of longer responses..
)


def report(results: Results) -> Report:
  less = {name: results.paired(name, FLOAT32, END) for name in (RECOMPUTED, WEIGHTED, OWN)}
  gaps = {name: statistics.interval(values) for name, values in less.items()}
  primary = gaps[RECOMPUTED]
  outcome = OPEN
  if primary.count >= len(EXPERIMENT.seeds):
    if primary.high < -LOSS:
      outcome = FAILS
    elif primary.low > -LOSS:
      outcome = HOLDS
  columns = {
    "accuracy after the cold start": START,
    "after GSPO": END,
    "reward of the run": REWARD,
    "mismatch of a response, nats per token": MISMATCH,
    "clipped fraction before any update": FIRST,
  }
  shown = {title: name for name, title in TITLES.items()}
  rows = []
  for name, gap in gaps.items():
    reward = statistics.interval(results.paired(name, FLOAT32, REWARD))
    rows.append([TITLES[name], str(gap.count), gap.text(), reward.text()])
  tables = [
    results.table(shown, columns, ".3g"),
    markdown(["less float32", "seeds", "final accuracy", "reward of the run"], rows),
  ]
  figure, (axes,) = figures.new()
  figures.curves(axes, results, shown, "eval/accuracy", title="held-out accuracy")
  because = (
    "the final accuracy with an int8 cache and recomputed old log-probs less that with a float32 "
    f"cache is {primary.text()}; with old log-probs of the sampler it is {gaps[OWN].text()}"
  )
  return Report(Verdict(outcome, because), tables, dict(accuracy=figure))
