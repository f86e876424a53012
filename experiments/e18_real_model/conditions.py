"""E18: SmolLM2-135M on word problems: a cold start and GSPO, or the cold start alone.

Both have equal numbers of updates. Further conditions count tokens clipped by GSPO and GRPO.
"""

from experiments import figures, statistics
from experiments.arms import ARMS, COLD_START_ALONE
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown
from experiments.statistics import Interval

START, ITERATIONS = 40, 30  # Updates of the cold start; iterations of GSPO.
UPDATES = 4  # Updates per iteration.
LEAST = 0.10  # Held-out accuracy.
BEFORE, LEARNED, GREEDY = "eval/start", "eval/final", "eval/greedy"
CLIPPED, MISMATCH = "clip_fraction/token", "mismatch/sequence/abs/mean"
CLIPPED_OF = "by_length/clip_fraction/"
LENGTHS = {"5 to 8": "le_8", "9 to 16": "le_16"}  # Tokens of a response. Shorter ones are rare.
ALONE = "cold start alone"
# The control is judged before its only iteration.
CONTROL = {"sft.steps": START + UPDATES * ITERATIONS} | COLD_START_ALONE
BRIEF = {"rl.iterations": 3, "eval.every": 1000}
WIDTHS = {"third": 1 / 3, "one": 1.0, "three": 3.0}
# A sampler in bfloat16: all of its error is in the ratio (§5.4), or none.
SAMPLER = {"engine.dtype": "bfloat16", "engine.cache_dtype": "bfloat16"}
OLD = {"its own": "sampler", "recomputed": "recompute"}


def brief(loss: str, name: str, width: float) -> Condition:
  """Declares a few iterations with `width` times the paper's range, to count clipped tokens."""
  low, high = (ARMS[loss][f"objective.clip_{side}"] for side in ("low", "high"))
  edges = {"objective.clip_low": min(width * low, 1.0), "objective.clip_high": width * high}
  changes = BRIEF | {"objective.name": loss} | edges
  return Condition(f"{loss}_{name}", changes, seeds=(11, 12, 13), secondary=True)


def low(old: str) -> Condition:
  """Declares GSPO with a bfloat16 sampler, and its or the trainer's log-probs."""
  changes = SAMPLER | {"objective.old_logp": old}
  return Condition(f"gspo_bfloat16_{old}", changes, seeds=(11, 12, 13), secondary=True)


EXPERIMENT = Experiment(
  question="Does a pretrained model learn word problems by GSPO, and more than by as many further "
  "updates of the cold start?",
  claim="GSPO trained Qwen3 (§5); the paper claims nothing of a model of 135 M parameters",
  hypothesis=f"after a cold start of {START} updates, {ITERATIONS} iterations of GSPO raise the "
  f"accuracy on held-out texts by at least {LEAST:g}, and above that of the cold start alone with "
  "as many updates",
  statistic="final held-out accuracy at temperature 1 less that of the cold start, and less that "
  "of the control of the same seed; means over seeds and 95 % t intervals",
  falsified=f"the mean gain is below {LEAST:g}, or either interval reaches below 0",
  conditions=(
    Condition("gspo"),
    Condition(ALONE, CONTROL),
    *map(low, OLD.values()),
    *(brief(loss, *item) for loss in ARMS for item in WIDTHS.items()),
  ),
  seeds=(11, 12, 13, 14, 15),
  base="configs/smollm2.py",
  columns=(r"by_length/(responses|clip_fraction|log_ratio_std)/.*",),
  minutes=10,
  start_minutes=6,
  pod=False,  # The flagship has other problems.
)


def report(results: Results) -> Report:
  rise = statistics.interval(results.gains("gspo"))
  control = results.values(ALONE, BEFORE)
  more = statistics.interval((results.values("gspo", LEARNED) - control).dropna())
  outcome = OPEN
  if min(rise.count, more.count) >= len(EXPERIMENT.seeds):
    learned = rise.value >= LEAST and rise.low > 0 and more.low > 0
    outcome = HOLDS if learned else FAILS
  rows = [
    [f"after the cold start of {START} updates", results.interval("gspo", BEFORE)],
    ["after GSPO", results.interval("gspo", LEARNED)],
    [
      f"control: after {CONTROL['sft.steps']} updates of the cold start",
      statistics.interval(control),
    ],
    ["after GSPO, less after its cold start", rise],
    ["after GSPO, less the control", more],
    ["greedy, after GSPO", results.interval("gspo", GREEDY)],
    ["greedy, control", results.interval(ALONE, GREEDY)],
  ]
  accuracy = markdown(
    ["", "seeds", "held-out accuracy"], [[name, str(x.count), x.text()] for name, x in rows]
  )
  heads = ["ranges, times the paper's", "seeds"]
  heads += [f"clipped fraction of tokens, {loss.upper()}" for loss in ARMS]
  clipped = []
  for name, width in WIDTHS.items():
    fractions = [results.interval(f"{loss}_{name}", CLIPPED) for loss in ARMS]
    clipped.append([f"{width:.3g}", *percentages(fractions)])
  by_length = [
    [title, *percentages([results.interval(f"{loss}_one", CLIPPED_OF + name) for loss in ARMS])]
    for title, name in LENGTHS.items()
  ]
  sampler = []
  shown = {f"bfloat16, old log-probs {title}": low(old).name for title, old in OLD.items()}
  for title, condition in ({"float32": "gspo"} | shown).items():
    columns = (MISMATCH, ".1e"), (CLIPPED, ".3f"), (BEFORE, ".3f"), (LEARNED, ".3f")
    cells = [results.interval(condition, column).text(form) for column, form in columns]
    less = statistics.interval(results.paired(condition, "gspo", LEARNED))
    sampler.append([title, str(less.count), *cells, less.text()])
  figure, (axes,) = figures.new()
  figures.curves(axes, results, {"GSPO": "gspo"}, "eval/accuracy", title="held-out accuracy")
  because = (
    f"GSPO gains {rise.text()} over its cold start; its difference to a control, which spends as "
    f"many updates on the cold start only, is {more.text()}"
  )
  head = ["sampler", "seeds", "mismatch, nats per token", "clipped fraction of tokens"]
  head += ["accuracy before", "after", "after, less float32"]
  tables = [
    accuracy,
    markdown(heads, clipped),
    markdown(["tokens of a response", *heads[1:]], by_length),
    markdown(head, sampler),
  ]
  return Report(Verdict(outcome, because), tables, dict(accuracy=figure))


def percentages(fractions: list[Interval]) -> list[str]:
  return [str(fractions[0].count), *(x.text(".4f") for x in fractions)]
