"""E3, Figure 3 and what contradicts it: which loss needs Routing Replay, and how far off-policy."""

from experiments import figures, statistics
from experiments.arms import ARMS
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown

LEARNED = "eval/final"
VOLATILITY = "minibatch/1/router/volatility/mean"
REPLAYS = ("none", "R2", "R3")
MINIBATCHES = (4, 16)
MATTERS = 0.03  # of held-out accuracy
VOLATILE = 0.03  # of the experts; where fewer change, that replay does nothing says nothing
# The model: to be the smallest of E4 whose volatility is VOLATILE or more.
MODEL = {"model.num_layers": 8, "model.num_experts": 32, "model.experts_per_token": 4}


def condition(loss: str, replay: str, minibatches: int) -> Condition:
  changes = {"objective.replay": replay, "rl.minibatches": minibatches}
  return Condition(f"{loss}_{replay}_{minibatches}", ARMS[loss] | changes)


EXPERIMENT = Experiment(
  question="Who needs Routing Replay: GRPO alone, or everything that is far enough off-policy?",
  claim="GRPO does not converge without it, GSPO does (§5.3, Figure 3); against that, off-policy "
  "it is needed whatever the loss, and R3 more than R2 (2510.11370, 2512.01374)",
  hypothesis="GSPO gains nothing by replay, with 16 mini-batches per rollout batch no more than "
  "with 4",
  statistic="paired difference of the final held-out accuracy, GSPO with R2 or R3 - GSPO without, "
  "with 4 and with 16 mini-batches; mean over seeds and 95 % t interval",
  falsified=f"one of the four intervals lies above 0; it holds if all four lie below {MATTERS:g}; "
  f"it cannot be told if fewer than {VOLATILE:.0%} of the experts change with an update",
  conditions=tuple(
    condition(loss, replay, number) for number in MINIBATCHES for loss in ARMS for replay in REPLAYS
  ),
  seeds=(20, 21, 22),
  common=MODEL
  | {
    "sft.steps": 500,  # as in E4
    "rl_optimizer.learning_rate": 2e-4,
    "rl.iterations": 20,
    "objective.old_logp": "recompute",  # which R2 needs; so that all arms have the same
    "engine.cache_dtype": "bfloat16",  # or sampler and trainer choose the same experts, and R2 = R3
  },
  minutes=5.0,
  start_minutes=6.0,
  columns=(r"minibatch/\d+/router/volatility/mean", r"mismatch/.*"),
)


def gain(results: Results, loss: str, replay: str, number: int) -> statistics.Interval:
  """What replay adds to a loss."""
  names = f"{loss}_{replay}_{number}", f"{loss}_none_{number}"
  return statistics.interval(results.paired(*names, LEARNED))


def report(results: Results) -> Report:
  found = {
    (loss, replay, number): gain(results, loss, replay, number)
    for loss in ARMS
    for number in MINIBATCHES
    for replay in REPLAYS[1:]
  }
  rows = []
  for condition in EXPERIMENT.conditions:
    loss, replay, number = condition.name.split("_")
    columns = ("eval/start", LEARNED, VOLATILITY, "clip_fraction/token")
    values = [results.interval(condition.name, column) for column in columns]
    change = found[loss, replay, int(number)].text() if replay != "none" else ""
    texts = [x.text(".4f") for x in values]
    rows.append([loss.upper(), replay, number, str(values[1].count), *texts, change])
  head = ["loss", "replay", "mini-batches", "seeds", "before", "after", "volatility of an update"]
  head += ["clipped tokens", "gain by replay"]
  r3 = {
    (loss, number): statistics.interval(
      results.paired(f"{loss}_R3_{number}", f"{loss}_R2_{number}", LEARNED)
    )
    for loss in ARMS
    for number in MINIBATCHES
  }
  second = [[f"{loss.upper()}, {number}", i.text()] for (loss, number), i in r3.items()]
  volatility = results.interval("gspo_none_4", VOLATILITY)
  of_gspo = [interval for (loss, *_), interval in found.items() if loss == "gspo"]
  outcome = OPEN
  if all(i.count > 1 for i in of_gspo) and volatility.value >= VOLATILE:
    if any(i.low > 0 for i in of_gspo):
      outcome = FAILS
    elif all(i.high < MATTERS for i in of_gspo):
      outcome = HOLDS
  gains = "; ".join(
    f"{loss.upper()} + {replay}, {number} mini-batches: {i.text()}"
    for (loss, replay, number), i in found.items()
  )
  figure, (axes,) = figures.new(6.4, 3.4)
  labels = {f"{loss.upper()} + {replay}, {n}": i for (loss, replay, n), i in found.items()}
  figures.intervals(axes, labels, "gain of final held-out accuracy by replay")
  because = f"with a volatility of {volatility.text('.4f')}, replay gains: {gains}"
  tables = [markdown(head, rows), markdown(["R3 - R2, mini-batches", "final accuracy"], second)]
  return Report(Verdict(outcome, because), tables, dict(replay=figure))
