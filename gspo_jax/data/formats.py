"""Formats of data rows, and the conversion of a row to a `Prompt`.

A format names a row's fields for question, answer, demonstration and id. `FORMATS` has the formats
of public data sets. Section `data` of the configuration describes one more format, for other files
(docs/data.md).
"""

import contextlib
import dataclasses
import decimal
import json
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gspo_jax import structs
from gspo_jax.data import contests, replies, tokenizer
from gspo_jax.data.files import BadRow
from gspo_jax.data.filters import TOKENS, Condition, as_text
from gspo_jax.settings.data import BOXED, DataConfig, Format
from gspo_jax.verifiers import math_answer

# If a format names no field for the id, a row's id is the first of these fields that is set.
ID_FIELDS = ("id", "ID", "task_id", "unique_id", "question_id", "problem_id")
# A `Format.answer` with this prefix lists several fields, separated by commas. The answer is then a
# JSON object of these fields, for the verifier of programs. `name=field` renames a field, and
# `tests.*.input` is the list of all tests' `input`. For example, the answer of
# `json:timeout,inputs=tests.*.input` may be {"timeout": 2, "inputs": ["1 2", "3 4"]}.
JSON = "json:"
# Maximum number of characters of a field in `Prompt.info`, to limit memory.
MAX_INFO = 1000
_EXACT = decimal.Context(prec=80)  # Decimals of Parquet have up to 76 digits.
# Roles of messages that are no question, or no answer.
_NOT_ASKING = ("system", "developer", "assistant", "gpt")
_NOT_ANSWERING = ("system", "developer", "user", "human")
# Names of special tokens that stand for an image, a video or a sound, such as <|image_pad|>.
_MEDIA = re.compile(r"<[^<>]*(?:image|video|vision|audio)[^<>]*>|\[IMG[^\[\]]*\]")


# Prompts of LiveCodeBench (lcb_runner/prompts/code_generation.py).
_STDIN = """### Question:
{question}

### Format: Read the inputs from stdin solve the problem and write the answer to stdout (do not \
directly test on the sample inputs). Enclose your code within delimiters as follows.
```python
# YOUR CODE HERE
```

### Answer: (use the provided format with backticks)

"""
_STARTER = """### Question:
{question}

### Format: You will use the following starter code to write the solution to the problem and \
enclose your code within delimiters.
```python
{starter}
```

### Answer: (use the provided format with backticks)

"""
_FUNCTION = """Complete the following Python function. Write the whole function, with its imports, \
in one code block.
```python
{question}
```
"""
_PROGRAM = dict(template=_STDIN, starter="starter_code", starter_template=_STARTER)

FORMATS = {
  "gsm8k": Format("question", "answer", r"####\s*(.+)"),
  "aime": Format("problem", "answer"),
  "math": Format("problem", "solution", BOXED),
  "svamp": Format("{Body} {Question}", "Answer", demonstration="Equation"),
  # The field `answer` is the demonstration too, since the field `solution` is often empty.
  "deepscaler": Format("problem", "answer"),
  # The data set's prompts have instructions already, so the template adds none.
  "dapo_math": Format(
    "prompt", "reward_model.ground_truth", template="{question}", id="extra_info.index"
  ),
  "livecodebench": Format(
    "question_content", "json:public_test_cases,private_test_cases,metadata", **_PROGRAM
  ),
  # TACO has this format, too.
  "apps": Format("question", "input_output", adapt=contests.apps, **_PROGRAM),
  "humaneval": Format(
    "prompt", "json:prompt,test,entry_point", demonstration="canonical_solution", template=_FUNCTION
  ),
  "codeforces": Format(
    "{description}\n\nInput\n{input_format}\n\nOutput\n{output_format}",
    "json:inputs=official_tests.*.input,outputs=official_tests.*.output",
    template=_STDIN,
    adapt=contests.codeforces,
  ),
}
FORMATS = {name: dataclasses.replace(form, name=name) for name, form in FORMATS.items()}


def prompt(
  row: Any,
  form: Format,
  tok: tokenizer.Tokenizer,
  *,
  filters: tuple[Condition, ...] = (),
  max_tokens: int,
  default_id: str,
) -> structs.Prompt | None:
  """Converts a data row to a prompt.

  Args:
    row: decoded row.
    form: names of the row's fields, and templates.
    tok: tokenizer of the run.
    filters: conditions that the row must meet.
    max_tokens: maximum number of tokens of the prompt.
    default_id: id of the prompt if the row has no id.

  Returns:
    The prompt; None if a filter excludes the row.

  Raises:
    BadRow: the row cannot be used.
  """
  if not isinstance(row, Mapping):
    raise BadRow(f"a row is an object with fields, and this is {_kind(row)}. Correct the row")
  if not all(c.keeps(_lookup(row, c.field, "the filter")) for c in filters if c.field != TOKENS):
    return None
  *before, last = _messages(row, form)
  question = last["content"]
  whole, answer = _answer(row, form)
  demonstration = whole
  if form.demonstration:
    key = form.key("demonstration_field")
    _refuse_roles(row, form.demonstration, key, _NOT_ANSWERING)
    demonstration = text_of(row, form.demonstration, key)
  template = form.template
  starter = row.get(form.starter) if form.starter else None
  if starter:
    template = form.starter_template.replace("{starter}", str(starter))
  messages = [*before, tokenizer.user_turn(question, template)]
  text = render_prompt(tok, messages)
  tokens = tuple(tok.encode(text))
  if not all(c.keeps(len(tokens)) for c in filters if c.field == TOKENS):
    return None
  if len(tokens) > max_tokens:
    raise BadRow(
      f"the prompt takes {len(tokens)} tokens, more than data.max_prompt_tokens={max_tokens}."
      " Shorten it, raise that limit or filter with `where prompt_tokens<=N`"
    )
  name = form.id or next((name for name in ID_FIELDS if row.get(name) is not None), None)
  row_id = text_of(row, name, name) if name else default_id
  info = tuple(_further(row, {*_fields(form.question), *_fields(form.answer), name}))
  thinks = text.rstrip().endswith("<think>")
  demonstration = replies.continuation(tok, messages, text, demonstration)
  return structs.Prompt(row_id, question, answer, tokens, demonstration, info, thinks)


def render_prompt(tok: tokenizer.Tokenizer, messages: Sequence[Mapping[str, str]]) -> str:
  """Renders the messages of a row.

  Raises BadRow if the template refuses them, or for a special token of an image, video or sound.
  """
  try:
    text = tok.chat(messages)
    text.encode()  # Half of a surrogate pair raises UnicodeError: a bad row.
  except tokenizer.TokenizerError as error:
    raise BadRow(f"{error}, or the messages of the row") from error
  for match in _MEDIA.finditer(text):
    if len(tok.encode(match[0])) == 1:
      raise BadRow(
        f"the prompt has the token {match[0]}, and only text is supported, no image, video or"
        " sound. Remove it from the row, or drop such rows with `where FIELD!~TOKEN`"
      )
  return text


def _messages(row: Mapping[str, Any], form: Format) -> list[dict[str, Any]]:
  """Returns the messages of a prompt, the question last.

  The question field is a text, or a list of messages. In a list the question is the user's last
  message; later messages are dropped.
  """
  key = form.key("question_field")
  value = None if "{" in form.question else _lookup(row, form.question, key)
  if not (isinstance(value, list | tuple) and all(isinstance(m, Mapping) for m in value)):
    _refuse_roles(row, form.question, key, _NOT_ASKING)
    return [dict(role="user", content=text_of(row, form.question, key, numbers=False))]
  messages = [_as_openai(message) for message in value]
  while messages and messages[-1].get("role") != "user":
    messages.pop()
  if not messages:
    raise BadRow(f"the field {form.question!r} has no message of the role user. Correct the row")
  return [dict(m, content=text_of(m, "content", key, numbers=False)) for m in messages]


def _as_openai(message: Mapping[str, Any]) -> Mapping[str, Any]:
  """Converts a message of ShareGPT to `role` and `content`."""
  if "role" in message or "from" not in message:
    return message
  role = str(message["from"])
  names = dict(human="user", gpt="assistant")
  return dict(role=names.get(role, role), content=message.get("value"))


def _refuse_roles(row: Mapping[str, Any], name: str, key: str, roles: Collection[str]) -> None:
  """Raises BadRow for the text of a message with one of these roles."""
  head, _, tail = name.rpartition(".")
  if not head or tail not in ("content", "value") or name in row:
    return
  message = _lookup(row, head, key)
  role = message.get("role", message.get("from")) if isinstance(message, Mapping) else None
  if role in roles:
    last = f".-1.{tail}, the last message"
    advice = ", the list of all messages" if roles == _NOT_ASKING else last
    raise BadRow(f"{name!r} is a {role} message. Set {key}={head.rpartition('.')[0]}{advice}")


def _further(
  row: Mapping[str, Any], used: Collection[str | None], prefix: str = ""
) -> Iterator[tuple[str, str]]:
  """Yields name and text of each field other than question, answer and id.

  Verifiers and evaluation use these fields. Nested fields have dotted names. Lists, empty texts and
  texts longer than MAX_INFO are excluded. They can be part of the answer instead (see JSON).

  Args:
    row: the row, or a nested object of it.
    used: names of the fields of question, answer and id.
    prefix: dotted name of the nested object, with a dot at its end.
  """
  for name, value in row.items():
    if isinstance(value, Mapping):
      yield from _further(value, used, f"{prefix}{name}.")
    elif prefix + name not in used and not isinstance(value, list | tuple | np.ndarray):
      with contextlib.suppress(UnicodeError):  # Excludes binary data.
        text = "" if value is None else as_text(value)
        if 0 < len(text) <= MAX_INFO:
          yield sys.intern(prefix + name), text  # All rows share one string of the name.


def _fields(spec: str) -> list[str]:
  """Returns names of the fields in a `Format.question` or `Format.answer`."""
  if spec.startswith(JSON):
    return [pair.rpartition("=")[2] for pair in spec.removeprefix(JSON).split(",")]
  return re.findall(r"\{([^{}]+)\}", spec) or [spec]


def _answer(row: Mapping[str, Any], form: Format) -> tuple[str, str]:
  """Returns the answer field's text, and the gold answer in this text.

  An answer of several fields is a JSON object (see JSON). This object is then returned twice.
  """
  further = form.adapt(row) if form.adapt else {}
  if form.answer.startswith(JSON):
    pairs = [name.rpartition("=") for name in form.answer.removeprefix(JSON).split(",")]
    key = form.key("answer_field")
    values = {new or old: _lookup_all(row, old, key) for new, _, old in pairs}
    answer = json.dumps(values | further, default=_plain)
    return answer, answer
  _refuse_roles(row, form.answer, form.key("answer_field"), _NOT_ANSWERING)
  whole = text_of(row, form.answer, form.key("answer_field"))
  if form.answer_pattern == BOXED:
    answer = math_answer.boxed(whole) or ""
  elif form.answer_pattern:
    match = re.search(form.answer_pattern, whole)
    answer = (match[1] or "").strip() if match else ""
  else:
    answer = whole.strip()
  if not answer:
    pattern = "the pattern " if form.name else "data.answer_pattern="
    raise BadRow(
      f"{pattern}{form.answer_pattern!r} finds no answer in the field {form.answer!r}, which "
      f"ends with {whole[-40:]!r}. Correct the row or {form.key('answer_pattern')} (if empty, the "
      "whole field is the answer)"
    )
  return whole, answer


# Fields.


def text_of(row: Mapping[str, Any], name: str, key: str, numbers: bool = True) -> str:
  """Returns the text of a field, or of a template with fields in braces.

  Args:
    row: the row.
    name: name of the field, or template.
    key: configuration key for `name`, for messages.
    numbers: whether numbers are converted to text. If False, a field with a number is bad, except
      in a template.

  Raises:
    BadRow: a field is missing, empty, or of another type, or has invalid characters.
  """
  if "{" in name:
    return re.sub(r"\{([^{}]+)\}", lambda match: text_of(row, match[1], key), name)
  value = _lookup(row, name, key)
  try:
    text = _text(value, numbers)
    text.encode()  # JSON may contain half of a surrogate pair, which cannot be encoded.
  except UnicodeError as error:
    raise BadRow(f"the field {name!r} is not UTF-8: {error}. Correct the row") from error
  except TypeError as error:
    expected = "text or a number" if numbers else "text"
    raise BadRow(
      f"the field {name!r} is {error}, and {expected} was expected. Correct the row or {key}"
    ) from error
  if not text.strip():
    raise BadRow(f"the field {name!r} is empty. Fill it in")
  if "\0" in text:
    raise BadRow(f"the field {name!r} has a NUL character. Correct the row")
  return text


def _lookup(row: Mapping[str, Any], name: str, key: str) -> Any:
  """Returns a field by its name, which may be dotted: `info.answer`, `messages.-1.content`."""
  value = row
  for part in [name] if name in row else name.split("."):
    if isinstance(value, Mapping) and part in value:
      value = value[part]
    elif isinstance(value, list | tuple) and part in map(str, range(-len(value), len(value))):
      value = value[int(part)]
    else:
      fields = ", ".join(map(repr, row))
      raise BadRow(f"the field {name!r} is missing; there are {fields}. Correct the row or {key}")
  return value


def _lookup_all(row: Mapping[str, Any], name: str, key: str) -> Any:
  """Returns a field. For `tests.*.input`, returns a list with the field `input` of each test."""
  head, star, tail = name.partition(".*.")
  if not star:
    return _lookup(row, name, key)
  items = _lookup(row, head, key)
  if not isinstance(items, list | tuple) or not items:
    raise BadRow(f"the field {head!r} is empty or not a list. Correct the row or {key}")
  if not all(isinstance(item, Mapping) for item in items):
    raise BadRow(f"the field {head!r} has items that are not objects. Correct the row or {key}")
  return [_lookup(item, tail, key) for item in items]


def _text(value: Any, numbers: bool) -> str:
  """Converts a text to str, and a number too if `numbers` is True.

  Raises:
    TypeError: the value is of another type or not finite; the message describes the value.
  """
  if isinstance(value, str):
    return value
  if isinstance(value, bytes):  # TFDS has texts as bytes.
    return value.decode("utf-8")
  if numbers and isinstance(value, decimal.Decimal) and value.is_finite():
    return f"{value.normalize(_EXACT):f}"
  if isinstance(value, np.generic):
    value = _plain(value)
  integer = isinstance(value, int) and not isinstance(value, bool)
  if numbers and (integer or (isinstance(value, float) and math.isfinite(value))):
    return repr(int(value) if value == int(value) else value)  # 145.0 becomes "145".
  raise TypeError(_kind(value))


def _plain(value: Any) -> Any:
  """Converts a value to a JSON type.

  Values come from NumPy, TFDS (bytes) and Parquet (decimals, dates). A NumPy float becomes its
  shortest decimal: 0.1, and not 0.10000000149.
  """
  if isinstance(value, bytes):
    return value.decode("utf-8")
  if isinstance(value, np.ndarray):
    return list(value) if value.ndim else value[()]
  if isinstance(value, np.floating):
    return float(str(value))
  if isinstance(value, decimal.Decimal):
    return int(value) if value == value.to_integral_value() else float(value)
  return value.item() if isinstance(value, np.generic) else str(value)


def _kind(value: Any) -> str:
  """Describes a value and its type, for messages."""
  return "null" if value is None else f"{value!r:.40} ({type(value).__name__})"


def named(config: DataConfig, name: str) -> Format:
  """Returns a format by name.

  Names are those in FORMATS, and "" for the format of section `data`. If a format has no template,
  `data.prompt_template` is used.
  """
  if not name:
    return config.form
  form = FORMATS[name]
  return dataclasses.replace(form, template=form.template or config.prompt_template)
