"""E22: GSPO and GRPO with noise on the sampler's log-probs."""

import math

from experiments import arms, figures, statistics
from experiments.arms import ARMS, GSPO
from experiments.definition import Condition, Experiment
from experiments.report import FAILS, HOLDS, OPEN, Report, Results, Verdict, markdown
from experiments.statistics import Interval

TOKENS = 6  # Tokens of a line.
LINES = (8, 32)
DOSES = (0, 1e-3, 3e-3, 1e-2, 3e-2)  # Deviations of the noise, in nats per token.
WEAK, STRONG = DOSES[1], DOSES[-1]
LOSSES = ARMS | {"adaptive": GSPO | {"objective.adaptive_clip.target": 0.15}}
TITLES = {"gspo": "GSPO", "grpo": "GRPO", "adaptive": "GSPO, adaptive range"}
HALF_RANGE = 3.5e-4  # Mean of GSPO's two ranges (§5.1).
OTHER = {  # Losses and doses of other noises, at lengths.
  "constant": (("gspo",), (1e-3, 3e-3), LINES),
  "student": (("gspo", "grpo"), (3e-3, 1e-2), LINES[:1]),
}
SEEDS, MORE = (50, 51, 52), (53, 54)
REWARD, START, END = "reward/mean", "eval/start", "eval/final"
MISMATCH, FIRST = "mismatch/sequence/abs/mean", "minibatch/0/clip_fraction/token"


def predicted(lines: int) -> float:
  """Solves σ/√T = HALF_RANGE for σ."""
  return HALF_RANGE * math.sqrt(TOKENS * lines)


def near(lines: int) -> tuple[float, ...]:
  """Returns 0 and the doses next to the predicted one. They have more seeds."""
  below = max(dose for dose in DOSES if dose < predicted(lines))
  return 0, below, DOSES[DOSES.index(below) + 1]


def name(loss: str, dose: float, lines: int, kind: str = "independent") -> str:
  return f"{loss}_n{lines}_{dose:g}" + ("" if kind == "independent" else f"_{kind}")


def noisy(loss: str, dose: float, lines: int, kind: str = "independent") -> Condition:
  """Declares a loss with noise on the sampler's log-probs."""
  length = {"data.lines": (lines,), "sampling.max_new_tokens": TOKENS * lines}
  seeds = SEEDS + MORE if kind == "independent" and dose in near(lines) else None
  return Condition(
    name(loss, dose, lines, kind),
    LOSSES[loss] | length,
    seeds,
    secondary=kind != "independent",
    measure=f"experiments.noise:train {kind} {dose:g}",
  )


EXPERIMENT = Experiment(
  question="How exact must the log-probs of an inference engine be, for GSPO and for GRPO?",
  claim='GSPO can "directly use the likelihoods returned by the inference engine", since sequences '
  "tolerate differences in precision better than tokens do (§5.4)",
  hypothesis="independent noise of deviation σ moves log s by σ/√T. So at the paper's ranges GSPO "
  f"is unharmed below σ = {HALF_RANGE:g} √T ("
  + " and ".join(f"{predicted(n):.1e} at {TOKENS * n} tokens" for n in LINES)
  + f") and learns less above it; GRPO is unharmed up to {STRONG:g}, whatever T is",
  statistic="mean reward over the run with noise less that without, paired by seed, with GSPO less "
  f"with GRPO, at σ = {STRONG:g} and each length; means over seeds and 95 % t intervals",
  falsified="at a length this interval includes 0 or lies above it, or that of GSPO's change at "
  f"σ = {WEAK:g} lies below 0",
  conditions=(
    *(noisy(loss, dose, n) for n in LINES for dose in DOSES for loss in LOSSES),
    *(
      noisy(loss, dose, n, kind)
      for kind, (losses, doses, lengths) in OTHER.items()
      for n in lengths
      for dose in doses
      for loss in losses
    ),
  ),
  seeds=SEEDS,
  common={"objective.old_logp": "sampler", "eval.every": 20},
  columns=(r"mismatch/.*", r"minibatch/0/clip_fraction/token"),
  minutes=2.5,
  start_minutes=3.0,
  pod=False,  # The doses are of these lengths.
)


def change(
  results: Results, loss: str, dose: float, lines: int, kind: str = "independent"
) -> Interval:
  """Returns the change of the mean reward by noise."""
  pair = name(loss, dose, lines, kind), name(loss, 0, lines)
  return statistics.interval(results.paired(*pair, REWARD))


def contrast(results: Results, lines: int) -> Interval:
  """Returns the change with GSPO less GRPO's, at the strongest noise."""
  gspo, grpo = (
    results.paired(name(loss, STRONG, lines), name(loss, 0, lines), REWARD) for loss in ARMS
  )
  return statistics.interval((gspo - grpo).dropna())


def outcome(results: Results) -> str:
  """Returns the outcome of the declared rule."""
  primary = [contrast(results, n) for n in LINES]
  weak = [change(results, "gspo", WEAK, n) for n in LINES]
  learned = (results.interval(name("gspo", 0, n), START).value >= arms.LEARNED for n in LINES)
  if min(x.count for x in (*primary, *weak)) < len(SEEDS) or not all(learned):
    return OPEN
  holds = all(x.high < 0 for x in primary) and all(x.high >= 0 for x in weak)
  return HOLDS if holds else FAILS


def report(results: Results) -> Report:
  head = ["tokens", "noise", "σ", "loss", "seeds", "mismatch of a response, nats per token"]
  head += ["clipped fraction before any update", "reward", "reward, less without noise"]
  head += ["final accuracy"]
  rows = []
  for c in EXPERIMENT.conditions:
    loss, lines, dose, *kind = c.name.split("_")
    lines, dose, kind = int(lines[1:]), float(dose), kind[0] if kind else "independent"
    values = [results.interval(c.name, x) for x in (MISMATCH, FIRST, REWARD, END)]
    less = change(results, loss, dose, lines, kind)
    cells = [f"{values[0].value:.1e}", values[1].text(), f"{values[2].value:.3f}"]
    cells += [less.text() if dose else "", values[3].text()]
    first = [str(TOKENS * lines), kind, f"{dose:g}", TITLES[loss], str(values[2].count)]
    rows.append([*first, *cells])
  parts = [f"{contrast(results, n).text()} at {TOKENS * n} tokens" for n in LINES]
  because = (
    f"noise of σ = {STRONG:g} changes the mean reward with GSPO less that with GRPO by "
    f"{' and '.join(parts)}"
  )
  verdict = Verdict(outcome(results), because)
  return Report(verdict, [markdown(head, rows)], dict(noise=_map(results)))


def _map(results: Results):
  """Draws the change of the reward over the deviation of independent noise."""
  figure, panels = figures.new(7.2, 3.4, columns=len(LINES))
  for axes, n in zip(panels, LINES):
    lines = {
      title: [change(results, loss, dose, n) for dose in DOSES[1:]]
      for loss, title in TITLES.items()
    }
    figures.bands(axes, DOSES[1:], lines, "σ, nats per token", f"reward, {TOKENS * n} tokens")
    axes.axvline(predicted(n), color="#888", lw=1, ls="--")
    axes.set_xscale("log")
  return figure
