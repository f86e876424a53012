"""Sections `data` and `offline`."""

import dataclasses
import re
from typing import Annotated, Literal

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


BOXED = "boxed"  # as an answer pattern: what the last \boxed{} (or \fbox{}) of the field holds


@dataclasses.dataclass(frozen=True)
class Format:
  """The fields in which a row keeps its parts. Names may be dotted (`info.answer`,
  `messages.1.content`), and one with braces is a text made of fields (`{Body} {Question}`).
  """

  question: str
  answer: str  # a field, or `json:tests,metadata`
  answer_pattern: str = ""  # regex whose group 1 is the gold answer; `boxed`; "": the whole field
  demonstration: str = ""  # what supervised fine-tuning learns to write; "": the answer field
  template: str = ""  # of the prompt, holds {question}; "": data.prompt_template
  starter: str = ""  # field of code to start from; where a row has some, the next template is used
  starter_template: str = ""  # holds {question} and {starter}
  id: str = ""  # "": the first of ID_FIELDS that the row has, else file and line
  name: str = ""  # of FORMATS; "": the keys of the section `data` say all this

  def key(self, name: str) -> str:
    """What to set for other fields, in messages."""
    return f"leave out {self.name}@ and set data.{name}" if self.name else f"data.{name}"

  def __post_init__(self):
    if self.answer_pattern and self.answer_pattern != BOXED:
      try:
        groups = re.compile(self.answer_pattern).groups
      except re.error as error:
        raise DataError(f"data.answer_pattern={self.answer_pattern!r}: {error}") from error
      if groups < 1:
        raise DataError(f"data.answer_pattern={self.answer_pattern!r} has no group (...) to take")
    for name, field in ("question_field", self.question), ("answer_field", self.answer):
      if "{" in field and not re.search(r"\{[^{}]+\}", field):
        raise DataError(f"data.{name}={field!r} has braces, and no {{field}} in them")
    if self.template:
      check_template(self.template)


def check_template(template: str) -> None:
  """DataError if a template of prompts lacks its question, or has a field that nothing fills.

  LaTeX may stay as it is: its braces follow a command, a script or other braces.
  """
  if "{question}" not in template:
    raise DataError(f"data.prompt_template={template!r} must hold {{question}}")
  others = set(re.findall(r"(?<![\w^}\]])\{(\w+)\}", template)) - {"question"}
  if others:
    raise DataError(
      f"data.prompt_template={template!r}: nothing fills {{{min(others)}}}, only {{question}};"
      f" put several fields into data.question_field, and write {{ {min(others)} }} for the text"
    )


@dataclasses.dataclass(frozen=True)
class OfflineConfig:
  """Recorded responses, which job=offline learns from. docs/data.md"""

  data: str = key("", "dumped rollouts, RUN/rollouts/rl_*.jsonl, or files like them, with commas")
  fresh: FractionBelowOne = key(0.0, "share of prompts whose responses are sampled now")

  def __post_init__(self):
    ranges.check(self, "offline")


@dataclasses.dataclass(frozen=True)
class QuerySetConfig:
  """Prompts that stay in use while the policy learns."""

  drop_after: NonNegativeInt = key(0, "groups all right or all wrong that drop a prompt; 0: none")
  readmit_after: NonNegativeInt = key(0, "iterations until a dropped prompt returns; 0: never")
  extra_rounds: NonNegativeInt = key(0, "of sampling, until all groups have spread (DAPO)")

  def __post_init__(self):
    ranges.check(self, "data.query_set")
    wrong = [
      (self.readmit_after, "{readmit_after} readmits nothing, since {drop_after}"),
    ]
    ranges.refuse(self, "data.query_set", [] if self.drop_after else wrong)


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Sources of problems, and the format of files that name none of their own. docs/data.md"""

  train: str = key("arithmetic:train", "embedded task | [format@]path [where ...] | several")
  eval: str = key("arithmetic:heldout", "held-out problems, in the same way")
  question_field: str = key("question", "a field, or a text made of {fields}")
  answer_field: str = key("answer", "a field, or json:tests,metadata")
  answer_pattern: str = key("", 'regex whose group 1 is the answer; boxed; "": the whole field')
  demonstration_field: str = key("", 'imitated by the cold start; "": the answer field')
  prompt_template: str = key(
    "{question}", "the user's turn where the tokenizer has a chat template; holds {question}"
  )
  chat_template: bool = key(True, "the tokenizer's, where it has one; False: plain text")
  template_arguments: dict = key({}, "of the chat template, by name: enable_thinking")
  system: str = key("", 'what the system says before the user; "": nothing')
  max_prompt_tokens: PositiveInt = key(8, 'of "999+999="; a longer one is a bad row')
  on_error: Literal["raise", "skip"] = key(
    "raise", "a bad row stops the run, or is left out and counted"
  )
  digits: Annotated[int, Range(1, 3)] = key(
    3, "embedded tasks: of an operand; with the calculator 1 or 2"
  )
  lines: tuple[Annotated[int, Range(1, 128)], ...] = key(
    (8, 16, 32), "recurrence: that its problems ask for"
  )
  carry_errors: Fraction = key(0.5, "probability that a demonstration forgets a carry")
  skipped_work: Fraction = key(0.0, "sums: share of demonstrations that are the answer alone")
  checks: Fraction = key(0.0, "calculator: probability that a demonstration asks twice")
  query_set: QuerySetConfig = QuerySetConfig()

  def __post_init__(self):
    try:
      ranges.check(self, "data")
    except ValueError as error:
      raise DataError(str(error)) from None
    check_template(self.prompt_template)
    _ = self.form  # checks the fields and the pattern

  @property
  def form(self) -> Format:
    """The format that this section describes."""
    return Format(
      self.question_field,
      self.answer_field,
      self.answer_pattern,
      self.demonstration_field,
      self.prompt_template,
    )
