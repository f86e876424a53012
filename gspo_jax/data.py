"""Data sets of problems, through Grain: checked once, then shuffled, sharded and resumable.

A source is the embedded task (`arithmetic:train`), files (JSON lines, Parquet, ArrayRecord of JSON
objects; any path or pattern that etils opens), or a TFDS data set (`tfds:gsm8k/train`; TensorFlow
is not needed). Rows become `Prompt`s before training starts, so that a bad row costs no accelerator
time.
"""

import dataclasses
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import grain
import numpy as np

from gspo_jax import structs, tokenizer
from gspo_jax.data_files import BadRow, DataError, read
from gspo_jax.rewards import arithmetic

ID_FIELDS = ("id", "ID", "task_id", "unique_id", "question_id")  # first one that a row has


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where problems come from. Field names may be dotted (`info.answer`, `messages.0.content`), and
  one with braces is a text made of fields (`{Body} {Question}`).
  """

  train: str  # arithmetic:train | path or pattern of files | tfds:name/split
  eval: str
  question_field: str
  answer_field: str
  answer_pattern: str  # group 1 is the gold answer within the answer field; '': all of it
  demonstration_field: str  # what supervised fine-tuning learns to write; '': the answer field
  prompt_template: str  # holds {question}; the user's turn where the tokenizer has a chat template
  max_prompt_tokens: int
  on_error: str  # what a bad row does: 'raise' stops the run, 'skip' leaves it out and counts it
  digits: int  # arithmetic: digits of the operands
  carry_errors: float  # arithmetic: probability that a demonstration forgets a carry

  def __post_init__(self):
    try:
      groups = re.compile(self.answer_pattern).groups
    except re.error as error:
      raise DataError(f"data.answer_pattern={self.answer_pattern!r}: {error}") from error
    if self.answer_pattern and groups < 1:
      raise DataError(f"data.answer_pattern={self.answer_pattern!r} has no group (...) to take")
    if "{question}" not in self.prompt_template:
      raise DataError(f"data.prompt_template={self.prompt_template!r} must hold {{question}}")
    if self.on_error not in ("raise", "skip"):
      raise DataError(f"data.on_error={self.on_error!r} is not raise or skip")
    if self.max_prompt_tokens < 1:
      raise DataError(f"data.max_prompt_tokens={self.max_prompt_tokens} must be at least 1")


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


def load(config: DataConfig, tok: tokenizer.Tokenizer, split: str) -> Source:
  """The prompts of `config.train` (split 'train') or `config.eval` (split 'eval').

  Raises:
    DataError: for a bad file, an empty data set, and for the first bad row unless
      `config.on_error` is 'skip'.
  """
  spec, key = {"train": (config.train, "data.train"), "eval": (config.eval, "data.eval")}[split]
  if not spec:
    raise DataError(f"{key} is empty. Set --config.{key} to a file or data set")
  if spec.startswith("arithmetic:"):
    return _Arithmetic(config, tok, spec.partition(":")[2], key)
  return _load_rows(config, tok, spec, key)


def batches(
  source: Source, batch_size: int, *, seed: int, process_index: int = 0, process_count: int = 1
) -> grain.DatasetIterator:
  """An endless iterator over lists of `batch_size` prompts, shuffled anew in every epoch.

  All processes cut one global order, so at every step they hold disjoint parts of it, and the
  prompts of a step do not depend on how many processes share them. Epochs follow each other
  without a gap: a batch may span two, and one larger than the source repeats prompts.
  `get_state()` is a dict that JSON can hold; `set_state` continues from there.
  """
  if batch_size < 1 or not 0 <= process_index < process_count:
    raise ValueError(f"batch size {batch_size}, process {process_index} of {process_count}")
  dataset = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
  if process_count > 1:
    dataset = dataset[process_index::process_count]
  dataset = dataset.batch(batch_size, batch_fn=list)
  # Prompts are in memory or cheap to make: threads that read ahead would only add latency.
  return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def demonstration_tokens(prompt: structs.Prompt, tok: tokenizer.Tokenizer) -> list[int]:
  """The tokens that supervised fine-tuning learns to write after the prompt: text, then stop."""
  return [*tok.encode(prompt.demonstration), tok.stop_ids[0]]


def pack_demonstrations(
  prompts: Sequence[structs.Prompt], tok: tokenizer.Tokenizer, length: int
) -> tuple[np.ndarray, np.ndarray]:
  """Prompt, demonstration and stop token per row, right-padded to `length`.

  Returns:
    tokens int32 [B, T] and mask float32 [B, T], 1 on the demonstration and its stop token.

  Raises:
    DataError: if a row does not fit (`fitting` finds such rows before training starts).
  """
  tokens_BT = np.full((len(prompts), length), tok.pad_id, np.int32)
  mask_BT = np.zeros((len(prompts), length), np.float32)
  for b, prompt in enumerate(prompts):
    target = demonstration_tokens(prompt, tok)
    start, end = len(prompt.tokens), len(prompt.tokens) + len(target)
    if end > length:
      raise DataError(_too_long(prompt, end, length))
    tokens_BT[b, :end] = [*prompt.tokens, *target]
    mask_BT[b, start:end] = 1
  return tokens_BT, mask_BT


def fitting(source: Source, tok: tokenizer.Tokenizer, length: int, on_error: str) -> Source:
  """`source` without the demonstrations that `pack_demonstrations` could not pack into `length`.

  With on_error 'raise' the first one is an error; with 'skip' they join `skipped`. The embedded
  task is looked at in samples only, and comes back whole.
  """
  rows = []
  for index in _spread(len(source)) if isinstance(source, _Arithmetic) else range(len(source)):
    prompt = source[index]
    end = len(prompt.tokens) + len(demonstration_tokens(prompt, tok))
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
    raise DataError(f"no demonstration fits into {length} tokens")
  if isinstance(source, _Arithmetic):
    return source
  return Prompts(tuple(rows), source.skipped + len(source) - len(rows))


def _too_long(prompt: structs.Prompt, end: int, length: int) -> str:
  return (
    f"{prompt.id}: prompt and demonstration take {end} tokens and the sequence has {length}."
    " Lengthen the sequence, or set data.on_error=skip to leave such rows out"
  )


class _Arithmetic:
  """The embedded task, generated as it is read."""

  skipped = 0

  def __init__(self, config: DataConfig, tok: tokenizer.Tokenizer, split: str, key: str):
    self._config, self._tok = config, tok
    try:
      self._problems = arithmetic.problems(split, config.digits)
    except ValueError as error:
      raise DataError(f"{key}: {error}") from error
    for index in _spread(len(self)):
      prompt = self[index]
      if len(prompt.tokens) > config.max_prompt_tokens:
        raise DataError(
          f"{key}: the prompt {prompt.question!r} takes {len(prompt.tokens)} tokens, more than"
          f" data.max_prompt_tokens={config.max_prompt_tokens}"
        )

  def __len__(self) -> int:
    return len(self._problems)

  def __getitem__(self, index: int) -> structs.Prompt:
    row = self._problems[index]
    text = self._tok.render(row["question"], template=self._config.prompt_template)
    return structs.Prompt(
      id=row["id"],
      question=row["question"],
      answer=row["answer"],
      tokens=tuple(self._tok.encode(text)),
      # The same problem is always demonstrated in the same way, right or wrong.
      demonstration=arithmetic.demonstration(row, self._config.carry_errors, seed=index),
    )


def _spread(length: int) -> range:
  """About 500 indices all over a source."""
  return range(0, length, max(1, length // 500))


def _load_rows(config: DataConfig, tok: tokenizer.Tokenizer, spec: str, key: str) -> Prompts:
  """Reads and checks every row of files or of a TFDS data set."""
  for name in ("question_field", "answer_field"):
    if not getattr(config, name):
      raise DataError(f"data.{name} is empty. Set it to the field of {key}={spec} that holds it")
  prompts, seen, skipped, first = [], {}, 0, ""
  for where, default_id, decode in read(spec, key):
    try:
      prompt = _prompt(decode(), config, tok, default_id)
      if prompt.id in seen:
        raise BadRow(f"the id {prompt.id!r} is that of {seen[prompt.id]} too. Make ids unique")
    except BadRow as error:
      if config.on_error == "raise":
        hint = "or set data.on_error=skip to leave such rows out"
        raise DataError(f"{where}: {error}, {hint}") from error
      skipped += 1
      first = first or f"; {where}: {error}"
      continue
    seen[prompt.id] = where
    prompts.append(prompt)
  if not prompts:
    raise DataError(f"{key}={spec}: the data set is empty ({skipped} bad rows{first})")
  if skipped:
    logging.warning("%s=%s: %d rows left out%s", key, spec, skipped, first)
  return Prompts(tuple(prompts), skipped)


def _prompt(
  row: Any, config: DataConfig, tok: tokenizer.Tokenizer, default_id: str
) -> structs.Prompt:
  if not isinstance(row, Mapping):
    raise BadRow(f"a row is an object with fields, and this is {_kind(row)}. Correct the row")
  question = _field(row, config.question_field, "data.question_field", numbers=False)
  whole = _field(row, config.answer_field, "data.answer_field")
  answer = whole.strip()
  if config.answer_pattern:
    match = re.search(config.answer_pattern, whole)
    answer = (match[1] or "").strip() if match else ""
    if not answer:
      raise BadRow(
        f"data.answer_pattern={config.answer_pattern!r} finds no answer in the field"
        f" {config.answer_field!r} (its end: {whole[-40:]!r}). Correct the row or the pattern"
      )
  demonstration = whole
  if config.demonstration_field:
    demonstration = _field(row, config.demonstration_field, "data.demonstration_field")
  tokens = tuple(tok.encode(tok.render(question, template=config.prompt_template)))
  if len(tokens) > config.max_prompt_tokens:
    raise BadRow(
      f"the prompt takes {len(tokens)} tokens, more than"
      f" data.max_prompt_tokens={config.max_prompt_tokens}. Shorten it, raise that limit"
    )
  name = next((name for name in ID_FIELDS if row.get(name) is not None), None)
  row_id = _field(row, name, name) if name else default_id
  return structs.Prompt(row_id, question, answer, tokens, demonstration)


def _field(row: Mapping[str, Any], name: str, key: str, numbers: bool = True) -> str:
  """The text of a field, or of a template of fields; numbers are written out if allowed."""
  if "{" in name:
    return re.sub(r"\{([^{}]+)\}", lambda match: _field(row, match[1], key, numbers), name)
  value = row
  for part in [name] if name in row else name.split("."):
    if isinstance(value, Mapping) and part in value:
      value = value[part]
    elif isinstance(value, list | tuple) and part.isdecimal() and int(part) < len(value):
      value = value[int(part)]
    else:
      fields = ", ".join(map(repr, row))
      raise BadRow(f"the field {name!r} is missing; there are {fields}. Correct the row or {key}")
  try:
    text = _text(value, numbers)
    text.encode()  # JSON can spell half of a surrogate pair
  except UnicodeError as error:
    raise BadRow(f"the field {name!r} is not UTF-8: {error}. Correct the row") from error
  except TypeError as error:
    wanted = "text or a number" if numbers else "text"
    raise BadRow(
      f"the field {name!r} is {error}, and {wanted} was expected. Correct the row or {key}"
    ) from error
  if not text.strip():
    raise BadRow(f"the field {name!r} is empty. Fill it in")
  return text


def _text(value: Any, numbers: bool) -> str:
  """A value as text. Raises TypeError, with the kind of value, for what is not text or number."""
  if isinstance(value, str):
    return value
  if isinstance(value, bytes):  # TFDS
    return value.decode("utf-8")
  if isinstance(value, np.generic):
    value = value.item()
  number = isinstance(value, int | float) and not isinstance(value, bool)
  if numbers and number and math.isfinite(value):
    return repr(int(value) if value == int(value) else value)  # 145.0 is the answer 145
  raise TypeError(_kind(value))


def _kind(value: Any) -> str:
  return "null" if value is None else f"{value!r:.40} ({type(value).__name__})"
