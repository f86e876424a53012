"""E7: old log-probs as the sampler returned them, or recomputed; samplers of less precision."""

from experiments import figures, statistics
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown

LOSSES = ("gspo", "grpo")
PRECISIONS = {
  "float32": {},
  "cache": {"engine.cache_dtype": "bfloat16"},
  "bfloat16": {"engine.dtype": "bfloat16", "engine.cache_dtype": "bfloat16"},
}
OLD = {
  "sampler": {"objective.old_logp": "sampler"},
  "recompute": {"objective.old_logp": "recompute"},
  "truncated": {"objective.old_logp": "recompute", "objective.correction.name": "truncated"},
}
ROUNDED = ("cache", "bfloat16")  # of the sampler: where its log-probs differ from the trainer's
LEARNED, MISMATCH, FIRST = (
  "eval/final",
  "mismatch/sequence/abs/mean",
  "minibatch/0/clip_fraction/token",
)
LOSS = 0.03  # of held-out accuracy, beyond which it would matter


def name(loss: str, precision: str, old: str) -> str:
  return f"{loss}_{precision}_{old}"


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
      name(loss, precision, old),
      {"objective.name": loss} | changes | OLD[old],
      secondary=loss != "gspo" or precision not in ROUNDED or old == "truncated",
    )
    for loss in LOSSES
    for precision, changes in PRECISIONS.items()
    for old in OLD
    if not (precision == "float32" and old == "truncated")  # weights would be 1
  ),
  seeds=(10, 11, 12, 13, 14, 15, 16),
  minutes=4.0,
  columns=(r"mismatch/.*", r"minibatch/0/clip_fraction/token", r"correction/.*"),
)


def report(results: Results) -> Report:
  gaps, mended, rows = {}, {}, []
  for loss in LOSSES:
    for precision in PRECISIONS:
      ours, theirs, weighted = (name(loss, precision, old) for old in OLD)
      gap = statistics.interval(results.paired(ours, theirs, LEARNED))
      gaps[loss, precision] = gap
      if precision != "float32":
        mended[loss, precision] = statistics.interval(results.paired(weighted, theirs, LEARNED))
      rows.append(
        [
          f"{loss.upper()}, {precision}",
          str(gap.count),
          results.interval(ours, MISMATCH).text(".1e"),
          results.interval(ours, FIRST).text(".4f"),
          gap.text(),
          mended[loss, precision].text() if (loss, precision) in mended else "",
        ]
      )
  head = ["", "seeds", "mismatch of a sequence, nats per token", "clipped before any update"]
  head += ["accuracy, sampler - recompute", "truncated - recompute"]
  columns = {"final accuracy": LEARNED, "area": "eval/area", "clipped": "clip_fraction/token"}
  columns |= {"weight": "correction/weight"}
  tables = [markdown(head, rows), results.table([c.name for c in EXPERIMENT.conditions], columns)]
  primary = {precision: gaps["gspo", precision] for precision in ROUNDED}
  outcome = OPEN
  if all(gap.count > 1 for gap in primary.values()):
    if any(gap.high < -LOSS for gap in primary.values()):
      outcome = FAILS
    elif all(gap.low > -LOSS for gap in primary.values()):
      outcome = HOLDS
  because = "sampler - recompute of GSPO: "
  because += "; ".join(f"{precision} {gap.text()}" for precision, gap in primary.items())
  both, (left, right) = figures.new(9, 3.4, columns=2)
  shown = {old: name("gspo", "bfloat16", old) for old in OLD}
  figures.curves(left, results, shown, "reward/mean", title="GSPO, sampler in bfloat16: reward")
  of = {f"{loss.upper()}, {precision}": gap for (loss, precision), gap in gaps.items()}
  figures.intervals(right, of, "accuracy, sampler - recompute", line=-LOSS)
  return Report(Verdict(outcome, because), tables, dict(log_probs=both))
