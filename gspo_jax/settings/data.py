"""Sections `data` and `offline`."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import (
  Fraction,
  FractionBelowOne,
  NonNegativeInt,
  PositiveInt,
  Range,
  key,
)


class DataError(ValueError):
  """Bad data, or a bad `data` config; the message names the file and row, or the key."""


BOXED = "boxed"  # Answer pattern: contents of the last \boxed{} or \fbox{} of the field.


@dataclasses.dataclass(frozen=True)
class Format:
  """Fields of a data row with question and answer, and templates of its prompt.

  A field may be a dotted name (`info.answer`, `messages.1.content`), or a template of several
  fields (`{Body} {Question}`).
  """

  question: str
  answer: str  # Field; `json:tests,metadata` means a JSON object of several fields.
  answer_pattern: str = ""  # Regex with the answer as group 1; `boxed`; "": the whole field.
  demonstration: str = ""  # Target of supervised fine-tuning; "": the answer field.
  template: str = ""  # Template of the prompt with {question}; "": data.prompt_template.
  starter: str = ""  # Field of starter code; rows with starter code use `starter_template`.
  starter_template: str = ""  # Has {question} and {starter}.
  id: str = ""  # Field of the row's id; "": the first of ID_FIELDS in the row, else file and line.
  name: str = ""  # Name in FORMATS; "": the format comes from the section `data`.
  # Function from a row to further fields of its `json:` answer. It may raise BadRow. None if there
  # are no further fields.
  adapt: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None

  def key(self, name: str) -> str:
    """Returns how to choose another field, for error messages."""
    return f"leave out {self.name}@ and set data.{name}" if self.name else f"data.{name}"

  def __post_init__(self):
    if self.answer_pattern and self.answer_pattern != BOXED:
      try:
        groups = re.compile(self.answer_pattern).groups
      except re.error as error:
        raise DataError(f"data.answer_pattern={self.answer_pattern!r}: {error}") from error
      if groups < 1:
        raise DataError(
          f"data.answer_pattern={self.answer_pattern!r} has no group; put (...) around the answer"
        )
    for name, field in ("question_field", self.question), ("answer_field", self.answer):
      if "{" in field and not re.search(r"\{[^{}]+\}", field):
        raise DataError(f"data.{name}={field!r} has braces without a field's name: write {{field}}")
    if self.template:
      check_template(self.template)


def check_template(template: str) -> None:
  """Raises DataError unless {question} is the only field of a template.

  Braces that follow a command, `^`, `_` or other braces are LaTeX, not fields.
  """
  if "{question}" not in template:
    raise DataError(f"data.prompt_template={template!r} must contain {{question}}")
  others = set(re.findall(r"(?<![\w^}\]])\{(\w+)\}", template)) - {"question"}
  if others:
    raise DataError(
      f"data.prompt_template={template!r}: only {{question}} is filled, and not {{{min(others)}}};"
      f" set data.question_field to a template of several fields, or write {{ {min(others)} }} for"
      " literal braces"
    )


@dataclasses.dataclass(frozen=True)
class OfflineConfig:
  """Recorded responses, the training data of job=offline. docs/data.md"""

  data: str = key(
    "", "files, separated by commas: rollouts/rl_*.jsonl of a run, or others of this format"
  )
  fresh: FractionBelowOne = key(0.0, "share of prompts with newly sampled responses")

  def __post_init__(self):
    ranges.check(self, "offline")


@dataclasses.dataclass(frozen=True)
class QuerySetConfig:
  """Prompts that training drops, readmits or samples again."""

  drop_after: NonNegativeInt = key(
    0, "consecutive groups, all right or all wrong, before their prompt is dropped; 0: never"
  )
  readmit_after: NonNegativeInt = key(0, "iterations until a dropped prompt returns; 0: never")
  extra_rounds: NonNegativeInt = key(
    0, "further rounds of sampling until rewards vary in all groups (DAPO)"
  )

  def __post_init__(self):
    ranges.check(self, "data.query_set")
    wrong = [
      (self.readmit_after, "{readmit_after} readmits nothing, since {drop_after}; set one of them"),
    ]
    ranges.refuse(self, "data.query_set", [] if self.drop_after else wrong)


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Sources of problems, and the default format of their files. docs/data.md"""

  train: str = key(
    "arithmetic:train", "embedded task | [format@]path [where ...] | several, with commas"
  )
  eval: str = key("arithmetic:heldout", "held-out problems, as data.train")
  question_field: str = key("question", "field, or template of {fields}")
  answer_field: str = key("answer", "field, or json:tests,metadata")
  answer_pattern: str = key(
    "", 'regex with the answer as group 1; boxed: contents of \\boxed{}; "": the whole field'
  )
  demonstration_field: str = key("", 'target of the cold start; "": the answer field')
  prompt_template: str = key(
    "{question}", "user turn of a chat template, else the whole prompt; has {question}"
  )
  chat_template: bool = key(True, "apply the tokenizer's chat template, if any; False: plain text")
  template_arguments: dict = key({}, "arguments of the chat template, by name: enable_thinking")
  system: str = key("", 'system prompt; "": none')
  max_prompt_tokens: PositiveInt = key(
    8, 'largest number of tokens, by default for "999+999="; longer prompts are bad rows (on_error)'
  )
  on_error: Literal["raise", "skip"] = key("raise", "bad rows: stop the run | skip and count them")
  digits: Annotated[int, Range(1, 3)] = key(
    3, "embedded tasks: digits of an operand; calculator: 1 or 2"
  )
  lines: tuple[Annotated[int, Range(1, 128)], ...] = key(
    (8, 16, 32), "recurrence: numbers of lines of a problem"
  )
  carry_errors: Fraction = key(
    0.5, "embedded tasks: probability of a forgotten carry in a demonstration"
  )
  skipped_work: Fraction = key(
    0.0, "arithmetic: share of demonstrations with the answer alone, without the work"
  )
  checks: Fraction = key(0.0, "calculator: probability of a repeated call in a demonstration")
  query_set: QuerySetConfig = QuerySetConfig()

  def __post_init__(self):
    try:
      ranges.check(self, "data")
    except ValueError as error:
      raise DataError(str(error)) from None
    check_template(self.prompt_template)
    _ = self.form  # Checks the fields and the pattern.

  @property
  def form(self) -> Format:
    """Format described by this section."""
    return Format(
      self.question_field,
      self.answer_field,
      self.answer_pattern,
      self.demonstration_field,
      self.prompt_template,
    )
