"""E19: changes of experts, and Routing Replay, in SmolLM2-135M upcycled to four experts a layer."""

from experiments import figures, smollm2, statistics
from experiments.arms import GRPO, GSPO
from experiments.definition import Condition, Experiment
from experiments.report import OPEN, Report, Results, Verdict, markdown

BEFORE, AFTER = "eval/start", "eval/final"
LEAST, PAPER = 0.03, 0.10  # Fractions of the experts.
VOLATILITY = "minibatch/1/router/volatility/mean"  # One update after the rollout.
ARMS = {  # Keys are names in tables.
  "GSPO": "gspo",
  "GRPO": "grpo",
  "GRPO with replay": "grpo_R2",
}
DIFFERENCES = {
  "(GRPO with replay) less GRPO": ("grpo_R2", "grpo"),
  "GSPO less GRPO": ("gspo", "grpo"),
  "GSPO less (GRPO with replay)": ("gspo", "grpo_R2"),
}
MODEL = {
  "model.num_experts": smollm2.EXPERTS,
  "model.experts_per_token": 2,
  "model.moe_intermediate_size": 1536,  # Width of the copied dense layers.
  "compute.experts": "batched",  # Best at 352 assignments per expert and this width, on two cores.
}

EXPERIMENT = Experiment(
  question="How many experts does one update change in a model of 30 layers, and which loss needs "
  "Routing Replay there?",
  claim="about 10 % of the experts change with one update of a model with 48 layers, so that GRPO "
  "does not converge without replay, and GSPO does (§5.3, Figure 3)",
  hypothesis="in a pretrained model of 30 layers, upcycled (experts are copies of its feed-forward "
  f"layers), one update changes at least {LEAST:.0%} of a rollout's experts",
  statistic="share of a rollout's experts that one update of GSPO without replay changes, averaged "
  "over layers, tokens and iterations; mean over seeds and 95 % t interval",
  falsified=f"the interval lies below {LEAST:g}; it holds if the interval lies above. One seed has "
  "no interval, so it cannot be told. Which loss needs replay is secondary: it has no rule",
  conditions=(
    Condition("gspo", GSPO),
    Condition("grpo", GRPO, secondary=True),
    Condition("grpo_R2", GRPO | {"objective.replay": "R2"}, secondary=True),
  ),
  seeds=(11,),  # Two more were declared, and not run: a run takes 14 GiB and half an hour.
  base="configs/smollm2.py",
  common=MODEL
  | {
    "sft.load_balance_coef": 0.01,
    "objective.volatility": True,
    "objective.old_logp": "recompute",  # R2 needs it; all arms have the same.
    "rl.iterations": 10,
  },
  minutes=24,
  start_minutes=8,
  columns=(r"minibatch/\d+/router/volatility/(mean|max_layer)",),
  pod=False,  # The flagship has other problems.
)


def report(results: Results) -> Report:
  changed = results.interval("gspo", VOLATILITY)
  columns = {
    "changed fraction of experts after one update": VOLATILITY,
    "after three updates": "minibatch/3/router/volatility/mean",
    "after one update, most volatile layer": "minibatch/1/router/volatility/max_layer",
    "clipped fraction of tokens": "clip_fraction/token",
  }
  accuracy = {"accuracy before": BEFORE, "after": AFTER, "greedy, after": "eval/greedy"}
  rows = []
  for title, pair in DIFFERENCES.items():
    more = statistics.interval(results.paired(*pair, AFTER))
    reward = statistics.interval(results.paired(*pair, "reward/mean"))
    rows.append([title, str(more.count), more.text(), reward.text()])
  differences = markdown(
    ["difference, paired by seed", "seeds", "final held-out accuracy", "mean reward over the run"],
    rows,
  )
  figure, (left_axes, right_axes) = figures.new(9.6, 3.4, columns=2)
  figures.curves(left_axes, results, ARMS, VOLATILITY, title="experts that one update changes")
  left_axes.axhline(PAPER, color="#888", lw=1, ls="--")  # 48 layers, 128 experts.
  left_axes.set_ylim(bottom=0)
  figures.curves(right_axes, results, ARMS, "reward/mean", title="reward")
  because = f"one update of GSPO changes {changed.text()} of a rollout's experts"
  tables = [results.table(ARMS, columns, ".4f"), results.table(ARMS, accuracy), differences]
  return Report(Verdict(OPEN, because), tables, dict(volatility=figure))
