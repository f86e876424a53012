"""E17: every objective of the command line on one task, as it was published."""

from experiments import figures, statistics
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown

BEFORE, LEARNED, AREA = "eval/start", "eval/final", "eval/area"
CLIPPED = "clip_fraction/token"
CONDITIONS = {
  "gspo": {},
  "gspo_token": {},
  # Half a response.
  "segment": {"objective.segment_unit": "tokens", "objective.segment_tokens": 5},
  # GSPO's range in configs/tiny.py.
  "luspo": {"objective.clip_low": 0.03, "objective.clip_high": 0.04},
  "grpo": {},
  "dapo": {},
  "dr_grpo": {},
  "cispo": {},
  "gmpo": {},
  "sapo": {},
  "dppo": {},
  "vespo": {},
  "opmd": {},
  "ppo_clip": {},
  "ppo_clip with a critic": {
    "objective.aggregate": "token",
    "critic.name": "model",
    "critic.warmup_iterations": 2,
    "critic_optimizer.learning_rate": 1e-3,
    "critic_optimizer.schedule": "linear",
  },
  "rft": {},
  "spo": {
    "objective.beta": 0.3,
    "objective.soft_value": 0.74,
  },  # Values of configs/tiny_offline.py.
}

ADDED = {  # Declared later; no verdict depends on them.
  "gspo batch": {"objective.advantage": "batch"},
  "gspo gdpo": {
    "objective.advantage": "gdpo",
    "constraints.rewards.extra.signal": "truncated",
    "constraints.rewards.extra.weight": -1.0,
  },
  "dr_grpo minirl": {  # docs/objectives.md
    "objective.clip_low": 0.2,
    "objective.clip_high": 0.27,
    "objective.old_logp": "recompute",
    "objective.correction.name": "truncated",
    "objective.correction.level": "token",
    "objective.correction.cap": 5.0,
  },
}

EXPERIMENT = Experiment(
  question="Does every objective learn from rewards, from the command line and untuned?",
  claim="each objective was published as one that learns. This tests the implementations and is no "
  "ranking: all have the learning rate of configs/tiny.py, which suits GSPO, and their published "
  "ranges. Only those of GSPO and its relatives are wider, for responses of ten tokens",
  hypothesis="with each objective the held-out accuracy rises",
  statistic="gain of each: final held-out accuracy less that of the cold start, by seed; "
  "mean and 95 % t interval",
  falsified="the interval of some objective's gain includes 0, or lies below it",
  conditions=tuple(
    Condition(name, {"objective.name": name.split()[0]} | changes, secondary=name in ADDED)
    for name, changes in (CONDITIONS | ADDED).items()
  ),
  seeds=(17, 18, 19),
  base="configs/tiny.py",
  minutes=1.2,
  start_minutes=1.5,
  pod=False,  # The ranges are for ten tokens.
)


def report(results: Results) -> Report:
  gains, rows = {}, []
  for name in CONDITIONS | ADDED:
    gain = gains[name] = statistics.interval(results.gains(name))
    intervals = [results.interval(name, column) for column in (BEFORE, LEARNED)]
    values = results.values(name, LEARNED)
    least = f"{values.min():.3f}" if len(values) else "no runs"
    clipped = results.interval(name, CLIPPED)
    shown = clipped.text(".4f") if clipped.count else ""
    area = results.interval(name, AREA).text()
    rows.append(
      [name, str(gain.count), *(x.text() for x in intervals), gain.text(), least, area, shown]
    )
  head = ["objective", "seeds", "accuracy before", "after", "gain", "worst seed after"]
  head += ["mean accuracy over the run", "clipped fraction of tokens"]
  outcome, judged = OPEN, [gains[name] for name in CONDITIONS]
  if all(gain.count > 1 for gain in judged):
    outcome = HOLDS if all(gain.low > 0 for gain in judged) else FAILS
  smallest = min(CONDITIONS, key=lambda name: gains[name].low if gains[name].count > 1 else 1.0)
  because = f"the smallest gain of accuracy is that of {smallest}, {gains[smallest].text()}"
  figure, (axes,) = figures.new(6.4, 3.6)
  figures.intervals(axes, gains, "gain of held-out accuracy")
  return Report(Verdict(outcome, because), [markdown(head, rows)], dict(gains=figure))
