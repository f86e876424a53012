"""The responses of a report: grouped by prompt, shortened, with what became of their tokens."""

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gspo_jax.report.data import as_text
from gspo_jax.runs import metrics
from gspo_jax.runs.metrics import Row
from gspo_jax.system.text import visible

# Beyond these the page would be slow, and nobody could read more.
MAX_CHARACTERS = 4000  # of one response
MAX_TOKENS = 1_000_000  # with a log-ratio, over the whole page

NEEDED = dict(prompt_id=str | int, prompt=str, response=str)  # of every response
SAMPLE_FIELDS = (
  "sample", "reward", "advantage", "length", "truncated", "stop_reason", "ratio", "clipped",
)  # fmt: skip


def read_rollouts(folders: Sequence[Path], limit: int, max_tokens: int = MAX_TOKENS) -> Row:
  """Groups of responses to one prompt, at most `limit` responses, spread evenly over the dumps.

  One folder per run; runs share the limits equally. `colors` says how log-ratios are written.
  """
  count = len(folders)
  runs = [_read_run(f, max(1, limit // count), max_tokens // count) for f in folders]
  groups = [group | {"run": i} for i, run in enumerate(runs) for group in run["groups"]]
  groups.sort(key=lambda group: (group["phase"] != "sft", group["step"], group["eval"]))
  samples = [sample for group in groups for sample in group["samples"]]
  return {
    "total": sum(run["total"] for run in runs),
    "groups": groups,
    "colors": {"known": sum(run["known"] for run in runs), **_quantize(samples)},
  }


def _read_run(folder: Path, limit: int, max_tokens: int) -> Row:
  def time(path: Path) -> tuple:
    phase, _, step = path.stem.rpartition("_")
    return phase != "sft", int(step) if step.isdigit() else -1, phase

  paths = sorted(folder.glob("*.jsonl"), key=time)  # none in a folder that is not there
  total = sum(path.read_bytes().count(b"\n") for path in paths)
  wanted = _spread(paths, limit)  # at least one response of each
  groups, known, left = [], 0, max_tokens
  for path in reversed(wanted):  # the newest first: theirs are the tokens that get colours
    groups_of, most = _group(metrics.read_rows(path), path), max(1, limit // len(wanted))
    size = max((len(group["samples"]) for group in groups_of), default=1)
    for group in _spread(groups_of, max(1, most // size)):
      samples = []
      for record in group["samples"][:most]:
        known += _has_ratios(record)
        sample = _color(record) if left > 0 and _has_ratios(record) else None
        # Once there is no room, older ones stay plain, even those that would fit.
        left = left - len(sample["log_ratio"]) if sample else left
        samples.append(sample if sample and left >= 0 else _plain(record))
      groups.append(group | {"samples": samples})
  return {"total": total, "known": known, "groups": groups}


def _group(records: Sequence[Row], path: Path) -> list[Row]:
  """Groups of responses to one prompt. ValueError names a response without what the page needs."""
  phase = path.stem.rpartition("_")[0]
  groups: dict[tuple, Row] = {}
  for number, record in enumerate(records, start=1):
    for name, kind in NEEDED.items():
      if not isinstance(record.get(name), kind):
        raise ValueError(
          f"{path}: response {number} has {name}={record.get(name)!r:.40}, which is no text: "
          "remove its line"
        )
    step, name, held_out = record["step"], record["prompt_id"], bool(record.get("eval"))
    if (step, name, held_out) not in groups:
      groups[step, name, held_out] = {
        "phase": phase, "step": step, "id": visible(str(name)), "eval": held_out,
        "prompt": _shorten(record["prompt"]),
        "answer": _shorten(as_text(record.get("answer", ""))), "samples": [],
      }  # fmt: skip
    groups[step, name, held_out]["samples"].append(record)
  return list(groups.values())


def _spread(items: Sequence[Any], limit: int) -> list[Any]:
  """At most `limit` items, evenly spaced, the last one among them."""
  if len(items) <= limit:
    return list(items)
  return [items[len(items) - 1 - i * len(items) // limit] for i in reversed(range(limit))]


def _has_ratios(record: Row) -> bool:
  tokens, ratios = record.get("tokens"), record.get("log_ratio")
  if not isinstance(tokens, list) or not isinstance(ratios, list) or not tokens:
    return False
  return len(tokens) == len(ratios) and all(isinstance(token, str) for token in tokens)


def _plain(record: Row) -> Row:
  """The fields of a record that the page shows."""
  known = ((name, record.get(name)) for name in SAMPLE_FIELDS)
  sample = {name: v for name, v in known if isinstance(v, str) or _finite(v)}
  return sample | {"response": _shorten(record["response"])}


def _color(record: Row) -> Row:
  """The same with its tokens, their log-ratios, and a 1 for each that was clipped, if any was;
  where there are segments, the number of each token's, and what is known of those that are shown.

  The response itself is left out where it is its tokens one after another. It is not where one is a
  byte of a character, or a mark that decoding leaves out.
  """
  tokens = [visible(token) for token in record["tokens"]]
  whole = "".join(tokens) == visible(record["response"])
  clipped = record.get("clipped_tokens")
  if not isinstance(clipped, list) or len(clipped) != len(tokens):
    clipped = [0] * len(tokens)
  segments = _segments(record, len(tokens))
  tokens, ratios, clipped, segments = _cut(tokens, record["log_ratio"], clipped, segments)
  colored = _plain(record) | {"tokens": tokens, "log_ratio": ratios}
  if shown := {*segments} - {None}:
    known = {i: (record["segment_ratio"][i], record["segment_gradient"][i]) for i in sorted(shown)}
    colored |= {"segments": segments, "segment_figures": known}
  if any(clipped):
    colored["clipped_tokens"] = clipped
  if whole:
    del colored["response"]
  return colored


def _segments(record: Row, count: int) -> list[int | None]:
  """The number of each token's segment; None for all where they are not known, or broken."""
  fields = [record.get(name) for name in ("segments", "segment_ratio", "segment_gradient")]
  if all(isinstance(field, list) for field in fields):
    numbers, ratios, gradients = fields
    known = range(len(ratios))
    whole = len(numbers) == count and all(type(n) is int and n in known for n in numbers)
    if whole and len(gradients) == len(known) and all(map(_finite, (*ratios, *gradients))):
      return numbers
  return [None] * count


def _cut(tokens: list[str], *columns: list) -> list[list]:
  """Leaves out tokens in the middle as `_shorten` leaves out characters, and what belongs to them:
  what stands for them was never sampled and has no ratio."""
  ends = list(itertools.accumulate(map(len, tokens)))
  if ends[-1] <= MAX_CHARACTERS:
    return [tokens, *columns]
  head = sum(end <= MAX_CHARACTERS * 3 // 4 for end in ends)
  tail = max(head, sum(end <= ends[-1] - MAX_CHARACTERS // 4 for end in ends))
  gap = _gap(sum(map(len, tokens[head:tail])))
  shown = [[*column[:head], None, *column[tail:]] for column in columns]
  return [[*tokens[:head], gap, *tokens[tail:]], *shown]


def _quantize(samples: Iterable[Row]) -> Row:
  """Writes the log-ratios as whole multiples of a `unit`; `scale` is where colours end, `clipped`
  whether any token was."""
  colored = [sample for sample in samples if "log_ratio" in sample]
  sizes = [abs(v) for sample in colored for v in sample["log_ratio"] if _finite(v)] or [1.0]
  # A few tokens move much further than the others and would leave those without colour.
  scale = float(np.quantile(sizes, 0.98) or max(sizes)) or 1.0
  unit = 10.0 ** (math.floor(math.log10(scale)) - 3)
  for sample in colored:
    values = sample["log_ratio"]
    sample["log_ratio"] = [round(v / unit) if _finite(v) else None for v in values]
  return {
    "colored": len(colored), "scale": float(f"{scale:.2g}"), "unit": unit,
    "clipped": any("clipped_tokens" in sample for sample in colored),
    "segments": any("segments" in sample for sample in colored),
  }  # fmt: skip


def _finite(value: Any) -> bool:
  return isinstance(value, int | float) and math.isfinite(value)


def _shorten(text: str) -> str:
  """The text as the page has it; long ones lose their middle."""
  text = visible(text)
  if len(text) <= MAX_CHARACTERS:
    return text
  head, tail = MAX_CHARACTERS * 3 // 4, MAX_CHARACTERS // 4
  return f"{text[:head]}{_gap(len(text) - head - tail)}{text[-tail:]}"


def _gap(left_out: int) -> str:
  return f"\n… {left_out:,} characters left out …\n"
