"""Declares the charts of a report, in the order of the page, and the metrics that they draw.

Titles, notes and labels are printed on the page. Names of metrics are explained in docs/metrics.md.
"""

import dataclasses
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Line:
  """One curve: a metric, optionally with a band between two other metrics."""

  key: str  # Name of the metric. `{i}` matches any number, `{name}` any word: a curve for each.
  label: str  # Printed name, which may have the same braces.
  # A colour of static/style.css. If the key matches several metrics: `sequence` (shades of one
  # colour), `cycle` (all colours in turn) or `stage` (the colours of STAGE_COLORS).
  color: str
  low: str = ""  # Metric of the band's lower edge; "" for no band.
  high: str = ""  # Metric of the band's upper edge.


@dataclasses.dataclass(frozen=True)
class Figure:
  """One chart.

  The page omits curves of metrics that a run does not have, and charts without curves.
  """

  title: str
  note: str  # Printed below the title.
  lines: tuple[Line, ...]
  phases: tuple[str, ...] = ("rl",)  # Phases of a run whose metrics it shows.
  unit: str = "number"  # Format of values: number, percent, seconds or ratio.
  kind: str = "line"  # "line", "stack" (bars), or "heat" (a row of colours for each curve).
  zero: bool = True  # Whether the axis always includes 0.
  wide: bool = False  # Whether the chart spans two columns of the page.
  overview: bool = False  # Whether the view "overview" shows this chart too.
  log: bool = True  # Whether a log scale is allowed; it is used if `curves.wants_log`.


@dataclasses.dataclass(frozen=True)
class Section:
  """A heading and its charts, in one of the page's views."""

  view: str  # A key of VIEWS.
  title: str
  note: str  # Printed below the title.
  figures: tuple[Figure, ...]
  # Regular expression of further metrics. Each undeclared metric takes a chart at the end.
  rest: str = ""


# The views (tabs) of a page in their order. A page opens with the first.
VIEWS = {
  "overview": "Overview", "responses": "Responses", "learning": "Learning",
  "ratio": "Ratio and clipping", "router": "Router", "speed": "Speed and memory", "other": "More",
}  # fmt: skip
BOTH = ("sft", "rl")
# Phases with evaluations: during training, or in a run that only evaluates.
HELD_OUT = ("rl", "eval")
# Stages of a step in the order of a bar, from metrics time/STAGE. Other stages follow by name.
STAGES = (
  *("compile", "wait_for_sampler", "sample", "score", "logp", "update", "publish", "evaluate"),
  *("save", "report", "restart", "wait"),
)


# A stage has the same colour in all charts. Successive stages have different colours.
STAGE_COLORS = dict(
  compile="grey", wait_for_sampler="green", sample="pink", score="teal", logp="orange",
  update="violet", publish="green", evaluate="blue", save="teal", report="amber",
  restart="orange", wait="grey",
)  # fmt: skip


def stage_order(stage: str) -> tuple[int, str]:
  """Returns a sort key for stages: the order of STAGES, then names."""
  return STAGES.index(stage) if stage in STAGES else len(STAGES), stage


# Labels and colours of the verifier's outcomes.
OUTCOMES = {
  "right": "right teal", "wrong": "wrong grey", "unparsable": "unparsable violet",
  "error": "error pink", "timeout": "timeout amber", "memory": "memory green",
  "crash": "crash orange",
}  # fmt: skip
# Metrics without a chart: the time of day, and the volatility of each layer in each mini-batch.
# The latter would be too many curves.
UNDRAWN = re.compile(r"minibatch/\d+/router/volatility/layer_\d+|wall/clock")


def _chart(
  title: str, note: str, lines: Mapping[str, str] | str, band: tuple[str, str] = ("", ""), **options
) -> Figure:
  """Builds a chart.

  Args:
    title: title of the chart.
    note: text below the title.
    lines: the metric of a single curve; or a dict from the metric of each curve to its label and
      colour, "LABEL COLOR".
    band: metrics of the lower and upper edge of the first curve's band; "" for no band.
    **options: other fields of Figure.
  """
  if isinstance(lines, str):
    color = "amber" if options.get("phases") == ("sft",) else "blue"
    lines = {lines: f"{title.lower()} {color}"}
  split = [(key, *text.rsplit(" ", 1)) for key, text in lines.items()]
  bands = [band] + [("", "")] * len(split)
  curves = tuple(Line(*line, *edges) for line, edges in zip(split, bands))
  return Figure(title, note, curves, **options)


def _by_minibatch(title: str, note: str, key: str, **options) -> Figure:
  """Builds a chart with a curve for each mini-batch."""
  line = {f"minibatch/{{i}}/{key}": "mini-batch {i} sequence"}
  return _chart(f"{title} by mini-batch", note, line, **options)


def _by_length(title: str, note: str, key: str, **options) -> Figure:
  """Builds a chart with a curve for each class of response lengths."""
  line = {f"by_length/{key}/le_{{i}}": "to {i} tokens sequence"}
  return _chart(f"{title} by length", note, line, **options)


def _by_segment(title: str, note: str, key: str, **options) -> tuple[Figure, Figure]:
  """Builds two charts: by third of the response, and by segment."""
  positions = dict(first="blue", middle="violet", last="orange")
  thirds = {f"segment/{key}/{third}": f"{third} {color}" for third, color in positions.items()}
  line = {f"segment/{key}/{{i}}": "number {i} sequence"}
  return (
    _chart(f"{title} by third", note, thirds, **options),
    _chart(f"{title} by number", note, line, **options),
  )


def _section(view: str, title: str, note: str, *figures: Figure, rest: str = "") -> Section:
  return Section(view, title, note, figures, rest)


SECTIONS = (
  _section(
    "learning", "Learning", "",
    _chart(
      "Held-out accuracy",
      "mean over the problems, with the 95% interval",
      {"eval/accuracy": "avg@k blue", "eval/greedy": "greedy orange"},
      ("eval/accuracy/low", "eval/accuracy/high"), phases=HELD_OUT, unit="percent", zero=False,
      wide=True, overview=True, log=False,
    ),
    _chart("Reward", "mean and standard deviation over a rollout; mean over held-out responses",
           {"reward/mean": "mean blue", "reward/std": "std grey",
            "eval/reward/mean": "held out orange"}, phases=HELD_OUT, overview=True, log=False),
    _chart("Entropy", "nats per token", "entropy", overview=True),
    _chart("Response length", "tokens",
           {"response_length/mean": "mean blue", "response_length/max": "longest grey",
            "eval/response_length/mean": "held out orange"}, phases=HELD_OUT, log=False),
    _chart(
      "Wasted samples",
      "shares of responses truncated at the token limit, of responses without a verdict since the"
      " verifier failed, and of groups with equal rewards, so without advantages",
      {"truncated_fraction": "truncated orange", "groups_without_spread": "equal rewards violet",
       "verifier/unknown": "no verdict pink",
       "eval/truncated_fraction": "truncated, held out amber"}, phases=HELD_OUT, unit="percent",
      log=False,
    ),
    *(_chart(f"Verifier{suffix}", "share of the responses by outcome",
             {f"{prefix}verifier/{name}": color for name, color in OUTCOMES.items()},
             unit="percent", kind="stack")
      for suffix, prefix in (("", ""), (", held out", "eval/"))),
    _chart("Conversations",
           "metrics of the environment, means over the conversations of a rollout",
           {"environment/{name}": "{name} cycle"}),
    _chart("Tool calls", "mean per conversation",
           {"environment/tool_calls": "rollouts blue", "eval/tool_calls": "held out orange"},
           phases=HELD_OUT, log=False),
    _by_length("Reward", "mean over the responses of a length", "reward", log=False),
    _by_length("Responses", "share of the responses of a length", "responses", unit="percent",
               log=False),
    rest="(eval|verifier)/.+",
  ),
  _section(
    "learning", "Optimisation", "",
    _chart("Gradient norm", "before clipping", "grad_norm", overview=True),
    _chart("Loss", "the negated objective", "loss", zero=False),
    _by_minibatch("Loss", "", "loss", zero=False),
    _chart("Advantage", "before the updates, with a band from smallest to largest",
           {"advantage/mean": "mean blue", "advantage/std": "std grey"},
           ("advantage/min", "advantage/max"), log=False),
    _chart("Learning rate", "", "learning_rate", log=False),
    _chart("Skipped updates", "number since the start, for a non-finite loss or gradient",
           "updates_skipped", phases=BOTH),
  ),
  _section(
    "learning", "Critic", "The value function, trained beside the policy.",
    _chart("Explained variance", "of the returns: 1 for a perfect critic, 0 for a constant one",
           "value/explained_variance", log=False),
    _chart("Values and returns", "means over the tokens of the updates",
           {"value/mean": "values blue", "return/mean": "returns orange"}, zero=False, log=False),
    _chart("Value loss", "mean over the updates", "value/loss"),
    _chart("Gradient norm of the critic", "before clipping", "value/grad_norm"),
    rest="(value|return)/.+",
  ),
  _section(
    "learning", "Distillation",
    "Distance of the policy from its teacher, on the policy's responses.",
    _chart("Reverse KL divergence", "estimated before the updates, nats per token",
           "distillation/reverse_kl", log=False),
    rest="distillation/.+",
  ),
  _section(
    "learning", "Cold start",
    "Supervised fine-tuning on demonstrations, before any reinforcement learning.",
    _chart("Loss", "cross-entropy, nats per token",
           {"loss": "training amber", "held_out_loss": "held out blue"}, phases=("sft",),
           overview=True),
    _chart("Entropy", "nats per token", "entropy", phases=("sft",), overview=True),
    _chart("Gradient norm", "before clipping", "grad_norm", phases=("sft",), overview=True),
    _chart("Learning rate", "", "learning_rate", phases=("sft",), log=False),
  ),
  _section(
    "ratio", "Ratio",
    "Distance of the policy from the sampling policy.",
    _chart("Importance ratio", "mean, with a band from smallest to largest",
           {"ratio/mean": "mean blue"}, ("ratio/min", "ratio/max"), unit="ratio", zero=False,
           wide=True),
    _chart("Deviation of the ratio", "over all mini-batches",
           {"ratio/std": "std violet", "ratio/deviation": "mean |ratio − 1| blue"}),
    _by_minibatch("Ratio deviation", "mean |ratio − 1| of each update", "ratio/deviation"),
    _by_minibatch("Ratio std", "of each update", "ratio/std"),
    _by_length("Std of log s",
               "log s: mean log-ratio of a response; standard deviation over responses of similar"
               " length",
               "log_ratio_std"),
    _chart("Effective length",
           "(Σ |log w|)² / Σ (log w)² over a response's tokens: how many carry its log-ratio",
           "ratio/effective_length"),
  ),
  _section(
    "ratio", "Clipping", "Shares of clipped responses and tokens.",
    *(_chart(f"Clipped {x}s", f"share of {units} that the loss clips",
             {f"clip_fraction/{x}": "all blue", f"clip_fraction/{x}/low": "low (A < 0) teal",
              f"clip_fraction/{x}/high": "high (A > 0) orange"}, unit="percent",
             overview=x == "token")
      for x, units in (("sequence", "responses"), ("token", "tokens"))),
    *(_by_minibatch(f"Clipped {x}s", "share of each update", f"clip_fraction/{x}", unit="percent")
      for x in ("sequence", "token")),
    *(_by_minibatch(f"Tokens clipped {side}", f"A {sign} 0; share of each update",
                    f"clip_fraction/token/{side}", unit="percent")
      for side, sign in (("high", ">"), ("low", "<"), ("dual", "<"))),
    _by_length("Clipped tokens", "share of the tokens of responses of a length", "clip_fraction",
               unit="percent"),
    _chart("Clip range", "distance of the nearer clip bound from a ratio of 1", "clip_range"),
    rest="(clip_fraction|ratio)/.+",
  ),
  _section(
    "ratio", "Segments",
    "Parts of a response, each with its own importance ratio, by position in the response.",
    *_by_segment("Clipped segments", "share of the segments at a position", "clip_fraction",
                 unit="percent"),
    *_by_segment("Gradient of segments",
                 "sum of |∂ loss/∂ log π| over a segment's tokens, mean over the segments",
                 "gradient"),
    *_by_segment("Std of segments' ratios", "over the segments at a position", "ratio_std"),
    _chart("Segments", "mean number per response, and mean length",
           {"segment/count": "segments blue", "segment/length": "tokens orange"}),
  ),
  _section(
    "ratio", "Distance", "",
    _chart("KL to the sampling policy", "estimators k1 and k3, nats per token",
           {"kl/k1": "k1 grey", "kl/k3": "k3 blue"}, zero=False),
    _by_minibatch("KL", "estimator k3 at each update, nats per token", "kl/k3"),
    rest="kl/.+",
  ),
  _section(
    "ratio", "Sampler against trainer",
    "Log-probabilities of the same tokens with the same weights, before the first update. They"
    " differ by rounding, not by learning. Only the curve “new to old policy” has the effect of"
    " updates.",
    _chart("Sampler against trainer", "|difference| of the two log-probabilities",
           {"mismatch/abs/mean": "mean blue", "mismatch/sequence/abs/mean": "per sequence teal",
            "mismatch/abs/max": "largest orange"}),
    _chart("Tail of ratios", "share of tokens with a ratio above 2 or below 1/2",
           {"mismatch/tail": "trainer to sampler blue", "ratio/tail": "new to old policy orange"},
           unit="percent"),
    _chart("Probe after publication",
           "engine against trainer: mean |difference| of log-probabilities on fixed prompts",
           {"engine/probe/mean": "worst server blue"}),
    rest="(mismatch|correction)/.+",
  ),
  _section(
    "ratio", "Asynchrony", "Age of the weights that sampled the training data.",
    _chart("Lag", "iterations between the sampling weights and the current ones",
           {"lag/{name}": "{name} cycle"}, log=False),
    rest="(lag|by_age|off_policy)/.+",
  ),
  _section(
    "router", "Volatility",
    "Share of a token's experts that changed since the rollout. The GSPO paper explains unstable"
    " training of mixture-of-experts models by it.",
    _chart("Volatility by layer", "a row per layer with experts, over all mini-batches",
           {"router/volatility/layer_{i}": "layer {i} sequence"}, unit="percent", kind="heat",
           wide=True),
    _chart("Volatility", "over all mini-batches",
           {f"router/volatility/{key}": text for key, text in {
             "mean": "mean blue", "max_layer": "largest layer orange"}.items()}, unit="percent",
           overview=True),
    *(_by_minibatch(f"Volatility{suffix}", "share of each update", f"router/volatility/{key}",
                    unit="percent")
      for suffix, key in (("", "mean"), (" of the largest layer", "max_layer"))),
  ),
  _section(
    "router", "Load and entropy", "",
    _chart("Load balance", "1 is even", "router/load_balance", phases=BOTH, zero=False, log=False),
    _chart("Busiest expert", "its share of a layer's assignments", "router/busiest_expert",
           phases=BOTH, unit="percent", zero=False, log=False),
    _chart("Router entropy", "nats", "router/entropy", phases=BOTH, zero=False, log=False),
    _chart("Router z-loss", "before its coefficient", "router/z", phases=BOTH, zero=False),
    _chart("Dropped tokens", "must be 0", "router/dropped_tokens", phases=BOTH),
  ),
  _section(
    "router", "Replay",
    "Difference between the trainer's experts and the sampler's. With replay, the volatility above"
    " compares replayed experts with those that the router would choose itself.",
    _chart("Sampler to trainer", "share of a token's experts that differ before the first update",
           "router/volatility/sampler", unit="percent"),
    rest="router/.+",
  ),
  _section(
    "speed", "Iteration", "",
    _chart("Time per stage", "seconds per step", {"time/{name}": "{name} stage"}, unit="seconds",
           kind="stack", wide=True, overview=True),
    _chart("Time of the cold start", "seconds between two rows of metrics",
           {"time/{name}": "{name} stage"}, unit="seconds", kind="stack", phases=("sft",),
           overview=True),
    _chart("Goodput", "share of the wall time since the first start, by stage",
           {"goodput/{name}": "{name} stage"}, unit="percent", kind="stack", phases=BOTH,
           log=False),
    _chart("Useful time",
           "share of the wall time in sampling, scoring, log-prob passes and updates", "goodput",
           unit="percent", phases=BOTH, zero=False, log=False),
    _chart("Wall time", "seconds since the first start, with pauses between restarts",
           "wall/seconds", unit="seconds", phases=BOTH, log=False),
    _chart("Within sampling", "seconds per step, by part of the sampling",
           {"time/sample/{name}": "{name} cycle"}, unit="seconds"),
    _chart("Beside the updates", "seconds per batch, of a sampler on separate devices",
           {"time/sampler/{name}": "{name} stage"}, unit="seconds", kind="stack"),
    _chart("Throughput", "tokens per second, of an iteration and of decoding alone",
           {"tokens_per_second": "iteration blue", "tokens_per_second/decode": "decoding teal"}),
    _chart("Checkpoint", "seconds until it is on disk; training continues meanwhile",
           "checkpoint/seconds", unit="seconds", phases=BOTH),
    rest="(time|wall)/.+",
  ),
  _section(
    "speed", "Utilisation and memory", "",
    _chart("Model FLOPs utilisation", "of the updates, as a share of the devices' peak",
           "mfu/update", unit="percent"),
    _chart("FLOPS", "floating-point operations per second of the update",
           "flops_per_second/update"),
    _chart("Peak memory", "GiB, since the start",
           {"memory/device_peak_gib": "device blue", "memory/host_peak_gib": "host orange"}),
    _chart("Padding", "share of the updates' positions without a token", "padding",
           unit="percent", log=False),
    _chart("Tokens so far", "sampled since the first iteration", "total/tokens", log=False),
    _chart("FLOPs so far", "of the model: sampling, passes without gradient, updates",
           "total/flops", log=False),
    rest="(mfu|flops_per_second|memory|total|checkpoint)/.+",
  ),
  _section(
    "speed", "Sampler and engine", "",
    _chart("Slots and prefill",
           "share of decoding slots in use, and of prefilled positions with a token",
           {"sampling/slot_utilisation": "slots blue",
            "sampling/prefill_utilisation": "prefill teal"}, unit="percent", log=False),
    rest="(sampling|engine)(/.+)?",
  ),
)  # fmt: skip
