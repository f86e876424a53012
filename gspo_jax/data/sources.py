"""Data sets of problems: checked once, then shuffled, mixed and resumed through Grain.

A source is an embedded task (`arithmetic:train`), files, or a TFDS data set (`tfds:gsm8k/train`).
Several sources are a mixture. A *spec* is a text with one or several sources (docs/data.md):

  [format@]path[:weight] [where condition [and condition ...]], ...

All rows of files are converted to `Prompt`s before training starts, so a bad row costs no
accelerator time. During training only growing files (growing.py) are read again.
"""

import array
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
import jax
import numpy as np

from gspo_jax import structs
from gspo_jax.data import filters, formats, tokenizer
from gspo_jax.data.embedded import TASKS, Embedded, probe
from gspo_jax.data.files import Skipped, read
from gspo_jax.data.rows import Check, Reader
from gspo_jax.settings.data import DataConfig, DataError
from gspo_jax.system import hosts

_SPEC = re.compile(
  r"(?:(?P<form>\w+)@)?(?P<path>\S.*?)(?::(?P<weight>\d*\.?\d+))?(?:\s+where\s+(?P<where>.+))?"
)


class Source(Protocol):
  """Random access to prompts."""

  skipped: int  # Number of bad data rows, which are excluded.

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> structs.Prompt: ...


@dataclasses.dataclass(frozen=True)
class Prompts:
  """A source in memory."""

  rows: Sequence[structs.Prompt]
  skipped: int = 0

  def __len__(self) -> int:
    return len(self.rows)

  def __getitem__(self, index: int) -> structs.Prompt:
    return self.rows[index]


@dataclasses.dataclass(frozen=True)
class Mixture:
  """Several sources, one after another. Weights affect `Batches`, not the indices."""

  sources: tuple[Source, ...]
  spec_weights: tuple[float, ...] = ()  # () if weights are the sources' sizes.

  @property
  def weights(self) -> tuple[float, ...]:
    return self.spec_weights or tuple(float(len(source)) for source in self.sources)

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
  """Returns the prompts of `data.train` or `data.eval`.

  Args:
    split: "train" or "eval".
    check: function of each gold answer, which raises ValueError for a bad one; None for no check.

  Raises:
    DataError: the spec is malformed, a file cannot be read, or the data set is empty; or a row is
      bad, and `config.on_error` is "raise".
  """
  return load_spec(config, tok, getattr(config, split), f"data.{split}", check)


def load_spec(
  config: DataConfig, tok: tokenizer.Tokenizer, spec: str, key: str, check: Check | None = None
) -> Source:
  """Returns the prompts of a spec, the value of `key`. Raises DataError as `load` does."""
  parts = parts_of(spec, key)
  names = [part[0] for part in parts]
  if len(set(names)) < len(names):
    raise DataError(f"{key}={spec!r} names a source twice; name it once, with a weight")
  weights = [float(part["weight"]) for part in parts if part["weight"]]
  if len(weights) not in (0, len(parts)) or not all(weights):
    raise DataError(f"{key}={spec!r}: either every source has a weight above 0, or none has one")
  if len(parts) == 1:
    return _load_part(config, tok, parts[0], key, None, check)
  places = {}  # `Reader.places` of all parts, since two parts may read the same file.
  sources = tuple(_load_part(config, tok, part, key, places, check) for part in parts)
  return Mixture(sources, tuple(weights))


def parts_of(spec: str, key: str) -> list[re.Match]:
  """Parses a spec into matches of `_SPEC`. Raises DataError for an empty spec or source."""
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
  places: dict[str, str] | None,
  check: Check | None,
) -> Source:
  """Returns the prompts of one source. `places` is None for a spec of one source."""
  path = part["path"]
  if path.partition(":")[0] in TASKS:
    if part["where"] or part["form"]:
      raise DataError(f"{key}={part[0]}: embedded tasks have neither formats nor filters")
    return Embedded(config, tok, path, key)
  # Rows of two files may have the same id, so ids begin with the source's name.
  prefix = "" if places is None else f"{part['form'] or ''}@{path}#"
  reader = reader_of(config, tok, part, key, prefix, check)
  reader.places = {} if places is None else places
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
  """Returns the row reader of one source.

  Raises DataError if the source's format, fields or conditions are invalid.
  """
  path, name = part["path"], part["form"] or ""
  if name and name not in formats.FORMATS:
    raise DataError(
      f"{key}={part[0]}: unknown format {name!r}; choose one of {', '.join(formats.FORMATS)}"
    )
  form, conditions = formats.named(config, name), filters.conditions(part["where"] or "", key)
  for field, value in ("question_field", form.question), ("answer_field", form.answer):
    if not value:
      raise DataError(f"data.{field} is empty. Set it to the name of the field in {key}={path}")
  skipped = Skipped(config.on_error)
  return Reader(form, tok, conditions, config.max_prompt_tokens, skipped, check, prefix)


class Batches(Iterator[list[structs.Prompt]]):
  """Iterates endlessly over batches of `batch_size` prompts; every epoch has a new order.

  A batch may span two epochs, and a batch larger than the source repeats prompts. Each source of a
  mixture has separate epochs; the sources are interleaved in a fixed order. `get_state` returns a
  JSON-compatible dict, and `set_state` resumes from this dict.

  If the prompts have changed when a run resumes (a new file of a pattern, an edited line, a changed
  weight), the saved position has no meaning, and a new epoch starts in a new order. New rows of a
  growing source (growing.py) also start a new epoch.
  """

  def __init__(self, source: Source, batch_size: int, *, seed: int):
    if batch_size < 1:
      raise ValueError(f"a batch size of {batch_size}: it must be at least 1")
    self._source, self._batch_size, self._seed = source, batch_size, seed
    self._grows = hasattr(source, "lengths")  # Only a `growing.Growing` has lengths of files.
    self._contents = "" if self._grows else _contents(source)
    self._rendered = "" if self._grows else rendered(source)
    self._start(0)

  def _start(self, restarts: int) -> None:
    """Starts an epoch. Its order depends on the seed and on `restarts`, the number of restarts."""
    self._restarts = restarts
    if self._grows:
      self._contents, self._rendered = self._source.contents, rendered(self._source)
    mixed = isinstance(self._source, Mixture)
    shuffled = []
    for number, source in enumerate(self._source.sources if mixed else (self._source,)):
      seed = self._seed + 1_000_003 * restarts + 7919 * number
      shuffled.append(grain.MapDataset.source(source).seed(seed % 2**32).shuffle().repeat())
    dataset = grain.MapDataset.mix(shuffled, self._source.weights) if mixed else shuffled[0]
    # Prompts are in memory or quick to compute, so threads to read ahead would only cost time.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    self._prompts = iter(dataset.to_iter_dataset(options))

  def __next__(self) -> list[structs.Prompt]:
    return self.take(self._batch_size)

  def take(
    self, count: int, accept: Callable[[structs.Prompt], bool] = lambda _: True
  ) -> list[structs.Prompt]:
    """Returns the next `count` prompts accepted by `accept`.

    After two epochs without an accepted prompt, refused prompts are returned too.
    """
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
    contents = dict(contents=self._contents, rendered=self._rendered)
    files = dict(files=[self._source.path, self._source.lengths]) if self._grows else {}
    return dict(position=position, restarts=self._restarts) | contents | files

  def set_state(self, state: dict[str, Any]) -> None:
    path, lengths = state.get("files", ("", {}))
    if self._grows and path == self._source.path:
      self._source.look(lengths)
      self._contents, self._rendered = self._source.contents, rendered(self._source)
    edited = state["contents"] != self._contents
    before = state.get("rendered", current := self._rendered)  # Without fields in earlier versions.
    changed = edited or before != (current if "+" in before else re.sub(r"\+\w+", "", current))
    if "rendered" not in state:
      logging.warning("the checkpoint has no checksum of prompts' tokens: they are not compared")
    self._start(state["restarts"] + changed)
    if edited:
      logging.warning("the training data has changed since the checkpoint: a new epoch starts")
    elif changed:
      logging.warning(
        "tokens, demonstrations or fields of prompts have changed since the checkpoint (the "
        "tokenizer's files, its chat template, or a row): a new epoch starts"
      )
    else:
      self._prompts.set_state(state["position"])


def epoch_of(source: Source) -> int:
  """Returns the number of prompts drawn until every source is completed once."""
  if not isinstance(source, Mixture):
    return len(source)
  total = sum(source.weights)
  return max(math.ceil(len(s) * total / w) for s, w in zip(source.sources, source.weights))


def _contents(source: Source) -> str:
  """Returns the number of rows and their checksum, for embedded tasks over `probe` alone."""
  if isinstance(source, Mixture):
    return f"{source.weights}: {', '.join(map(_contents, source.sources))}"
  indices = probe(len(source)) if isinstance(source, Embedded) else range(len(source))
  checksum = 0
  for i in indices:
    checksum = zlib.crc32(source[i].content.encode() + b"\n", checksum)
  return f"{len(source)} rows {checksum:08x}"


def rendered(source: Source) -> str:
  """Returns a checksum of tokens, demonstrations and fields, for embedded tasks over `probe`."""
  if isinstance(source, Mixture):
    return " ".join(map(rendered, source.sources))
  indices = probe(len(source)) if isinstance(source, Embedded) else range(len(source))
  checksum, fields = 0, 0
  for row in map(source.__getitem__, indices):
    prompt = getattr(row, "prompt", row)  # In job=offline, a row is a group with its prompt.
    checksum = zlib.crc32(array.array("q", prompt.tokens).tobytes(), checksum)
    checksum = zlib.crc32(repr(prompt.demonstration).encode(), checksum)
    fields = zlib.crc32(repr(prompt.info).encode() if prompt.info else b"", fields)
  return f"{checksum:08x}" + (f"+{fields:08x}" if fields else "")


def require_same_on_hosts(parts: Sequence[Any]) -> None:
  """Raises DataError unless prompts have the same tokens on all hosts. All hosts must call it."""
  if jax.process_count() == 1:
    return
  first, *others = hosts.gather(zlib.crc32(" ".join(map(rendered, parts)).encode()))
  if different := [i for i, checksum in enumerate(others, start=1) if checksum != first]:
    raise DataError(
      f"host {different[0]} has other prompts than host 0: give all hosts the same data files, "
      "tokenizer and versions of packages"
    )


def skipped_rows(source: Source) -> dict[str, float]:
  """Returns the number of skipped rows as a metric; {} if no row was skipped."""
  return {"data/skipped_rows": float(source.skipped)} if source.skipped else {}


def demonstration_tokens(
  prompt: structs.Prompt, tok: tokenizer.Tokenizer
) -> tuple[list[int], list[int]]:
  """Returns the tokens of a prompt's demonstration, and their mask.

  The mask is 1 on responses and their stop tokens, and 0 on the observations of a conversation.
  """
  turns, tokens, mask = prompt.demonstration, [], []
  for i, text in enumerate((turns,) if isinstance(turns, str) else turns):
    turn = [*tok.encode(text), *tok.stop_ids[:1]] if i % 2 == 0 else tok.encode(text)
    tokens += turn
    mask += [1 - i % 2] * len(turn)
  return tokens, mask


def pack_demonstrations(
  prompts: Sequence[structs.Prompt], tok: tokenizer.Tokenizer, length: int
) -> tuple[np.ndarray, np.ndarray]:
  """Writes prompts and their demonstrations into rows, right-padded to `length`.

  Returns:
    Tokens, int32 [B, T], and mask, float32 [B, T]: 1 on responses and stop tokens, 0 elsewhere.

  Raises:
    DataError: a prompt with its demonstration is longer than `length`.
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
  """Excludes data rows of more than `length` tokens, and rows without a demonstration.

  If the source is an embedded task, some problems are checked (`probe`), and none is excluded.

  Args:
    length: `sft.max_tokens`, maximum number of tokens of a prompt with its demonstration.
    on_error: "raise" or "skip"; if "skip", the result counts excluded rows in `skipped`.

  Raises:
    DataError: a checked row is unusable and `on_error` is "raise", or no checked row is usable.
  """
  if isinstance(source, Mixture):
    parts = tuple(fitting(part, tok, length, on_error) for part in source.sources)
    return Mixture(parts, source.spec_weights)
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
    raise DataError(
      f"no row has a demonstration within sft.max_tokens={length} tokens, prompt included. Raise"
      " that key, or set data.demonstration_field"
    )
  if isinstance(source, Embedded):
    return source
  return Prompts(tuple(rows), source.skipped + len(source) - len(rows))


def _too_long(prompt: structs.Prompt, end: int, length: int) -> str:
  """Returns the message about a prompt and demonstration of `end` tokens."""
  return (
    f"{prompt.id}: prompt and demonstration take {end} tokens, more than sft.max_tokens={length}."
    " Raise that key, or set data.on_error=skip to exclude such rows"
  )
