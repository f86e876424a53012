"""The charts of a report: each with the metrics it shows, in the order of the page."""

import dataclasses
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Line:
  """One curve: a metric, optionally with a band between two others."""

  key: str  # `{i}` stands for any index, `{name}` for any name: one curve each
  label: str
  color: str  # one of the template; `sequence`: shades of one; `cycle`: one after the other
  low: str = ""
  high: str = ""


@dataclasses.dataclass(frozen=True)
class Figure:
  """One chart. Curves whose metric the run does not have are left out, and so are empty charts."""

  title: str
  note: str
  lines: tuple[Line, ...]
  phases: tuple[str, ...] = ("rl",)
  unit: str = "number"  # number, percent, seconds, ratio: how values are written
  kind: str = "line"  # or "stack"
  zero: bool = True  # the axis includes 0
  wide: bool = False


@dataclasses.dataclass(frozen=True)
class Section:
  """A heading and its charts."""

  title: str
  note: str
  figures: tuple[Figure, ...]


BOTH = ("sft", "rl")
HELD_OUT = ("rl", "eval")  # while training, or alone
# Colours of the stages of a step, in the order in which they run; others follow by name.
# As many curves as mini-batches times layers: metrics.jsonl has them, the page does not.
UNDRAWN = re.compile(r"minibatch/\d+/router/volatility/layer_\d+")
STAGES = ("sample", "score", "logp", "update", "publish", "evaluate", "save", "report")


def _chart(
  title: str, note: str, lines: Mapping[str, str] | str, band: tuple[str, str] = ("", ""), **options
) -> Figure:
  """A chart of `{metric: "label color"}`, or of one metric; `band` is that of the first line."""
  if isinstance(lines, str):
    color = "amber" if options.get("phases") == ("sft",) else "blue"
    lines = {lines: f"{title.lower()} {color}"}
  split = [(key, *text.rsplit(" ", 1)) for key, text in lines.items()]
  bands = [band] + [("", "")] * len(split)
  found = tuple(Line(*line, *edges) for line, edges in zip(split, bands))
  return Figure(title, note, found, **options)


def _by_minibatch(title: str, note: str, key: str, **options) -> Figure:
  line = {f"minibatch/{{i}}/{key}": "mini-batch {i} sequence"}
  return _chart(f"{title} by mini-batch", note, line, **options)


def _by_length(title: str, note: str, key: str, **options) -> Figure:
  line = {f"by_length/{key}/le_{{i}}": "to {i} tokens sequence"}
  return _chart(f"{title} by length", note, line, **options)


def _section(title: str, note: str, *figures: Figure) -> Section:
  return Section(title, note, figures)


SECTIONS = (
  _section(
    "Learning", "",
    _chart(
      "Held-out accuracy",
      "average over k samples per held-out problem, with its confidence interval, and greedy",
      {"eval/accuracy": "avg@k blue", "eval/greedy": "greedy orange"},
      ("eval/accuracy/low", "eval/accuracy/high"), phases=HELD_OUT, unit="percent", zero=False,
      wide=True,
    ),
    _chart("Reward", "mean over the responses of a rollout",
           {"reward/mean": "mean blue", "reward/std": "std grey"}),
    _chart("Conversations",
           "what environments report, by name; mean over the conversations of a rollout",
           {"environment/{name}": "{name} cycle"}),
    _chart("Response length", "tokens",
           {"response_length/mean": "mean blue", "response_length/max": "longest grey",
            "eval/response_length/mean": "held out orange"}, phases=HELD_OUT),
    _by_length("Reward", "mean over responses of so many tokens", "reward"),
    _by_length("Responses", "share of the responses", "responses", unit="percent"),
    _chart("Entropy", "nats per token", "entropy"),
    _chart(
      "Wasted samples",
      "responses cut at the limit, or without a verdict because the verifier failed; groups whose"
      " rewards are all equal, so without advantage",
      {"truncated_fraction": "truncated orange", "groups_without_spread": "equal rewards violet",
       "verifier/unknown": "no verdict pink",
       "eval/truncated_fraction": "truncated, held out amber"}, phases=HELD_OUT, unit="percent",
    ),
    _chart(
      "Verifier", "share of the responses by outcome",
      {"verifier/right": "right teal", "verifier/wrong": "wrong grey",
       "verifier/unparsable": "unparsable violet", "verifier/error": "error pink",
       "verifier/timeout": "timeout amber", "verifier/memory": "memory green",
       "verifier/crash": "crash orange"}, unit="percent", kind="stack",
    ),
  ),
  _section(
    "Ratio and clipping",
    "How far the policy moves from the one that sampled, and what clipping makes of it.",
    _chart("Importance ratio", "mean, with the band from smallest to largest",
           {"ratio/mean": "mean blue"}, ("ratio/min", "ratio/max"), unit="ratio", zero=False),
    _chart("Deviation of the ratio", "over all mini-batches",
           {"ratio/std": "std violet", "ratio/deviation": "mean |ratio − 1| blue"}),
    _by_minibatch("Ratio deviation", "mean |ratio − 1| of each update", "ratio/deviation"),
    _by_minibatch("Ratio std", "of each update", "ratio/std"),
    _by_length("Std of log s", "the mean log-ratio of a response, over responses of so many tokens",
               "log_ratio_std"),
    _chart("Effective length", "tokens that make up the log-ratio of a response",
           "ratio/effective_length"),
    *(_chart(f"Clipped {x}s", f"share of {what} outside the clip range",
             {f"clip_fraction/{x}": "all blue", f"clip_fraction/{x}/low": "low (A < 0) teal",
              f"clip_fraction/{x}/high": "high (A > 0) orange"}, unit="percent")
      for x, what in (("sequence", "responses"), ("token", "tokens"))),
    _chart("Sampler against trainer", "|difference| of their log-probabilities of the same tokens",
           {"mismatch/abs/mean": "mean blue", "mismatch/sequence/abs/mean": "per sequence teal",
            "mismatch/abs/max": "largest orange"}),
    *(_by_minibatch(f"Clipped {x}s", "share of each update", f"clip_fraction/{x}", unit="percent")
      for x in ("sequence", "token")),
    *(_by_minibatch(f"Tokens clipped {side}", f"A {sign} 0; share of each update",
                    f"clip_fraction/token/{side}", unit="percent")
      for side, sign in (("high", ">"), ("low", "<"), ("dual", "<"))),
    _by_length("Clipped tokens", "share of the tokens", "clip_fraction", unit="percent"),
    _chart("KL to the sampling policy", "estimators k1 and k3, nats per token",
           {"kl/k1": "k1 teal", "kl/k3": "k3 blue"}, zero=False),
    _by_minibatch("KL", "estimator k3 at each update, nats per token", "kl/k3"),
  ),
  _section(
    "Optimisation", "",
    _chart("Loss", "the negated objective", "loss", zero=False),
    _by_minibatch("Loss", "", "loss", zero=False),
    _chart("Gradient norm", "before clipping", "grad_norm"),
    _chart("Learning rate", "", "learning_rate"),
    _chart("Skipped updates", "of a step, not applied", "updates_skipped", phases=BOTH),
  ),
  _section(
    "Router", "",
    _chart("Load balance", "1 is even", "router/load_balance", phases=BOTH, zero=False),
    _chart("Router entropy", "nats", "router/entropy", phases=BOTH, zero=False),
    _chart("Busiest expert", "its share of the tokens", "router/busiest_expert", phases=BOTH,
           unit="percent", zero=False),
    _chart("Router z-loss", "before its coefficient", "router/z", phases=BOTH, zero=False),
    _chart("Dropped tokens", "must be 0", "router/dropped_tokens", phases=BOTH),
    _chart("Volatility", "share of a token's experts that are others than at rollout time",
           {f"router/volatility/{key}": text for key, text in {
             "mean": "mean blue", "max_layer": "largest layer orange",
             "sampler": "sampler to trainer grey"}.items()}, unit="percent"),
    *(_by_minibatch(f"Volatility{of}", "", f"router/volatility/{key}", unit="percent")
      for of, key in (("", "mean"), (" of the largest layer", "max_layer"))),
    _chart("Volatility by layer", "over all mini-batches",
           {"router/volatility/layer_{i}": "layer {i} sequence"}, unit="percent"),
  ),
  _section(
    "Time", "",
    _chart("Time per stage", "seconds per step", {"time/{name}": "{name} cycle"}, unit="seconds",
           kind="stack", wide=True),
    _chart("Throughput", "tokens per second", "tokens_per_second"),
    _chart("Tokens so far", "sampled since the first iteration", "total/tokens"),
    _chart("FLOPs so far", "of the model: sampling, passes without gradient, updates",
           "total/flops"),
    _chart("Model FLOPs utilisation", "of the update: its share of what the devices could do",
           "mfu/update", unit="percent"),
    _chart("FLOPS", "floating-point operations per second of the update",
           "flops_per_second/update"),
    _chart("Peak memory", "GiB, since the start",
           {"memory/device_peak_gib": "device blue", "memory/host_peak_gib": "host orange"}),
    _chart("Checkpoint", "seconds until it is on disk, in the background", "checkpoint/seconds",
           unit="seconds"),
  ),
  _section(
    "Cold start", "Supervised fine-tuning on demonstrations, before any reinforcement learning.",
    _chart("Loss", "cross-entropy, nats per token", "loss", phases=("sft",)),
    _chart("Entropy", "nats per token", "entropy", phases=("sft",)),
    _chart("Gradient norm", "before clipping", "grad_norm", phases=("sft",)),
    _chart("Learning rate", "", "learning_rate", phases=("sft",)),
  ),
)  # fmt: skip
