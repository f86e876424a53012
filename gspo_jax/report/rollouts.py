"""Reads the logged responses of runs for a report, as JSON values.

Responses are grouped by step and prompt, and long responses are shortened. The page colours each
token by its log-ratio: the log-probability after the iteration's updates minus the log-probability
under the old policy. A response with log-ratios also has a list of its tokens.
"""

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

# These limits let the page open quickly.
MAX_CHARACTERS = 4000  # Characters of one response.
MAX_TOKENS = 1_000_000  # Tokens with a log-ratio on the whole page.
POLICY = "policy"  # Role of the policy's turns in a record (sampling/transcript.py).

# A record is one logged response, a line of rollouts/*.jsonl. It must have these fields.
REQUIRED_FIELDS = dict(prompt_id=str | int, prompt=str, response=str)
# Fields of a record that are copied to the page.
SAMPLE_FIELDS = (
  "sample", "reward", "advantage", "length", "truncated", "stop_reason", "ratio", "clipped",
)  # fmt: skip


def read_rollouts(folders: Sequence[Path], limit: int, max_tokens: int = MAX_TOKENS) -> Row:
  """Reads at most `limit` responses, spread evenly over the files.

  Returns a dict for the page: the number of all logged responses (`total`), groups of responses to
  one prompt (`groups`), and the encoding of log-ratios (`colors`).

  Args:
    folders: the folder "rollouts" of each run. Runs share the limits equally.
    limit: maximum number of responses.
    max_tokens: maximum number of tokens with a log-ratio.

  Raises:
    ValueError: a response lacks one of REQUIRED_FIELDS.
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
  """Reads a run's responses. Only the newest have log-ratios, up to `max_tokens` tokens.

  Returns a dict with the number of logged responses (`total`), the number of selected responses
  whose records have log-ratios (`known`), and the groups of selected responses (`groups`).
  """

  def order(path: Path) -> tuple:
    phase, _, step = path.stem.rpartition("_")
    return phase != "sft", int(step) if step.isdigit() else -1, phase

  paths = sorted(folder.glob("*.jsonl"), key=order)  # Empty if the folder does not exist.
  total = sum(path.read_bytes().count(b"\n") for path in paths)
  selected = _spread(paths, limit)  # Each selected file has at least one response on the page.
  groups, measured, budget = [], 0, max_tokens
  for path in reversed(selected):  # From the newest file to the oldest.
    file_groups = _group(metrics.read_rows(path, counted=False), path)
    file_limit = max(1, limit // len(selected))
    size = max((len(group["samples"]) for group in file_groups), default=1)
    for group in _spread(file_groups, max(1, file_limit // size)):
      samples = []
      for record in group["samples"][:file_limit]:
        measured += _has_ratios(record)
        sample = _color(record) if budget > 0 and _has_ratios(record) else None
        # Once the budget is exceeded, no older response has log-ratios, even a short one.
        budget = budget - len(sample["log_ratio"]) if sample else budget
        samples.append(sample if sample and budget >= 0 else _plain(record))
      groups.append(group | {"samples": samples})
  return {"total": total, "known": measured, "groups": groups}


def _group(records: Sequence[Row], path: Path) -> list[Row]:
  """Groups the responses of a file by step, prompt, benchmark and kind (training, held out).

  Raises:
    ValueError: a response lacks one of REQUIRED_FIELDS.
  """
  phase = path.stem.rpartition("_")[0]
  groups: dict[tuple, Row] = {}
  for number, record in enumerate(records, start=1):
    for name, kind in REQUIRED_FIELDS.items():
      if not isinstance(record.get(name), kind):
        raise ValueError(
          f"{path}: response {number} has {name}={record.get(name)!r:.40}, which is not a text: "
          "remove the line of this response"
        )
    step, name, held_out = record["step"], record["prompt_id"], bool(record.get("eval"))
    benchmark = str(record.get("benchmark", ""))  # Prompts of two benchmarks may have one id.
    if (step, name, held_out, benchmark) not in groups:
      groups[step, name, held_out, benchmark] = {
        "phase": phase, "step": step, "id": visible(str(name)), "eval": held_out,
        "benchmark": visible(benchmark),
        "prompt": _shorten(record["prompt"]), "rendered": _rendered(record),
        "answer": _shorten(as_text(record.get("answer", ""))), "samples": [],
      }  # fmt: skip
    group = groups[step, name, held_out, benchmark]
    # The group has the rendered prompt of its first response. Another response keeps its rendered
    # prompt only if it is different.
    same = _rendered(record) == group["rendered"]
    group["samples"].append(record | {"rendered_prompt": ""} if same else record)
  return list(groups.values())


def _rendered(record: Row) -> str:
  """Returns the rendered prompt; "" if equal to the prompt or not logged."""
  text = as_text(record.get("rendered_prompt", ""))
  return "" if text == record["prompt"] else _shorten(text)


def _spread(items: Sequence[Any], limit: int) -> list[Any]:
  """Returns at most `limit` items, evenly spaced, including the last."""
  if len(items) <= limit:
    return list(items)
  return [items[len(items) - 1 - i * len(items) // limit] for i in reversed(range(limit))]


def _has_ratios(record: Row) -> bool:
  """Whether a record has tokens and a log-ratio for each."""
  tokens, ratios = record.get("tokens"), record.get("log_ratio")
  if not isinstance(tokens, list) or not isinstance(ratios, list) or not tokens:
    return False
  return len(tokens) == len(ratios) and all(isinstance(token, str) for token in tokens)


def _plain(record: Row) -> Row:
  """Returns a record's fields for the page, without tokens and log-ratios."""
  fields = ((name, record.get(name)) for name in SAMPLE_FIELDS)
  sample = {name: v for name, v in fields if isinstance(v, str) or _finite(v)}
  if reason := record.get("unknown"):  # Evaluations log such a response with the reward 0.
    sample.pop("reward", None)
    sample["unknown"] = _shorten(as_text(reason), 200)
  if rendered := _rendered(record):
    sample["rendered"] = rendered
  if turns := _turns(record):
    return sample | {"turns": [[turn["shown"], turn["role"] != POLICY] for turn in turns]}
  return sample | {"response": _shorten(record["response"])}


def _turns(record: Row) -> list[Row]:
  """Returns the turns of a conversation; [] if missing or malformed.

  `shown` is a turn's text for the page. In a long conversation, `shown` lacks the middle of a long
  turn.
  """
  turns = record.get("turns")
  types = dict(role=str, text=str, length=int)
  if not isinstance(turns, list) or not all(
    isinstance(turn, dict) and all(isinstance(turn.get(k), v) for k, v in types.items())
    for turn in turns
  ):
    return []
  tokens = sum(turn["length"] for turn in turns if turn["role"] == POLICY)
  if isinstance(record.get("tokens"), list) and len(record["tokens"]) != tokens:
    return []
  short = sum(len(turn["text"]) for turn in turns) <= MAX_CHARACTERS
  limit = MAX_CHARACTERS if short else MAX_CHARACTERS // len(turns)
  return [turn | {"shown": _shorten(turn["text"], limit)} for turn in turns]


def _color(record: Row) -> Row:
  """Returns a record's fields for the page, with tokens and log-ratios.

  Optional fields:

    - `clipped_tokens`: 1 for a clipped token, 0 for any other token.
    - `segments`: number of each token's segment.
    - `segment_figures`: ratio and gradient of each segment, by number.
    - `observations`: indices in `tokens` of the environment's turns. Each of these turns is
      inserted as one token without log-ratio.

  The field `response` or `turns` is omitted if the joined tokens are equal to its text. The text
  differs if a character is split into several tokens, or if decoding drops a special token.
  """
  tokens, count = [visible(token) for token in record["tokens"]], len(record["tokens"])
  clipped = record.get("clipped_tokens")
  if not isinstance(clipped, list) or len(clipped) != count:
    clipped = [0] * count
  columns = [tokens, record["log_ratio"], clipped, _segments(record, count), [False] * count]
  if turns := _turns(record):
    text = "".join(visible(t["text"]) for t in turns if t["role"] == POLICY)
    columns = _insert_observations(columns, turns)
  else:
    text = visible(record["response"])
  same_text = "".join(tokens) == text
  tokens, ratios, clipped, segments, observations = _cut(*columns)
  colored = _plain(record) | {"tokens": tokens, "log_ratio": ratios}
  if shown := {*segments} - {None}:
    pairs = {i: (record["segment_ratio"][i], record["segment_gradient"][i]) for i in sorted(shown)}
    colored |= {"segments": segments, "segment_figures": pairs}
  if any(clipped):
    colored["clipped_tokens"] = clipped
  if any(observations):
    colored["observations"] = [i for i, flag in enumerate(observations) if flag]
  if same_text:
    del colored["turns" if turns else "response"]
  return colored


def _insert_observations(columns: Sequence[list], turns: Sequence[Row]) -> list[list]:
  """Inserts each turn of the environment as one token without log-ratio.

  columns: five lists with a value per sampled token: the token's text, log-ratio, clip flag,
    segment number, and False. In the result, the last list has True for inserted turns.
  """
  spans, position = [], 0
  for turn in turns:
    end = position + turn["length"]
    if turn["role"] == POLICY:
      spans.append([column[position:end] for column in columns])
      position = end
    else:
      spans.append([[turn["shown"]], [None], [0], [None], [True]])
  return [list(itertools.chain(*parts)) for parts in zip(*spans)]


def _segments(record: Row, count: int) -> list[int | None]:
  """Returns each token's segment number.

  Returns a None for each token if the segments are missing or malformed.

  count: number of tokens.
  """
  fields = [record.get(name) for name in ("segments", "segment_ratio", "segment_gradient")]
  if all(isinstance(field, list) for field in fields):
    numbers, ratios, gradients = fields
    valid = range(len(ratios))
    whole = len(numbers) == count and all(type(n) is int and n in valid for n in numbers)
    if whole and len(gradients) == len(valid) and all(map(_finite, (*ratios, *gradients))):
      return numbers
  return [None] * count


def _cut(tokens: list[str], *columns: list) -> list[list]:
  """Replaces the middle of a long response by a mark (`_gap`).

  columns: further lists with a value per token. Their value for the mark is None.
  """
  ends = list(itertools.accumulate(map(len, tokens)))
  if ends[-1] <= MAX_CHARACTERS:
    return [tokens, *columns]
  head = sum(end <= MAX_CHARACTERS * 3 // 4 for end in ends)
  tail = max(head, sum(end <= ends[-1] - MAX_CHARACTERS // 4 for end in ends))
  gap = _gap(sum(map(len, tokens[head:tail])))
  shown = [[*column[:head], None, *column[tail:]] for column in columns]
  return [[*tokens[:head], gap, *tokens[tail:]], *shown]


def _quantize(samples: Iterable[Row]) -> Row:
  """Replaces log-ratios by whole multiples of a `unit`, for a smaller page.

  Returns a dict with these fields:

    - `unit`: the unit of log-ratios.
    - `scale`: absolute value from which a log-ratio has the strongest colour.
    - `colored`: number of responses with log-ratios.
    - `clipped`, `segments`: whether any response has clipped tokens or segments.
  """
  colored = [sample for sample in samples if "log_ratio" in sample]
  sizes = [abs(v) for sample in colored for v in sample["log_ratio"] if _finite(v)] or [1.0]
  # The largest log-ratio is often an outlier. As the scale it would leave other tokens colourless.
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
  """Whether a value is a finite number."""
  return isinstance(value, int | float) and math.isfinite(value)


def _shorten(text: str, limit: int = MAX_CHARACTERS) -> str:
  """Returns a text for the page, without a long text's middle."""
  text = visible(text)
  if len(text) <= limit:
    return text
  head, tail = limit * 3 // 4, limit // 4
  return f"{text[:head]}{_gap(len(text) - head - tail)}{text[-tail:]}"


def _gap(characters: int) -> str:
  """Returns the mark in place of omitted characters."""
  return f"\n… {characters:,} characters left out …\n"
