"""E8: the exponent of 1/|y| in GSPO's ratio, at matched clipped fractions."""

from experiments import figures, statistics
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown

TOKENS = 6  # Tokens of a line.
SETTINGS = {
  "n8": {"data.lines": (8,), "sampling.max_new_tokens": TOKENS * 8},
  "n32": {"data.lines": (32,), "sampling.max_new_tokens": TOKENS * 32},
  "mixed": {},
}
TITLES = {"n8": "at 48 tokens", "n32": "at 192 tokens", "mixed": "with mixed lengths"}
EXPONENTS = {"zero": 0.0, "half": 0.5, "one": 1.0}
TARGET = 0.15  # Fraction of tokens, the paper's.
CLIPPED, LEARNED = "clip_fraction/token", "eval/final"
NEGLIGIBLE = 0.03
ALIKE = 1.5  # Largest ratio of the fractions.


def ratio(exponent: float) -> dict:
  """Declares GSPO with |y|^exponent in the place of |y| and an adapted range.

  The range starts at the paper's for 96 tokens, scaled like log s by 96^(1 - exponent).
  """
  times = 96 ** (1 - exponent)
  return {
    "objective.length_exponent": exponent,
    "objective.clip_low": 3e-4 * times,
    "objective.clip_high": 4e-4 * times,
    "objective.adaptive_clip.target": TARGET,
    "objective.adaptive_clip.gain": 2.0,
  }


OTHERS = (
  Condition("mixed_dapo", {"objective.name": "dapo"}),
  Condition("mixed_dr_grpo", {"objective.name": "dr_grpo", "objective.advantage": "none"}),
)
EXPERIMENT = Experiment(
  question="Is 1/|y| the right normalisation of the sequence's log-ratio?",
  claim='GSPO divides by |y| (Eq. 7); "is the 1/|y| exponent always optimal?" is open. At 1/2 the '
  "noise of independent tokens has the same size at every length",
  hypothesis="at the same clipped fraction nothing is learned better with |y|^(1/2) than with |y|",
  statistic="final held-out accuracy with exponent 1/2 less that with exponent 1, paired by seed, "
  "at 48 tokens, at 192 tokens and with lengths mixed, all with ranges that adapt to 15 % of "
  "tokens clipped; mean over seeds and 95 % t interval",
  falsified="at some length the 95 % interval lies above 0; it holds if all lie below "
  f"{NEGLIGIBLE:g}; it cannot be told if the clipped fractions differ by more than {ALIKE:g} times",
  conditions=tuple(
    Condition(f"{setting}_{name}", changes | ratio(value))
    for setting, changes in SETTINGS.items()
    for name, value in EXPONENTS.items()
  )
  + OTHERS,
  seeds=(10, 11, 12, 13, 14),
  columns=(r"ratio/effective_length", r"by_length/.*"),
  pod=False,  # Lengths are the toy's.
)


def report(results: Results) -> Report:
  gains, rows, apart = {}, [], []
  for setting in SETTINGS:
    baseline = f"{setting}_one"
    for name in ("zero", "half"):
      interval = statistics.interval(results.paired(f"{setting}_{name}", baseline, LEARNED))
      gains[f"{setting}: {name} less one"] = interval
      fractions = [results.interval(c, CLIPPED) for c in (f"{setting}_{name}", baseline)]
      rows.append(
        [setting, name, str(interval.count), interval.text(), *(f.text() for f in fractions)]
      )
      if name == "half" and all(f.count for f in fractions):
        low, high = sorted(f.value for f in fractions)
        apart.append(high / low if low > 0 else float("inf"))
  heads = ["lengths", "exponent", "seeds", "accuracy less that of exponent 1", "clipped fraction"]
  heads += ["clipped fraction of exponent 1"]
  conditions = {c.name: c.name for c in EXPERIMENT.conditions}
  columns = {"final accuracy": LEARNED, "mean accuracy over the run": "eval/area"}
  columns |= {"clipped fraction": CLIPPED}
  tables = [markdown(heads, rows), results.table(conditions, columns)]
  halves = {s: gains[f"{s}: half less one"] for s in SETTINGS}
  because = "the final accuracy with exponent 1/2 less that with exponent 1 is "
  because += ", ".join(f"{halves[s].text()} {title}" for s, title in TITLES.items())
  outcome = OPEN
  if all(interval.count > 1 for interval in halves.values()):
    if max(apart, default=float("inf")) > ALIKE:
      because += "; the clipped fractions do not match"
    elif any(interval.low > 0 for interval in halves.values()):
      outcome = FAILS
    elif all(interval.high < NEGLIGIBLE for interval in halves.values()):
      outcome = HOLDS
  figure, (left_axes, right_axes) = figures.new(9, 3.4, columns=2)
  shown = {f"exponent {value:g}": f"mixed_{name}" for name, value in EXPONENTS.items()}
  shown |= {"DAPO": "mixed_dapo", "Dr. GRPO": "mixed_dr_grpo"}
  figures.curves(left_axes, results, shown, "reward/mean", title="reward, lengths mixed")
  figures.intervals(right_axes, gains, "accuracy, difference to exponent 1")
  return Report(Verdict(outcome, because), tables, dict(exponents=figure))
