"""E7: old log-probs as the sampler returned them, or recomputed; samplers of less precision."""

from experiments import figures, statistics
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown

# Sampler precisions, which separate its log-probs from the trainer's.
PRECISIONS = {
  "cache": {"engine.cache_dtype": "bfloat16"},
  "bfloat16": {"engine.dtype": "bfloat16", "engine.cache_dtype": "bfloat16"},
}
TITLES = {"cache": "cache in bfloat16", "bfloat16": "bfloat16 throughout"}
OLD = {"sampler": "sampler's", "recompute": "recomputed"}
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
  statistic="GSPO's final held-out accuracy with the sampler's log-probs less that with recomputed "
  "ones, paired by seed, for each of the two samplers; mean over seeds and 95 % t interval",
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
    rows.append(
      [TITLES[precision], str(gap.count), mismatch.text(".1e"), first.text(".4f"), gap.text()]
    )
  head = ["sampler", "seeds", "mismatch of a sequence, nats per token"]
  head += ["clipped fraction before any update"]
  head += ["final accuracy, sampler's log-probs less recomputed"]
  columns = {"final accuracy": LEARNED, "mean accuracy over the run": "eval/area"}
  columns |= {"clipped fraction of tokens": "clip_fraction/token"}
  conditions = {
    f"{TITLES[precision]}, {title} log-probs": name(precision, old)
    for precision in PRECISIONS
    for old, title in OLD.items()
  }
  tables = [markdown(head, rows), results.table(conditions, columns)]
  outcome = OPEN
  if all(gap.count > 1 for gap in gaps.values()):
    if any(gap.high < -LOSS for gap in gaps.values()):
      outcome = FAILS
    elif all(gap.low > -LOSS for gap in gaps.values()):
      outcome = HOLDS
  because = "the final accuracy with the sampler's log-probs less that with recomputed ones is "
  because += f"{gaps['cache'].text()} for a sampler with a bfloat16 cache, and "
  because += f"{gaps['bfloat16'].text()} for one wholly in bfloat16"
  figure, (left_axes, right_axes) = figures.new(9, 3.4, columns=2)
  shown = {old: name("bfloat16", old) for old in OLD}
  figures.curves(
    left_axes, results, shown, "reward/mean", title="GSPO, sampler in bfloat16: reward"
  )
  figures.intervals(right_axes, gaps, "accuracy, sampler's less recomputed", line=-LOSS)
  return Report(Verdict(outcome, because), tables, dict(log_probs=figure))
