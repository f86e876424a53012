"""Parses the words after a number: units, counted things and multipliers.

Examples are "cm", "apples" and "thousand". The time is linear in the text, except for long runs of
spaces. `spelling.MAX_ANSWER` limits the length of an answer, and thereby this time.
"""

import dataclasses
import fractions
import re

F = fractions.Fraction

# A line has a dimension, then units, each with its scale and its other names. Plurals in -s need no
# name. The scale is relative to the unit of scale 1: 1 cm is 1/100 m, and 1 L is 1/1000 m^3.
_TABLE = """
length: m 1 meter metre; cm 1/100 centimeter centimetre; mm 1/1000 millimeter millimetre
length: dm 1/10 decimeter decimetre; km 1000 kilometer kilometre; µm 1/1000000; nm 1/1000000000
length: in 127/5000 inch; ft 381/1250 foot feet; yd 1143/1250 yard; mi 201168/125 mile
mass: g 1 gram gm; mg 1/1000 milligram; kg 1000 kilogram kilo; tonne 1000000
mass: lb 45359237/100000 pound; oz 45359237/1600000 ounce
time: s 1 sec second; ms 1/1000 millisecond; min 60 minute; h 3600 hr hour; day 86400; week 604800
calendar: month 1; year 12 yr; decade 120; century 1200
capacity: gallon 1 gal; quart 1/4 qt; pint 1/8 pt; cup 1/16
length^3: L 1/1000 l liter litre; mL 1/1000000 ml milliliter millilitre
length^3: dL 1/10000; cL 1/100000; kL 1 kiloliter kilolitre
angle: degree 1 ° deg
radian: rad 1 radian
dollar: $ 1 dollar usd buck; cent 1/100 ¢
sterling: £ 1 gbp; penny 1/100 pence
euro: € 1 euro eur
yen: ¥ 1 yen jpy
rupee: ₹ 1 rupee rs inr
yuan: yuan 1
celsius: °C 1 celsius centigrade
fahrenheit: °F 1 fahrenheit
kelvin: K 1 kelvin
percent: % 1 percent pct percentage
acre: acre 1
hectare: hectare 1
watt: W 1 watt; kW 1000 kilowatt; MW 1000000 megawatt; mW 1/1000; GW 1000000000
joule: J 1 joule; kJ 1000 kilojoule; MJ 1000000 megajoule; mJ 1/1000
energy: kWh 1; Wh 1/1000; MWh 1000
calorie: cal 1 calorie; kcal 1000 kilocalorie
electronvolt: eV 1 electronvolt; keV 1000; MeV 1000000; GeV 1000000000
volt: V 1 volt; kV 1000 kilovolt; mV 1/1000 millivolt
ampere: A 1 ampere amp; mA 1/1000 milliampere; µA 1/1000000
ohm: Ω 1 ohm; kΩ 1000 kiloohm; MΩ 1000000
coulomb: C 1 coulomb; mC 1/1000; µC 1/1000000; nC 1/1000000000
farad: F 1 farad; µF 1/1000000; nF 1/1000000000; pF 1/1000000000000
henry: H 1 henry; mH 1/1000
tesla: T 1 tesla; mT 1/1000
newton: N 1 newton; kN 1000 kilonewton; mN 1/1000
pascal: Pa 1 pascal; kPa 1000 kilopascal; MPa 1000000; hPa 100; atm 101325 atmosphere
mole: mol 1 mole; mmol 1/1000; kmol 1000
hertz: Hz 1 hertz; kHz 1000; MHz 1000000; GHz 1000000000
"""
UNITS: dict[str, tuple[str, int, F]] = {}  # (dimension, its power, scale) by name.
for _line in _TABLE.strip().split("\n"):
  _key, _, _entries = _line.partition(":")
  _dimension, _, _power = _key.partition("^")
  for _name, _scale, *_aliases in map(str.split, _entries.split(";")):
    UNITS |= dict.fromkeys([_name, *_aliases], (_dimension, int(_power or 1), F(_scale)))
# Letters that are units only within \text. Elsewhere they are choices or points.
_TYPESET_ONLY = frozenset("ACFHT")
CURRENCIES = frozenset("dollar sterling euro yen rupee yuan".split())
_SHAPES = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}  # Power of the unit after each word.
_COMPOUND = {  # Abbreviations of several units.
  "Nm": "N m",
  "mph": "mi/h",
  "kph": "km/h",
  "kmh": "km/h",
  "kmph": "km/h",
  "fps": "ft/s",
}
_COMPOUNDS = re.compile(rf"\b(?:{'|'.join(_COMPOUND)})\b")

# Factors by words and letters after a number: 18K is 18,000 and not kelvins.
_ORDINALS = (
  "third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth"
  " fifteenth sixteenth seventeenth eighteenth nineteenth twentieth".split()
)
MULTIPLIERS = {word: F(1, n) for n, word in enumerate(_ORDINALS, 3)}
MULTIPLIERS |= {"half": F(1, 2), "halve": F(1, 2), "quarter": F(1, 4), "hundredth": F(1, 100)}
MULTIPLIERS |= {"thousandth": F(1, 1000), "millionth": F(1, 10**6), "billionth": F(1, 10**9)}
MULTIPLIERS |= {"dozen": F(12), "hundred": F(100), "thousand": F(1000), "grand": F(1000)}
MULTIPLIERS |= {"gross": F(144), "lakh": F(10**5), "crore": F(10**7)}
_ILLIONS = "m b tr quadr quint sext sept oct non dec".split()
MULTIPLIERS |= {f"{word}illion": F(1000**n) for n, word in enumerate(_ILLIONS, 2)}
_LETTERS = {"K": F(1000), "k": F(1000), "M": F(10**6), "mn": F(10**6), "B": F(10**9)}
_LETTERS["bn"] = F(10**9)
# Multipliers that may be the thing counted: "7 dozen" is right if the gold answer is 7 (dozens).
COUNTED = ("dozen", "quarter", "half", "halve")

# Plurals without -s. A counted thing is a plural, possibly after adjectives. No word of a counted
# thing is in _CLOSED.
_PLURALS = frozenset("people children men women teeth geese mice fish sheep deer dice".split())
_CLOSED = frozenset(
  """is are was were be been being am has have had does do did isn't aren't wasn't doesn't don't
  not no non never none nothing nor neither either both but if unless except without with and or
  minus plus times divided over under above below less fewer greater than at least most about
  approx around only just even maybe perhaps because since so as this thus his hers its theirs
  ours yours us it he she we they you him her them who whose which that what why how when where
  while to from between through until up down out by yes always sometimes besides else instead
  also too still fails works seems looks appears remains means makes gives equals holds lies
  goes comes counts needs exceeds violates misses contradicts happens exists factorials
  negatives halves guess guesses negative opposite double twice triple half one two three four
  five six seven eight nine ten eleven twelve zero infinity sum difference product quotient
  ratio mod modulo modulus choose root roots squared cubed power powers several couple many few ths
  googol googols another score per each every""".split()
)
# An ordinal as a part of a whole, such as "fifths". Such a word is no counted thing.
_PART = re.compile(
  r".*(?:third|four|fif|six|seven|eigh|nin|ten|eleven|twelf|teen|tie|red|sand|illion)ths?"
)
_PLAIN = str.maketrans({"²": "^2", "³": "^3"} | dict.fromkeys("\\{}()"))
_RATE = re.compile(r"\s*(?:/|(?:per|an?|each|every)\s)")  # "per" of "dollars per hour".
_FILLER = frozenset("the more total".split())  # Words without effect.
_TERM = re.compile(r"(?:^|[°%])\s*[-*·]\s*[a-zA-Z](?![a-zA-Z])")  # A variable, as in "5 - m".
_DOTS = re.compile(r"\\?cdot(?![a-zA-Z])|⋅|∙|•")
_SPACES = re.compile(r"\\[,;:! ]|~")
_TRAILER = re.compile(
  r"\s+(?:in total|in all|total|altogether|each|apiece|overall|times|left|remaining|long|wide|high"
  r"|tall|deep|old|away|apart|more)$"
)
_OF = re.compile(r"\s+of [a-z]{3,}(?: [a-z]{3,}){0,2}$")  # The end of "cups of flour".
# A word or sign with an optional power, possibly after "per" or a dot.
_ITEM = re.compile(
  r"\s*(?P<per>/|\b(?:per|an?|every|each)\b(?=\s*\w))?\s*(?:\\cdot|[·*-])?\s*"
  r"(?P<word>[^\W\d_]+(?:'[a-z]+)?|[$£€¥₹%°¢](?:[CF]\b)?)\.?"
  r"(?:\s*\^\s*(?P<power>-?\s?[1-4]))?"
)


@dataclasses.dataclass(frozen=True)
class Unit:
  """A unit: a scale, and a product of dimensions.

  For example, km/h has the scale 5/18 and the dimensions (("length", 1), ("time", -1)). Each
  counted thing is a separate dimension.
  """

  scale: F  # Relative to the units of scale 1 in the table.
  dimensions: tuple[tuple[str, int], ...]  # Sorted pairs (name, power).

  @property
  def percent(self) -> bool:
    return self.dimensions == (("percent", 1),)

  @property
  def degrees(self) -> bool:
    return self.dimensions == (("angle", 1),)


def spaces(text: str) -> str:
  """Replaces LaTeX's commands for spaces and dots by characters."""
  return _SPACES.sub(" ", _DOTS.sub("·", text))


def multiplier(word: str) -> F | None:
  """Returns the factor of a multiplier, 12 for "dozen". Returns None for other words."""
  word = word.casefold()
  return MULTIPLIERS.get(word, MULTIPLIERS.get(word.removesuffix("s")))


def parse(text: str, currency: str = "", typeset: bool = False) -> tuple[F, Unit | None] | None:
  """Parses the words after a number to (factor, unit). Returns None for other words.

  Without words other than multipliers, the unit is None. A counted thing is a plural after a space.
  After "per", any word of three or more letters that is no unit is a counted thing, unless
  `_CLOSED` or `_PART` excludes it.

  Args:
    text: words after the number, e.g. "apples", "cm^2", "miles per hour", "thousand dollars", "%".
    currency: sign before the number; "" if there is none.
    typeset: whether the words are in \\text or the like. A is then amperes, and K is kelvins
      rather than 1000.
  """
  text = re.sub(r"\s+", " ", spaces(text).translate(_PLAIN))
  text = re.sub(r"\^?\s*circ\b ?", "°", text)
  if _TERM.search(text):
    return None
  if currency:
    rate = _RATE.match(text)
    factor, unit = parse(currency + text if rate else text) or (0, None)
    money = unit if rate else parse(currency)[1]
    return (factor, money) if factor and unit in (None, money) else None
  glued = text[:1].isalpha()
  text = " " + text.strip().replace("per cent", "percent")
  text = _COMPOUNDS.sub(lambda match: _COMPOUND[match[0]], text)
  kind = _OF.search(text)
  if kind and not _CLOSED.isdisjoint(kind[0].split()):
    return None
  text = _TRAILER.sub("", text[: kind.start()] if kind else text)
  items = _items(text, glued, typeset)
  if items is None:
    return None
  factor, groups = items
  if sum(map(len, groups)) > 5 or not all(groups[1:]):
    return None
  dimensions, scale = {}, F(1)
  for index, group in enumerate(groups):
    measures = _measure(group, index > 0)
    if measures is None:
      return None
    sign = -1 if index else 1
    for name, power, size in measures:
      dimensions[name] = dimensions.get(name, 0) + sign * power
      scale *= size**sign
  if any(dimensions.get(name, 1) != 1 for name in ("percent", "angle")):
    return None
  dimensions = tuple(sorted((name, power) for name, power in dimensions.items() if power))
  return factor, (Unit(scale, dimensions) if dimensions else None)


def _items(text: str, glued: bool, typeset: bool) -> tuple[F, list] | None:
  """Splits words into a factor, and groups of (word, power) separated by "per".

  Returns None if a word cannot be a multiplier, a unit, a filler or part of a counted thing.

  glued: whether the first word follows the number without a space.
  """
  factor, start, groups = F(1), 0, [[]]
  while start < len(text.rstrip()):
    match = _ITEM.match(text, start)
    if not match:
      return None
    word, power, lower = match["word"], match["power"], match["word"].casefold()
    if match["per"]:
      groups.append([])
    kelvins = typeset and word == "K" and not text[match.end() :].strip()[:1].isalpha()
    size = multiplier(word) or (None if start or kelvins else _LETTERS.get(word))
    start = match.end()
    if word in _TYPESET_ONLY and not typeset:
      return None
    if size and not power:
      if groups != [[]]:
        return None
      factor *= size
    elif (
      lower in ("squared", "cubed") and groups[-1] and _unit_name(groups[-1][-1][0]) and not power
    ):
      groups[-1][-1] = (groups[-1][-1][0], 2 if lower == "squared" else 3)
    elif lower not in _FILLER:
      has_unit = _unit_name(word) or lower in _SHAPES
      if not has_unit and (glued or len(word) < 3 or lower in _CLOSED or _PART.fullmatch(lower)):
        return None
      groups[-1].append((word, int((power or "1").replace(" ", ""))))
  return factor, groups


def _unit_name(word: str) -> str | None:
  """Returns the key in `UNITS` of a word or of its singular. Returns None for other words."""
  # A single letter is tried as written only, two letters also in lower case.
  names = (word, word.casefold(), _singular(word.casefold()))[: len(word)]
  return next(filter(UNITS.__contains__, names), None)


def _measure(group: list[tuple[str, int]], per: bool) -> list[tuple[str, int, F]] | None:
  """Returns (dimension, power, scale) of each unit or counted thing. Returns None for other words.

  per: whether the group is after "per".
  """
  measures, shape = [], 1
  for word, power in group:
    lower = word.casefold()
    if lower in _SHAPES:
      shape = _SHAPES[lower]
    elif name := _unit_name(word):
      dimension, base, size = UNITS[name]
      power, shape = power * shape, 1
      measures.append((dimension, base * power, size**power))
    elif measures:
      return None
  if measures or not group:
    money = any(dimension in CURRENCIES for dimension, *_ in measures)
    return (
      None if money and len(measures) > 1 else measures
    )  # The m of "18m dollars" means million.
  word, power = group[-1]
  lower = word.casefold()
  if shape > 1 and len(group) == 1:
    return [("unit", shape, F(1))]
  plural = lower in _PLURALS or (lower.endswith("s") and not lower.endswith(("ss", "us")))
  return [(_singular(lower), power * shape, F(1))] if plural or per else None


def _singular(word: str) -> str:
  """Returns the singular of a regular plural."""
  return re.sub("(?<=..[sx])es$|(?<=.[cs]h)es$|(?<!s)s$", "", re.sub("(?<=..)ies$", "y", word))
