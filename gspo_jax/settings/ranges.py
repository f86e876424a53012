"""Declarations of a configuration's keys: type, range, default and meaning.

A section is a frozen dataclass, with one declaration for each key. Its values are checked when an
instance is made. For example:

@ranges.section("engine")
class EngineConfig:
  slots: NonNegativeInt = key(0, "responses decoded at once; 0: all of a batch")
  prefill_tokens: Annotated[int, Range(16, 2**20)] = key(4096, "tokens prefilled per device")
  cache_dtype: Literal["float32", "bfloat16"] = key("float32", "dtype of keys and values")
  window: Annotated[float, Range(0, 60, reason="nobody waits for longer")] | None = key(None, "...")

The first check of a section raises TypeError for a number without a range.
"""

import dataclasses
import functools
import math
import numbers
import os
import re
import struct
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

from gspo_jax.system.text import did_you_mean

INT32 = 2**31 - 1
TINY = 2.0**-126  # Smallest normal float32; devices flush smaller numbers to 0.
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def key(default: Any, meaning: str) -> Any:
  """Declares a key, with its default and its meaning or unit."""
  if isinstance(default, dict):
    return dataclasses.field(default_factory=default.copy, metadata=dict(meaning=meaning))
  return dataclasses.field(default=default, metadata=dict(meaning=meaning))


def required(meaning: str) -> Any:
  """Declares a key without a default."""
  return dataclasses.field(metadata=dict(meaning=meaning))


@dataclasses.dataclass(frozen=True)
class Range:
  """Numbers from `low` to `high`, except those in `excluded`. The number `also` is permitted too.

  A float must be in the range before and after rounding to float32, its dtype on devices. A number
  between -TINY and TINY must be 0. `reason` is added to error messages.
  """

  low: float
  high: float
  excluded: tuple[float, ...] = ()
  also: float | None = None
  reason: str = ""

  def __contains__(self, value: float) -> bool:
    if not isinstance(value, numbers.Real):
      return False
    exact = self.low, value, self.high
    rounded = tuple(map(_float32, exact))
    inside = all(low <= x <= high and x not in self.excluded for low, x, high in (exact, rounded))
    return (inside and (not value or abs(value) >= TINY)) or value == self.also

  def __str__(self) -> str:
    low = "above" if self.low in self.excluded else "at least"
    high = "below" if self.high in self.excluded else "at most"
    text = f"{low} {_written(self.low)} and {high} {_written(self.high)}"
    if self.also is not None:
      text += f", or {_written(self.also)}"
    return f"{text}: {self.reason}" if self.reason else text


_SYNONYMS = {"vllm": "server", "sglang": "server"}  # Other libraries' words, for error messages.


@dataclasses.dataclass(frozen=True)
class Name:
  """One of `words`, or the name of a user's function, `package.module:function`."""

  words: tuple[str, ...]

  def __contains__(self, value: str) -> bool:
    return value in self.words or (isinstance(value, str) and bool(_DOTTED.fullmatch(value)))

  def __str__(self) -> str:
    return (
      f"one of {', '.join(word or repr(word) for word in self.words)}, or package.module:function"
    )


# A count above a million is probably a typing error. Keys for larger counts have their own Range.
PositiveInt = Annotated[int, Range(1, 1_000_000)]
NonNegativeInt = Annotated[int, Range(0, 1_000_000)]
PositiveFloat = Annotated[float, Range(0, 1e6, excluded=(0,))]
NonNegativeFloat = Annotated[float, Range(0, 1e6)]
Fraction = Annotated[float, Range(0, 1)]
PositiveFraction = Annotated[float, Range(0, 1, excluded=(0,))]
FractionBelowOne = Annotated[float, Range(0, 1, excluded=(1,))]
Temperature = Annotated[float, Range(0.01, 100, also=0)]  # Divisor of logits; 0: greedy.
Workers = Annotated[int, Range(0, 1024)]  # Processes or threads.
Seconds = Annotated[float, Range(0, 86_400)]
PositiveSeconds = Annotated[float, Range(0, 86_400, excluded=(0,))]
Seed = Annotated[int, Range(0, 2**32 - 1)]


def check(section: Any, name: str) -> None:
  """Raises ValueError if a field's value is outside its range or choices.

  Args:
    section: a section, as a dataclass.
    name: path of the section, for error messages.
  """
  for field, kind in kinds(type(section)).items():
    check_value(kind, getattr(section, field), f"{name}.{field}")


@typing.dataclass_transform(frozen_default=True)
def section(path: str, **options: bool) -> Callable[[type], type]:
  """Declares a section: a frozen dataclass, checked by `check`.

  Args:
    path: path of the section, for error messages.
    options: options of `dataclasses.dataclass`.
  """

  def decorate(cls: type) -> type:
    further = getattr(cls, "__post_init__", lambda self: None)

    def check_all(self: Any) -> None:
      check(self, path)
      further(self)

    cls.__post_init__ = check_all
    return dataclasses.dataclass(frozen=True, **options)(cls)

  return decorate


def check_value(kind: Any, value: Any, key: str) -> None:
  """Raises ValueError, naming the key, if its value is not permitted."""
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if origin is tuple:
    for entry in value:
      check_value(arguments[0], entry, key)
  if _optional(origin) and value is not None:
    check_value(arguments[0], value, key)
  permitted = arguments if origin is Literal else arguments[1] if origin is Annotated else None
  if isinstance(permitted, tuple | Name) and value not in permitted:
    choices = permitted.words if isinstance(permitted, Name) else permitted
    word = str(value)
    stem = word.removesuffix("_loss")  # objectives.gspo_loss has the name gspo.
    hint = did_you_mean(_SYNONYMS.get(stem, stem), map(str, choices))
    if isinstance(permitted, Name) and (name := ":".join(word.rsplit(".", 1))) in permitted:
      hint = f"; did you mean {name}?"  # A dot instead of the colon.
    module = os.path.relpath(word.removesuffix(".py") or ".")
    if isinstance(permitted, Name) and module[0] != "." and os.path.isfile(f"{module}.py"):
      hint = f"; for a function in {module}.py write {module.replace('/', '.')}:FUNCTION"
    raise ValueError(f"{key}={value!r} is not {describe(kind)}{hint}")
  if isinstance(permitted, Range) and value not in permitted:
    as_float32 = " (in float32)" if isinstance(value, float) and value != _float32(value) else ""
    raise ValueError(f"{key}={value!r} must be {permitted}{as_float32}")
  if kind is str and "\0" in value:
    raise ValueError(f"{key}={value!r} must not contain NUL")
  if kind is str and value.encode(errors="replace").decode() != value:
    raise ValueError(f"{key}={value!r} must be UTF-8")


def refuse(section: Any, path: str, wrong: Iterable[tuple[Any, str]]) -> None:
  """Raises ValueError with the message of the first true condition.

  Args:
    section: a section, as a dataclass.
    path: path of the section, for `fill`.
    wrong: pairs of condition and message.
  """
  for condition, message in wrong:
    if condition:
      raise ValueError(fill(section, path, message))


def fill(section: Any, path: str, message: str, /, **others: tuple[str, Any]) -> str:
  """Fills a message: {key} becomes `path.key=value`, and {key:} becomes the value.

  Args:
    section: object of the keys.
    path: path of the section; "" for the whole configuration.
    message: text with keys in braces.
    others: (path, object) by name. A key that begins with such a name is looked up in the object:
      with `x=(path, entry)`, {x.limit} becomes `path.limit=value`.
  """

  def text(match: re.Match[str]) -> str:
    first, _, rest = match[1].partition(".")
    prefix, owner = others.get(first, (path, section))
    key = rest if first in others else match[1]
    value = look_up(owner, key) if key else owner
    return _listed(value) if match[2] else f"{'.'.join(filter(None, (prefix, key)))}={value!r}"

  return re.sub(r"\{([\w.]+)(:?)\}", text, message)


def _listed(value: Any) -> str:
  """Returns a value as text. Floats in a mapping become percentages."""
  if not isinstance(value, Mapping):
    return str(value)
  shares = {key: f"{x:.0%}" if isinstance(x, float) else x for key, x in value.items()}
  return ", ".join(f"{key}: {text}" for key, text in shares.items())


def look_up(section: Any, key: str) -> Any:
  """Returns the value of a dotted key."""
  for part in key.split("."):
    section = section[part] if isinstance(section, Mapping) else getattr(section, part)
  return section


def describe(kind: Any) -> str:
  """Describes the permitted values of a type in words."""
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if origin is Annotated and arguments[0] is str:
    return str(arguments[1])
  if origin is Annotated:
    return f"{describe(arguments[0])}, {arguments[1]}"
  if origin is Literal:
    return f"one of {', '.join(word or repr(word) for word in arguments)}"
  if origin is tuple:
    return f"a tuple, each {describe(arguments[0])}"
  if _optional(origin):
    return f"{describe(arguments[0])}, or None"
  if plain(kind) is dict or dataclasses.is_dataclass(kind):
    return "a section"
  return {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}[kind]


@functools.cache
def kinds(section: type) -> dict[str, Any]:
  """Returns types of a dataclass's fields by name, with their ranges.

  Raises:
    TypeError: a number has no range.
  """
  hints = typing.get_type_hints(section, include_extras=True)
  for name, kind in hints.items():
    if not _ranged(kind):
      raise TypeError(f"{section.__name__}.{name}: a number needs a range, like PositiveInt")
  return hints


def plain(kind: Any) -> type:
  """Returns the Python type of a key's values.

  This is str for a Literal, and X for `X | None`.
  """
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if _optional(origin) or origin is Annotated:
    return plain(arguments[0])
  return str if origin is Literal else origin or kind


def _ranged(kind: Any) -> bool:
  """Whether every number in a type has a range."""
  if typing.get_origin(kind) is Annotated:
    return isinstance(typing.get_args(kind)[1], Range | Name)
  return kind not in (int, float, complex) and all(map(_ranged, typing.get_args(kind)))


def _written(number: float) -> str:
  return f"{int(number) if number == int(number) else number:,}"


def _optional(origin: Any) -> bool:
  return origin in (typing.Union, types.UnionType)


def _float32(value: float) -> float:
  """Rounds a float to float32; returns an int unchanged."""
  if isinstance(value, int):
    return value
  try:
    return struct.unpack("f", struct.pack("f", value))[0]
  except OverflowError:
    return math.copysign(math.inf, value)
