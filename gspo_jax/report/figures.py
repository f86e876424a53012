"""Declares the charts of a report, in the order of the page, and the metrics that they draw.

Titles, notes and labels are printed on the page. Names of metrics are explained in docs/metrics.md.
"""

import dataclasses
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Line:
  """One curve: a metric, optionally with a band between two other metrics."""

  # Name of the metric. `{i}` matches any number, and `{name}` any word. Each match has a curve.
  key: str
  label: str  # Printed name of the curve. Braces are replaced by the matching number or word.
  # A colour of static/style.css. A key with braces has `sequence` (shades of one colour), `cycle`
  # (all colours in turn) or `stage` (the colours of STAGE_COLORS) instead.
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
  phases: tuple[str, ...] = ("rl",)  # The chart shows metrics of these phases.
  unit: str = "number"  # Format of values: number, percent, seconds or ratio.
  kind: str = "line"  # "line", "stack" (bars), or "heat" (a row of colours for each curve).
  zero: bool = True  # Whether the axis always includes 0.
  wide: bool = False  # Whether the chart spans two columns of the page.
  overview: bool = False  # Whether the view "overview" shows this chart too.
  log: bool = True  # Whether the scale is logarithmic if `curves.wants_log` returns True.


@dataclasses.dataclass(frozen=True)
class Section:
  """A heading and its charts, in one of the page's views."""

  view: str  # A key of VIEWS.
  title: str
  note: str  # Printed below the title.
  figures: tuple[Figure, ...]
  # Regular expression. Each matching metric without a declared chart has a chart at the end of the
  # section.
  rest: str = ""


# The views (tabs) of a page in their order. A page opens with the first view.
VIEWS = {
  "overview": "Overview", "responses": "Responses", "learning": "Learning",
  "ratio": "Ratio and clipping", "router": "Router", "speed": "Speed and memory", "other": "More",
}  # fmt: skip
BOTH = ("sft", "rl")
# Phases with evaluations: during training, or in a run that only evaluates.
HELD_OUT = ("rl", "eval")
# Order of the stages in a bar. The stage NAME has the metric time/NAME. Stages that are not in this
# list follow in alphabetical order.
STAGES = (
  *("compile", "wait_for_sampler", "sample", "score", "logp", "update", "publish", "evaluate"),
  *("save", "report", "restart", "wait"),
)


# The colour of each stage, in all charts. Successive stages have different colours.
STAGE_COLORS = dict(
  compile="grey", wait_for_sampler="green", sample="pink", score="teal", logp="orange",
  update="violet", publish="green", evaluate="blue", save="teal", report="amber",
  restart="orange", wait="green",
)  # fmt: skip


def stage_order(stage: str) -> tuple[int, str]:
  """Returns a sort key for stages: the order of STAGES, then names."""
  return STAGES.index(stage) if stage in STAGES else len(STAGES), stage


# Label and colour of each outcome of the verifier.
OUTCOMES = {
  "right": "right teal", "wrong": "wrong grey", "unparsable": "unparsable violet",
  "error": "error pink", "timeout": "timeout amber", "memory": "memory green",
  "crash": "crash orange",
}  # fmt: skip
# Metrics without a chart: the time of day; volatility by layer and mini-batch (too many curves).
UNDRAWN = re.compile(r"minibatch/\d+/router/volatility/layer_\d+|wall/clock")


def _chart(
  title: str, note: str, lines: Mapping[str, str] | str, band: tuple[str, str] = ("", ""), **options
) -> Figure:
  """Builds a chart.

  Args:
    title: title of the chart.
    note: text below the title.
    lines: the metric of a single curve, or a dict for several curves. Its keys are metrics. Its
      values are "LABEL COLOR", the label and the colour of a curve.
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
  line = {f"by_length/{key}/le_{{i}}": "up to {i} tokens sequence"}
  return _chart(f"{title} by length", note, line, **options)


def _by_segment(title: str, note: str, key: str, **options) -> tuple[Figure, Figure]:
  """Builds a chart by third of the segments, and a chart by segment number."""
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
      "mean over the problems; the band is the 95% interval of avg@k",
      {"eval/accuracy": "avg@k blue", "eval/greedy": "greedy orange"},
      ("eval/accuracy/low", "eval/accuracy/high"), phases=HELD_OUT, unit="percent", zero=False,
      wide=True, overview=True, log=False,
    ),
    _chart("Reward",
           "mean and standard deviation over the responses of a rollout, and mean over the held-out"
           " responses",
           {"reward/mean": "mean blue", "reward/std": "std grey",
            "eval/reward/mean": "held out orange"}, phases=HELD_OUT, overview=True, log=False),
    _chart("Entropy", "nats per token", "entropy", overview=True),
    _chart("Response length", "tokens; the held-out curve is a mean",
           {"response_length/mean": "mean blue", "response_length/max": "longest grey",
            "eval/response_length/mean": "held out orange"}, phases=HELD_OUT, log=False),
    _chart(
      "Wasted samples",
      "shares of the responses or, for “equal rewards”, of the groups. In a group with equal"
      " rewards, all advantages are 0. A response has no verdict if the verifier failed.",
      {"truncated_fraction": "truncated orange", "groups_without_spread": "equal rewards violet",
       "verifier/unknown": "no verdict pink",
       "eval/truncated_fraction": "truncated, held out amber"}, phases=HELD_OUT, unit="percent",
      log=False,
    ),
    *(_chart(f"Verifier{suffix}", "share of each outcome in the responses",
             {f"{prefix}verifier/{name}": color for name, color in OUTCOMES.items()},
             unit="percent", kind="stack")
      for suffix, prefix in (("", ""), (", held out", "eval/"))),
    _chart("Conversations", "metrics of the environment; means over the conversations of a rollout",
           {"environment/{name}": "{name} cycle"}),
    _chart("Tool calls", "mean number in a conversation",
           {"environment/tool_calls": "rollouts blue", "eval/tool_calls": "held out orange"},
           phases=HELD_OUT, log=False),
    _by_length("Reward", "mean over the responses of each length class", "reward", log=False),
    _by_length("Responses", "share of each length class in the trained responses", "responses",
               unit="percent", log=False),
    rest="(eval|verifier)/.+",
  ),
  _section(
    "learning", "Optimisation", "",
    _chart("Gradient norm", "largest norm of an iteration's updates, before clipping", "grad_norm",
           overview=True),
    _chart("Loss", "the negated objective", "loss", zero=False),
    _by_minibatch("Loss", "", "loss", zero=False),
    _chart("Advantage",
           "before the updates; the band is from the smallest to the largest advantage",
           {"advantage/mean": "mean blue", "advantage/std": "std grey"},
           ("advantage/min", "advantage/max"), log=False),
    _chart("Learning rate", "", "learning_rate", log=False),
    _chart("Skipped updates", "number of updates so far whose loss or gradient was not finite",
           "updates_skipped", phases=BOTH),
  ),
  _section(
    "learning", "Critic", "The value function is trained together with the policy.",
    _chart("Explained variance",
           "explained share of the returns' variance; 1 for perfect values, 0 for constant values",
           "value/explained_variance", log=False),
    _chart("Values and returns", "means over the trained tokens",
           {"value/mean": "values blue", "return/mean": "returns orange"}, zero=False, log=False),
    _chart("Value loss", "mean over the updates", "value/loss"),
    _chart("Gradient norm of the critic",
           "largest norm of an iteration's updates, before clipping", "value/grad_norm"),
    rest="(value|return)/.+",
  ),
  _section(
    "learning", "Distillation",
    "The policy is compared with its teacher on the policy's own responses.",
    _chart("Reverse KL divergence", "nats per token, estimated before the updates",
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
    "The importance ratio compares the policy with the old policy: with the sampler or, with"
    " objective.old_logp=recompute, with the trainer before the updates.",
    _chart("Importance ratio", "mean; the band is from the smallest to the largest ratio",
           {"ratio/mean": "mean blue"}, ("ratio/min", "ratio/max"), unit="ratio", zero=False,
           wide=True),
    _chart("Deviation of the ratio", "over all mini-batches of an iteration",
           {"ratio/std": "std violet", "ratio/deviation": "mean |ratio − 1| blue"}),
    _by_minibatch("Ratio deviation", "mean |ratio − 1| at each update", "ratio/deviation"),
    _by_minibatch("Ratio std", "standard deviation at each update", "ratio/std"),
    _by_length("Std of log s",
               "log s is the mean log-ratio of a response's tokens. The standard deviation is over"
               " the responses of a length class.",
               "log_ratio_std"),
    _chart("Effective length",
           "mean number of tokens that carry a response's log-ratio, (Σ |log w|)² / Σ (log w)²,"
           " where w is the ratio of a token",
           "ratio/effective_length"),
  ),
  _section(
    "ratio", "Clipping", "A is the advantage. CISPO clips at both bounds for either sign of A.",
    *(_chart(f"Clipped {x}s", note, {
        f"clip_fraction/{x}": "all blue", f"clip_fraction/{x}/low": "low (A < 0) teal",
        f"clip_fraction/{x}/high": "high (A > 0) orange"}, unit="percent", overview=x == "token")
      for x, note in (("sequence", "share of clipped tokens in a response; mean over responses"),
                      ("token", "share of clipped tokens"))),
    *(_by_minibatch(f"Clipped {x}s", "share at each update", f"clip_fraction/{x}", unit="percent")
      for x in ("sequence", "token")),
    *(_by_minibatch(f"Tokens clipped {side}", f"share of tokens clipped at {bound}, at each update",
                    f"clip_fraction/token/{side}", unit="percent")
      for side, bound in (("high", "the upper bound, where A > 0"),
                          ("low", "the lower bound, where A < 0"),
                          ("dual", "the ratio objective.dual_clip, where A < 0"))),
    _by_length("Clipped tokens", "share of clipped tokens in the responses of each length class",
               "clip_fraction", unit="percent"),
    _chart("Clip range",
           "distance from ratio 1 (GMPO: log-ratio 0; DPPO: divergence 0) to the nearer clip bound",
           "clip_range"),
    rest="(clip_fraction|ratio)/.+",
  ),
  _section(
    "ratio", "Segments",
    "A segment is a part of a response with its own importance ratio. Charts show segments by third"
    " (of the segments of a response), or by their number in the response.",
    *_by_segment("Clipped segments", "share of clipped segments", "clip_fraction", unit="percent"),
    *_by_segment("Gradient of segments",
                 "mean over the segments. The gradient of a segment is the sum of |∂ loss/∂ log π|"
                 " over its tokens, where π is the probability of a token.",
                 "gradient"),
    *_by_segment("Std of segments' ratios", "standard deviation over the segments", "ratio_std"),
    _chart("Segments", "mean number of segments in a response, and of tokens in a segment",
           {"segment/count": "segments blue", "segment/length": "tokens orange"}),
  ),
  _section(
    "ratio", "KL divergence", "",
    _chart("KL to the sampling policy", "estimators k1 and k3, nats per token",
           {"kl/k1": "k1 grey", "kl/k3": "k3 blue"}, zero=False),
    _by_minibatch("KL", "estimator k3 at each update, nats per token", "kl/k3"),
    rest="kl/.+",
  ),
  _section(
    "ratio", "Sampler against trainer",
    "Before the first update, sampler and trainer compute two log-probabilities of each token with"
    " the same weights. The two differ by rounding. In the first two charts, only the curve “new to"
    " old policy” shows an effect of the updates.",
    _chart("Sampler against trainer",
           "|difference| of a token's two log-probabilities. For the curve “per sequence”, the"
           " differences are first averaged over the tokens of a response.",
           {"mismatch/abs/mean": "mean blue", "mismatch/sequence/abs/mean": "per sequence teal",
            "mismatch/abs/max": "largest orange"}),
    _chart("Tail of ratios", "share of tokens with a ratio above 2 or below 1/2",
           {"mismatch/tail": "trainer to sampler blue", "ratio/tail": "new to old policy orange"},
           unit="percent"),
    _chart("Probe after publication",
           "mean |difference| between the engine's and the trainer's log-probabilities on fixed"
           " prompts",
           {"engine/probe/mean": "worst server blue"}),
    rest="(mismatch|correction)/.+",
  ),
  _section(
    "ratio", "Asynchrony", "Age of the weights that sampled the training data.",
    _chart("Lag", "age of the weights, in iterations",
           {"lag/{name}": "{name} cycle"}, log=False),
    rest="(lag|by_age|off_policy)/.+",
  ),
  _section(
    "router", "Volatility",
    "Volatility is the share of a token's experts that changed since the rollout. According to the"
    " GSPO paper, such changes make the training of mixture-of-experts models unstable.",
    _chart("Volatility by layer", "mean over all mini-batches; a row for each layer with experts",
           {"router/volatility/layer_{i}": "layer {i} sequence"}, unit="percent", kind="heat",
           wide=True),
    _chart("Volatility", "mean over all mini-batches",
           {f"router/volatility/{key}": text for key, text in {
             "mean": "mean blue", "max_layer": "largest layer orange"}.items()}, unit="percent",
           overview=True),
    *(_by_minibatch(f"Volatility{suffix}", "share of changed experts at each update",
                    f"router/volatility/{key}", unit="percent")
      for suffix, key in (("", "mean"), (" of the largest layer", "max_layer"))),
  ),
  _section(
    "router", "Load and entropy", "",
    _chart("Load balance", "1 if all experts have the same load", "router/load_balance",
           phases=BOTH, zero=False, log=False),
    _chart("Busiest expert", "largest share of a layer's assignments that go to one expert",
           "router/busiest_expert", phases=BOTH, unit="percent", zero=False, log=False),
    _chart("Router entropy", "nats; mean over tokens and layers", "router/entropy", phases=BOTH,
           zero=False, log=False),
    _chart("Router z-loss", "before multiplication by its coefficient", "router/z", phases=BOTH,
           zero=False),
    _chart("Dropped tokens", "dropped by experts; must be 0", "router/dropped_tokens", phases=BOTH),
  ),
  _section(
    "router", "Replay",
    "Sampler and trainer may choose different experts for a token. If experts are replayed, the"
    " charts of volatility compare the replayed experts with the router's own choice.",
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
    _chart("Goodput", "share of each stage in the wall time since the run's first start",
           {"goodput/{name}": "{name} stage"}, unit="percent", kind="stack", phases=BOTH,
           log=False),
    _chart("Useful time",
           "share of the wall time that sampling, scoring, log-prob passes and updates take",
           "goodput", unit="percent", phases=BOTH, zero=False, log=False),
    _chart("Wall time", "seconds since the run's first start, including interruptions",
           "wall/seconds", unit="seconds", phases=BOTH, log=False),
    _chart("Within sampling", "seconds of each part of sampling, per step",
           {"time/sample/{name}": "{name} cycle"}, unit="seconds"),
    _chart("Beside the updates", "stages of a sampler on separate devices, seconds per batch",
           {"time/sampler/{name}": "{name} stage"}, unit="seconds", kind="stack"),
    _chart("Throughput", "sampled tokens per second of an iteration, and per second of decoding",
           {"tokens_per_second": "iteration blue", "tokens_per_second/decode": "decoding teal"}),
    _chart("Checkpoint", "seconds until a checkpoint is on disk, while training continues",
           "checkpoint/seconds", unit="seconds", phases=BOTH),
    rest="(time|wall)/.+",
  ),
  _section(
    "speed", "Utilisation and memory", "",
    _chart("Model FLOPs utilisation", "share of the devices' peak FLOP/s that the updates reach",
           "mfu/update", unit="percent"),
    _chart("FLOPS", "floating-point operations of the model per second of the updates",
           "flops_per_second/update"),
    _chart("Peak memory", "largest memory in use since the process started, in GiB",
           {"memory/device_peak_gib": "device blue", "memory/host_peak_gib": "host orange"}),
    _chart("Padding", "share of positions without a token in the batches of the updates",
           "padding", unit="percent", log=False),
    _chart("Tokens so far", "sampled since the first iteration", "total/tokens", log=False),
    _chart("FLOPs so far",
           "the model's operations in sampling, passes without gradient and updates",
           "total/flops", log=False),
    rest="(mfu|flops_per_second|memory|total|checkpoint)/.+",
  ),
  _section(
    "speed", "Sampler and engine", "",
    _chart("Slots and prefill",
           "share of decoding slots in use, and share of prefilled positions that have a token",
           {"sampling/slot_utilisation": "slots blue",
            "sampling/prefill_utilisation": "prefill teal"}, unit="percent", log=False),
    rest="(sampling|engine)(/.+)?",
  ),
)  # fmt: skip
