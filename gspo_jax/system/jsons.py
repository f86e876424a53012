"""Strict parsing of JSON from users and downloads, with readable errors."""

import collections
import json
from collections.abc import Iterable
from typing import Any

# Maximum number of arrays and objects inside each other. Code that prints or writes values is
# recursive, and would fail for deeper values.
DEEPEST = 200


def parse(text: str | bytes) -> Any:
  """Returns the value of a JSON text.

  Raises:
    ValueError: the text is not UTF-8 or not JSON, an object has a key twice, or values are nested
      too deeply.
  """
  try:
    if isinstance(text, bytes):
      text = text.decode("utf-8-sig")
    text = text.rstrip("\r\n")  # So an error in a JSON line names only a column.
    value = json.loads(text, object_pairs_hook=_require_unique_keys)
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(value):
      raise RecursionError
    return value
  except UnicodeError as error:
    raise ValueError(f"it is not UTF-8: {error}") from error
  except json.JSONDecodeError as error:
    line = f"line {error.lineno} " if "\n" in text else ""
    raise ValueError(f"it is not JSON: {error.msg}: {line}column {error.colno}") from error
  except RecursionError as error:
    raise ValueError("it is nested too deeply") from error


def parse_object(text: str | bytes) -> dict[str, Any]:
  """Returns the object of a JSON text. Raises ValueError for other texts."""
  value = parse(text)
  if not isinstance(value, dict):
    raise ValueError(f"it is not a JSON object, but {value!r:.40}")
  return value


def read_object(path: Any) -> dict[str, Any]:
  """Reads a file's JSON object. Raises ValueError with the file's name if there is none."""
  try:
    return parse_object(path.read_bytes())
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error
  except OSError as error:
    raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


def typed(key: str, value: Any, kind: type) -> Any:
  """Returns a JSON value as type `kind`. Raises ValueError if the value has another type.

  An integer becomes a float if `kind` is float. A list becomes a tuple if `kind` is tuple.

  key: name of the value in the error message.
  """
  number = isinstance(value, int | float) and not isinstance(value, bool)
  in_json = list if kind is tuple else kind
  if not (number if kind is float else type(value) is in_json):
    raise ValueError(f"{key}={value!r} is not of type {in_json.__name__}")
  return kind(value)


def _is_deep(value: Any) -> bool:
  level = [value] if isinstance(value, dict | list) else []
  for _ in range(DEEPEST):
    inner = [list(v.values() if isinstance(v, dict) else v) for v in level]
    level = [v for values in inner for v in values if isinstance(v, dict | list)]
    if not level:
      return False
  return True


def _require_unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
  value = dict(pairs)
  if len(value) < len(pairs):
    twice, _ = collections.Counter(key for key, _ in pairs).most_common(1)[0]
    raise ValueError(f"it has the key {twice!r} twice")
  return value
