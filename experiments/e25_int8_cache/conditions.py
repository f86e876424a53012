"""E25: the run of configs/tiny.py with keys and values in eight bits."""

from experiments import figures
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict

INT8 = {"engine.cache_dtype": "int8"}
OWN = "old log-probs of the sampler"
START, END = "eval/start", "eval/final"
LEARNED = 0.85  # As in tiny_gspo.

EXPERIMENT = Experiment(
  question="Does the run of configs/tiny.py learn from rollouts with an int8 cache?",
  claim="training with a ratio per sequence tolerates a less precise sampler (§5.4)",
  hypothesis=f"every seed ends at a held-out accuracy of {LEARNED:g} or more; with a float32 cache "
  "20 of 20 seeds do (tiny_gspo)",
  statistic="number of seeds whose final held-out accuracy, sampled with the int8 cache, is "
  f"{LEARNED:g} or more",
  falsified=f"a seed ends below {LEARNED:g}",
  conditions=(
    Condition("int8", INT8),
    Condition(OWN, INT8 | {"objective.old_logp": "sampler"}, secondary=True),
  ),
  seeds=(10, 11, 12, 13, 14),
  base="configs/tiny.py",
  columns=(r"mismatch/.*|ratio/tail", r"minibatch/0/clip_fraction/token"),
  minutes=2.0,
  start_minutes=2.0,
  pod=False,  # E7 asks it of longer responses.
)


def report(results: Results) -> Report:
  final = results.values("int8", END)
  count = int((final >= LEARNED).sum())
  outcome = OPEN
  if len(final) >= len(EXPERIMENT.seeds):
    outcome = HOLDS if count == len(final) else FAILS
  columns = {
    "accuracy after the cold start": START,
    "after GSPO": END,
    "mismatch of a token, nats": "mismatch/abs/mean",
    "of a response, nats per token": "mismatch/sequence/abs/mean",
    "fraction of tokens whose probabilities differ by more than a factor of 2": "mismatch/tail",
    "clipped fraction before any update": "minibatch/0/clip_fraction/token",
  }
  shown = {"old log-probs recomputed": "int8", OWN: OWN}
  figure, (axes,) = figures.new()
  figures.curves(axes, results, shown, "eval/accuracy", title="held-out accuracy")
  because = f"{count} of {len(final)} seeds end at a held-out accuracy of {LEARNED:g} or more"
  table = results.table(shown, columns, ".3g")
  return Report(Verdict(outcome, because), [table], dict(accuracy=figure))
