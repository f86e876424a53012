"""Filters of data rows: conditions on fields, such as `level>=3 and subject!=Geometry`."""

import dataclasses
import decimal
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gspo_jax.data.files import BadRow
from gspo_jax.settings.data import DataError

TOKENS = "prompt_tokens"  # A condition on this name limits the prompt's number of tokens.
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
  "==": operator.eq,
  "!=": operator.ne,
  "<=": operator.le,
  ">=": operator.ge,
  "<": operator.lt,
  ">": operator.gt,
}
ORDER = ("<=", ">=", "<", ">")  # Operators for values that have an order.
_CONDITION = re.compile(r"\s*([\w.]+)\s*(==|!=|<=|>=|<|>|=~|!~)\s*(.+?)\s*")
_JOINED = re.compile(r"(?:&&|\|\||\b(?:AND|OR|or)\b)\s*[\w.]+\s*[=!<>]")  # Not by `and`.
_WEIGHT = re.compile(r"(?<!\d):\d*\.?\d+$|:0?\.\d+$")  # A source's weight after its conditions.
_NUMBER = re.compile(r"(?:(?<![^\s(:])[-+−])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
_WORDS = re.compile(r"(?:[^\W\d_]|[\s:#.,()%$°'\"/_−-])*")  # Allowed text around a number.
_MULTIPLIED = re.compile(r"\d\s?[kKM]\b")  # A number with a multiplier: 2.5k.
_DATE = re.compile(r"\d{4}(?:[-/]\d\d(?:[-/]\d\d(?:[T ].*)?)?)?")


@dataclasses.dataclass(frozen=True)
class Condition:
  """A filter condition `field op value`, such as `level>=3`.

  - Two numbers are compared as numbers.
  - A number and a text with one number, such as `Level 3` or `12 kyu`, are compared as numbers.
  - Two dates of the form 2024-10-01, 2024-10 or 2024/10/01 are compared as dates.
  - Other texts are compared as texts. If two texts have one number each and are otherwise equal,
    their numbers determine their order: `Level 9` is below `Level 10`.
  - `=~` and `!~` search the field for a regular expression, the condition's value.
  - A null field or NaN fails `<`, `<=`, `>` and `>=`. For other operators null is an empty text.
  """

  field: str
  op: str  # One of == != < <= > >= =~ !~.
  value: str

  def keeps(self, field: Any) -> bool:
    """Whether a row's field meets the condition.

    Raises:
      BadRow: the field and the condition's value cannot be compared.
    """
    # In Parquet files, a missing number may be NaN.
    is_nan = isinstance(field, float | np.floating | decimal.Decimal) and field != field
    if self.op in ORDER and (field is None or is_nan):
      return False
    text, value = "" if field is None else as_text(field), self.value
    if self.op in ("=~", "!~"):
      return bool(re.search(value, text)) == (self.op == "=~")
    if isinstance(field, bool | np.bool_):  # JSON writes true, and Python writes True.
      text, value = text.lower(), value.lower()
      if self.op in ORDER or value not in ("true", "false"):
        raise self._error(field, "the field can only be compared by == or !=, with true or false")
    elif isinstance(field, list | tuple | np.ndarray | Mapping):
      if self.op in ORDER:
        raise self._error(field, "a list or an object has no order")
    else:
      return self._compare(text, value)
    return _OPERATORS[self.op](text, value)

  def _compare(self, text: str, value: str) -> bool:
    """Compares two texts, by their numbers or as dates if possible.

    Raises:
      BadRow: the operator needs an order, and the texts have none.
    """
    compare, texts = _OPERATORS[self.op], (text, value)
    plain = [*map(_number, texts)]
    if None not in plain:
      return compare(*plain)
    if all(map(_DATE.fullmatch, texts)):
      shortest = min(map(len, texts))  # 2025-02-28T00:00:00 is 2025-02-28.
      return compare(*(x.replace("/", "-")[:shortest] for x in texts))
    parts = [*map(_split, texts)]
    numbers = [part[0] if number is None else number for number, part in zip(plain, parts)]
    if plain != [None, None]:  # A number and a text.
      if None not in numbers:
        return compare(*numbers)
      if self.op not in ORDER:
        return self.op == "!="
    elif self.op not in ORDER or numbers == [None, None]:
      return compare(*texts)
    elif None not in numbers:
      return compare(*(numbers if parts[0][1] == parts[1][1] else texts))
    raise self._error(text, "only one of the two can be read as a number, so they have no order")

  def _error(self, field: Any, reason: str) -> BadRow:
    return BadRow(
      f"the field {self.field!r} is {field!r:.60}, and the filter is"
      f" {self.field}{self.op}{self.value}: {reason}. Correct the row or the filter"
    )


def conditions(text: str, key: str) -> tuple[Condition, ...]:
  """Parses conditions, such as `a==1 and b>=2024-10-01`.

  Args:
    text: conditions; "" for none.
    key: configuration key of the text, for messages.

  Raises:
    DataError: a condition is malformed.
  """
  parsed = []
  for part in re.split(r"\s+and\s+", text) if text else []:
    match = _CONDITION.fullmatch(part)
    if not match:
      raise DataError(
        f"{key}: {part!r} is not a condition; write field==value, with one of"
        f" {' '.join(_OPERATORS)} =~ !~, and join several with `and`"
      )
    field, op, value = match.groups()
    if op in ("=~", "!~"):
      try:
        re.compile(value)
      except re.error as error:
        raise DataError(f"{key}: {part!r}: {error}") from error
    elif _JOINED.search(value):
      raise DataError(f"{key}: {part!r}: join conditions with `and`, and there is no `or`")
    elif _WEIGHT.search(value):
      raise DataError(f"{key}: {part!r}: write a weight before `where`, or quote the value")
    elif quoted := re.fullmatch(r"""(["'])(.*)\1""", value):
      value = quoted[2]
    parsed.append(Condition(field, op, value))
  return tuple(parsed)


def as_text(value: Any) -> str:
  """Converts a field to text. Dates have ISO format."""
  if hasattr(value, "isoformat"):
    return value.isoformat()
  return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _number(text: str) -> decimal.Decimal | None:
  """Converts a text to a number; None if impossible."""
  try:
    number = decimal.Decimal(text.strip())
  except decimal.InvalidOperation:
    return None
  return None if number.is_nan() else number


def _split(text: str) -> tuple[decimal.Decimal | None, str]:
  """Returns a text's only number, and the text around this number.

  The number is None if the text has several numbers or no number, if the number has a multiplier
  (2.5k), or if the text has other symbols (3 + x).
  """
  match, *others = [*_NUMBER.finditer(text)] or [None]
  words = text if match is None else f"{text[: match.start()]} {text[match.end() :]}"
  multiplied = _MULTIPLIED.search(text)
  if match is None or others or multiplied or not _WORDS.fullmatch(words):
    return None, words
  return _number(match[0].replace(",", "").replace("−", "-")), " ".join(words.split())
