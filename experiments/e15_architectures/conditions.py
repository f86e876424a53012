"""E15: GSPO and GRPO on models that differ from the paper's in one thing each."""

import pandas as pd

from experiments import arms, figures, statistics
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown

LOSSES = ("gspo", "grpo")
OURS = "top_2"  # the architecture of the other experiments
MODELS = {
  OURS: {},
  "top_1": {"model.experts_per_token": 1, "model.norm_topk_prob": False},  # else all gates are 1
  "top_4": {"model.experts_per_token": 4},
  # As wide as the two experts that a token has.
  "dense": {"model.num_experts": 0, "model.experts_per_token": 0, "model.intermediate_size": 256},
  "no_qk_norm": {"model.qk_norm": False},
  "shared_head": {"model.tie_word_embeddings": True},
}
TITLES = {
  OURS: "8 experts, top 2",
  "top_1": "top 1",
  "top_4": "top 4",
  "dense": "dense",
  "no_qk_norm": "top 2, no qk-norm",
  "shared_head": "top 2, shared head",
}
BEFORE, LEARNED, CLIPPED = "eval/start", "eval/final", "clip_fraction/token"
VOLATILITY = "minibatch/1/router/volatility/mean"
LOSS = 0.03  # of held-out accuracy, beyond which it would matter

EXPERIMENT = Experiment(
  question="Does what holds of Qwen3's architecture hold of others?",
  claim="GSPO was shown on one family, Qwen3; others are an open question",
  hypothesis="on five other architectures GSPO does not end below GRPO on average: dense, with 1 "
  "or 4 of 8 experts per token, without qk-norm, with the embedding as head",
  statistic="difference GSPO - GRPO of the final held-out accuracy, per seed the mean over the "
  f"five, less those whose cold starts are right on under {arms.LEARNED:.0%}; mean over seeds and "
  "95 % t interval",
  falsified=f"the interval lies below -{LOSS:g}; it holds if it lies above, else it cannot be told",
  conditions=tuple(
    Condition(f"{model}_{loss}", changes | {"objective.name": loss}, secondary=model == OURS)
    for model, changes in MODELS.items()
    for loss in LOSSES
  ),
  seeds=(10, 11, 12, 13, 14),
  columns=(VOLATILITY,),
  pod=False,  # architectures are the toy's
)


def gaps(results: Results) -> pd.DataFrame:
  """GSPO - GRPO by seed (rows) and architecture (columns)."""
  return pd.DataFrame(
    {m: results.paired(*(f"{m}_{loss}" for loss in LOSSES), LEARNED) for m in MODELS}
  )


def report(results: Results) -> Report:
  apart, rows = gaps(results), []
  each = {title: statistics.interval(apart[m].dropna()) for m, title in TITLES.items()}
  started = {m: results.interval(f"{m}_gspo", BEFORE).value for m in MODELS if m != OURS}
  others = [m for m, accuracy in started.items() if accuracy >= arms.LEARNED]
  mean = statistics.interval(apart[others].dropna().mean(axis=1))
  for model, title in TITLES.items():
    gspo, grpo = (f"{model}_{loss}" for loss in LOSSES)
    gap = each[title]
    rows.append(
      [
        title,
        str(gap.count),
        results.interval(gspo, BEFORE).text(),
        *(results.interval(one, LEARNED).text() for one in (gspo, grpo)),
        gap.text(),
        *(results.interval(one, CLIPPED).text(".4f") for one in (gspo, grpo)),
        results.interval(gspo, VOLATILITY).text(".4f"),
      ]
    )
  head = ["", "seeds", "before", "GSPO", "GRPO", "GSPO - GRPO", "clipped by GSPO", "by GRPO"]
  head += ["volatility of an update"]
  rows.append([f"mean of {len(others)} others", str(mean.count), *[""] * 3, mean.text(), *[""] * 3])
  outcome = OPEN
  if mean.count > 1:
    outcome = FAILS if mean.high < -LOSS else HOLDS if mean.low > -LOSS else OPEN
  because = f"on {len(others)} other architectures GSPO - GRPO is {mean.text()} on average"
  figure, (axes,) = figures.new(6.4, 2.6)
  figures.intervals(axes, each, "final held-out accuracy, GSPO - GRPO", line=-LOSS)
  return Report(Verdict(outcome, because), [markdown(head, rows)], dict(architectures=figure))
