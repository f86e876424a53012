"""Data sets of problems, through Grain: checked once, then shuffled, mixed, sharded and resumable.

A source is an embedded task (`arithmetic:train`), files, or a TFDS data set (`tfds:gsm8k/train`).
Several of them, with commas, make a mixture (docs/data.md):

  [format@]path[:weight] [where condition [and condition ...]], ...

Rows become `Prompt`s before training starts, so that a bad row costs no accelerator time.
"""

import bisect
import dataclasses
import itertools
import logging
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import grain
import numpy as np

from gspo_jax import structs
from gspo_jax.data import formats, tokenizer
from gspo_jax.data.embedded import TASKS, Embedded, probe
from gspo_jax.data.files import Skipped, read
from gspo_jax.data.rows import Check, Reader
from gspo_jax.settings.data import DataConfig, DataError

_WORDS = 8  # first words of a question, compared before whole questions
_SPEC = re.compile(
  r"(?:(?P<form>\w+)@)?(?P<path>\S.*?)(?::(?P<weight>\d*\.?\d+))?(?:\s+where\s+(?P<where>.+))?"
)


class Source(Protocol):
  """Random access to prompts; `skipped` counts the bad rows that were left out."""

  skipped: int

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> structs.Prompt: ...


@dataclasses.dataclass(frozen=True)
class Prompts:
  """A source held in memory."""

  rows: Sequence[structs.Prompt]
  skipped: int = 0

  def __len__(self) -> int:
    return len(self.rows)

  def __getitem__(self, index: int) -> structs.Prompt:
    return self.rows[index]


@dataclasses.dataclass(frozen=True)
class Mixture:
  """Several sources, drawn from in proportion to their weights; indexed one after another."""

  sources: tuple[Source, ...]
  weights: tuple[float, ...]

  @property
  def skipped(self) -> int:
    return sum(source.skipped for source in self.sources)

  def __len__(self) -> int:
    return sum(map(len, self.sources))

  def __getitem__(self, index: int) -> structs.Prompt:
    ends = list(itertools.accumulate(map(len, self.sources)))
    number = bisect.bisect_right(ends, index)
    return self.sources[number][index - (ends[number - 1] if number else 0)]


def load(
  config: DataConfig, tok: tokenizer.Tokenizer, split: str, check: Check | None = None
) -> Source:
  """Returns the prompts of `config.train` (split 'train') or `config.eval` (split 'eval'). A row
  with an answer refused by `check` is a bad row.

  Raises:
    DataError: for a bad file, an empty data set, and for the first bad row unless
      `config.on_error` is 'skip'.
  """
  return load_spec(config, tok, getattr(config, split), f"data.{split}", check)


def load_spec(
  config: DataConfig, tok: tokenizer.Tokenizer, spec: str, key: str, check: Check | None = None
) -> Source:
  """Returns the prompts of a source or mixture.

  `key` is the config key of `spec`.
  """
  parts = parts_of(spec, key)
  names = [part[0] for part in parts]
  if len(set(names)) < len(names):
    raise DataError(f"{key}={spec!r} names a source twice; use a weight")
  weights = [float(part["weight"]) for part in parts if part["weight"]]
  if len(weights) not in (0, len(parts)) or not all(weights):
    raise DataError(f"{key}={spec!r}: either every source has a weight above 0, or none has one")
  if len(parts) == 1:
    return _load_part(config, tok, parts[0], key, "", check)
  # The same id may be in two sources; with its source before it, it is nobody else's.
  sources = [
    _load_part(config, tok, part, key, f"{part['form'] or ''}@{part['path']}#", check)
    for part in parts
  ]
  return Mixture(tuple(sources), tuple(weights or map(float, map(len, sources))))


def parts_of(spec: str, key: str) -> list[re.Match]:
  """Returns the sources of a spec.

  Each is a match with the groups form, path, weight and where.
  """
  if not spec.strip():
    raise DataError(f"{key} is empty. Set --config.{key} to a file or data set")
  parts = [_SPEC.fullmatch(part.strip()) for part in spec.split(",")]
  if not all(parts):
    raise DataError(f"{key}={spec!r} has an empty part: sources are separated by single commas")
  return parts


def _load_part(
  config: DataConfig,
  tok: tokenizer.Tokenizer,
  part: re.Match,
  key: str,
  prefix: str,
  check: Check | None,
) -> Source:
  path = part["path"]
  if path.partition(":")[0] in TASKS:
    if part["where"] or part["form"]:
      raise DataError(f"{key}={part[0]}: the embedded task has neither formats nor filters")
    return Embedded(config, tok, path, key)
  reader = reader_of(config, tok, part, key, prefix, check)
  prompts = reader(read(path, key))
  if not prompts:
    raise DataError(f"{key}={path}: the data set is empty ({reader.left_out})")
  reader.skipped.warn(f"{key}={path}")
  return Prompts(tuple(prompts), reader.skipped.count)


def reader_of(
  config: DataConfig,
  tok: tokenizer.Tokenizer,
  part: re.Match,
  key: str,
  prefix: str = "",
  check: Check | None = None,
) -> Reader:
  """Returns a reader of the rows of a part of a spec. Raises DataError if there can be none."""
  path, name = part["path"], part["form"] or ""
  if name and name not in formats.FORMATS:
    raise DataError(
      f"{key}={part[0]}: there is no format {name!r}; there are {', '.join(formats.FORMATS)}"
    )
  form, filters = formats.named(config, name), formats.conditions(part["where"] or "", key)
  for field, value in ("question_field", form.question), ("answer_field", form.answer):
    if not value:
      raise DataError(f"data.{field} is empty. Set it to the field of {key}={path} that holds it")
  skipped = Skipped(config.on_error)
  return Reader(form, tok, filters, config.max_prompt_tokens, skipped, check, prefix)


class Batches(Iterator[list[structs.Prompt]]):
  """An endless iterator over lists of `batch_size` prompts, shuffled anew in every epoch.

  Epochs follow each other without a gap: a batch may span two, and one larger than the source
  repeats prompts. The sources of a mixture have epochs of their own, and are interleaved in a fixed
  order. `get_state()` is a dict that JSON can hold; `set_state` continues from there.

  A changed source (a new file that a pattern matches, lines added, weights) has another order, in
  which the old position means nothing. A new epoch then starts in an order of its own, with all
  rows, old and new, once. So it does when a source grows between two calls (`growing.Growing`).
  """

  def __init__(self, source: Source, batch_size: int, *, seed: int):
    if batch_size < 1:
      raise ValueError(f"a batch size of {batch_size}")
    self._source, self._batch_size, self._seed = source, batch_size, seed
    self._grows = hasattr(source, "looks")
    self._contents = "" if self._grows else _contents(source)
    self._start(0)

  def _start(self, restarts: int) -> None:
    self._restarts = restarts
    if self._grows:
      self._contents = self._source.contents
    mixed = isinstance(self._source, Mixture)
    shuffled = []
    for number, source in enumerate(self._source.sources if mixed else (self._source,)):
      seed = self._seed + 1_000_003 * restarts + 7919 * number
      shuffled.append(grain.MapDataset.source(source).seed(seed % 2**32).shuffle().repeat())
    dataset = grain.MapDataset.mix(shuffled, self._source.weights) if mixed else shuffled[0]
    # Prompts are in memory or cheap to make: threads that read ahead would only add latency.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    self._prompts = iter(dataset.to_iter_dataset(options))

  def __next__(self) -> list[structs.Prompt]:
    return self.take(self._batch_size)

  def take(
    self, count: int, accept: Callable[[structs.Prompt], bool] = lambda _: True
  ) -> list[structs.Prompt]:
    """Returns the next `count` accepted prompts; any, after two epochs without one."""
    if self._grows and self._contents != self._source.contents:
      self._start(self._restarts + 1)
    prompts, refused, epoch = [], 0, epoch_of(self._source)
    while len(prompts) < count:
      prompt = next(self._prompts)
      if accept(prompt):
        refused = 0
      elif refused < 2 * epoch:
        refused += 1
        continue
      prompts.append(prompt)
    return prompts

  def get_state(self) -> dict[str, Any]:
    position = self._prompts.get_state()
    looks = dict(looks=self._source.looks) if self._grows else {}
    return dict(position=position, contents=self._contents, restarts=self._restarts) | looks

  def set_state(self, state: dict[str, Any]) -> None:
    if self._grows:
      self._source.go_to(state.get("looks", 1))
      self._contents = self._source.contents
    changed = state["contents"] != self._contents
    self._start(state["restarts"] + changed)
    if changed:
      logging.warning("the training data has changed since the checkpoint: a new epoch starts")
    else:
      self._prompts.set_state(state["position"])


def epoch_of(source: Source) -> int:
  """Counts draws until every row of every part has come."""
  if not isinstance(source, Mixture):
    return len(source)
  total = sum(source.weights)
  return max(math.ceil(len(s) * total / w) for s, w in zip(source.sources, source.weights))


def _contents(source: Source) -> str:
  """Describes rows, their order, and the weights of a mixture."""
  if isinstance(source, Mixture):
    return f"{source.weights}: {', '.join(map(_contents, source.sources))}"
  indices = probe(len(source)) if isinstance(source, Embedded) else range(len(source))
  checksum = 0
  for i in indices:
    checksum = zlib.crc32(source[i].content.encode() + b"\n", checksum)
  return f"{len(source)} rows {checksum:08x}"


def shared_prompts(train: Source, held_out: Source, chosen: Sequence[structs.Prompt]) -> int:
  """Counts problems of `chosen`, a part of `held_out`, among those of `train`.

  Two are the same if their questions are, up to white space. A million rows take about a second.
  Splits of embedded tasks are compared by their names.
  """
  questions = [_first_words(prompt.question) for prompt in chosen]
  all_questions, openings = set(questions), {_first_words(text, _WORDS) for text in questions}
  shared: set[str] = set()
  for part in train.sources if isinstance(train, Mixture) else [train]:
    if isinstance(part, Embedded) and isinstance(held_out, Embedded):
      shared |= all_questions if part.path == held_out.path else set()
      continue
    if isinstance(part, Embedded):
      texts = part.questions()
    else:
      texts = (part[index].question for index in range(len(part)))
    texts = (text for text in texts if _first_words(text, _WORDS) in openings)
    shared |= all_questions.intersection(map(_first_words, texts))
  return sum(text in shared for text in questions)


def _first_words(text: str, words: int | None = None) -> str:
  """Returns the first words with single spaces; None: all."""
  return " ".join(text.split(None, -1 if words is None else words)[:words])


def skipped_rows(source: Source) -> dict[str, float]:
  """Returns the metric of bad rows; empty without any."""
  return {"data/skipped_rows": float(source.skipped)} if source.skipped else {}


def demonstration_tokens(
  prompt: structs.Prompt, tok: tokenizer.Tokenizer
) -> tuple[list[int], list[int]]:
  """Returns the tokens after a prompt, and a mask.

  The mask is 1 on texts and their stop tokens, and 0 on an environment's tokens.
  """
  turns, tokens, mask = prompt.demonstration, [], []
  for i, text in enumerate((turns,) if isinstance(turns, str) else turns):
    written = [*tok.encode(text), *tok.stop_ids[:1]] if i % 2 == 0 else tok.encode(text)
    tokens += written
    mask += [1 - i % 2] * len(written)
  return tokens, mask


def pack_demonstrations(
  prompts: Sequence[structs.Prompt], tok: tokenizer.Tokenizer, length: int
) -> tuple[np.ndarray, np.ndarray]:
  """Prompt, demonstration and stop token per row, right-padded to `length`.

  Returns:
    tokens int32 [B, T] and mask float32 [B, T], 1 on the demonstration and its stop tokens.

  Raises:
    DataError: if a row does not fit (`fitting` finds such rows before training starts).
  """
  tokens_BT = np.full((len(prompts), length), tok.pad_id, np.int32)
  mask_BT = np.zeros((len(prompts), length), np.float32)
  for b, prompt in enumerate(prompts):
    target, mask = demonstration_tokens(prompt, tok)
    start, end = len(prompt.tokens), len(prompt.tokens) + len(target)
    if end > length:
      raise DataError(_too_long(prompt, end, length))
    tokens_BT[b, :end] = [*prompt.tokens, *target]
    mask_BT[b, start:end] = mask
  return tokens_BT, mask_BT


def fitting(source: Source, tok: tokenizer.Tokenizer, length: int, on_error: str) -> Source:
  """Returns `source` without demonstrations longer than `length`.

  With on_error 'raise' the first one is an error; with 'skip' they join `skipped`. The embedded
  task is looked at in samples only, and comes back whole.
  """
  if isinstance(source, Mixture):
    parts = tuple(fitting(part, tok, length, on_error) for part in source.sources)
    return Mixture(parts, source.weights)
  rows = []
  for index in probe(len(source)) if isinstance(source, Embedded) else range(len(source)):
    prompt = source[index]
    end = len(prompt.tokens) + len(demonstration_tokens(prompt, tok)[0])
    if not prompt.demonstration:
      reason = f"{prompt.id}: the demonstration is empty; set data.demonstration_field"
    elif end > length:
      reason = _too_long(prompt, end, length)
    else:
      rows.append(prompt)
      continue
    if on_error == "raise":
      raise DataError(reason)
  if not rows:
    raise DataError(f"no demonstration fits into sft.max_tokens={length}")
  if isinstance(source, Embedded):
    return source
  return Prompts(tuple(rows), source.skipped + len(source) - len(rows))


def _too_long(prompt: structs.Prompt, end: int, length: int) -> str:
  return (
    f"{prompt.id}: prompt and demonstration take {end} tokens, more than sft.max_tokens={length}."
    " Raise it, or set data.on_error=skip to leave such rows out"
  )
