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
  """Bad data, or a bad section `data`. The message names the file and row, or the key."""


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
  starter_template: str = ""  # Template with {question} and {starter}.
  id: str = ""  # Field of the row's id; "": the first of ID_FIELDS in the row, else file and line.
  name: str = ""  # Name in FORMATS; "": the format comes from the section `data`.
  # Function from a row to further fields of its `json:` answer. It may raise BadRow. None if there
  # are no further fields.
  adapt: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None

  def key(self, name: str) -> str:
    """Returns how to change the key `data.NAME`, for error messages."""
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

  Braces directly after a letter, a digit, `_`, `^`, `}` or `]` are LaTeX, not fields.
  """
  if "{question}" not in template:
    raise DataError(f"data.prompt_template={template!r} must contain {{question}}")
  others = set(re.findall(r"(?<![\w^}\]])\{(\w+)\}", template)) - {"question"}
  if others:
    raise DataError(
      f"data.prompt_template={template!r}: only {{question}} is filled, and not {{{min(others)}}};"
      f" set data.question_field to a template of several fields. For literal braces write"
      f" {{ {min(others)} }}, with spaces"
    )


@ranges.section("offline")
class OfflineConfig:
  """Recorded responses, the training data of job=offline. docs/data.md"""

  data: str = key(
    "",
    "files of recorded responses, separated by commas: rollouts/rl_*.jsonl of a run, or other "
    "files of this format",
  )
  fresh: FractionBelowOne = key(
    0.0,
    "share of an iteration's prompts whose responses are newly sampled. The other prompts have "
    "recorded responses.",
  )


@ranges.section("data.query_set")
class QuerySetConfig:
  """Choice of prompts by earlier results: dropping, readmission and dynamic sampling."""

  drop_after: NonNegativeInt = key(
    0,
    "a prompt is dropped after this number of consecutive groups that are all right, or that are "
    "all wrong; 0: never",
  )
  readmit_after: NonNegativeInt = key(
    0, "number of iterations until a dropped prompt is readmitted; 0: never"
  )
  extra_rounds: NonNegativeInt = key(
    0,
    "largest number of further rounds of sampling in an iteration, to replace groups whose "
    "responses all have the same score (DAPO)",
  )

  def __post_init__(self):
    wrong = [
      (
        self.readmit_after,
        "{readmit_after} has no effect, since {drop_after} drops no prompts; change one of them",
      ),
    ]
    ranges.refuse(self, "data.query_set", [] if self.drop_after else wrong)


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Sources of problems, and the default format of files. docs/data.md"""

  train: str = key(
    "arithmetic:train",
    "training problems: embedded task, such as arithmetic:train | file, as [format@]path [where "
    "...] | several of these, separated by commas",
  )
  eval: str = key("arithmetic:heldout", "held-out problems, named as in data.train")
  question_field: str = key(
    "question", "field with the question, or a template of several {fields}"
  )
  answer_field: str = key(
    "answer",
    "field with the gold answer, or json:tests,metadata for a JSON object of several fields",
  )
  answer_pattern: str = key(
    "",
    "regular expression whose group 1 is the answer | boxed: contents of the last \\boxed{} or "
    '\\fbox{} | "": the whole field',
  )
  demonstration_field: str = key(
    "", 'field with the target of the cold start; "": the answer field'
  )
  prompt_template: str = key(
    "{question}",
    "text of the user turn if a chat template is applied, else of the whole prompt; must contain "
    "{question}",
  )
  chat_template: bool = key(
    True,
    "True: apply the chat template of the tokenizer, if it has one | False: prompts are plain text",
  )
  template_arguments: dict = key(
    {}, "arguments of the chat template, by name, such as enable_thinking"
  )
  system: str = key("", 'system prompt; "": none')
  max_prompt_tokens: PositiveInt = key(
    8,
    "largest number of tokens of a prompt. A longer prompt is a bad row (data.on_error). The "
    'default fits "999+999=".',
  )
  on_error: Literal["raise", "skip"] = key(
    "raise", "raise: a bad row stops the run | skip: bad rows are excluded and counted"
  )
  digits: Annotated[int, Range(1, 3)] = key(
    3,
    "number of digits of each number in the problems of arithmetic and calculator (calculator: 1 "
    "or 2)",
  )
  lines: tuple[Annotated[int, Range(1, 128)], ...] = key(
    (8, 16, 32), "possible numbers of lines of a right response to a problem of recurrence"
  )
  carry_errors: Fraction = key(
    0.5,
    "probability of forgetting a carry, for each carry in a demonstration of arithmetic, of "
    "recurrence, or of a step of calculator without a tool call",
  )
  skipped_work: Fraction = key(
    0.0,
    "share of demonstrations of arithmetic that have the answer alone, without the work. Such a "
    "demonstration forgets all carries.",
  )
  checks: Fraction = key(
    0.0,
    "probability of repeating a call, for each call of the calculator in a demonstration of "
    "calculator",
  )
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
