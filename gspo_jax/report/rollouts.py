"""The responses of a report: grouped by prompt, shortened, with what became of their tokens."""

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gspo_jax.report.data import as_text
from gspo_jax.runs import metrics

Row = dict[str, Any]

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
  shares = max(1, limit // len(folders)), max_tokens // len(folders)
  runs = [_read_run(folder, *shares) for folder in folders]
  groups = [group | {"run": i} for i, run in enumerate(runs) for group in run["groups"]]
  groups.sort(key=lambda group: (group["phase"] != "sft", group["step"], group["eval"]))
  known = sum(run["known"] for run in runs)
  return {
    "total": sum(run["total"] for run in runs),
    "groups": groups,
    "colors": {"known": known, **_quantize([s for group in groups for s in group["samples"]])},
  }


def _read_run(folder: Path, limit: int, max_tokens: int) -> Row:
  paths = sorted(folder.glob("*.jsonl"), key=_time) if folder.exists() else []
  total = sum(path.read_bytes().count(b"\n") for path in paths)
  wanted = _spread(paths, limit)  # at least one response of each
  groups, known, left = [], 0, max_tokens
  for path in reversed(wanted):  # the newest first: theirs are the tokens that get colours
    for group in _some_groups(_group(metrics.read_rows(path), path), limit // len(wanted)):
      samples = []
      for record in group["samples"]:
        known += _has_ratios(record)
        sample = _color(record) if left > 0 and _has_ratios(record) else None
        # Once there is no room, older ones stay plain, even those that would fit.
        left = left - len(sample["log_ratio"]) if sample else left
        samples.append(sample if sample and left >= 0 else _plain(record))
      groups.append(group | {"samples": samples})
  return {"total": total, "known": known, "groups": groups}


def _time(path: Path) -> tuple:
  phase, _, step = path.stem.rpartition("_")
  return phase != "sft", int(step) if step.isdigit() else -1, phase


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
    identity = (record["step"], record["prompt_id"], bool(record.get("eval")))
    if identity not in groups:
      groups[identity] = {
        "phase": phase, "step": record["step"], "id": str(record["prompt_id"]),
        "eval": bool(record.get("eval")), "prompt": _shorten(_spell(record["prompt"])),
        "answer": _shorten(_spell(as_text(record.get("answer", "")))), "samples": [],
      }  # fmt: skip
    groups[identity]["samples"].append(record)
  return list(groups.values())


def _some_groups(groups: list[Row], limit: int) -> list[Row]:
  size = max((len(group["samples"]) for group in groups), default=1)
  kept = _spread(groups, max(1, limit // size))
  return [group | {"samples": group["samples"][: max(1, limit)]} for group in kept]


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
  return sample | {"response": _shorten(_spell(record["response"]))}


def _color(record: Row) -> Row:
  """The same with its tokens, their log-ratios, and a 1 for each that was clipped, if any was;
  where there are segments, the number of each token's, and what is known of those that are shown.

  The response itself is left out where it is its tokens one after another. It is not where one is a
  byte of a character, or a mark that decoding leaves out.
  """
  tokens = [_spell(token) for token in record["tokens"]]
  whole = "".join(tokens) == _spell(record["response"])
  clipped = record.get("clipped_tokens")
  if not isinstance(clipped, list) or len(clipped) != len(tokens):
    clipped = [0] * len(tokens)
  segments = _segments(record, len(tokens))
  tokens, ratios, clipped, segments = _cut(tokens, record["log_ratio"], clipped, segments)
  colored = _plain(record) | {"tokens": tokens, "log_ratio": ratios}
  if any(segment is not None for segment in segments):
    figures = zip(record["segment_ratio"], record["segment_gradient"], strict=True)
    shown = {*segments}
    known = {i: pair for i, pair in enumerate(figures) if i in shown}
    colored |= {"segments": segments, "segment_figures": known}
  if any(clipped):
    colored["clipped_tokens"] = clipped
  if whole:
    del colored["response"]
  return colored


def _segments(record: Row, count: int) -> list[int | None]:
  """The number of each token's segment; None for all where they are not known, or broken."""
  numbers, none = record.get("segments"), [None] * count
  figures = [record.get(f"segment_{name}") for name in ("ratio", "gradient")]
  if not (isinstance(numbers, list) and len(numbers) == count):
    return none
  if not all(isinstance(x, list) and all(map(_finite, x)) for x in figures):
    return none
  known = range(len(figures[0]))
  whole = all(type(n) is int and n in known for n in numbers)
  return numbers if whole and len(figures[1]) == len(known) else none


def _cut(
  tokens: list[str],
  ratios: list[float | None],
  clipped: list[int],
  segments: list[int | None],
) -> list[list]:
  """Leaves out tokens in the middle as `_shorten` leaves out characters."""
  ends = list(itertools.accumulate(map(len, tokens)))
  if ends[-1] <= MAX_CHARACTERS:
    return [tokens, ratios, clipped, segments]
  head = sum(end <= MAX_CHARACTERS * 3 // 4 for end in ends)
  tail = max(head, sum(end <= ends[-1] - MAX_CHARACTERS // 4 for end in ends))
  left_out = sum(map(len, tokens[head:tail]))
  # What stands for them was never sampled and has no ratio.
  gap = ((tokens, _gap(left_out)), (ratios, None), (clipped, 0), (segments, None))
  return [[*values[:head], between, *values[tail:]] for values, between in gap]


def _quantize(samples: Iterable[Row]) -> Row:
  """Writes the log-ratios as whole multiples of a `unit`; `scale` is where colours end, `clipped`
  whether any token was."""
  colored = [sample for sample in samples if "log_ratio" in sample]
  sizes = [abs(v) for sample in colored for v in sample["log_ratio"] if _finite(v)]
  # A few tokens move much further than the others and would leave those without colour.
  scale = float(np.quantile(sizes, 0.98) or max(sizes)) if sizes else 0.0
  scale = scale or 1.0
  unit = 10.0 ** (math.floor(math.log10(scale)) - 3)
  for sample in colored:
    values = sample["log_ratio"]
    sample["log_ratio"] = [round(v / unit) if _finite(v) else None for v in values]
  clipped = any("clipped_tokens" in sample for sample in colored)
  return {
    "colored": len(colored), "scale": float(f"{scale:.2g}"), "unit": unit, "clipped": clipped,
    "segments": any("segments" in sample for sample in colored),
  }  # fmt: skip


def _finite(value: Any) -> bool:
  return isinstance(value, int | float) and math.isfinite(value)


def _spell(text: str) -> str:
  """Half characters, which no browser can show, are spelled out."""
  return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _shorten(text: str) -> str:
  """Long texts lose their middle."""
  if len(text) <= MAX_CHARACTERS:
    return text
  head, tail = MAX_CHARACTERS * 3 // 4, MAX_CHARACTERS // 4
  return f"{text[:head]}{_gap(len(text) - head - tail)}{text[-tail:]}"


def _gap(left_out: int) -> str:
  return f"\n… {left_out:,} characters left out …\n"
