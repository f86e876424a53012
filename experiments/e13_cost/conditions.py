"""E13: what Routing Replay and recomputed log-probs cost, in seconds, operations and bytes.

Seconds are those of a quiet machine: `python -m experiments.run e13 --jobs=1`, with nothing else on
it. What a pod would need is in pod.csv, which pod.py makes by compiling the flagship's programs.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from experiments import figures, statistics
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown
from experiments.statistics import Interval

NOTHING = {"objective.volatility": False}  # Volatility would record experts too.
ARMS = {
  f"{old}_{replay}": {"objective.old_logp": old, "objective.replay": replay} | NOTHING
  for old, replay in (
    ("sampler", "none"),
    ("sampler", "R3"),
    ("recompute", "none"),
    ("recompute", "R2"),
    ("recompute", "R3"),
  )
}
LEAST, MOST = "sampler_none", "recompute_R2"  # Needs of GSPO and GRPO, by the paper.
STAGES = ("sample", "logp", "update", "publish")
WARM = 3  # First iteration without compilation.
MATTERS = 1.05

EXPERIMENT = Experiment(
  question="What do Routing Replay and recomputed log-probs cost?",
  claim="Routing Replay comes at a cost in memory and communication, which GSPO spares; and old "
  "log-probs of the sampler spare a pass (§5.3, §5.4)",
  hypothesis=f"an iteration with R2 and recomputed log-probs takes at least {MATTERS:g} times as "
  "long as one with neither",
  statistic="seconds of an iteration (sampling, log-probs, updates, publication) with recomputed "
  "log-probs and R2, over those with the sampler's log-probs and no replay, each the median over a "
  f"run's iterations from number {WARM} on; geometric mean over seeds and 95 % t interval",
  falsified=f"the 95 % interval lies below {MATTERS:g}; it holds if it lies above",
  conditions=tuple(Condition(arm, changes) for arm, changes in ARMS.items()),
  seeds=(10, 11, 12),
  common={"rl.iterations": 12, "eval.every": 1000, "eval.problems": 8, "eval.samples": 1},
  columns=(r"time/.*", r"memory/.*", r"total/.*"),
  minutes=1.5,
)


def seconds(results: Results, arm: str, stages: tuple[str, ...] = STAGES) -> pd.Series:
  """Returns median seconds of an iteration, by seed."""
  parts = [results.curve(arm, f"time/{stage}") for stage in stages]
  if any(part.empty for part in parts):
    return pd.Series(dtype=float)
  whole = sum(part.fillna(0) for part in parts)
  return whole[whole.index >= WARM].median()


def ratio(results: Results, arm: str) -> Interval:
  """Returns the ratio of an iteration's seconds to the cheapest arm's."""
  logs = np.log(seconds(results, arm)) - np.log(seconds(results, LEAST))
  return statistics.exp(statistics.interval(logs.dropna()))


def report(results: Results) -> Report:
  ratios, rows = {}, []
  for arm in ARMS:
    ratios[arm] = interval = ratio(results, arm)
    each = [statistics.interval(seconds(results, arm, (stage,))) for stage in STAGES]
    flops = results.values(arm, "flops") / results.values(arm, "tokens")
    rows.append(
      [
        arm.replace("_", ", "),
        str(interval.count),
        statistics.interval(seconds(results, arm)).text(".2f"),
        *(stage_seconds.text(".2f") for stage_seconds in each),
        interval.text(".3f"),
        f"{flops.mean() / 1e6:.2f}" if len(flops) else "",
        results.interval(arm, "memory/host_peak_gib").text(".2f"),
      ]
    )
  head = ["old log-probs, replay", "seeds", "s per iteration", *STAGES, "over the first row's s"]
  head += ["MFLOP of the trainer per token sampled", "peak GiB of the host"]
  tables = [markdown(head, rows)]
  if (pod := Path(__file__).with_name("pod.csv")).exists():
    tables.append(on_pod(pd.read_csv(pod)))
  primary = ratios[MOST]
  outcome = OPEN
  if primary.count > 1:
    outcome = HOLDS if primary.low > MATTERS else FAILS if primary.high < MATTERS else OPEN
  figure, (axes,) = figures.new(6.4, 2.4)
  shown = {arm.replace("_", ", "): interval for arm, interval in ratios.items()}
  figures.intervals(axes, shown, "seconds of an iteration, times those of the first", line=1.0)
  because = f"an iteration with R2 and recomputed log-probs takes {primary.text()} times "
  because += "as long as one with neither"
  return Report(Verdict(outcome, because), tables, dict(cost=figure))


def on_pod(table: pd.DataFrame) -> str:
  """Formats aot's figures of the flagship: seconds of an iteration, memory of programs."""
  head = ["flagship, compiled for " + table.topology.iloc[0], "s per iteration", "of these update"]
  head += ["log-probs", "GiB per chip: update", "log-probs", "prefill", "decode"]
  rows = [
    [
      row.arm.replace("_", ", "),
      f"{row.iteration_s:.1f}",
      f"{row.train_s:.1f}",
      f"{row.score_s:.1f}",
      *(f"{x:.2f}" for x in (row.train_gib, row.score_gib, row.prefill_gib, row.decode_gib)),
    ]
    for row in table.itertuples()
  ]
  return markdown(head, rows)
