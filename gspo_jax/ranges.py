"""Ranges of the numbers of a configuration: declared as types of its keys, checked in each section.

@dataclasses.dataclass(frozen=True)
class EngineConfig:
  slots: NonNegativeInt
  prefill_tokens: Annotated[int, Range(16)]
  cache_dtype: Literal["float32", "bfloat16"]

  def __post_init__(self):
    ranges.check(self, "engine")
"""

import dataclasses
import functools
import math
import types
import typing
from typing import Annotated, Any, Literal


@dataclasses.dataclass(frozen=True)
class Range:
  """Numbers from `low` to `high`, without the bounds in `excluded`, and `also` one outside.

  `why` is added to the message of an error.
  """

  low: float
  high: float = math.inf
  excluded: tuple[float, ...] = ()
  also: float | None = None
  why: str = ""

  def __contains__(self, value: float) -> bool:
    inside = self.low <= value <= self.high and value not in self.excluded
    return inside or value == self.also

  def __str__(self) -> str:
    text = f"{'above' if self.low in self.excluded else 'at least'} {self.low}"
    if self.high < math.inf:
      text += f" and {'below' if self.high in self.excluded else 'at most'} {self.high}"
    if self.also is not None:
      text += f", or {self.also}"
    return f"{text}: {self.why}" if self.why else text


PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
PositiveFloat = Annotated[float, Range(0, excluded=(0,))]
NonNegativeFloat = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
PositiveFraction = Annotated[float, Range(0, 1, excluded=(0,))]
FractionBelowOne = Annotated[float, Range(0, 1, excluded=(1,))]


def check(section: Any, name: str) -> None:
  """Raises ValueError if a value of the dataclass is not one that its type allows; the message
  names the key, with `name` for the section."""
  for field, kind in kinds(type(section)).items():
    check_value(kind, getattr(section, field), f"{name}.{field}")


def check_value(kind: Any, value: Any, key: str) -> None:
  """The same for one value, of a type as in the module's example, of a tuple of such, or None
  where the type is that or None."""
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if origin is tuple:
    for entry in value:
      check_value(arguments[0], entry, key)
  if origin in (typing.Union, types.UnionType) and value is not None:
    check_value(arguments[0], value, key)
  if origin is Annotated and value not in arguments[1]:
    raise ValueError(f"{key}={value!r} must be {arguments[1]}")
  if origin is Literal and value not in arguments:
    raise ValueError(f"{key}={value!r} is not one of {', '.join(map(str, arguments))}")


@functools.cache
def kinds(section: type) -> dict[str, Any]:
  """The types of a dataclass's fields by name, with their ranges."""
  return typing.get_type_hints(section, include_extras=True)
