"""E7: old log-probs as the sampler returned them, or recomputed; samplers of less precision."""

from experiments import figures, statistics
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown

# Of the sampler: where its log-probs differ from the trainer's.
PRECISIONS = {
  "cache": {"engine.cache_dtype": "bfloat16"},
  "bfloat16": {"engine.dtype": "bfloat16", "engine.cache_dtype": "bfloat16"},
}
OLD = ("sampler", "recompute")
LEARNED, MISMATCH, FIRST = (
  "eval/final",
  "mismatch/sequence/abs/mean",
  "minibatch/0/clip_fraction/token",
)
LOSS = 0.03  # Loss of held-out accuracy above this would matter.


def name(precision: str, old: str) -> str:
  return f"gspo_{precision}_{old}"


EXPERIMENT = Experiment(
  question="Can training use the likelihoods that the inference engine returns?",
  claim='GSPO can "directly use the likelihoods returned by the inference engine", which spares '
  "the recomputation, since sequences tolerate differences in precision (§5.4)",
  hypothesis="GSPO learns as well with the sampler's log-probs as with recomputed ones, with a "
  "sampler that has a bfloat16 cache and with one wholly in bfloat16",
  statistic="paired difference sampler - recompute of GSPO's final held-out accuracy, for each of "
  "both; mean over seeds and 95 % t interval",
  falsified=f"one of the intervals lies below -{LOSS:g}; it holds if both lie above -{LOSS:g}, "
  "else it cannot be told",
  conditions=tuple(
    Condition(
      name(precision, old), {"objective.name": "gspo"} | changes | {"objective.old_logp": old}
    )
    for precision, changes in PRECISIONS.items()
    for old in OLD
  ),
  seeds=(10, 11, 12, 13, 14, 15, 16),
  minutes=5.7,
  start_minutes=6.6,
  columns=(r"mismatch/.*", r"minibatch/0/clip_fraction/token"),
)


def report(results: Results) -> Report:
  gaps, rows = {}, []
  for precision in PRECISIONS:
    ours, theirs = (name(precision, old) for old in OLD)
    gaps[precision] = gap = statistics.interval(results.paired(ours, theirs, LEARNED))
    mismatch, first = results.interval(ours, MISMATCH), results.interval(ours, FIRST)
    rows.append([precision, str(gap.count), mismatch.text(".1e"), first.text(".4f"), gap.text()])
  head = ["", "seeds", "mismatch of a sequence, nats per token", "clipped before any update"]
  head += ["accuracy, sampler - recompute"]
  columns = {"final accuracy": LEARNED, "area": "eval/area", "clipped": "clip_fraction/token"}
  tables = [markdown(head, rows), results.table([c.name for c in EXPERIMENT.conditions], columns)]
  outcome = OPEN
  if all(gap.count > 1 for gap in gaps.values()):
    if any(gap.high < -LOSS for gap in gaps.values()):
      outcome = FAILS
    elif all(gap.low > -LOSS for gap in gaps.values()):
      outcome = HOLDS
  because = "sampler - recompute of GSPO: "
  because += "; ".join(f"{precision} {gap.text()}" for precision, gap in gaps.items())
  figure, (left_axes, right_axes) = figures.new(9, 3.4, columns=2)
  shown = {old: name("bfloat16", old) for old in OLD}
  figures.curves(
    left_axes, results, shown, "reward/mean", title="GSPO, sampler in bfloat16: reward"
  )
  figures.intervals(right_axes, gaps, "accuracy, sampler - recompute", line=-LOSS)
  return Report(Verdict(outcome, because), tables, dict(log_probs=figure))
