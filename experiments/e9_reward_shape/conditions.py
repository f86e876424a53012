"""E9: GSPO-token by the shape of the reward, and ratios of segments of many lengths."""

from experiments import figures, statistics
from experiments.arms import GSPO
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown
from experiments.statistics import Interval

LEARNED, CLIPPED = "eval/final", "clip_fraction/token"
NEGLIGIBLE = 0.03
NOISE = 0.1  # of lines are misjudged, right ones and others
PROCESS = {"reward.per_line": True}
SHAPES = {
  "terminal": {},
  "process": PROCESS,
  "noisy": PROCESS | {"reward.false_positive": NOISE, "reward.false_negative": NOISE},
}
TOKEN = GSPO | {"objective.name": "gspo_token"}
SIZES = (1, 6, 24, 96, 192)  # tokens of a segment; no response is longer than the last
TARGET = 0.15  # of tokens clipped, whatever the segments: the paper's fraction of GSPO


def segments(size: float, **unit) -> dict:
  """Ratios of segments. The range finds itself, from the paper's at 96 tokens: the mean over fewer
  ones has so much more noise."""
  times = (96 / size) ** 0.5
  return {
    "objective.name": "segment",
    "objective.clip_low": 3e-4 * times,
    "objective.clip_high": 4e-4 * times,
    "objective.adaptive_clip.target": TARGET,
    "objective.adaptive_clip.gain": 2.0,
  } | {f"objective.segment_{key}": value for key, value in unit.items()}


EXPERIMENT = Experiment(
  question="When does GSPO-token gain on GSPO, and what is the best unit of the ratio?",
  claim="GSPO-token is GSPO where advantages are constant, and is for finer ones (§4.3); the unit "
  "of the ratio should match that of the reward (§4.1), and the optimal granularity is open",
  hypothesis="with a reward per line GSPO-token ends with a higher held-out accuracy than GSPO "
  "with their sum, and with one reward per response it does not",
  statistic="paired differences of the final held-out accuracy, GSPO-token - GSPO with process "
  "rewards and with terminal ones; mean over seeds and 95 % t interval",
  falsified=f"the first interval lies below {NEGLIGIBLE:g}, or the second above 0",
  conditions=(
    *(
      Condition(f"{loss}_{shape}", changes | more, secondary=shape == "noisy")
      for loss, changes in {"gspo": GSPO, "token": TOKEN}.items()
      for shape, more in SHAPES.items()
    ),
    # The same share of tokens is clipped; but of one-token ratios these are nearly all that moved.
    *(
      Condition(f"segment_{n}", segments(n, unit="tokens", tokens=n), secondary=True) for n in SIZES
    ),
    Condition("segment_line_process", segments(6, unit="line") | PROCESS, secondary=True),
  ),
  seeds=(10, 11, 12, 13, 14),
)


def report(results: Results) -> Report:
  def difference(a: str, b: str) -> Interval:
    return statistics.interval(results.paired(a, b, LEARNED))

  whole = f"segment_{SIZES[-1]}"
  found = {f"GSPO-token - GSPO, {s}": difference(f"token_{s}", f"gspo_{s}") for s in SHAPES}
  found |= {
    f"segments of {n} - of all tokens": difference(f"segment_{n}", whole) for n in SIZES[:-1]
  }
  found["segments of lines - GSPO-token, process"] = difference(
    "segment_line_process", "token_process"
  )
  process, terminal = (found[f"GSPO-token - GSPO, {s}"] for s in ("process", "terminal"))
  outcome = OPEN
  if min(process.count, terminal.count) > 1:
    if process.high < NEGLIGIBLE or terminal.low > 0:
      outcome = FAILS
    elif process.low > 0:
      outcome = HOLDS
  because = (
    f"GSPO-token gains {process.text()} on GSPO with process rewards and {terminal.text()} with "
    "terminal ones"
  )
  columns = {"before": "eval/start", "final accuracy": LEARNED, "area": "eval/area"}
  columns |= {"clipped": CLIPPED}
  rows = [[title, str(x.count), x.text()] for title, x in found.items()]
  tables = [
    results.table([c.name for c in EXPERIMENT.conditions], columns),
    markdown(["paired difference of final accuracy", "seeds", ""], rows),
  ]
  curves, (left, right) = figures.new(9, 3.4, columns=2)
  arms = {"GSPO, terminal": "gspo_terminal", "GSPO, process": "gspo_process"}
  arms |= {"GSPO-token, process": "token_process", "GSPO-token, noisy": "token_noisy"}
  figures.curves(left, results, arms, "eval/accuracy", title="held-out accuracy")
  sizes = {f"{n} tokens": results.interval(f"segment_{n}", LEARNED) for n in SIZES}
  figures.intervals(right, sizes, "final accuracy by segment", line=None)
  return Report(Verdict(outcome, because), tables, dict(shapes=curves))
