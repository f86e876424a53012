"""Answers at the top of a report: is the run learning, healthy and fast?

An answer is a dict. Its `state` is "good", "bad", "open" (undecided) or "plain" (neutral). The
other fields are the `question`, its `answer`, a reason `because`, and a list of `facts`. The page
prints the facts below the answer. A fact is a dict with a `label`, a `value` and a `unit`. The
value is a number or a text. A fact may also have an initial value, `before`, and a `note`.
"""

import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_jax.report.curves import ByPhase
from gspo_jax.report.figures import stage_order
from gspo_jax.runs.metrics import Row, graded_reward
from gspo_jax.system.text import clock_text, seconds_text

Rows = Sequence[Row]  # Rows of metrics, in the order of steps.

SIGNIFICANT = 2.0  # Number of standard errors above which a change of the reward is significant.
ACCURACY = re.compile(r"eval/(.+/)?accuracy")


def answer(by_phase: ByPhase, alarms: Rows, flat: Mapping[str, Any]) -> list[Row]:
  """Answers three questions about a run.

  Args:
    by_phase: rows of metrics by phase of the run.
    alarms: alarms of the run, from `data.warnings`.
    flat: settings by dotted key.
  """
  return [
    {"question": "Is it learning?", **_learning(by_phase, flat)},
    {"question": "Is it healthy?", **_healthy(by_phase, alarms)},
    {"question": "Is it fast?", **_fast(by_phase)},
  ]


def _learning(by_phase: ByPhase, flat: Mapping[str, Any]) -> Row:
  """Answers by the accuracy of evaluations, else by the reward.

  If the accuracy rose but the reward fell, the state is "bad". If there is a cold start but no
  iteration of RL yet, the answer is about the loss. If the run only evaluates, the state is
  "plain".
  """
  rows = by_phase["rl"]
  evaluated, facts = rows or by_phase["eval"], []
  measured = [row for row in evaluated if row.get("eval/accuracy") is not None]
  keys = {key for row in evaluated for key in row if ACCURACY.fullmatch(key)}
  keys = sorted(keys, key=lambda key: (key != "eval/accuracy", key))
  by_accuracy = _assess_accuracies(evaluated, keys)
  by_reward = assess_reward(rows)
  state, text, because = by_accuracy or by_reward
  if by_accuracy and state == "good" and by_reward[0] == "bad":
    state, text, because = "bad", "It was, but the reward fell", f"{because}; {by_reward[2]}"
  if not rows and by_phase["sft"]:
    state, text, because = assess_loss(by_phase["sft"], flat)
    facts += _change("Loss", _finite(by_phase["sft"], "loss"))
    facts += _change("Held-out loss", _finite(by_phase["sft"], "held_out_loss"))
    facts += [_fact("Target of the held-out loss", x) for x in [flat.get("sft.target_loss")] if x]
  elif not rows and evaluated:
    state, text, because = "plain", "It is evaluated, not trained", "no iterations"
  for key in keys:
    accuracies = _finite(evaluated, key)
    label = f"{_benchmark(key) or 'Held-out accuracy'}, {average(flat, key)}"
    facts += _change(label, accuracies, "percent")
    prefix = key.removesuffix("accuracy")
    latest = next((row for row in reversed(evaluated) if key in row), {})
    if graded_reward(latest, prefix) is not None:
      rewards = _finite(evaluated, f"{prefix}reward/mean")
      facts += _change(f"{_benchmark(key) or 'Held-out problems'}, mean reward", rewards)
  facts += _change("Held-out accuracy, greedy", _finite(evaluated, "eval/greedy"), "percent")
  if len(measured) > 2:
    best = max(measured, key=lambda row: row["eval/accuracy"])
    note = f"at step {best['step']}"
    facts.append(_fact(f"Best, {average(flat)}", best["eval/accuracy"], "percent", note))
  facts += _trend("Reward", rows, "reward/mean")
  facts += _trend("Groups of equal rewards", rows, "groups_without_spread", "percent")
  if rows or by_phase["sft"]:
    trained = rows or by_phase["sft"]
    planned = flat.get("rl.iterations" if rows else "sft.steps")
    total = f" of {planned:,}" if isinstance(planned, int) else ""
    name = "Iterations" if rows else "Updates of the cold start"
    facts.append(_fact(name, f"{trained[-1]['step']:,}{total}"))
  return {"state": state, "answer": text, "because": because, "facts": facts}


def average(flat: Mapping[str, Any], key: str = "eval/accuracy") -> str:
  """Returns the name of a mean accuracy: "avg@4" for four samples, "avg@k" if unknown."""
  benchmark = _benchmark(key)
  k = flat.get(f"eval.benchmarks.{benchmark}.samples" if benchmark else "eval.samples", "k")
  return f"avg@{k}"


def assess_accuracy(rows: Rows, key: str = "eval/accuracy") -> tuple[str, str, str] | None:
  """Returns state, answer and reason, from the first, best and last evaluation.

  Two accuracies differ if their 95% intervals do not overlap. Returns None if fewer than two
  evaluations have intervals.

  key: metric of the accuracy, on the held-out problems or on a benchmark.
  """
  measured = [row for row in rows if None not in map(row.get, (key, f"{key}/low", f"{key}/high"))]
  if len(measured) < 2:
    return None
  first, last, best = measured[0], measured[-1], max(measured, key=lambda row: row[key])

  def is_below(lower: Row, upper: Row) -> bool:
    return lower[f"{key}/high"] < upper[f"{key}/low"]

  def comparison(earlier: Row) -> str:
    shown = (f"{100 * row[key]:.1f}% at step {row['step']}" for row in (earlier, last))
    return f"{_benchmark(key) or 'held-out'} accuracy: {', '.join(shown)}"

  if is_below(last, first):
    return "bad", "No, it got worse", comparison(first)
  if is_below(last, best):
    return "bad", "It was, but accuracy fell again", comparison(best)
  if is_below(first, last):
    return "good", "Yes", f"{comparison(first)}; the 95% intervals do not overlap"
  return "open", "Not shown yet", f"{comparison(first)}; the 95% intervals overlap"


def _assess_accuracies(rows: Rows, keys: Sequence[str]) -> tuple[str, str, str] | None:
  """Assesses the held-out accuracy, else all benchmarks. A fall outweighs a rise."""
  answers = {key: answer for key in keys if (answer := assess_accuracy(rows, key))}
  states = ("bad", "good", "open")
  chosen = min(answers.values(), key=lambda answer: states.index(answer[0]), default=None)
  return answers.get("eval/accuracy", chosen)


def _benchmark(key: str) -> str:
  """Returns the benchmark of an accuracy's key; "" for the held-out problems."""
  return key.removeprefix("eval/").removesuffix("accuracy").rstrip("/")


def assess_reward(rows: Rows) -> tuple[str, str, str]:
  """Returns state, answer and reason, from the first and last rewards.

  Compares the means over the first and the last tenth of the iterations, at least two each. The
  reward changed if the means differ by more than SIGNIFICANT standard errors. With fewer than six
  iterations, the state is "open". The standard deviation of an iteration's reward is the larger of
  two estimates. The first estimate uses differences between successive iterations, since a trend
  hardly affects them. But it is too small if the noise of successive iterations is correlated. So
  the second estimate uses the variances within the two tenths.
  """
  rewards = _finite(rows, "reward/mean")
  if len(rewards) < 6:
    return "open", "Too early to say", "an answer needs two evaluations, or six iterations"
  count = max(2, len(rewards) // 10)
  tenths = rewards[:count], rewards[-count:]
  first, last = map(statistics.fmean, tenths)
  std = math.sqrt(statistics.fmean((b - a) ** 2 for a, b in itertools.pairwise(rewards)) / 2)
  std = max(std, math.sqrt(statistics.fmean(map(statistics.variance, tenths))))
  error = std * math.sqrt(2 / count)
  text = f"training reward: {first:.3g} at first, {last:.3g} at the end; standard error {error:.2g}"
  if abs(last - first) <= SIGNIFICANT * error:
    return "open", "Not shown yet", text
  return ("good", "Yes", text) if last > first else ("bad", "No, the reward fell", text)


def assess_loss(rows: Rows, flat: Mapping[str, Any]) -> tuple[str, str, str]:
  """Returns state, answer and reason of a cold start.

  The loss on held-out demonstrations is assessed like a reward with the opposite sign, and compared
  with `sft.target_loss`. Without held-out demonstrations, the training loss is assessed, but not
  compared with the target.
  """
  held_out = _finite(rows, "held_out_loss")
  name, values = ("held-out loss", held_out) if held_out else ("loss", _finite(rows, "loss"))
  state, text, because = assess_reward([{"reward/mean": -v} for v in values])
  if len(values) > 1:
    because = f"{name}: {values[0]:.3g} at first, {values[-1]:.3g} at the end"
  elif values:
    because = f"{name}: {values[0]:.3g}; an answer needs six rows of metrics"
  target = flat.get("sft.target_loss") or 0
  if held_out and held_out[-1] <= target:
    return "good", "Yes, the loss reached its target", because
  if held_out and target and state == "good" and rows[-1]["step"] == flat.get("sft.steps"):
    return "open", "Yes, but the loss missed its target", because
  return state, "No, the loss rose" if state == "bad" else text, because


def _healthy(by_phase: ByPhase, alarms: Rows) -> Row:
  """Answers by alarms, skipped updates, dropped tokens, gradients and rewards.

  The answer is "No" in any of these cases:

  - an alarm in the last tenth of the rows
  - dropped tokens
  - a non-finite loss or gradient in a row without skipped updates
  - a gradient of 0 in all rows, if there are at least three rows
  - skipped updates in each of the last three rows, or in all rows if there are fewer

  Otherwise the answer is "Look closer" if there were skipped updates or alarms, if the gradient is
  0 in all rows, or if rewards are equal within each group in all rows.
  """
  rows = by_phase["rl"]
  trained = [row for row in rows or by_phase["sft"] if row["step"] > 0]  # Step 0 only evaluates.
  # Cumulative numbers of skipped updates. A resumed run may count from 0 again.
  counts = [row.get("updates_skipped") or 0 for row in trained]
  skipped = [b - a if b >= a else b for a, b in itertools.pairwise([0, *counts])]
  dropped = max(_finite(trained, "router/dropped_tokens"), default=0)
  broken = [  # Steps with a non-finite loss or gradient that was not skipped.
    row["step"]
    for row, count in zip(trained, skipped)
    if not count and any(k in row and not _finite([row], k) for k in ("loss", "grad_norm"))
  ]
  equal = _finite(trained, "groups_without_spread")
  norms = _finite(trained, "grad_norm")
  idle = len(norms) * (not any(norms))
  last = trained[-max(1, len(trained) // 10) :]  # Rows of the last tenth.
  recent = dict.fromkeys(
    alarm["name"]
    for alarm in alarms
    if last and alarm["to"] >= last[0]["step"] and alarm["phase"] == last[-1]["phase"]
  )
  earlier = _count(len(alarms), "alarm")
  problems = [
    ("bad", recent, f"{_count(len(recent), 'alarm')} at the end, listed below"),
    ("bad", dropped, f"experts dropped {_count(dropped, 'token')}"),
    ("bad" if idle > 2 else "open", idle, f"no learning: the gradient was 0 in all {idle} rows"),
    ("bad", broken, f"loss or gradient was not finite in {_count(len(broken), 'row')}"),
    ("open", min(equal, default=0) == 1, "rewards are equal within each group"),
    ("bad" if all(skipped[-3:]) else "open", sum(skipped), _count(sum(skipped), "skipped update")),
    ("open", alarms and not recent, f"{earlier} earlier, none at the end"),
  ]
  states = [state for state, happened, _ in problems if happened]
  because = "; ".join(text for _, happened, text in problems if happened)
  if not trained:
    state, text, because = _nothing_yet(by_phase, "iterations")
  elif not states:
    state, text, because = "good", "Yes", "no alarms, no skipped updates, finite loss and gradient"
  else:
    state, text = ("bad", "No") if "bad" in states else ("open", "Look closer")
  facts = [_fact("Alarms", float(len(alarms)))] if trained else []
  facts += _trend("Tokens clipped", rows, "clip_fraction/token", "percent")
  facts += _trend("Entropy, nats", trained, "entropy")
  facts += _trend("Gradient norm", trained, "grad_norm")
  facts += _trend("Truncated responses", rows, "truncated_fraction", "percent")
  facts += _trend("Changed experts", rows, "router/volatility/mean", "percent")
  facts += _trend("Age of the sampling weights, iterations", rows, "lag/mean")
  return {"state": state, "answer": text, "because": because, "facts": facts}


def _fast(by_phase: ByPhase) -> Row:
  """Answers with the seconds of an iteration, or of an SFT update.

  The seconds are medians over the second half of the rows, since the first iterations compile.
  """
  rows = by_phase["rl"] or by_phase["sft"]
  times = [(step, stages) for step, stages, _ in _stage_times(rows)]
  # Step 0 only evaluates. A row of the cold start covers several updates.
  count, name = (1, "iteration") if by_phase["rl"] else (_updates_per_row(rows), "update")
  timed = [{k: s / count for k, s in stages.items()} for step, stages in times if step > 0]
  typical = _medians(_second_half(timed))
  if not typical:
    state, text, because = _nothing_yet(by_phase, f"timed {name}s")
    return {"state": state, "answer": text, "because": because, "facts": []}
  longest = max(typical, key=typical.get)
  seconds = statistics.median(sum(stages.values()) for stages in _second_half(timed))
  share = typical[longest] / (sum(typical.values()) or 1)
  facts = [_fact(f"Seconds per {name}", seconds, "seconds")]
  facts.append(_fact("Longest stage", f"{longest}, {100 * share:.0f}%"))
  for label, key, unit in (
    ("Tokens per second", "tokens_per_second", "number"),
    ("FLOPs utilisation of updates", "mfu/update", "percent"),
    ("Slots in use", "sampling/slot_utilisation", "percent"),
    ("Padding of updates", "padding", "percent"),
    ("Peak device memory, GiB", "memory/device_peak_gib", "number"),
    ("Peak host memory, GiB", "memory/host_peak_gib", "number"),
  ):
    if values := _finite(_second_half(rows), key):
      facts.append(_fact(label, statistics.median(values), unit))
  facts += [_fact("Goodput", share, "percent") for share in _finite(rows, "goodput")[-1:]]
  total = sum(sum(stages.values()) for step, stages in times if step > 0)
  facts.append(_fact("Time in stages", clock_text(total)))
  answer, most = f"{seconds_text(seconds)} an {name}", seconds_text(typical[longest])
  because = f"{most} for {longest}; medians over the second half of the run"
  return {"state": "plain", "answer": answer, "because": because, "facts": facts}


def _nothing_yet(by_phase: ByPhase, missing: str) -> tuple[str, str, str]:
  """Returns state, answer and reason if rows for an answer are missing.

  missing: what the run needs for an answer, such as "iterations".
  """
  if by_phase["eval"] and not (by_phase["rl"] or by_phase["sft"]):
    return "plain", "Nothing was trained", "the run only evaluates"
  return "open", "Too early to say", f"no {missing} yet"


def _updates_per_row(rows: Rows) -> float:
  """Returns the median number of SFT updates between two rows of metrics."""
  steps = [row["step"] for row in rows]
  return statistics.median([b - a for a, b in itertools.pairwise([0, *steps])]) if rows else 1


def timeline(rows: Rows) -> list[Row]:
  """Returns the times of a typical, the last and the slowest iteration.

  The typical iteration has the median time of each stage over the second half of the run. The
  slowest iteration is omitted if it is also the last. Each iteration lists its stages in the order
  of a step. Each stage lists the times of its parts.
  """
  timed = _stage_times(rows)
  timed = [times for times in timed if times[0] > 0] or timed  # Step 0 only evaluates.
  if not timed:
    return []
  _, *later = zip(*_second_half(timed))
  slowest = max(timed, key=lambda times: sum(times[1].values()))
  iterations = {"typical": (None, *map(_medians, later)), "last": timed[-1]}
  if slowest is not timed[-1]:
    iterations["slowest"] = slowest

  def describe_stage(stage: str, seconds: float, parts: Mapping[str, float]) -> Row:
    prefix = f"{stage}/"
    own_parts = [
      [k.removeprefix(prefix), s] for k, s in parts.items() if k.startswith(prefix) and s > 0
    ]
    return {"name": stage, "seconds": seconds, "parts": own_parts}

  return [
    {
      "name": name,
      "step": step,
      "stages": [
        describe_stage(stage, stages[stage], parts)
        for stage in sorted(stages, key=stage_order)
        if stages[stage] > 0
      ],
    }
    for name, (step, stages, parts) in iterations.items()
  ]


def _stage_times(rows: Rows) -> list[tuple[int, dict[str, float], dict[str, float]]]:
  """Returns (step, seconds by stage, seconds by part) of each row with times.

  The names of parts begin with the stage: "sample/decode".
  """
  timed = []
  for row in rows:
    times = {k[5:]: v for k, v in row.items() if k.startswith("time/") and v is not None}
    stages = {name: v for name, v in times.items() if "/" not in name}
    if stages:
      timed.append((row["step"], stages, {name: v for name, v in times.items() if "/" in name}))
  return timed


def _second_half(items: Sequence[Any]) -> Sequence[Any]:
  """Returns the second half of a run, since the first iterations compile."""
  return items[len(items) // 2 :]


def _medians(iterations: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Returns the median by name; a missing value counts as 0."""
  names = dict.fromkeys(name for times in iterations for name in times)
  return {name: statistics.median(times.get(name, 0.0) for times in iterations) for name in names}


def _count(number: float, noun: str) -> str:
  """Formats a number with its noun, e.g. "2 alarms"."""
  return f"{number:g} {noun}{'' if number == 1 else 's'}"


def _fact(label: str, value: float | str, unit: str = "number", note: str = "") -> Row:
  """Returns a fact; see the module's docstring."""
  return {"label": label, "value": value, "unit": unit} | ({"note": note} if note else {})


def _change(label: str, values: Sequence[float], unit: str = "number") -> list[Row]:
  """Returns a list with one fact, the last value.

  If there are several values, `before` is the first. Returns [] if there is no value.
  """
  if len(values) < 2:
    return [_fact(label, value, unit) for value in values]
  return [_fact(label, values[-1], unit) | {"before": values[0]}]


def _trend(label: str, rows: Rows, key: str, unit: str = "number") -> list[Row]:
  """Returns a list with one fact, the mean of a metric's last values.

  The mean is over the last tenth of the values. `before` is the mean over the first tenth. Returns
  [] if the metric has no values.
  """
  values = _finite(rows, key)
  count = max(1, len(values) // 10)
  tenths = (values[:count], values[-count:]) if len(values) > 1 else (values,) * len(values)
  return _change(label, [statistics.fmean(tenth) for tenth in tenths], unit)


def _finite(rows: Rows, key: str) -> list[float]:
  """Returns a metric's finite values."""
  return [v for row in rows if (v := row.get(key)) is not None and math.isfinite(v)]
