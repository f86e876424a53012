"""What a run's report draws: each chart, with the metrics it shows, in the order of the page."""

import dataclasses
from typing import Any


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
  phases: tuple[str, ...]
  lines: tuple[Line, ...]
  unit: str = "number"  # number, percent, seconds, ratio: how values are written
  kind: str = "line"  # or "stack"
  zero: bool = False  # the axis includes 0
  wide: bool = False


@dataclasses.dataclass(frozen=True)
class Section:
  """A heading and its charts."""

  title: str
  note: str
  figures: tuple[Figure, ...]


def _clip(level: str, note: str) -> Figure:
  key = f"clip_fraction/{level}"
  lines = (
    Line(key, "all", "blue"),
    Line(f"{key}/low", "low (A < 0)", "teal"),
    Line(f"{key}/high", "high (A > 0)", "orange"),
  )
  return Figure(f"Clipped {level}s", note, ("rl",), lines, "percent", zero=True)


def _per_minibatch(
  title: str, note: str, key: str, unit: str = "number", zero: bool = True
) -> Figure:
  lines = (Line(f"minibatch/{{i}}/{key}", "mini-batch {i}", "sequence"),)
  return Figure(title, note, ("rl",), lines, unit, zero=zero)


def _plain(title: str, note: str, key: str, phase: str = "rl", **options: Any) -> Figure:
  line = Line(key, title.lower(), "blue" if phase == "rl" else "amber")
  return Figure(title, note, (phase,), (line,), **options)


def _both(title: str, note: str, *lines: Line, **options: Any) -> Figure:
  return Figure(title, note, ("sft", "rl"), lines, **options)


def _router(title: str, note: str, key: str, **options: Any) -> Figure:
  return _both(title, note, Line(f"router/{key}", key, "blue"), **options)


# Colours of the stages of a step, in the order in which they run; others follow by name.
STAGES = ("sample", "score", "logp", "update", "publish", "evaluate", "save", "report")
TIMES = (Line("time/{name}", "{name}", "cycle"),)
OUTCOMES = tuple(
  Line(f"verifier/{name}", name, color)
  for name, color in zip(
    ("right", "wrong", "unparsable", "timeout", "crash"),
    ("teal", "grey", "violet", "amber", "orange"),
  )
)
ACCURACY = Line("eval/accuracy", "avg@k", "blue", "eval/accuracy/low", "eval/accuracy/high")

SECTIONS = (
  Section(
    "Learning",
    "",
    (
      Figure(
        "Held-out accuracy",
        "average over k samples per held-out problem, with its confidence interval, and greedy",
        ("sft", "rl"),
        (ACCURACY, Line("eval/greedy", "greedy", "orange")),
        "percent",
        wide=True,
      ),
      Figure(
        "Reward",
        "mean over the responses of a rollout",
        ("rl",),
        (Line("reward/mean", "mean", "blue"), Line("reward/std", "std", "grey")),
        zero=True,
      ),
      Figure(
        "Conversations",
        "what environments report, by name; mean over the conversations of a rollout",
        ("rl",),
        (Line("environment/{name}", "{name}", "cycle"),),
        zero=True,
      ),
      Figure(
        "Response length",
        "tokens",
        ("rl",),
        (
          Line("response_length/mean", "mean", "blue"),
          Line("response_length/max", "longest", "grey"),
          Line("eval/response_length/mean", "held out", "orange"),
        ),
        zero=True,
      ),
      _plain("Entropy", "nats per token", "entropy", zero=True),
      Figure(
        "Wasted samples",
        "responses cut at the limit; groups whose rewards are all equal, so without advantage",
        ("rl",),
        (
          Line("truncated_fraction", "truncated", "orange"),
          Line("eval/truncated_fraction", "truncated, held out", "amber"),
          Line("groups_without_spread", "no spread", "violet"),
        ),
        "percent",
        zero=True,
      ),
      Figure(
        "Verifier",
        "a crash or a timeout is not a wrong answer",
        ("rl",),
        OUTCOMES,
        "percent",
        "stack",
      ),
    ),
  ),
  Section(
    "Ratio and clipping",
    "How far the policy moves from the one that sampled, and what clipping makes of it.",
    (
      Figure(
        "Importance ratio",
        "mean, with the band from smallest to largest",
        ("rl",),
        (Line("ratio/mean", "mean", "blue", "ratio/min", "ratio/max"),),
        "ratio",
      ),
      Figure(
        "Spread of the ratio",
        "over all mini-batches",
        ("rl",),
        (Line("ratio/std", "std", "violet"), Line("ratio/deviation", "mean |ratio − 1|", "blue")),
        zero=True,
      ),
      _per_minibatch(
        "Ratio deviation by mini-batch", "mean |ratio − 1| of each update", "ratio/deviation"
      ),
      _clip("sequence", "share of responses outside the clip range"),
      _clip("token", "share of tokens outside it"),
      Figure(
        "Sampler against trainer",
        "|difference| of their log-probabilities of the same tokens",
        ("rl",),
        (
          Line("mismatch/abs/mean", "mean", "blue"),
          Line("mismatch/sequence/abs/mean", "per sequence", "teal"),
          Line("mismatch/abs/max", "largest", "orange"),
        ),
        zero=True,
      ),
      _per_minibatch(
        "Clipped sequences by mini-batch",
        "share of each update",
        "clip_fraction/sequence",
        "percent",
      ),
      _per_minibatch(
        "Clipped tokens by mini-batch", "share of each update", "clip_fraction/token", "percent"
      ),
      Figure(
        "KL to the sampling policy",
        "estimators k1 and k3, nats per token",
        ("rl",),
        (Line("kl/k1", "k1", "teal"), Line("kl/k3", "k3", "blue")),
      ),
    ),
  ),
  Section(
    "Optimisation",
    "",
    (
      _plain("Loss", "the negated objective", "loss"),
      _per_minibatch("Loss by mini-batch", "", "loss", zero=False),
      _plain("Gradient norm", "before clipping", "grad_norm", zero=True),
      _plain("Learning rate", "", "learning_rate", zero=True),
      _plain("Skipped updates", "of a step, not applied", "updates_skipped", zero=True),
    ),
  ),
  Section(
    "Router",
    "",
    (
      _router("Load balance", "1 is even", "load_balance"),
      _router("Router entropy", "nats", "entropy"),
      _router("Busiest expert", "its share of the tokens", "busiest_expert", unit="percent"),
      _router("Router z-loss", "before its coefficient", "z"),
      _router("Dropped tokens", "must be 0", "dropped_tokens", zero=True),
    ),
  ),
  Section(
    "Time",
    "",
    (
      Figure("Time per stage", "seconds per step", ("rl",), TIMES, "seconds", "stack", wide=True),
      _plain("Throughput", "tokens per second", "tokens_per_second", zero=True),
      _both(
        "Model FLOPs utilisation",
        "of the update: its share of what the devices could do",
        Line("mfu/update", "update", "blue"),
        unit="percent",
        zero=True,
      ),
      _both(
        "FLOPS",
        "floating-point operations per second of the update",
        Line("flops_per_second/update", "update", "blue"),
        zero=True,
      ),
      _both(
        "Peak memory",
        "GiB, since the start",
        Line("memory/device_peak_gib", "device", "blue"),
        Line("memory/host_peak_gib", "host", "orange"),
        zero=True,
      ),
      _both(
        "Checkpoint",
        "seconds until it is on disk, in the background",
        Line("checkpoint/seconds", "checkpoint", "blue"),
        unit="seconds",
        zero=True,
      ),
    ),
  ),
  Section(
    "Cold start",
    "Supervised fine-tuning on demonstrations, before any reinforcement learning.",
    (
      _plain("Loss", "cross-entropy, nats per token", "loss", "sft", zero=True),
      _plain("Token accuracy", "", "accuracy", "sft", unit="percent"),
      _plain("Entropy", "nats per token", "entropy", "sft", zero=True),
      _plain("Gradient norm", "before clipping", "grad_norm", "sft", zero=True),
      _plain("Learning rate", "", "learning_rate", "sft", zero=True),
      _plain("Throughput", "tokens per second", "tokens_per_second", "sft", zero=True),
      _plain("Response length", "held out, tokens", "eval/response_length/mean", "sft", zero=True),
      Figure("Time per stage", "seconds per step", ("sft",), TIMES, "seconds", "stack"),
    ),
  ),
)
