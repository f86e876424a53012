r"""Parses and compares plain numbers and their units, as exact fractions and without SymPy."""

import dataclasses
import fractions
import functools
import re

from gspo_jax.verifiers.mathematics import numerals, spelling, units

_VALUE = re.compile(
  r"(?P<sign>[-+]?)\s*(?P<currency>\\?[$€£¥₹])?\s*(?P<sign2>[-+]?)"
  r"(?:(?P<whole>\d+)\s*(?=\s\d+\s*/|\\frac))?\s*"  # mixed numbers
  r"(?:(?P<digits>(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
  r"(?P<exponent>[eE][-+]?\d{1,2})?(?:\s*/\s*(?P<over>\d+))?"
  r"|\\frac\s*\{\s*(?P<top>\d+)\s*\}\s*\{\s*(?P<bottom>\d+)\s*\}"
  r"|\\frac\s*(?P<top1>\d)\s*(?P<bottom1>\d))"
)
# The rest of 5x, 5/x or 5x - y after the number.
_VARIABLE = re.compile(r"\s*(?P<over>/?)\s*[a-zA-Z](?:\s*[\^*·-].*)?")
_BEFORE_TEXT = re.compile(r"\s*[a-zA-Z]{1,3}\s*\\[a-z]")
# Minimum digits after the point, and minimum significant digits, for a decimal to count as the
# rounding of an endless decimal such as 1/3.
ROUNDED = 6
SIGNIFICANT = 5


@dataclasses.dataclass(frozen=True)
class Quantity:
  """A number with an optional unit."""

  value: fractions.Fraction  # Exact value.
  # Digits after the point of a decimal without exponent, denominator or word such as "million".
  # None for other numbers.
  places: int | None = None
  unit: units.Unit | None = None
  count: fractions.Fraction | None = None  # Number before one of `units.COUNTED`: 7 of "7 dozen".


@functools.lru_cache(maxsize=1 << 16)
def read(text: str, letters: bool = False) -> Quantity | None:
  r"""Parses a plain number with an optional unit. Returns None for other text.

  A number is an integer in digits or words, a decimal, a/b, \frac or a mixed number.

  letters: whether "12 m" is 12 metres. If not, m may be a variable, and the result is None.
  """
  if len(text) > 80:
    return None
  source = numerals.to_digits(spelling.normalise(text))
  text = spelling.TEXT.sub(r" \1", source).strip()
  match = _VALUE.match(text)
  if not match:
    return None
  part = match.groupdict()
  digits = (part["top"] or part["top1"] or part["digits"]).replace(",", "")
  bottom = int(part["bottom"] or part["bottom1"] or part["over"] or 1)
  rest = text[match.end() :]
  if rest[:1].isdigit() or not re.fullmatch(r"(?:[^\W\d]|\s*\()?[^(=<>+!&]*\.?", rest):
    return None
  worded = bool(spelling.TEXT.search(source))
  if worded and _BEFORE_TEXT.match(source[match.end() :]):  # 5A\text{ m}: A may be a variable.
    return None
  variable = None if worded or part["currency"] else _VARIABLE.fullmatch(rest)
  if variable and (variable["over"] or not letters):
    return None
  parsed = units.parse(rest, (part["currency"] or "")[-1:], worded)
  if bottom == 0 or (part["sign"] and part["sign2"]) or parsed is None:
    return None
  factor, unit = parsed
  value = fractions.Fraction(digits + (part["exponent"] or "")) / bottom + int(part["whole"] or 0)
  places = len(digits.partition(".")[2]) if "." in digits and bottom == 1 else None
  value = -value if "-" in (part["sign"], part["sign2"]) else value
  word = rest.split()[0].casefold() if factor != 1 else ""
  counts = word.removesuffix("s") in units.COUNTED and factor == units.multiplier(word)
  places = places if factor == 1 and not part["exponent"] else None
  return Quantity(value * factor, places, unit, value if counts else None)


def same(gold: Quantity, ours: Quantity) -> bool | None:
  r"""Compares quantities. Returns None if SymPy must decide.

  Units are converted, so 1 km agrees with 1000 m. A missing unit is taken to be the other's, named
  in the question. 50\% agrees with 0.5, and with 50 as the answer to "how many percent". But 0.5\%
  does not agree with 0.5. The response "7 dozen" agrees with the gold answers 84 and 7, since the
  question may be "how many dozen". SymPy must decide if one quantity is in degrees, and the other
  is in radians or is a different number without a unit.
  """
  if ours.count is not None and gold.unit is None is gold.count and ours.count == gold.value:
    return True
  if gold.unit and ours.unit:
    if gold.unit.dimensions == ours.unit.dimensions:
      return gold.value * gold.unit.scale == ours.value * ours.unit.scale or (
        gold.unit == ours.unit and same_number(gold, ours)
      )
    return None if _angular(gold.unit) and _angular(ours.unit) else False
  if same_number(gold, ours):
    return not _is_percent(gold, ours) or abs(gold.value) >= 1 or gold.value == 0
  if _is_percent(gold, ours):
    percent, number = (gold, ours) if gold.unit else (ours, gold)
    return same_number(Quantity(percent.value / 100), number)
  angles = [side for side in (gold, ours) if side.unit and side.unit.degrees]
  return None if angles else False


def _is_percent(a: Quantity, b: Quantity) -> bool:
  """Whether any of two quantities is in percent."""
  return any(side.unit and side.unit.percent for side in (a, b))


def _angular(unit: units.Unit) -> bool:
  """Whether a unit is degrees or radians."""
  return unit.dimensions in ((("angle", 1),), (("radian", 1),))


def same_number(a: Quantity, b: Quantity) -> bool:
  """Whether two numbers are equal.

  A decimal may be a rounding of an endless decimal, for example 0.333333 of 1/3.
  """
  if a.value == b.value:
    return True
  for exact, rounded in ((a, b), (b, a)):
    bottom = exact.value.denominator
    endless = exact.places is None and pow(10, bottom.bit_length(), bottom) > 0
    if endless and rounded.places is not None and rounds_to(rounded, exact.value):
      return True
  return False


def rounds_to(rounded: Quantity, value: fractions.Fraction) -> bool:
  """Whether a decimal of enough digits (`ROUNDED`, `SIGNIFICANT`) is a rounding of `value`."""
  places = rounded.places or 0
  digits = len(str(abs(rounded.value.numerator) * 10**places // rounded.value.denominator))
  return (
    places >= ROUNDED and digits >= SIGNIFICANT and 2 * 10**places * abs(rounded.value - value) <= 1
  )
