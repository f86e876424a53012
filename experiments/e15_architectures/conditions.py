"""E15: GSPO and GRPO on models that differ from the paper's in one thing each."""

from experiments import figures, statistics
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown

LOSSES = ("gspo", "grpo")
MODELS = {
  "top_2": {},
  "top_1": {"model.experts_per_token": 1, "model.norm_topk_prob": False},  # else all gates are 1
  "top_4": {"model.experts_per_token": 4},
  # As wide as the two experts that a token has.
  "dense": {"model.num_experts": 0, "model.experts_per_token": 0, "model.intermediate_size": 256},
  "no_qk_norm": {"model.qk_norm": False},
  "shared_head": {"model.tie_word_embeddings": True},
}
TITLES = {
  "top_2": "8 experts, top 2",
  "top_1": "top 1",
  "top_4": "top 4",
  "dense": "dense",
  "no_qk_norm": "top 2, no qk-norm",
  "shared_head": "top 2, shared head",
}
LEARNED, CLIPPED, VOLATILITY = (
  "eval/final",
  "clip_fraction/token",
  "minibatch/1/router/volatility/mean",
)
LOSS = 0.03  # of held-out accuracy, beyond which it would matter

EXPERIMENT = Experiment(
  question="Does what holds of Qwen3's architecture hold of others?",
  claim="GSPO was shown on one family, Qwen3; others are an open question",
  hypothesis="on none of six architectures does GSPO end below GRPO: dense, with 1, 2 or 4 of 8 "
  "experts per token, without qk-norm, with the embedding as head",
  statistic="paired difference GSPO - GRPO of the final held-out accuracy on each; mean "
  "over seeds and 95 % t interval",
  falsified=f"on some architecture the interval lies below -{LOSS:g}; it holds if all lie above "
  f"-{LOSS:g}, else it cannot be told",
  conditions=tuple(
    Condition(f"{model}_{loss}", changes | {"objective.name": loss})
    for model, changes in MODELS.items()
    for loss in LOSSES
  ),
  seeds=(10, 11, 12),
  columns=(VOLATILITY,),
  pod=False,  # architectures are the toy's
)


def report(results: Results) -> Report:
  gaps, rows = {}, []
  for model, title in TITLES.items():
    gspo, grpo = (f"{model}_{loss}" for loss in LOSSES)
    gap = gaps[title] = statistics.interval(results.paired(gspo, grpo, LEARNED))
    rows.append(
      [
        title,
        str(gap.count),
        results.interval(gspo, "eval/start").text(),
        *(results.interval(one, LEARNED).text() for one in (gspo, grpo)),
        gap.text(),
        *(results.interval(one, CLIPPED).text(".4f") for one in (gspo, grpo)),
        results.interval(gspo, VOLATILITY).text(".4f"),
      ]
    )
  head = ["", "seeds", "before", "GSPO", "GRPO", "GSPO - GRPO", "clipped by GSPO", "by GRPO"]
  head += ["volatility of an update"]
  outcome = OPEN
  if all(gap.count > 1 for gap in gaps.values()):
    if any(gap.high < -LOSS for gap in gaps.values()):
      outcome = FAILS
    elif all(gap.low > -LOSS for gap in gaps.values()):
      outcome = HOLDS
  because = "GSPO - GRPO: " + "; ".join(f"{title} {gap.text()}" for title, gap in gaps.items())
  figure, (axes,) = figures.new(6.4, 2.6)
  figures.intervals(axes, gaps, "final held-out accuracy, GSPO - GRPO", line=-LOSS)
  return Report(Verdict(outcome, because), [markdown(head, rows)], dict(architectures=figure))
