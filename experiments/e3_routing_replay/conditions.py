"""E3, Figure 3 and what contradicts it: which loss needs Routing Replay, and how far off-policy."""

from experiments import arms, figures, statistics
from experiments.arms import ARMS
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown

BEFORE, AFTER, REWARD = "eval/start", "eval/final", "reward/mean"
REPLAYS = ("none", "R2", "R3")
MINIBATCHES = (4, 16)
FAR = 16  # of them: what the verdict is about
MATTERS = 0.03  # of held-out accuracy
VOLATILE = 0.03  # of the experts; where fewer change, that replay does nothing says nothing
STAKE = 0.05  # of accuracy, gained by the best arm; where nothing is learned, nothing is lost
# Chosen on seed 0, on which no claim rests: a small model of which enough experts change.
MODEL = {"model.num_layers": 4, "model.num_experts": 32, "model.experts_per_token": 4}


def condition(loss: str, replay: str, minibatches: int) -> Condition:
  changes = ARMS[loss] | {"objective.replay": replay, "rl.minibatches": minibatches}
  return Condition(f"{loss}_{replay}_{minibatches}", changes, secondary=minibatches != FAR)


EXPERIMENT = Experiment(
  question="Who needs Routing Replay: GRPO alone, or everything that is far enough off-policy?",
  claim="GRPO does not converge without it, GSPO does (§5.3, Figure 3); against that, off-policy "
  "it is needed whatever the loss, and R3 more than R2 (2510.11370, 2512.01374)",
  hypothesis=f"GSPO gains nothing by replay, with {FAR} mini-batches per rollout batch either",
  statistic="paired difference of the final held-out accuracy, GSPO with replay (the mean of R2 "
  f"and R3) - GSPO without, with {FAR} mini-batches; mean over seeds and 95 % t interval",
  falsified=f"the interval lies above 0; otherwise it holds if it lies below {MATTERS:g}. It "
  f"cannot be told if fewer than {VOLATILE:.0%} of the experts are others by the last mini-batch, "
  f"if the cold start is right on less than {arms.LEARNED:.0%}, or if no arm gains {STAKE:g}",
  conditions=tuple(
    condition(loss, replay, number)
    for number in reversed(MINIBATCHES)
    for loss in ARMS
    for replay in REPLAYS
  ),
  seeds=(30, 31, 32, 33, 34, 35),
  common=MODEL
  | arms.SHORT
  | {
    "rl_optimizer.learning_rate": 2e-4,
    "rl.iterations": 20,
    "eval.every": 10,
    "objective.old_logp": "recompute",  # which R2 needs; so that all arms have the same
    "engine.cache_dtype": "bfloat16",  # or sampler and trainer choose the same experts, and R2 = R3
  },
  minutes=1.7,
  start_minutes=4.0,
  columns=(r"minibatch/\d+/router/volatility/mean", r"mismatch/.*"),
)


def volatility(minibatches: int) -> str:
  """Column of the share of a rollout's experts that are others by the last mini-batch."""
  return f"minibatch/{minibatches - 1}/router/volatility/mean"


def gain(results: Results, loss: str, replay: str, number: int) -> statistics.Interval:
  """What replay adds to a loss."""
  names = f"{loss}_{replay}_{number}", f"{loss}_none_{number}"
  return statistics.interval(results.paired(*names, AFTER))


def gain_of_both(
  results: Results, loss: str, number: int, column: str = AFTER
) -> statistics.Interval:
  """The mean of what R2 and R3 add to a loss."""
  r2, r3 = (
    results.paired(f"{loss}_{replay}_{number}", f"{loss}_none_{number}", column)
    for replay in REPLAYS[1:]
  )
  return statistics.interval(((r2 + r3) / 2).dropna())


def outcome(results: Results, primary: statistics.Interval) -> str:
  """Of the declared rule, for GSPO's gain by replay."""
  plain = f"gspo_none_{FAR}"
  ends = [results.gains(f"{loss}_{replay}_{FAR}") for loss in ARMS for replay in REPLAYS]
  sound = (
    primary.count > 1
    and results.interval(plain, volatility(FAR)).value >= VOLATILE
    and results.interval(plain, BEFORE).value >= arms.LEARNED
    and max(of.mean() for of in ends if len(of)) >= STAKE
  )
  if not sound:
    return OPEN
  if primary.low > 0:
    return FAILS
  return HOLDS if primary.high < MATTERS else OPEN


def report(results: Results) -> Report:
  rows = []
  for condition in EXPERIMENT.conditions:
    loss, replay, number = condition.name.split("_")
    columns = (BEFORE, AFTER, volatility(int(number)), "clip_fraction/token")
    values = [results.interval(condition.name, column) for column in columns]
    change = gain(results, loss, replay, int(number)).text() if replay != "none" else ""
    texts = [x.text(".4f") for x in values]
    rows.append([loss.upper(), replay, number, str(values[1].count), *texts, change])
  head = ["loss", "replay", "mini-batches", "seeds", "before", "after", "experts that change"]
  head += ["clipped tokens", "gain by replay"]
  both = {
    f"{loss.upper()}, {number} mini-batches": (
      gain_of_both(results, loss, number),
      statistics.interval(results.paired(f"{loss}_R3_{number}", f"{loss}_R2_{number}", AFTER)),
      gain_of_both(results, loss, number, REWARD),
    )
    for loss in ARMS
    for number in reversed(MINIBATCHES)
  }
  second = [[name, *(of.text() for of in found)] for name, found in both.items()]
  changed = results.interval(f"gspo_none_{FAR}", volatility(FAR))
  gains = {loss: gain_of_both(results, loss, FAR) for loss in ARMS}
  found = "; ".join(f"{loss.upper()} {of.text()}" for loss, of in gains.items())
  because = (
    f"{changed.text('.3f')} of the experts are others by the last of {FAR} mini-batches, and "
    f"replay gains: {found}"
  )
  figure, (axes,) = figures.new(6.4, 3.4)
  labels = {
    f"{loss.upper()} + {replay}, {n}": gain(results, loss, replay, n)
    for loss in ARMS
    for n in reversed(MINIBATCHES)
    for replay in REPLAYS[1:]
  }
  figures.intervals(axes, labels, "gain of final held-out accuracy by replay")
  tables = [
    markdown(head, rows),
    markdown(
      [
        "",
        "final accuracy, mean of R2 and R3 - none",
        "R3 - R2",
        "reward of the run, the same mean",
      ],
      second,
    ),
  ]
  return Report(Verdict(outcome(results, gains["gspo"]), because), tables, dict(replay=figure))
